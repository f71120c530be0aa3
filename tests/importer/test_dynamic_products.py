"""What quantize_dynamic writes: products with 8-bit weights of numbers that are rounded while they run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from decoders import DecoderConfig, make_decoder
from foreign_decoders import make_foreign
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import BuildOptions, PlanOptions, build_engine
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.extensions.quantizers.dynamic import NOTE, keep_weights_only, refuse_integers
from trt_kvcache.importer.weights import stand_in
from trt_kvcache.verify import verify_import

Array = np.ndarray[Any, Any]
FLOAT = TensorProto.FLOAT
K, N = 24, 10
SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)
OPTIONS = PlanOptions(capacity=16)


def quantized(weight: Array, kind: Any, columns: bool, zero: int | None = None) -> tuple[Array, Array, Array]:
    """Numbers, scale and zero points; `zero`: the zero point, else one that uses all numbers."""
    low, high = (weight.min(0), weight.max(0)) if columns else (weight.min(), weight.max())
    info = np.iinfo(kind)
    scale = np.float32((high - low) / 250 if zero is None else np.maximum(high, -low) / 127)
    zeros = np.round(info.min - low / scale + 2) if zero is None else np.full_like(scale, zero)
    numbers = np.clip(np.round(weight / scale + zeros), info.min, info.max)
    return numbers.astype(kind), scale, zeros.astype(kind)


def add_product(
    nodes: list[onnx.NodeProto], form: str, x: str, names: tuple[str, str, str], out: str, bias: str
) -> None:
    """A product as quantize_dynamic writes it, or as ONNX Runtime fuses that."""
    weight, scale, zero = names
    q, s, z = (f"{out}_{part}" for part in ("q", "s", "z"))
    if form == "fused":
        inputs = [x, weight, scale, zero, bias]
        nodes.append(helper.make_node("DynamicQuantizeMatMul", inputs, [out], f"n_{out}", domain="com.microsoft"))
        return
    nodes.append(helper.make_node("DynamicQuantizeLinear", [x], [q, s, z], f"n_{q}"))
    if form == "half fused":
        inputs = [q, weight, s, scale, z, zero, bias]
        nodes.append(helper.make_node("MatMulIntegerToFloat", inputs, [out], f"n_{out}", domain="com.microsoft"))
        return
    product = f"{out}_mul" if bias else out
    nodes.append(helper.make_node("Mul", [s, scale], [f"{out}_scales"], f"n_{out}_scales"))
    nodes.append(helper.make_node("MatMulInteger", [q, weight, z, zero], [f"{out}_int"], f"n_{out}_int"))
    nodes.append(helper.make_node("Cast", [f"{out}_int"], [f"{out}_cast"], f"n_{out}_cast", to=FLOAT))
    nodes.append(helper.make_node("Mul", [f"{out}_cast", f"{out}_scales"], [product], f"n_{product}"))
    if bias:
        nodes.append(helper.make_node("Add", [product, bias], [out], f"n_{out}"))


def product(form: str, numbers: Array, scale: Array, zeros: Array | None, bias: Array | None) -> onnx.ModelProto:
    graph = Graph()
    graph.input("x", FLOAT, ["B", "S", K])
    for name, value in (("w", numbers), ("ws", scale), ("wz", zeros), ("b", bias)):
        if value is not None:
            graph.initializers.append(numpy_helper.from_array(np.asarray(value), name))
    names = ("w", "ws", "wz" if zeros is not None else "")
    add_product(graph.nodes, form, "x", names, "y", "b" if bias is not None else "")
    graph.output("y", FLOAT, ["B", "S", N])
    return graph.model(21, ["com.microsoft"])


def run(model: onnx.ModelProto, **feeds: Array) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # ONNX Runtime would round what they read, too
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize("form", ["spelled", "half fused", "fused"])
@pytest.mark.parametrize(
    ("kind", "columns", "zero", "biased"),
    [*itertools.product([np.int8, np.uint8], [False, True], [None, "middle", "absent"], [False, True])],
)
def test_a_product_is_that_of_the_numbers_before_rounding(
    form: str, kind: Any, columns: bool, zero: str | None, biased: bool
) -> None:
    rng = np.random.default_rng(4)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, K), (K, N)))
    fixed = {None: None, "middle": 128 if kind is np.uint8 else 0, "absent": 0}[zero]
    numbers, scale, zeros = quantized(weight + 0.3, kind, columns, fixed)
    bias = rng.standard_normal(N).astype(np.float32) if biased else None
    model = product(form, numbers, scale, None if zero == "absent" else zeros, bias)
    rounded = run(model, x=x)
    assert keep_weights_only(model)
    onnx.checker.check_model(model, full_check=True)
    refuse_integers(model)
    assert not {n.op_type for n in model.graph.node} & {"DynamicQuantizeLinear", "MatMulInteger", "Cast"}
    for node in model.graph.node:  # what TensorRT takes, once unsigned numbers are signed
        middles = [numpy_helper.to_array(t) for t in model.graph.initializer if t.name in node.input[2:]]
        if node.op_type == "DequantizeLinear":
            assert len(middles) == (kind is np.uint8)
            assert all((middle == 128).all() for middle in middles)
    expected = x @ ((numbers.astype(np.float64) - zeros.astype(np.float64)) * scale) + (0 if bias is None else bias)
    np.testing.assert_allclose(run(model, x=x), expected, rtol=1e-4, atol=1e-4)
    step = (max(x.max(), 0) - min(x.min(), 0)) / 255
    reach = np.abs((numbers.astype(np.float64) - zeros) * scale).sum(0).max()
    assert np.abs(rounded - expected).max() < step * reach  # the original's, within its rounding


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("columns", [False, True])
def test_zero_points_outside_of_the_model_are_taken_out_as_well(kind: Any, columns: bool) -> None:
    rng = np.random.default_rng(5)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 2, K), (K, N)))
    numbers, scale, zeros = quantized(weight + 0.3, kind, columns)
    model = product("spelled", numbers, scale, zeros, None)
    index = next(i for i, t in enumerate(model.graph.initializer) if t.name == "wz")
    kept = TensorProto()
    kept.CopyFrom(model.graph.initializer[index])
    model.graph.initializer[index].CopyFrom(stand_in(kept))
    assert keep_weights_only(model)
    model.graph.initializer[index].CopyFrom(kept)
    expected = x @ ((numbers.astype(np.float64) - zeros.astype(np.float64)) * scale)
    np.testing.assert_allclose(run(model, x=x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("zero", [None, 128])
@pytest.mark.parametrize("rows", [8, 2048])
def test_rows_of_a_table_that_are_moved_before_they_are_dequantized(kind: Any, zero: int | None, rows: int) -> None:
    """As quantize_dynamic leaves T5's position bias."""
    if kind is np.int8:
        zero = None if zero is None else 0
    rng = np.random.default_rng(5)
    table, ids = rng.standard_normal((rows, 4)).astype(np.float32) + 0.3, rng.integers(0, rows, (3, 5))
    numbers, scale, zeros = quantized(table, kind, False, zero)
    model = product("spelled", *quantized(rng.standard_normal((K, N)).astype(np.float32), np.int8, False, 0), None)
    for name, value in (("table", numbers), ("ts", scale), ("tz", zeros), ("axes", np.array([0]))):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, [3, 5]))
    made = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], "rows"),
        helper.make_node("Transpose", ["rows"], ["turned"], "turned", perm=[2, 0, 1]),
        helper.make_node("Unsqueeze", ["turned", "axes"], ["wide"], "wide"),
        helper.make_node("DequantizeLinear", ["wide", "ts", "tz"], ["bias"], "bias"),
    ]
    model.graph.node.extend(made)
    model.graph.output.insert(0, helper.make_tensor_value_info("bias", FLOAT, [1, 4, 3, 5]))
    feeds = {"x": np.zeros((1, 1, K), np.float32), "ids": ids}
    before = run(model, **feeds)
    assert keep_weights_only(model)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(run(model, **feeds), before, rtol=1e-6, atol=1e-6)
    gather = next(n for n in model.graph.node if n.op_type == "Gather")
    makers = {n.output[0]: n.op_type for n in model.graph.node}
    is_shifted = bool((zeros.astype(int) != (0 if kind is np.int8 else 128)).any())
    assert makers[gather.input[0]] == ("Sub" if is_shifted and rows == 8 else "DequantizeLinear")
    assert not {"rows", "turned", "wide"} & makers.keys()


