"""The kernels compiled by the oldest NVRTC that the extra ``plugin`` admits; the other tests use the newest.

``scripts/bindings`` puts it into ``.bindings``. In a process of its own, where the newest is never loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = "13.0.88"
LIBRARIES = ROOT / ".bindings" / f"nvrtc-{OLDEST}" / "nvidia" / "cu13" / "lib"


def test_it_is_the_oldest() -> None:
    assert '\nplugin = ["nvidia-cuda-nvrtc>=13,<14"]\n' in (ROOT / "pyproject.toml").read_text()
    assert f"nvrtc={OLDEST}\n" in (ROOT / "scripts" / "bindings").read_text()


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    if not LIBRARIES.is_dir():
        pytest.skip(f"NVRTC {OLDEST} is not here; run scripts/bindings")
    script = ROOT / "tests" / "compile_kernels.py"
    env = os.environ | {"TRT_KVCACHE_KERNELS": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(script), "sm_90", str(LIBRARIES)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == "NVRTC 13.0\n"
    rows = json.loads(done.stdout)
    assert [row["spill_bytes"] for row in rows] == [0] * (56 + 3)
    assert len(list(tmp_path.iterdir())) == 2 * 56 + 3
