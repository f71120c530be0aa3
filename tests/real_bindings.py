"""TensorRT's real Python bindings and plugin registry, with neither its builder nor a GPU.

``scripts/bindings`` puts the wheels into ``.bindings/VERSION``. The bindings' extension module needs nine C entry
points of libraries that only the full package has: a few lines of C provide those of builder and parser (null) and link
the lean runtime, which has the registry, for the rest. In a process of its own, because the libraries' names are the
real ones.
"""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from needs import c_compiler

ROOT = Path(__file__).parents[1]
OLDEST, NEWEST = "10.15.1.29", "11.4.0.106"

_BUILDER = (
    "createInferBuilder_INTERNAL", "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL",
    "getNvOnnxParserVersion", "initLibNvInferPlugins", "getBuilderPluginRegistry",
)  # fmt: skip
_LEAN = ("createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL", "getPluginRegistry")


def ask(version: str, script: Path, question: Any, folder: Path, *, registry: bool = True) -> Any:
    """Run `script` with these bindings: JSON on its stdin, JSON on its stdout; skips the test where they are not here.

    Args:
        version: of the bindings.
        script: imports ``tensorrt``.
        question: what it gets.
        folder: an empty one, for the stand-in libraries.
        registry: it needs the plugin registry.
    """
    site = ROOT / ".bindings" / version
    lean = site / "tensorrt_lean_libs"
    if not (lean if registry else site / "tensorrt").is_dir():
        flag = " --lean" if registry and version != NEWEST else ""
        pytest.skip(f"the TensorRT {version} bindings are not here; run scripts/bindings{flag}")
    if not list((site / "tensorrt_bindings").glob("tensorrt*.so")) or not _fits(site):
        pytest.skip(
            f"the TensorRT {version} bindings are for another Python; remove .bindings and run scripts/bindings"
        )
    stubs = _stubs(version.split(".")[0], lean if lean.is_dir() else None, folder)
    paths = os.pathsep.join(map(str, (stubs, lean)))
    env = {**os.environ, "LD_LIBRARY_PATH": paths, "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], input=json.dumps(question), env=env, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@lru_cache
def _fits(site: Path) -> bool:
    """True if pip chose the wheel for this interpreter."""
    (tags,) = site.glob("tensorrt_cu13_bindings-*.dist-info/WHEEL")
    return f"cp{sys.version_info.major}{sys.version_info.minor}" in tags.read_text()


def _stubs(major: str, lean: Path | None, folder: Path) -> Path:
    compiler = c_compiler()
    null = _BUILDER if lean is not None else _BUILDER + _LEAN
    source = folder / "stubs.c"
    source.write_text("\n".join(f"void *{name}(void) {{ return 0; }}" for name in null))
    empty = folder / "empty.c"
    empty.write_text("typedef int nothing;\n")
    link = [] if lean is None else ["-Wl,--no-as-needed", f"-L{lean}", f"-l:libnvinfer_lean.so.{major}"]
    for library, code, extra in (("nvinfer", source, link), ("nvinfer_plugin", empty, []), ("nvonnxparser", empty, [])):
        name = f"lib{library}.so.{major}"
        command = [compiler, "-shared", "-fPIC", "-o", str(folder / name), str(code), f"-Wl,-soname,{name}", *extra]
        subprocess.run(command, check=True, capture_output=True)
    return folder