def test_two_rounded_operands() -> None:
    graph = Graph()
    graph.input("x", FLOAT, ["B", 3, K])
    graph.input("y", FLOAT, ["B", K, N])
    for name in "xy":
        graph.node("DynamicQuantizeLinear", [name], [f"{name}q", f"{name}s", f"{name}z"])
    graph.node("Mul", ["ys", "xs"], "scales")
    graph.node("Cast", [graph.node("MatMulInteger", ["xq", "yq", "xz", "yz"])], "cast", to=FLOAT)
    graph.node("Mul", ["scales", "cast"], "out")
    graph.output("out", FLOAT, ["B", 3, N])
    model = graph.model(21)
    assert keep_weights_only(model)
    assert [(n.op_type, [*n.input]) for n in model.graph.node] == [("MatMul", ["x", "y"])]


@pytest.mark.parametrize("edit", ["another scale", "another zero point", "no scale", "kept integers", "rank 3"])
def test_what_is_no_such_product_is_refused_by_name(edit: str) -> None:
    rng = np.random.default_rng(6)
    numbers, scale, zeros = quantized(rng.standard_normal((K, N)).astype(np.float32), np.int8, False, 0)
    model = product("spelled", numbers, scale, zeros, None)
    nodes = {n.op_type: n for n in model.graph.node}
    if edit == "another scale":
        model.graph.node.insert(0, helper.make_node("DynamicQuantizeLinear", ["x"], ["q2", "s2", "z2"]))
        nodes["Mul"].input[1] = "s2"
        scaled = next(n for n in model.graph.node if n.output[0] == "y_scales")
        scaled.input[:] = ["s2", "ws"]
    elif edit == "another zero point":
        model.graph.initializer.append(numpy_helper.from_array(np.uint8(3), "three"))
        nodes["MatMulInteger"].input[2] = "three"
    elif edit == "no scale":
        next(n for n in model.graph.node if n.output[0] == "y").input[1] = "ws"
    elif edit == "kept integers":
        model.graph.output.append(helper.make_tensor_value_info("y_int", TensorProto.INT32, ["B", "S", N]))
    else:
        weight = next(t for t in model.graph.initializer if t.name == "w")
        weight.CopyFrom(numpy_helper.from_array(numbers[None], "w"))
    keep_weights_only(model)
    with pytest.raises(UnsupportedModelError, match=r"(MatMulInteger|DynamicQuantizeLinear) .* integers of 8 bits"):
        refuse_integers(model)


