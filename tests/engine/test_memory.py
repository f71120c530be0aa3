"""If memory runs out, the build process goes first, and the message says so."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.engine_build import build_engine


@pytest.mark.slow
def test_the_build_process_is_the_first_to_go(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    seen: list[str] = []

    def look(_: object) -> None:
        workers = [p for p in psutil.Process().children() if str(tmp_path) in " ".join(p.cmdline())]
        seen.extend(Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip() for worker in workers)

    build_engine(model, tmp_path / "model.engine", build=BuildOptions(proof="off"), progress=look)
    assert seen
    assert set(seen) == {"1000"}
