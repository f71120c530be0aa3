"""A model whose files change while TensorRT builds is refused: weights of two files would be in one engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache.engine.build import ProgressEvent, build_engine
from trt_kvcache.errors import InvalidModelError


def replace(file: Path, aside: Path) -> None:
    shutil.copy(file, aside)
    aside.replace(file)


def link_out(file: Path, aside: Path) -> None:
    shutil.move(file, aside)
    file.symlink_to(aside)


def write(file: Path, aside: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"\x01")


def move_and_return(file: Path, aside: Path) -> None:
    shutil.move(file, aside)
    shutil.move(aside, file)


def remove(file: Path, aside: Path) -> None:
    file.unlink()


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["loading", "parsing", "building"])
@pytest.mark.parametrize("change", [replace, link_out, write, move_and_return, remove], ids=lambda f: f.__name__)
@pytest.mark.parametrize("changed", ["model.onnx.data", "model.onnx"])
def test_a_change_while_tensorrt_builds_is_an_error(
    tmp_path: Path, changed: str, change: Callable[[Path, Path], None], stage: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = write_decoder(folder / "model.onnx", DecoderConfig(layers=1, head_size=16), external_threshold=256)
    left: list[str] = []

    def meanwhile(event: ProgressEvent) -> None:
        if event.phase.startswith(stage) and not left:
            change(folder / changed, tmp_path / "aside")
            left.extend(p.name for p in folder.iterdir() if not p.name.startswith("."))

    with pytest.raises(InvalidModelError, match=rf"{changed}: (was changed or replaced while|cannot be read)"):
        build_engine(model, folder / "model.engine", progress=meanwhile)
    assert left
    assert {p.name for p in folder.iterdir()} == set(left)
