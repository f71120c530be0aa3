"""Needs of some tests, which are skipped without them."""

import shutil
import subprocess
import sys
from functools import lru_cache
from tempfile import TemporaryDirectory

import onnxruntime
import pytest

from trt_kvcache.errors import BackendError
from trt_kvcache.plugins.compile import nvrtc_version


def _no_nvrtc() -> str:
    try:
        nvrtc_version()
    except BackendError as error:
        return str(error)
    return ""


ORT_VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
"""The version of ONNX Runtime: major and minor."""

needs_nvrtc = pytest.mark.skipif(bool(_no_nvrtc()), reason=_no_nvrtc())


def c_compiler() -> str:
    """The path of one; the test is skipped where none makes libraries for Linux: a compiler may lack libc's files."""
    path, lacks = _c_compiler()
    if lacks:
        pytest.skip(f"no C compiler for stand-in libraries: {lacks}")
    return path


@lru_cache
def _c_compiler() -> tuple[str, str]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return "", "install gcc"
    probe = '#include <stdio.h>\n#include <stdlib.h>\nint probe(void) { return puts(getenv("HOME")); }\n'
    with TemporaryDirectory() as folder:
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", f"{folder}/probe.so", "-"]
        done = subprocess.run(command, input=probe, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return compiler, ""
    return compiler, f"{' '.join(done.stderr.splitlines()[:1])}; install libc's headers (libc6-dev)"
