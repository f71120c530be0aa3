"""Simplified models compute what the models as exported compute, and keep their interface and names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper, parser
from stored import MODELS

from trt_kvcache.importer.prepare import detach_weights
from trt_kvcache.importer.protos import Shape, shape_of
from trt_kvcache.importer.simplify import simplify
from trt_kvcache.importer.steps.runnable import with_exact_products

BATCH, PAST, NEW, HEAD = 1, 8, 3, 16  # GroupQueryAttention takes several tokens of one sequence only
START = PAST - NEW  # of the new rows in caches of a fixed length
STORED = sorted(str(p.parent.relative_to(MODELS)) for p in MODELS.glob("*/*/model.onnx"))
# Attention and TensorScatter are no operators that are folded; ONNX Runtime has no kernel on the CPU for these.
NO_KERNEL = {"ort-genai/llama_trtrtx_fp16", "ort-genai/gptoss_cpu_int4"}  # norms; sinks, in an input of our own


def size(name: str, shape: Shape, axis: int) -> int:
    """The symbol in the shape of an input."""
    dim = shape[axis]
    if isinstance(dim, int):
        return dim
    if name == "pos":  # where each sequence has one, or all have the same
        return NEW if axis == len(shape) - 1 else BATCH
    if axis == 0 or (len(shape) == 3 and axis == 1 and "position" in name):
        return BATCH
    if "past" in name or "cache" in name:
        return HEAD if axis == 3 else PAST
    if "mask" in name and axis == len(shape) - 1:
        return PAST if len(shape) == 4 else PAST + NEW
    return NEW


def feed(value: onnx.ValueInfoProto, symbols: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    stated = shape_of(value) or ()
    shape = tuple(symbols.setdefault(str(d), size(value.name, stated, i)) for i, d in enumerate(stated))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if "mask" in value.name or dtype.kind == "b":
        return np.ones(shape, dtype)
    if "nonpad" in value.name:
        return np.full(shape, PAST, dtype)
    if "ids" in value.name and "position" not in value.name:
        return rng.integers(0, 32, shape).astype(dtype)
    rows = START + np.arange(shape[-1] if shape else 1, dtype=dtype)
    return np.broadcast_to(
        rows if len(shape) > 1 or (shape and value.name == "pos") else dtype.type(START), shape
    ).copy()


def run(model: onnx.ModelProto, folder: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    onnx.save(model, folder / "simplified.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(folder / "simplified.onnx", options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.mark.parametrize("source", STORED)
def test_stored_exports_keep_numbers_and_interface(source: str, tmp_path: Path) -> None:
    for path in (MODELS / source).glob("*.data"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = onnx.load(MODELS / source / "model.onnx", load_external_data=False)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    simplified, _ = simplify(copy)
    assert list(simplified.graph.input) == list(model.graph.input)
    assert list(simplified.graph.output) == list(model.graph.output)
    assert not any(node.op_type == "Constant" for node in simplified.graph.node)
    if source in NO_KERNEL:
        return
    for node in (n for n in simplified.graph.node if n.op_type == "Attention"):  # what it was in the export
        kept = [a for a in node.attribute if a.name != "operator"]
        del node.attribute[:]
        node.attribute.extend(kept)
    symbols: dict[str, int] = {}
    feeds = {v.name: feed(v, symbols, np.random.default_rng(i)) for i, v in enumerate(model.graph.input)}
    numbers = [run(m, tmp_path, feeds) for m in (with_exact_products(model), simplified)]
    for before, after in zip(*numbers, strict=True):
        rough = before.dtype == np.float16
        np.testing.assert_allclose(after, before, rtol=1e-2 if rough else 1e-5, atol=1e-2 if rough else 1e-5)
        assert np.isfinite(after).any()


SIZES = """
<ir_version: 10, opset_import: ["" : 24]>
g (float[B,S,64] x) => (float[B,S,64] y, float[B,S,64] z) {
    shape = Shape (x)
    two = Constant <value_int = 2> ()
    width = Gather (shape, two)
    wide = Cast <to = 1> (width)
    root = Sqrt (wide)
    y = Div (x, root)
    last = Shape <start = -1> (x)
    as_float = Cast <to = 1> (last)
    again = Sqrt (as_float)
    z = Mul (x, again)
}"""


def test_what_sizes_make_is_a_constant() -> None:
    simplified, _ = simplify(parser.parse_model(SIZES))
    assert [node.op_type for node in simplified.graph.node] == ["Div", "Mul"]
    constants = [numpy_helper.to_array(t).item() for t in simplified.graph.initializer]
    assert constants == [8.0, 8.0]


@pytest.mark.parametrize("size", ["B", "S"])
def test_what_open_sizes_make_stays(size: str) -> None:
    index = "BS".index(size)
    model = parser.parse_model(SIZES.replace("value_int = 2", f"value_int = {index}"))
    assert "Gather" in [node.op_type for node in simplify(model)[0].graph.node]


def test_equal_nodes_become_one_but_not_those_that_differ_in_an_attribute() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 24]>
        g (float[B,4] x) => (float[B,1] y, float[B,1] z) {
            a = Softmax <axis = 1> (x)
            b = Softmax <axis = 1> (x)
            c = Softmax <axis = 0> (x)
            one = Constant <value_ints = [1]> ()
            also = Constant <value_ints = [1]> ()
            y = ReduceSum (a, one)
            t = ReduceSum (b, also)
            u = ReduceSum (c, also)
            z = Sub (t, u)
        }""")
    nodes = list(simplify(model)[0].graph.node)
    assert sorted(n.op_type for n in nodes) == ["ReduceSum", "ReduceSum", "ReduceSum", "Softmax", "Softmax", "Sub"]


