"""The main jobs without what Windows lacks; on Windows itself every other test says more."""

import subprocess
import sys
from pathlib import Path

import pytest
import windows_stand_in
from decoders import DecoderConfig, write_decoder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_main_jobs_need_nothing_that_windows_lacks(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    (tmp_path / "out").mkdir()
    command = [sys.executable, windows_stand_in.__file__, model, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = ["model.engine", "model.engine.json", "model.engine.proof", "rewritten.onnx", "saved.safetensors"]
    assert done.stdout.split() == made