@pytest.mark.parametrize(
    ("op", "domain"),
    [("QLinearMatMul", ""), ("ConvInteger", ""), ("QLinearAdd", "com.microsoft"), ("QAttention", "com.microsoft")],
)
def test_other_integers_are_refused_by_name(op: str, domain: str) -> None:
    graph = Graph()
    graph.input("x", FLOAT, [K])
    graph.node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    graph.node(op, ["q"], "y", domain=domain)
    with pytest.raises(UnsupportedModelError, match=rf"{op} 'node_y'.*op_types_to_quantize=\['MatMul'\].*QDQ"):
        refuse_integers(graph.model(21))


def test_a_product_in_a_body() -> None:
    """Weights outside of it, and names that both branches have."""
    rng = np.random.default_rng(7)
    numbers, scale, zeros = quantized(rng.standard_normal((K, N)).astype(np.float32), np.uint8, False)
    model = product("spelled", numbers, scale, zeros, None)
    result = helper.make_tensor_value_info("y", FLOAT, None)
    body = helper.make_graph(list(model.graph.node), "body", [], [result])
    choice = helper.make_tensor_value_info("choice", TensorProto.BOOL, [])
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("If", ["choice"], ["z"], then_branch=body, else_branch=body))
    model.graph.input.append(choice)
    model.graph.output[0].name = "z"
    assert keep_weights_only(model)
    onnx.checker.check_model(model, full_check=True)
    x = rng.standard_normal((1, 2, K)).astype(np.float32)
    expected = x @ ((numbers.astype(np.float64) - zeros.astype(np.float64)) * scale)
    np.testing.assert_allclose(run(model, x=x, choice=np.array(False)), expected, rtol=1e-4, atol=1e-4)


