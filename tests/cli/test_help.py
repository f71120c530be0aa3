"""`--help` and `import trt_kvcache` load nothing heavy: that is what makes them quick."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trt_kvcache

HEAVY = (
    "onnx",
    "onnx_graphsurgeon",
    "numpy",
    "onnxruntime",
    "polygraphy",
    "tensorrt_rtx",
    "tensorrt",
    "cuda",
    "yaml",
    "tokenizers",
)
LOADED = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)


COMMANDS = ("plan", "rewrite", "build", "verify", "generate", "inspect", "plugins", "doctor")


@pytest.mark.few(6)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    arguments = [command, "--help"] if command else ["--help"]
    code = f"""
import contextlib, io
from trt_kvcache.cli.app import app
out = io.StringIO()
with contextlib.redirect_stdout(out):
    try:
        app({arguments}, prog_name="trt-kvcache")
    except SystemExit as stop:
        assert not stop.code, stop.code
assert "Usage: trt-kvcache {command}" in out.getvalue(), out.getvalue()
{LOADED}
"""
    assert run_python(code).stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["TrtKvCacheError", "CachePlan", "Manifest"])
def test_import_loads_nothing_heavy(name: str) -> None:
    """Nor do data classes: a program that only reads plans and manifests needs no ONNX."""
    assert run_python(f"import trt_kvcache; trt_kvcache.{name}; {LOADED}").stdout.strip() == "[]"


def test_imports_without_tensorrt_and_cuda() -> None:
    blocked = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); import trt_kvcache; print(trt_kvcache.__version__)"
    )
    assert run_python(blocked).stdout.strip() == trt_kvcache.__version__


def test_every_public_name_loads_and_is_typed() -> None:
    for name in trt_kvcache.__all__:
        assert getattr(trt_kvcache, name) is not None
    tree = ast.parse(Path(trt_kvcache.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(trt_kvcache.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trt_kvcache.nothing  # noqa: B018


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trt_kvcache", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"trt-kvcache {trt_kvcache.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pl", ["plan", "plugins"]),
        ("plan --cap", ["--capacity"]),
        ("plan mod", [""]),  # the shell completes names of files
    ],
)
def test_shells_complete_what_is_typed(typed: str, completed: list[str]) -> None:
    words = ["trt-kvcache", *typed.split()]
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_TRT_KVCACHE_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "trt_kvcache"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == completed
