"""Transpose and Slice whose operands are none: refused by name when a model is read."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from trt_kvcache import plan_model
from trt_kvcache.errors import InvalidModelError

BOUNDS = "int64[1] zero = {0}, int64[1] four = {4}, int64[1] last = {3}, int64[0] none = {}, int64[2] two = {4, 4}"
CASES = {
    "Slice(past, zero, four, none)": r"operands of the shapes \[1\], \[1\], \[0\]",
    "Slice(past, zero, two, last)": r"operands of the shapes \[1\], \[2\], \[1\]",
    "Slice(past, zero, four, number)": r"operands of the shapes \[1\], \[1\], \[1, 1\]",
    "Slice(past, zero, four, four)": r"of 'past', which has 4 axes, has the axes \[4\]",
    "Transpose<perm=[0, 1, 2, -1]>(past)": r"the perm \[0, 1, 2, -1\], which is none",
    "Transpose<perm=[0, 1, 2, 2]>(past)": r"the perm \[0, 1, 2, 2\], which is none",
    "Transpose<perm=[0, 1, 2]>(past)": r"of 'past', which has 4 axes, has the perm \[0, 1, 2\]",
}


@pytest.mark.parametrize("move", CASES)
def test_operands_that_fit_nothing_are_refused(move: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 18]>
    decoder (float[B, 2, P, 4] past, float[B, 2, S, 4] new) => (float[B, 2, T, 4] present)
    <{BOUNDS}, int64[1, 1] number = {{3}}> {{
        moved = {move}
        present = Concat<axis=2>(moved, new)
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(InvalidModelError, match=CASES[move]):
        plan_model(tmp_path / "model.onnx")
