"""Quantized weights and numbers in TensorRT for RTX.

A failure here means that TensorRT changed: `importer.quantized.signed`, `normalize.nbits`, `normalize.zero_points` and
`importer.families.quantizers` rely on these facts.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trt
from block_graphs import FORMS, in_blocks
from graphs import Graph
from onnx import ModelProto, TensorProto, helper

SIZE, WIDE = 64, 512
FP8 = ml_dtypes.float8_e4m3fn


def product(
    weight: Callable[[Graph, int], str], size: int = SIZE, rounded: Callable[[Graph, str], str] | None = None
) -> ModelProto:
    """``x @ weight`` in float16, of numbers as they are or rounded."""
    g = Graph()
    x = g.input("x", TensorProto.FLOAT16, ["batch", size])
    g.MatMul(rounded(g, x) if rounded else x, weight(g, size), out="y")
    g.output("y", TensorProto.FLOAT16, ["batch", size])
    return g.model(opset=24, domains=["trt"])


def raw(g: Graph, kind: int, shape: tuple[int, ...], data: Any) -> str:
    """An initializer of any type, from its bytes."""
    name = f"raw_{len(g.initializers)}"
    g.initializers.append(helper.make_tensor(name, kind, shape, np.ascontiguousarray(data).tobytes(), raw=True))
    return name


def random_bytes(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8)


def floats(g: Graph, size: int) -> str:
    return g.constant(np.random.default_rng(0).standard_normal((size, size)), np.float16)


def int4(kind: int = TensorProto.INT4, axis: int = 0, zero: int | None = None) -> Callable[[Graph, int], str]:
    """A weight of 4 bits in blocks of 32."""

    def weight(g: Graph, size: int) -> str:
        shape = (size // 32, size) if axis == 0 else (size, size // 32)
        inputs = [
            raw(g, kind, (size, size), random_bytes(size * size // 2)),
            g.constant(np.full(shape, 0.01), np.float16),
        ]
        if zero is not None:
            inputs.append(raw(g, kind, shape, np.full(size * size // 64, zero * 17, np.uint8)))
        return g.node("DequantizeLinear", inputs, axis=axis, block_size=32)

    return weight


def int8(scale: float = 0.01, zero: int | None = None) -> Callable[[Graph, int], str]:
    """A weight of 8 bits with a scale for each column."""

    def weight(g: Graph, size: int) -> str:
        inputs = [
            raw(g, TensorProto.INT8, (size, size), random_bytes(size * size)),
            g.constant([scale] * size, np.float16),
        ]
        if zero is not None:
            inputs.append(g.constant([zero] * size, np.int8))
        return g.node("DequantizeLinear", inputs, axis=1)

    return weight


def fp8(g: Graph, size: int) -> str:
    data = np.random.default_rng(0).standard_normal(size * size).astype(FP8)
    return g.DequantizeLinear(raw(g, TensorProto.FLOAT8E4M3FN, (size, size), data), g.constant(1, np.float16))


def rounds(zero: Any, domain: str = "", prefix: str = "") -> Callable[[Graph, str], str]:
    """QuantizeLinear and DequantizeLinear with one scale."""

    def pair(g: Graph, x: str) -> str:
        more = [] if prefix else [g.constant(zero, zero.dtype)]
        inputs = [g.constant(0.1, np.float16), *more]
        small = g.node(f"{prefix}QuantizeLinear", [x, *inputs], domain=domain)
        return g.node(f"{prefix}DequantizeLinear", [small, *inputs], domain=domain)

    return pair


BUILT: dict[str, Callable[[], ModelProto]] = {
    "int4 in blocks of rows": lambda: product(int4()),
    "int4 in blocks of columns": lambda: product(int4(axis=1)),
    "int4, zero points of 0": lambda: product(int4(zero=0)),
    "int8, zero points of 0": lambda: product(int8(zero=0)),
    "int8 on both sides": lambda: product(int8(), rounded=rounds(np.int8(0))),
    "fp8 on both sides": lambda: product(fp8, rounded=rounds(FP8(0))),
    "fp8 of the domain trt": lambda: product(fp8, rounded=rounds(None, "trt", "TRT_FP8")),
    "int4 of the domain trt, in an opset without blocks": lambda: of_trt(product(int4()), 20),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "int4, other zero points": (lambda: product(int4(zero=1)), "Non-zero zero point is not supported"),
    "int8, other zero points": (lambda: product(int8(zero=3)), "Non-zero zero point is not supported"),
    "activations with a zero point": (
        lambda: product(int8(), rounded=rounds(np.int8(3))), "Non-zero zero point is not supported",
    ),
    "activations of 16 bits": (lambda: product(int8(), rounded=rounds(np.int16(0))), "Failed to import initializer"),
    "rows of a table before they are dequantized": (lambda: table(), "Quantized constant"),
    "uint4": (lambda: product(int4(TensorProto.UINT4, zero=8)), "Failed to import initializer"),
    "a scale that is not positive": (lambda: product(int8(scale=-0.01)), "scale"),
}  # fmt: skip


def table() -> ModelProto:
    """An embedding as onnxruntime's quantizers write it."""
    g = Graph()
    g.input("ids", TensorProto.INT64, ["batch"])
    rows = g.Gather(raw(g, TensorProto.INT8, (SIZE, SIZE), random_bytes(SIZE * SIZE)), "ids")
    g.Relu(g.DequantizeLinear(rows, g.constant(0.1, np.float16)), out="y")
    g.output("y", TensorProto.FLOAT16, ["batch", SIZE])
    return g.model(opset=24)


def of_trt(model: ModelProto, opset: int) -> ModelProto:
    """The same with DequantizeLinear in NVIDIA's domain."""
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            node.domain = "trt"
    model.opset_import[0].version = opset
    return model


@pytest.mark.parametrize("name", BUILT)
def test_builds(name: str) -> None:
    outcome = trt.build(BUILT[name]())
    assert outcome.stage == "built", outcome.words


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    outcome = trt.build(make())
    assert outcome.stage in ("parse", "build")
    assert words in outcome.words


@pytest.mark.parametrize("form", FORMS)
def test_blocks_build_on_both_sides(form: str) -> None:
    outcome = trt.build(in_blocks(product(floats), form))
    assert outcome.stage == "built", outcome.words


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (lambda size: product(floats, size), 16),
        (lambda size: product(int4(), size), 4.5),  # a scale of float16 for 32 numbers
        (lambda size: product(int8(), size), 8),
        (lambda size: product(fp8, size), 8),
        (lambda size: in_blocks(product(floats, size), "nvfp4"), 4.5),
        (lambda size: in_blocks(product(floats, size), "mxfp8"), 8.25),
    ],
    ids=["float16", "int4", "int8", "fp8", "nvfp4", "mxfp8"],
)
def test_weights_keep_their_bits(make: Callable[[int], ModelProto], bits: float) -> None:
    """By what twice the size adds, since engines bring kernels of their own for each type."""
    small, large = (trt.build(make(size)).size for size in (WIDE, 2 * WIDE))
    assert (large - small) * 8 / (3 * WIDE**2) == pytest.approx(bits, abs=0.4)
