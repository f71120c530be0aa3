"""Models whose weights do not fit into memory are refused before ONNX Runtime is started, which would be killed."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import DecodeSession
from trt_kvcache.errors import SessionError
from trt_kvcache.runtime.ort import memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "factor", "why"),
    [("float32", 0.8, "packs them for products"), ("float16", 2.5, "computes float16 in float32")],
)
def test_weights_that_do_not_fit_are_refused(
    dtype: str, factor: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype=dtype, hidden=256), 1024)
    need = int(factor * (tmp_path / "m.onnx.data").stat().st_size)
    monkeypatch.setattr(memory, "free_memory", lambda *, swap: int(1.1 * need))
    with DecodeSession.open(path, device="cpu") as session:
        assert session.name.startswith("ONNX Runtime")
    monkeypatch.setattr(memory, "free_memory", lambda *, swap: int(0.9 * need))
    monkeypatch.delattr(ort, "InferenceSession")
    with pytest.raises(SessionError, match=f"take at least 0.0 GB of memory .*{why}.* are to be had; free memory"):
        DecodeSession.open(path, device="cpu")
