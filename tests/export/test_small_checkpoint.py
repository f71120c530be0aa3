"""A checkpoint for trials without a download."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")


from trt_kvcache.export.run import installed

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_from_a_checkpoint_to_text(tmp_path: Path) -> None:
    """In an empty folder, without a download; the exporter may be in another environment."""
    python = os.environ.get("TRT_KVCACHE_EXPORTERS", sys.executable)
    if not installed(python):
        pytest.skip("no exporter is installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (
        [str(ROOT / "scripts" / "small_checkpoint.py"), "my-checkpoint/"],
        ["-m", "trt_kvcache", "export", "my-checkpoint/", "-o", "my-export/", "--python", python],
        ["-m", "trt_kvcache", "generate", "my-export/", "--prompt", "Hello"],
    ):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert "128 new (length)" in done.stderr or "(eos)" in done.stderr
