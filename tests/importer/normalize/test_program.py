"""Programs give what probes find, in types that NumPy does not know as well."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import Graph
from onnx import TensorProto

from trt_kvcache.importer.normalize.evidence.blueprint import Blueprint
from trt_kvcache.importer.normalize.evidence.probe import Probe
from trt_kvcache.importer.normalize.evidence.program import Program, Step


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_masks_in_every_type_of_scores_are_computed(kind: int) -> None:
    """ONNX Runtime does not hand bfloat16 to NumPy: all lengths of such models were looked at by probes, slowly."""
    g = Graph()
    g.input("padding", TensorProto.FLOAT, ["batch", "total"])
    mask = g.node("Cast", [g.node("Mul", ["padding", g.constant(-1e4 / 3, np.float32)])], to=kind)
    g.output(mask, kind, ["batch", "total"])
    blueprint = Blueprint(g.model(20), {})

    def step(past: int, length: int) -> Step:
        padding = np.arange(past + length, dtype=np.float32)[None]
        return Step(past, length, Probe(blueprint, {"padding": padding.shape}, {"padding": padding}))

    program = Program(blueprint, [mask], [step(p, s) for p, s in ((3, 2), (5, 1), (4, 7))], {})
    assert program.runs
    for past, length in ((0, 1), (17, 5)):
        probe = step(past, length).probe
        found, expected = program.run(past, length, probe.values)[mask], probe.value(mask)
        assert expected is not None
        assert found.dtype == expected.dtype == onnx.helper.tensor_dtype_to_np_dtype(kind)
        assert np.array_equal(found, expected)
