"""quantize_dynamic and quantize_static of onnxruntime: the same numbers, in operators that TensorRT takes.

`test_block_quantizers` has those of NVIDIA ModelOpt.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import trt
from decoders import DecoderConfig, make_decoder
from foreign_decoders import make_foreign
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import BuildOptions, PlanOptions, build_engine, plan_model, rewrite_model, verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.extensions.quantizers import for_tensorrt, note, read, standardize
from trt_kvcache.importer.weights import stand_in
from trt_kvcache.verify import verify_import

Array = np.ndarray[Any, Any]
FLOAT = TensorProto.FLOAT
FLOATS = {np.float32: FLOAT, np.float16: TensorProto.FLOAT16}
K, N = 24, 10
SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)
OPTIONS = PlanOptions(capacity=16)
NOT_ROUNDED = "is not rounded to 8 bits"


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


def product(form: str, numbers: Array, scale: Array, zeros: Array | None, bias: Array | None = None) -> onnx.ModelProto:
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
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # ONNX Runtime would round what they read, too
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize("form", ["spelled", "half fused", "fused"])
@pytest.mark.parametrize(("kind", "columns"), [*itertools.product([np.int8, np.uint8], [False, True])])
@pytest.mark.parametrize("zero", [None, "middle", "absent", "external"])
def test_a_product_is_that_of_the_numbers_before_rounding(
    form: str, kind: Any, columns: bool, zero: str | None
) -> None:
    """`zero`: zero points; outside of the model, their numbers are not at hand."""
    rng = np.random.default_rng(4)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, K), (K, N)))
    fixed = {"middle": 128 if kind is np.uint8 else 0, "absent": 0}.get(zero or "")
    numbers, scale, zeros = quantized(weight + 0.3, kind, columns, fixed)
    if kind is np.int8:  # of 7 bits: ONNX Runtime cuts larger products off on processors without VNNI
        numbers, zeros = numbers // 2, zeros // 2
    bias = rng.standard_normal(N).astype(np.float32) if columns else None
    model = product(form, numbers, scale, None if zero == "absent" else zeros, bias)
    rounded = run(model, x=x)
    held = next((t for t in model.graph.initializer if t.name == "wz"), TensorProto())
    kept = TensorProto.FromString(held.SerializeToString())
    if zero == "external":
        held.CopyFrom(stand_in(kept))
    model, notes = standardize(model)
    for tensor in model.graph.initializer:
        if tensor.name == "wz":
            tensor.CopyFrom(kept)
    assert len(notes) == 1
    assert NOT_ROUNDED in notes[0]
    assert not {n.op_type for n in model.graph.node} & {"DynamicQuantizeLinear", "MatMulInteger", "Cast"}
    expected = x @ ((numbers.astype(np.float64) - zeros.astype(np.float64)) * scale) + (0 if bias is None else bias)
    np.testing.assert_allclose(run(model, x=x), expected, rtol=1e-4, atol=1e-4)
    step = (max(x.max(), 0) - min(x.min(), 0)) / 255
    reach = np.abs((numbers.astype(np.float64) - zeros) * scale).sum(0).max()
    assert np.abs(rounded - expected).max() < step * reach  # the original's, within its rounding


@pytest.mark.parametrize(("kind", "zero"), [(np.int8, None), (np.int8, 0), (np.uint8, None), (np.uint8, 128)])
@pytest.mark.parametrize("rows", [8, 2048])
def test_rows_of_a_table_that_are_moved_before_they_are_dequantized(kind: Any, zero: int | None, rows: int) -> None:
    """As quantize_dynamic leaves T5's position bias."""
    rng, graph = np.random.default_rng(5), Graph()
    table, ids = rng.standard_normal((rows, 4)).astype(np.float32) + 0.3, rng.integers(0, rows, (3, 5))
    names = [graph.constant(value, np.asarray(value).dtype) for value in quantized(table, kind, False, zero)]
    graph.input("ids", TensorProto.INT64, [3, 5])
    taken = graph.Transpose(graph.Gather(names[0], "ids"), perm=[2, 0, 1])
    graph.DequantizeLinear(graph.Unsqueeze(taken, [0]), *names[1:], out="bias")
    graph.output("bias", FLOAT, [1, 4, 3, 5])
    model = graph.model(21)
    before = run(model, ids=ids)
    model, notes = standardize(model)
    assert not notes
    np.testing.assert_allclose(run(model, ids=ids), before, rtol=1e-6, atol=1e-6)
    made = {o: n.op_type for n in model.graph.node for o in n.output}
    gather = next(n for n in model.graph.node if n.op_type == "Gather")
    assert made[gather.input[0]] in ("Sub", "DequantizeLinear")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("kind", "zero"), [(np.int8, None), (np.int8, 0), (np.uint8, None), (np.uint8, 128)])
