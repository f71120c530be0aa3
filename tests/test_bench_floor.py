"""The floor of the decode benchmark is every product with a weight matrix, computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from bench_floor import Products
from decoders import DecoderConfig, write_decoder
from onnx import numpy_helper

LAYERS = 2


def test_every_matrix_is_read(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=LAYERS, dtype="float32"))
    products = Products(model, 1)
    assert list(products.steps(2)) == [-1, -1]
    matrices = [numpy_helper.to_array(w) for w in onnx.load(model).graph.initializer]
    found = [made[0] for made in products.outputs.values()]
    assert len(found) == 7 * LAYERS + 1  # four of attention and three of the MLP in each layer, and the head
    for made in found:
        sums = [m.sum(axis=0) for m in matrices if m.ndim == 2 and m.shape[1] == made.size]
        assert any(np.allclose(made, columns, rtol=1e-4, atol=1e-4) for columns in sums)


def test_a_model_without_products_is_refused(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, dtype="float16"))
    with pytest.raises(ValueError, match="no MatMul with a float32 weight matrix"):
        Products(model, 1)
