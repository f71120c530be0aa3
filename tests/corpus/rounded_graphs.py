"""Attention that rounds to 8 bits on its way, as NVIDIA ModelOpt quantizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import concat_graphs
import ml_dtypes
import numpy as np
from concat_graphs import Build, Decoder, decoders
from onnx import helper

from corpus import Entry

Hook = Callable[[Build, str], str]
INT8, FP8 = np.int8, ml_dtypes.float8_e4m3fn
STEPS = {INT8: 1 / 32, FP8: 1 / 64}
PARTS = ("query", "keys", "scores", "weights", "values")
OPSET = 21


def rounds(kind: Any, scale: float = 0.0, zero: int = 0, behind: float = 0.0, **attrs: int) -> Hook:
    """A hook that rounds a tensor; `behind`: another scale for DequantizeLinear."""

    def hook(g: Build, tensor: str) -> str:
        dtype = np.float32 if g.decoder.upcast else g.decoder.dtype
        first = scale or STEPS[kind]
        names = [g.constant(first, dtype), g.constant(zero, kind), g.constant(behind or first, dtype)]
        small = g.node("QuantizeLinear", [tensor, names[0], names[1]], **attrs)
        return g.node("DequantizeLinear", [small, names[2], names[1]])

    return hook


def modelopt(
    kind: Any, parts: tuple[str, ...] = PARTS, *, from_sizes: bool = False
) -> Callable[[Build, str, str, str], str]:
    """Attention as ModelOpt's PTQ of ONNX models leaves it: what a product reads is rounded right before it.

    `from_sizes`: with the factor as TorchScript computes it.
    """

    def rounded(g: Build, tensor: str, part: str, step: float = 1.0) -> str:
        return rounds(kind, STEPS[kind] * step)(g, tensor) if part in parts else tensor

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        root = _root(g, query) if from_sizes else g.constant(g.decoder.size**-0.25, g.decoder.dtype)
        turned = g.node("Transpose", [keys], perm=[0, 1, 3, 2])
        query, turned = (g.node("Mul", [tensor, root]) for tensor in (query, turned))
        scores = g.node("MatMul", [rounded(g, query, "query"), rounded(g, turned, "keys", 0.75)])
        masked = concat_graphs._masked(g, rounded(g, scores, "scores"))
        weights = g.node("Softmax", [masked], axis=-1)
        weights = rounded(g, weights, "weights", 0.25)
        return g.node("MatMul", [weights, rounded(g, values, "values")])

    return attend


def _root(g: Build, query: str) -> str:
    """The fourth root of one by the size of a head."""
    ends = [g.constant([n]) for n in (-1, np.iinfo(np.int64).max)]
    size = g.node("Slice", [g.node("Shape", [query]), *ends])
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(g.decoder.dtype))
    root = g.node("Sqrt", [g.node("Cast", [size], to=kind)])
    return g.node("Sqrt", [g.node("Div", [g.constant([1.0], g.decoder.dtype), root])])


def entries() -> Iterator[Entry]:
    kinds = {"int8": INT8, "float8": FP8}
    yield from decoders("rounded", {n: Decoder(attend=modelopt(k), opset=OPSET) for n, k in kinds.items()})
