"""Rewritten models: their data files, and what killed commands leave."""

import sys
from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import rewrite_model

TINY = DecoderConfig(layers=1, head_size=16)


def _split(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    return write_decoder(tmp_path / "in" / "model.onnx", TINY, external_threshold=256), tmp_path / "out" / "model.onnx"


def _weights(path: Path) -> dict[str, bytes]:
    return {t.name: t.raw_data for t in onnx.load(path).graph.initializer}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell where holes are")
def test_a_hole_in_a_data_file_is_not_copied(tmp_path: Path) -> None:
    model, out = _split(tmp_path)
    data = model.with_name("model.onnx.data")
    with data.open("r+b") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"the middle")
    rewrite_model(model, out)
    copy = out.with_name("model.onnx.data")
    assert copy.stat().st_size == 1 << 40
    assert copy.stat().st_blocks * 512 < 1 << 24
    with copy.open("rb") as file:
        file.seek(1 << 39)
        assert file.read(11) == b"the middle\0"
    kept = _weights(out)
    assert {name: raw for name, raw in _weights(model).items() if name in kept}.items() <= kept.items()