def test_rows_of_a_table_that_is_dequantized_first(kind: Any, zero: int | None, dtype: Any) -> None:
    """As quantize_static has embeddings: around the middle, as TensorRT takes it, less the rest after the Gather."""
    rng, graph = np.random.default_rng(5), Graph()
    table, ids = rng.standard_normal((64, 4)).astype(np.float32) + 0.3, rng.integers(0, 64, (3, 5))
    numbers, scale, zeros = quantized(table, kind, False, zero)
    names = [graph.constant(value, np.asarray(value).dtype) for value in (numbers, scale.astype(dtype), zeros)]
    graph.input("ids", TensorProto.INT64, [3, 5])
    graph.Gather(graph.node("DequantizeLinear", names), "ids", out="rows")
    graph.output("rows", FLOATS[dtype], [3, 5, 4])
    model = graph.model(21)
    before = run(model, ids=ids)
    model = standardize(model)[0]
    np.testing.assert_allclose(run(model, ids=ids), before, rtol=1e-6, atol=1e-6 if dtype is np.float32 else 2e-2)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    middles = [constants[n.input[2]] for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[2:]]
    assert all((middle == (128 if kind is np.uint8 else 0)).all() for middle in middles)


@pytest.mark.parametrize(("numbers", "zero"), [([3, 5, 9], 4), ([[3, 5, 9]], 4), ([130], 128), (130, 128), (2, None)])
def test_few_numbers_are_floats(numbers: Any, zero: int | None) -> None:
    graph = Graph()
    graph.input("x", FLOAT, ["B", 3])
    inputs = [graph.constant(numbers, np.uint8), graph.constant(0.5, np.float32)]
    inputs += [] if zero is None else [graph.constant(zero, np.uint8)]
    graph.Mul("x", graph.node("DequantizeLinear", inputs), out="y")
    graph.output("y", FLOAT, ["B", 3])
    model = standardize(graph.model(21))[0]
    assert "DequantizeLinear" not in {n.op_type for n in model.graph.node}
    expected = (np.array(numbers) - (zero or 0)) * 0.5 * np.ones((1, 3))
    assert run(model, x=np.ones((1, 3), np.float32)).tolist() == expected.tolist()


@pytest.mark.parametrize("edit", ["another zero point", "no scale", "kept integers", "rank 3"])
def test_what_is_no_such_product_is_refused_by_name(edit: str) -> None:
    rng = np.random.default_rng(6)
    numbers, scale, zeros = quantized(rng.standard_normal((K, N)).astype(np.float32), np.int8, False, 0)
    model = product("spelled", numbers[None] if edit == "rank 3" else numbers, scale, zeros)
    if edit == "another zero point":
        model.graph.initializer.append(numpy_helper.from_array(np.uint8(3), "three"))
        next(n for n in model.graph.node if n.op_type == "MatMulInteger").input[2] = "three"
    elif edit == "no scale":
        next(n for n in model.graph.node if n.output[0] == "y").input[1] = "ws"
    elif edit == "kept integers":
        model.graph.output.append(helper.make_tensor_value_info("y_int", TensorProto.INT32, ["B", "S", N]))
    with pytest.raises(UnsupportedModelError, match=r"(MatMulInteger|DynamicQuantizeLinear) .* integers of 8 bits"):
        standardize(model)