def test_weights_take_no_part(tmp_path: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 24]>
        g (float[B,64] x) => (float[B,64] y) { t = Transpose (w)  s = Cast <to = 1> (t)  y = MatMul (x, s) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float16), "w"))
    light, weights = detach_weights(model)
    missing = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    missing.external_data.add(key="location", value="there_is_no_such.file")
    light.graph.initializer.append(missing)
    simplified, _ = simplify(light)
    assert list(weights) == ["w"]
    assert [node.op_type for node in simplified.graph.node] == ["Transpose", "Cast", "MatMul"]


def test_a_branch_inside_a_branch_keeps_what_it_captures() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 24]>
        g (float[N] x, bool c) => (float[N] y) {
            always = Constant <value = bool {1}> ()
            y = If (always) <
                then_branch = a () => (float[N] ya) <float two = {2.0}> {
                    ya = If (c) <then_branch = b () => (float[N] yb) { yb = Mul (x, two) },
                                 else_branch = d () => (float[N] yd) { yd = Div (x, two) }> },
                else_branch = e () => (float[N] ye) { ye = Identity (x) }>
        }""")
    simplified, inlined = simplify(model)
    assert [node.op_type for node in simplified.graph.node] == ["If"]
    assert len(inlined) == 1
    session = ort.InferenceSession(simplified.SerializeToString(), providers=["CPUExecutionProvider"])
    for chosen, want in ((True, 6.0), (False, 1.5)):
        assert session.run(None, {"x": np.full(2, 3, np.float32), "c": np.array(chosen)})[0].tolist() == [want] * 2


def test_presents_of_cross_attention_have_their_heads_apart() -> None:
    """As mobius-onnx declares those of encoder-decoders: ``[B, S, N*D]``, which the operator does not give."""
    rows = "float[B,S,8] x, float[B,T,8] k, float[B,T,8] v"
    model = parser.parse_model(f"""<ir_version: 11, opset_import: ["" : 24]>
        g ({rows}) => (float[B,S,8] y, float[B,T,8] pk, float[B,T,8] pv) {{
            y, pk, pv = Attention <q_num_heads = 2, kv_num_heads = 2> (x, k, v)
        }}""")
    simplified, _ = simplify(model)
    assert [(v.name, shape_of(v)) for v in simplified.graph.output][:1] == [("y", ("B", "S", 8))]
    assert [(v.name, shape_of(v)) for v in simplified.graph.output][1:] == [
        ("pk", ("B", 2, "T", 4)), ("pv", ("B", 2, "T", 4)),
    ]  # fmt: skip
