"""Families of ONNX operators, by their effect on numbers."""

from __future__ import annotations

RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""The numbers of the first input in their order, in another shape."""

VIEWS = ("Identity", "Transpose", *RESHAPES)
"""The numbers of the first input, each once."""

MOVES = (*VIEWS, "Expand", "Tile", "Slice", "Gather")
"""Numbers of the first input, some of them left out or repeated."""

PASSES = (*MOVES, "Split", "Cast")
"""Nothing comes out but numbers of the first input, maybe in another type."""

ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear", "Round")
"""Numbers become the nearest of a few; one scale may be that of all tokens of a step."""

NORMS = ("LayerNormalization", "RMSNormalization")
"""Numbers along the last axes are divided by their own size."""

QUANTIZES = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")
"""The operands become integers of 8 bits."""

INTEGER_PRODUCTS = (
    "ConvInteger", "DynamicQuantizeLSTM", "MatMulInteger", "MatMulIntegerToFloat", "QAttention", "QGemm",
)  # fmt: skip
"""Products of integers of 8 bits, beside those whose names begin with QLinear."""