def dynamic(model: onnx.ModelProto, form: str, kind: Any, columns: bool) -> onnx.ModelProto:
    """`model` with its products and its table of embeddings quantized as quantize_dynamic does."""
    weights = {t.name: t for t in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []

    def names_of(name: str, kind: Any, columns: bool) -> tuple[str, str, str]:
        names = (f"{name}_quantized", f"{name}_scale", f"{name}_zero_point")
        if names[0] not in weights:
            weight = numpy_helper.to_array(weights[name])
            for made, value in zip(names, quantized(weight, kind, columns), strict=True):
                weights[made] = numpy_helper.from_array(np.asarray(value), made)
                model.graph.initializer.append(weights[made])
        return names

    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            add_product(nodes, form, node.input[0], names_of(node.input[1], kind, columns), node.output[0], "")
        elif node.op_type == "Gather" and len(weights.get(node.input[0], TensorProto()).dims) == 2:
            table, scale, zero = names_of(node.input[0], np.uint8, False)
            out = node.output[0]
            nodes.append(helper.make_node("Gather", [table, node.input[1]], [f"{out}_quantized"], f"n_{out}"))
            nodes.append(helper.make_node("DequantizeLinear", [f"{out}_quantized", scale, zero], [out], f"n_{out}_dq"))
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    if all(entry.domain != "com.microsoft" for entry in model.opset_import):
        model.opset_import.add(domain="com.microsoft", version=1)
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize(("form", "kind", "columns"), [("spelled", np.int8, False), ("fused", np.uint8, True)])
@pytest.mark.parametrize("external", [False, True])
def test_a_decoder_is_verified_and_built(tmp_path: Path, form: str, kind: Any, columns: bool, external: bool) -> None:
    path = tmp_path / "model.onnx"
    options = {"save_as_external_data": True, "location": "model.data", "size_threshold": 256} if external else {}
    onnx.save(dynamic(make_foreign("concat", SMALL), form, kind, columns), path, **options)
    found = import_model(path, OPTIONS)
    assert NOTE in found.plan.notes
    report = verify_import(found)
    report.check()
    assert any(NOTE in note for note in report.notes)
    manifest = build_engine(path, tmp_path / "model.engine", options=OPTIONS, build=BuildOptions(max_batch=2))
    assert len(manifest.aliases) == 2


def test_of_a_model_with_canonical_caches_it_is_said_too(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(dynamic(make_decoder(SMALL), "spelled", np.uint8, columns=False), path)
    found = import_model(path)
    assert NOTE in found.plan.notes
    verify_import(found).check()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("order", ["rows first", "table first"])
def test_a_table_with_a_zero_point_beside_plain_products(tmp_path: Path, kind: Any, order: str) -> None:
    """Olive's dynamic quantization of a model in float16 leaves products alone; quantize_static writes tables first."""
    model = make_decoder(replace(SMALL, dtype="float16"))
    weights = {t.name: t for t in model.graph.initializer}
    (at, node), *_ = [(i, n) for i, n in enumerate(model.graph.node) if n.op_type == "Gather" and n.input[0] in weights]
    numbers, scale, zero = quantized(
        numpy_helper.to_array(weights[node.input[0]]).astype(np.float32), kind, False, None
    )
    for name, value in (("table_q", numbers), ("table_s", scale.astype(np.float16)), ("table_z", zero)):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    rows, made = ["table_q", node.input[1]], node.output[0]
    if order == "rows first":
        chain = [("Gather", rows, "mid"), ("DequantizeLinear", ["mid", "table_s", "table_z"], made)]
    else:
        chain = [("DequantizeLinear", ["table_q", "table_s", "table_z"], "mid"), ("Gather", ["mid", rows[1]], made)]
    del model.graph.node[at]
    for place, (op, inputs, output) in enumerate(chain):
        model.graph.node.insert(at + place, helper.make_node(op, inputs, [output], f"n_{output}"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    found = import_model(path)
    assert NOTE not in found.plan.notes
    verify_import(found).check()
    build_engine(path, tmp_path / "model.engine", build=BuildOptions(max_batch=2))


@pytest.mark.parametrize(("numbers", "zero"), [([3, 5, 9], 4), ([[3, 5, 9]], 4), ([130], 128), (130, 128), (2, None)])
def test_few_numbers_are_floats(numbers: Any, zero: int | None) -> None:
    graph = Graph()
    graph.input("x", FLOAT, ["B", 3])
    inputs = [graph.constant(numbers, np.uint8), graph.constant(0.5, np.float32)]
    inputs += [] if zero is None else [graph.constant(zero, np.uint8)]
    graph.node("Mul", ["x", graph.node("DequantizeLinear", inputs)], "y")
    graph.output("y", FLOAT, ["B", 3])
    model = graph.model(21)
    assert not keep_weights_only(model)
    assert "DequantizeLinear" not in {n.op_type for n in model.graph.node}
    expected = (np.array(numbers) - (zero or 0)) * 0.5 * np.ones((1, 3))
    assert run(model, x=np.ones((1, 3), np.float32)).tolist() == expected.tolist()