@pytest.mark.parametrize(
    ("op", "domain"),
    [("QLinearMatMul", ""), ("ConvInteger", ""), ("QLinearAdd", "com.microsoft"), ("QAttention", "com.microsoft")],
)
def test_other_integers_are_refused_by_name(op: str, domain: str) -> None:
    graph = Graph()
    graph.input("x", FLOAT, [K])
    graph.DynamicQuantizeLinear("x", out=["q", "s", "z"])
    graph.node(op, ["q"], "y", domain=domain)
    graph.output("y", FLOAT, [K])
    with pytest.raises(UnsupportedModelError, match=rf"{op} 'node_y'.*op_types_to_quantize=\['MatMul'\].*QDQ"):
        standardize(graph.model(21))


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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["concat", "canonical"])
@pytest.mark.parametrize(("product", "kind", "columns"), [("spelled", np.int8, False), ("fused", np.uint8, True)])
@pytest.mark.parametrize("external", [False, True])
def test_a_decoder_by_quantize_dynamic(
    tmp_path: Path, form: str, product: str, kind: Any, columns: bool, external: bool
) -> None:
    path = tmp_path / "model.onnx"
    options = {"save_as_external_data": True, "location": "model.data", "size_threshold": 256} if external else {}
    model = make_foreign(form, SMALL) if form == "concat" else make_decoder(SMALL)
    onnx.save(dynamic(model, product, kind, columns), path, **options)
    found = import_model(path, OPTIONS)
    assert any(NOT_ROUNDED in n for n in found.plan.notes)
    report = verify_import(found)
    report.check()
    assert any(NOT_ROUNDED in n for n in report.notes)
    manifest = build_engine(path, tmp_path / "model.engine", options=OPTIONS, build=BuildOptions(max_batch=2))
    assert len(manifest.aliases) == 2


def rounding(zero: Any, dtype: Any = np.float32, scale: Any = 0.05) -> onnx.ModelProto:
    """``zero`` None: no zero point, so uint8 around 0."""
    graph = Graph()
    graph.input("x", FLOATS[dtype], ["B", 8])
    numbers = [graph.constant(scale, dtype), *([] if zero is None else [graph.constant(zero, zero.dtype)])]
    small = graph.QuantizeLinear("x", *numbers)
    graph.node("Sum", [graph.DequantizeLinear(small, *numbers) for _ in range(2)], "y")
    graph.output("y", FLOATS[dtype], ["B", 8])
    return graph.model(21)


def spelled(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for_tensorrt(copy, Path())
    return copy


ZEROS = [None, *(np.uint8(n) for n in (0, 3, 128, 255)), np.int8(-5), np.uint16(31571), np.int16(0)]


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "float16"])
@pytest.mark.parametrize("zero", ZEROS, ids=repr)
def test_rounding_is_the_same(zero: Any, dtype: Any) -> None:
    """Halves and what lies beyond the limits are rounded alike, too. Nothing stays unread: TensorRT reads it all."""
    scale = dtype(0.25)
    model = rounding(zero, dtype, scale)
    x = np.concatenate([np.arange(-256, 256) * scale / 2, np.linspace(-300, 300, 512) * 30 * scale]).astype(dtype)
    made = spelled(model)
    assert np.array_equal(run(made, x=x.reshape(-1, 8)), run(model, x=x.reshape(-1, 8)))
    is_signed = zero is not None and zero.dtype == np.uint8 and zero == 128
    assert ("QuantizeLinear" in {n.op_type for n in made.graph.node}) == is_signed
    assert bool(note(model, Path())) != is_signed
    assert not {t.data_type for t in made.graph.initializer} & {TensorProto.UINT16, TensorProto.INT16}
    assert trt.build(made).stage == "built"


