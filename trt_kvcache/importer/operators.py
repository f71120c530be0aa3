"""Defines groups of ONNX operators, such as those that only move numbers, or compute each number separately."""

from __future__ import annotations

RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""The result has the numbers of the first input in the same order, but another shape."""

VIEWS = ("Identity", "Transpose", *RESHAPES)
"""The result has each number of the first input once."""

MOVES = (*VIEWS, "Expand", "Tile", "Slice", "Gather")
"""The result has numbers of the first input; some may be missing or repeated."""

PASSES = (*MOVES, "Split", "Cast")
"""The results have only numbers of the first input, possibly in another type."""

ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear", "Round")
"""Numbers are rounded; all tokens of a step may share one scale."""

NORMS = ("LayerNormalization", "RMSNormalization")
"""Numbers are divided by their norm along the last axes."""

QUANTIZES = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")
"""Operands are rounded to 8-bit integers."""

INTEGER_PRODUCTS = (
    "ConvInteger", "DynamicQuantizeLSTM", "MatMulInteger", "MatMulIntegerToFloat", "QAttention", "QGemm",
)  # fmt: skip
"""Products of 8-bit integers, except operators whose names start with QLinear."""
