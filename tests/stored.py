"""Stored exports of real exporters, edited."""

from collections.abc import Callable
from pathlib import Path

import onnx

MODELS = Path(__file__).parent / "models"


def edited(source: str, folder: Path, edit: Callable[[onnx.ModelProto], object]) -> Path:
    """Write a stored export, such as ``optimum/llama``, to `folder` with changes."""
    for path in (MODELS / source).glob("*.data"):
        (folder / path.name).write_bytes(path.read_bytes())
    model = onnx.load(MODELS / source / "model.onnx", load_external_data=False)
    edit(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"
