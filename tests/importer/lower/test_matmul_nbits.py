"""Products with weights of 4 and 8 bits against their bodies, the same with signed weights, and numpy."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from builder import build_in_child
from graphs import Graph
from lowering import CONTRIB, close, lowered
from lowering import run as run_all
from mixtures import packed
from onnx import NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer.files.signed_weights import for_tensorrt as sign_weights
from trt_kvcache.runtime.ort.cpu_model import fuse_products

Array = np.ndarray[Any, Any]
UINT8, UINT4, INT4, INT8 = TensorProto.UINT8, TensorProto.UINT4, TensorProto.INT4, TensorProto.INT8
HERE = Path()


@dataclass(frozen=True)
class Linear:
    """A MatMulNBits with random weights; `y` is its definition in numpy."""

    k: int = 64
    n: int = 24
    block: int = 32
    bits: int = 4
    dtype: Any = np.float32
    zeros: str = ""  # "uint8", "float", or none
    bias: bool = False
    rank: int = 3
    flat: bool = False
    positive: bool = False  # scales
    seed: int = 0

    def make(self, **attrs: Any) -> tuple[onnx.ModelProto, dict[str, Array], Array]:
        rng, blocks, top = np.random.default_rng(self.seed), -(-self.k // self.block), 2**self.bits
        numbers = rng.integers(0, top, (self.n, blocks * self.block))
        scales = (rng.uniform(0.005, 0.02, (self.n, blocks)) / top * 16).astype(self.dtype)
        if not self.positive:
            scales *= rng.choice([-1, 1], scales.shape).astype(self.dtype)
        zeros: Array = np.full((self.n, blocks), top // 2, np.float64)
        x = rng.standard_normal((2, 3, self.k)[3 - self.rank :]).astype(self.dtype)

        graph = Graph()
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        inputs = [graph.input("x", kind, x.shape)]
        stored = packed(numbers.reshape(self.n, blocks, self.block), self.bits)
        inputs += [graph.constant(stored, np.uint8)]
        inputs += [graph.constant(scales.ravel() if self.flat else scales, self.dtype)]
        if self.zeros == "uint8":
            zeros = rng.integers(0, top, zeros.shape).astype(np.float64)
            rows = packed(zeros, self.bits)
            inputs.append(graph.constant(rows.ravel() if self.flat else rows, np.uint8))
        elif self.zeros == "float":
            zeros = rng.uniform(0, top, zeros.shape).astype(self.dtype).astype(np.float64)
            inputs.append(graph.constant(zeros, self.dtype))
        dense = (numbers.reshape(self.n, blocks, self.block) - zeros[..., None]) * scales.astype(np.float64)[..., None]
        y = x.astype(np.float64) @ dense.reshape(self.n, -1)[:, : self.k].T
        if self.bias:
            bias = rng.standard_normal(self.n).astype(self.dtype)
            inputs += [""] * (5 - len(inputs)) + [graph.constant(bias, self.dtype)]
            y += bias.astype(np.float64)
        attrs = {"K": self.k, "N": self.n, "bits": self.bits, "block_size": self.block} | attrs
        graph.node("MatMulNBits", inputs, "y", domain=CONTRIB, **attrs)
        graph.output("y", kind, (*x.shape[:-1], self.n))
        return graph.model(24, [CONTRIB]), {"x": x}, y


@dataclass(frozen=True)
class Table:
    """A GatherBlockQuantized over a random table; `y` is its definition in numpy."""

    stored: int = UINT8
    rows: int = 40
    width: int = 64
    block: int = 32
    dtype: Any = np.float32
    zeros: bool = False
    reshaped: bool = False
    rank: int = 2
    axis: int = 1
    bits: int = 4

    def make(self, **attrs: Any) -> tuple[onnx.ModelProto, dict[str, Array], Array]:
        rng, blocks = np.random.default_rng(3), self.width // self.block
        low, high = (-8, 8) if self.stored == INT4 else (0, 2**self.bits)
        numbers = rng.integers(low, high, (self.rows, self.width))
        numbers[0], numbers[1, ::2] = high - 1, low  # every bit of a word, and the lowest alone
        scales = rng.uniform(-0.02, 0.02, (self.rows, blocks)).astype(self.dtype)
        middle = 2 ** (self.bits - 1) if self.stored == UINT8 else 0
        zeros: Array = rng.integers(low, high, scales.shape) if self.zeros else np.full(scales.shape, middle)
        ids = np.concatenate([np.arange(self.rows), [-1, -self.rows]]).reshape((1, 2, -1)[3 - self.rank :] + (-1,) * 0)
        ids = ids.reshape(-1) if self.rank == 1 else ids

        graph = Graph()
        names = [self._constant(graph, numbers), graph.input("ids", TensorProto.INT64, ids.shape)]
        if self.reshaped:
            raw = graph.constant(packed(numbers, self.bits).reshape(self.rows, blocks, -1), np.uint8)
            names[0] = graph.Reshape(raw, [self.rows, self.width * self.bits // 8])
        names.append(graph.constant(scales, self.dtype))
        names += [self._constant(graph, zeros)] if self.zeros else []
        attrs = {"gather_axis": 0, "quantize_axis": self.axis, "block_size": self.block, "bits": self.bits} | attrs
        if self.stored != UINT8:
            attrs.pop("bits")
        graph.node("GatherBlockQuantized", names, "y", domain=CONTRIB, **attrs)
        graph.output("y", helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)), (*ids.shape, self.width))
        dense = (numbers.reshape(self.rows, blocks, -1) - zeros[..., None]).astype(self.dtype) * scales[..., None]
        return graph.model(24, [CONTRIB]), {"ids": ids}, dense.reshape(self.rows, -1)[ids]

    def _constant(self, graph: Graph, numbers: Array) -> str:
        if self.stored == UINT8:
            return graph.constant(packed(numbers, self.bits), np.uint8)
        return graph.constant(numbers, ml_dtypes.uint4 if self.stored == UINT4 else ml_dtypes.int4)


@dataclass(frozen=True)
class Dequantized:
    """A MatMul with a weight ``[K, N]`` in blocks of rows, as onnxruntime-genai writes it for TensorRT for RTX."""

    bits: int = 4
    zeros: bool = True
    rank: int = 3
    readers: int = 1
    dtype: Any = np.float32

    def make(self) -> tuple[onnx.ModelProto, dict[str, Array], Array]:
        rng, top, k, n, block = np.random.default_rng(self.bits), 2**self.bits, 64, 24, 16
        kind = ml_dtypes.uint4 if self.bits == 4 else np.uint8
        numbers, zero = rng.integers(0, top, (k, n)), rng.integers(0, top, (k // block, n))
        scales = (rng.uniform(0.005, 0.02, zero.shape) / top * 16).astype(self.dtype)
        x = rng.standard_normal((2, 5, k)[3 - self.rank :]).astype(self.dtype)
        graph, code = Graph(), helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph.input("x", code, x.shape)
        names = [graph.constant(numbers, kind), graph.constant(scales, self.dtype)]
        names += [graph.constant(zero, kind)] if self.zeros else []
        weight = graph.node("DequantizeLinear", names, axis=0, block_size=block)
        graph.node("Sum", [graph.MatMul("x", weight) for _ in range(self.readers)], "y")
        graph.output("y", code, (*x.shape[:-1], n))
        apart = numbers.reshape(-1, block, n) - (zero if self.zeros else 0 * zero)[:, None]
        dense = (apart * scales.astype(float)[:, None]).reshape(k, n)
        return graph.model(), {"x": x}, self.readers * (x.astype(float) @ dense)


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    return run_all(model, feeds)[0]


def signed(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = deepcopy(model)
    assert sign_weights(copy, HERE) == ()
    assert not {t.data_type for t in copy.graph.initializer} & {UINT4, UINT8}
    return copy


LINEARS = [
    *(Linear(bits=bits, block=block, k=2 * block) for bits in (4, 8) for block in (16, 32, 64, 128)),
    *(Linear(bits=bits, zeros=zeros) for bits in (4, 8) for zeros in ("uint8", "float")),
    *(Linear(bits=bits, k=96, zeros="uint8", flat=True) for bits in (4, 8)),  # three zero points: half a byte is left
    *(Linear(k=k, block=block, zeros=zeros) for k, block in ((100, 32), (8, 16), (72, 64)) for zeros in ("", "uint8")),
    Linear(bias=True), Linear(bias=True, zeros="uint8"), Linear(rank=2, zeros="uint8"), Linear(n=1, k=32, flat=True),
]  # fmt: skip
TABLES = [
    *(Table(stored, zeros=zeros) for stored in (UINT8, UINT4, INT4) for zeros in (False, True)),
    Table(reshaped=True), Table(width=96, zeros=True), Table(UINT4, width=96, zeros=True), Table(width=48, block=16),
    *(Table(bits=8, zeros=zeros, reshaped=reshaped) for zeros in (False, True) for reshaped in (False, True)),
    Table(bits=8, width=48, block=16, rank=3, dtype=np.float16),
    Table(rank=1), Table(rank=3, zeros=True), Table(axis=-1), Table(UINT4, rank=1, zeros=True),
]  # fmt: skip


DEQUANTIZED = [
    *(Dequantized(bits, zeros) for bits in (4, 8) for zeros in (False, True)),
    Dequantized(rank=2), Dequantized(readers=2), Dequantized(dtype=np.float16),
]  # fmt: skip


@pytest.mark.parametrize("case", DEQUANTIZED, ids=str)
def test_matmul_of_dequantized_blocks(case: Dequantized) -> None:
    model, feeds, expected = case.make()
    result = lowered(model)
    for each in (model, result, signed(result)):
        close(run(each, feeds), expected, 2e-6 if case.dtype == np.float32 else 4e-3)


def test_a_weight_that_something_else_reads_keeps_its_zero_points() -> None:
    model, feeds, expected = Dequantized().make()
    weight = model.graph.node[0].output[0]
    model.graph.output.append(helper.make_tensor_value_info(weight, TensorProto.FLOAT, [64, 24]))
    result = lowered(model)
    before, after = run_all(model, feeds), run_all(result, feeds)
    close(after[0], expected, 2e-6)
    np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_matmul_nbits(case: Linear, dtype: Any) -> None:
    model, feeds, expected = replace(case, dtype=dtype).make()
    result = lowered(model)
    share = 2e-6 if dtype == np.float32 else 4e-3
    if (case.bits, case.zeros) != (8, "float"):  # for which ONNX Runtime 1.31.1 has no kernel on the CPU
        close(run(model, feeds), expected, share)  # it understands the operator as this test does
    close(run(result, feeds), expected, share)
    on_cpu = fuse_products(result)
    assert [n.op_type for n in on_cpu.graph.node].count("MatMulNBits") == 1
    assert not {n.op_type for n in on_cpu.graph.node if "weight" in n.output[0]} & {"DequantizeLinear", "Transpose"}
    close(run(on_cpu, feeds), expected, share)
    if case.bits == 4 or case.positive:
        np.testing.assert_array_equal(run(signed(result), feeds), run(result, feeds))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", TABLES, ids=str)
def test_gather_block_quantized(case: Table, dtype: Any) -> None:
    model, feeds, expected = replace(case, dtype=dtype).make()
    result = lowered(model)
    np.testing.assert_array_equal(run(model, feeds), expected)
    np.testing.assert_array_equal(run(result, feeds), expected)
    np.testing.assert_array_equal(run(signed(result), feeds), expected)


def test_rounding_of_activations_is_left_out() -> None:
    model, feeds, expected = Linear(k=256, n=64).make(accuracy_level=4)
    assert np.abs(run(model, feeds) - expected).max() > 1e-3 * np.abs(expected).max()
    close(run(lowered(model), feeds), expected, 2e-6)


OTHERS: dict[str, Callable[[NodeProto, NodeProto, TensorProto], object]] = {
    "not transposed": lambda turn, *_: turn.attribute[0].ints.__setitem__(slice(None), [0, 1]),
    "other zero points": lambda _, dequantize, zeros: setattr(zeros, "raw_data", bytes(len(zeros.raw_data))),
    "no zero points": lambda _, dequantize, zeros: dequantize.input.pop(),
    "small blocks": lambda _, dequantize, zeros: setattr(dequantize.attribute[1], "i", 8),
    "a weight that is computed": lambda _, dequantize, zeros: dequantize.input.__setitem__(0, "computed"),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_products_that_onnx_runtime_would_read_otherwise_stay(change: Callable[..., object]) -> None:
    model = lowered(Linear().make()[0])
    assert fuse_products(model) is not model
    nodes = {node.op_type: node for node in model.graph.node}
    zeros = next(t for t in model.graph.initializer if t.name == nodes["DequantizeLinear"].input[2])
    assert nodes["DequantizeLinear"].attribute[1].name == "block_size"
    change(nodes["Transpose"], nodes["DequantizeLinear"], zeros)
    assert fuse_products(model) is model


def test_a_weight_that_two_products_read_is_held_once() -> None:
    model, _, _ = Linear().make()
    model.graph.node.append(helper.make_node("MatMulNBits", model.graph.node[0].input, ["z"], "again", domain=CONTRIB,
                                             **{a.name: a.i for a in model.graph.node[0].attribute}))  # fmt: skip
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert sum(t.data_type == UINT4 and len(t.dims) == 2 for t in lowered(model).graph.initializer) == 2  # and 8s


def test_weights_in_a_file_stay_there(tmp_path: Path) -> None:
    model, feeds, expected = Linear(zeros="uint8", positive=True, bits=8).make()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    before = (tmp_path / "m.data").read_bytes()
    result = lowered(onnx.load(tmp_path / "m.onnx", load_external_data=False))
    flipped = sign_weights(result, tmp_path)
    assert sorted(f.mask for f in flipped) == [0x80, 0x80]  # the weight and its zero points
    for tensor in result.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(tmp_path))
            tensor.ClearField("data_location")
            del tensor.external_data[:]
        for weight in flipped:
            if weight.name == tensor.name:
                tensor.raw_data = b"".join(weight.read(tmp_path))
    close(run(result, feeds), expected, 2e-6)
    assert (tmp_path / "m.data").read_bytes() == before


class TestTensorRT:
    @pytest.mark.few(8)
    @pytest.mark.parametrize(
        "case",
        [
            *(Linear(k=256, block=block, n=64) for block in (16, 32, 64, 128)),
            Linear(zeros="uint8"), Linear(zeros="float"), Linear(k=96, zeros="uint8", dtype=np.float16),
            Linear(k=100, bias=True), Linear(bits=8, positive=True), Linear(bits=8, positive=True, zeros="uint8"),
            Table(bits=8, zeros=True),
            Table(), Table(zeros=True), Table(INT4), Table(UINT4, zeros=True, dtype=np.float16),
            Dequantized(), Dequantized(8, dtype=np.float16),
        ],
        ids=str,
    )  # fmt: skip
    def test_builds(self, case: Linear | Table | Dequantized) -> None:
        model = signed(lowered(case.make()[0]))
        assert build_in_child(model.SerializeToString(), [{}]).stage == "built"

    def test_what_it_does_not_take(self) -> None:
        """Why weights are signed, and why zero points and 8-bit scales get a treatment of their own."""
        unsigned = lowered(Linear().make()[0])
        assert "Failed to import initializer" in build_in_child(unsigned.SerializeToString(), [{}]).words
        model = signed(lowered(Linear().make()[0]))
        model.graph.initializer.append(helper.make_tensor("zeros", INT4, [24, 2], [3] * 48))
        next(n for n in model.graph.node if n.op_type == "DequantizeLinear").input.append("zeros")
        assert "Non-zero zero point is not supported" in build_in_child(model.SerializeToString(), [{}]).words
        model = signed(lowered(Linear(bits=8, positive=True).make()[0]))
        scales = next(t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT)
        scales.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(scales), scales.name))
        assert "Scale coefficients must all be positive" in build_in_child(model.SerializeToString(), [{}]).words