def test_rounding_that_something_else_reads_is_refused_by_name() -> None:
    model = rounding(np.uint8(0))
    model.graph.node[1].input[0] = "moved"
    model.graph.node.insert(1, helper.make_node("Identity", [model.graph.node[0].output[0]], ["moved"]))
    with pytest.raises(UnsupportedModelError, match="rounds to uint8, and something else than DequantizeLinear"):
        spelled(model)
    assert not note(model, Path())


def test_rounding_with_a_scale_for_each_channel_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="rounds to uint8, with a scale for each channel"):
        spelled(rounding(np.full(8, 3, np.uint8), scale=np.full(8, 0.1)))


def quantize_static(scale: Array, zero: Array) -> onnx.ModelProto:
    """A decoder whose products read activations rounded to 8 bits."""
    model = make_decoder(SMALL)
    widths = {t.name: t.dims[0] for t in model.graph.initializer if len(t.dims) == 2}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in widths and scale.size in (1, widths[node.input[1]]):
            pair = [f"{node.output[0]}_{part}" for part in ("q", "dq")]
            for i, op in enumerate(("QuantizeLinear", "DequantizeLinear")):
                names = [[node.input[0], pair[0]][i], "scale", "zero"]
                nodes.append(helper.make_node(op, names, pair[i : i + 1], f"n_{pair[i]}", axis=2))
            node.input[0] = pair[1]
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for name, value in (("scale", scale), ("zero", zero)):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


@pytest.mark.slow
def test_a_decoder_by_quantize_static(tmp_path: Path) -> None:
    """Activations around another number, as it writes them by default: planned with a note, verified and built."""
    path = tmp_path / "model.onnx"
    onnx.save(quantize_static(np.array(0.01, np.float32), np.array(120, np.uint8)), path)
    assert any("QuantizeLinear round to 16 bits, to uint8" in n for n in plan_model(path).notes)
    verify_model(path).check()
    rewrite_model(path, tmp_path / "rewritten.onnx")
    assert "QuantizeLinear" not in {n.op_type for n in onnx.load(tmp_path / "rewritten.onnx").graph.node}
    build_engine(path, tmp_path / "model.engine", build=BuildOptions(max_batch=2))


@pytest.mark.slow
def test_plan_refuses_rounding_that_rewrite_refuses_and_the_cpu_runs_it(tmp_path: Path) -> None:
    path, width = tmp_path / "model.onnx", SMALL.hidden
    onnx.save(quantize_static(np.full(width, 0.01, np.float32), np.full(width, 120, np.uint8)), path)
    said = []
    for refuse in (plan_model, lambda given: rewrite_model(given, tmp_path / "rewritten.onnx")):
        with pytest.raises(UnsupportedModelError, match="rounds to uint8, with a scale for each channel") as error:
            refuse(path)
        said.append(str(error.value))
    assert said[0] == said[1]
    verify_model(path).check()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scales", [(), (16,)])
def test_biases_of_int32_build_and_are_the_same(dtype: Any, scales: tuple[int, ...]) -> None:
    rng, g = np.random.default_rng(0), Graph()
    x = g.input("x", FLOATS[dtype], ["batch", 16])
    given = [
        g.constant(rng.integers(-100, 100, 16) * 1000, np.int32),
        g.constant(rng.random(scales) * 1e-5 + 1e-5, dtype),
    ]
    zero = g.constant(np.zeros(scales), np.int32)
    g.Add(x, g.DequantizeLinear(*given, zero, axis=0), out="y")
    g.output("y", FLOATS[dtype], ["batch", 16])
    model, feeds = g.model(opset=21), {"x": rng.standard_normal((3, 16)).astype(dtype)}
    wanted = harness.run(model, feeds)["y"]
    assert "must have type FP8, FP4, Int4, Int8" in trt.parse(model).words
    assert read(model)
    np.testing.assert_allclose(harness.run(model, feeds)["y"], wanted, atol=1e-6 if dtype is np.float32 else 2e-3)
    assert trt.build(model).stage == "built"
