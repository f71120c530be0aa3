"""ONNX's own node tests for TensorScatter and Attention, with their stored inputs and outputs."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from corpus import Entry, built

OPERATORS = ("TensorScatter", "Attention")


@dataclass(frozen=True)
class NodeCase:
    """One node test: its model, and one set of inputs and expected outputs by name."""

    name: str
    model: onnx.ModelProto
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]
    rtol: float
    atol: float

    @property
    def node(self) -> onnx.NodeProto:
        return self.model.graph.node[0]

    @property
    def attrs(self) -> dict[str, Any]:
        return {a.name: helper.get_attribute_value(a) for a in self.node.attribute}

    @property
    def has_in_op_cache(self) -> bool:
        """True if Attention itself keeps the cache (``past_key``)."""
        return self.node.op_type == "Attention" and len(self.node.input) > 4 and bool(self.node.input[4])


def _array(value: Any) -> NDArray[Any]:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


@cache
def node_cases() -> tuple[tuple[NodeCase, ...], tuple[str, ...]]:
    """The node tests of `OPERATORS`, and the names of those left out.

    ONNX stores each Attention test a second time with the node replaced by its function body (``_expanded``): no
    Attention is left in those, so there is nothing to treat.
    """
    with warnings.catch_warnings():
        # Importing a module generates the data of its tests, some of which overflow on purpose. ONNX's own way is to
        # import those of all operators, which takes 6 seconds.
        warnings.simplefilter("ignore")
        from onnx.backend.test.case import node

        for operator in OPERATORS:
            import_module(f"{node.__name__}.{operator.lower()}")
    cases = node._NodeTestCases
    found = {case.name: case for case in cases if case.name.startswith(("test_tensorscatter", "test_attention"))}
    kept, left_out = [], []
    for name, case in sorted(found.items()):
        if len(case.model.graph.node) != 1 or case.model.graph.node[0].op_type not in OPERATORS:
            left_out.append(name)
            continue
        ((inputs, outputs),) = case.data_sets
        graph = case.model.graph
        kept.append(
            NodeCase(
                name,
                case.model,
                {value.name: _array(array) for value, array in zip(graph.input, inputs, strict=True)},
                {value.name: _array(array) for value, array in zip(graph.output, outputs, strict=True)},
                case.rtol,
                case.atol,
            )
        )
    return tuple(kept), tuple(left_out)


def entries() -> Iterator[Entry]:
    yield from built("node", {c.name: (lambda c=c: c.model) for c in node_cases()[0]})
