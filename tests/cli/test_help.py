"""`--help` is readable at 80 columns; it and `import trt_kvcache` load nothing heavy, which makes them quick."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import trt_kvcache
from trt_kvcache import BuildOptions, GenerationConfig, PlanOptions, VerifyOptions
from trt_kvcache.cli.app import app
from trt_kvcache.cli.build import BuildFlags
from trt_kvcache.cli.generate import BatchGenerationFlags, GenerationFlags
from trt_kvcache.cli.habits import FOREIGN
from trt_kvcache.cli.options import PlanFlags
from trt_kvcache.cli.verify import VerifyFlags

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


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_help_loads_nothing_heavy() -> None:
    code = f"""
import contextlib, io
from trt_kvcache.cli.app import app
for command in {["", *COMMANDS]}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            app([*command.split(), "--help"], prog_name="trt-kvcache")
        except SystemExit as stop:
            assert not stop.code, stop.code
    assert "Usage: trt-kvcache " + command in out.getvalue(), out.getvalue()
{LOADED}
"""
    assert run_python(code).stdout.strip() == "[]"


def test_hints_name_flags_that_exist() -> None:
    own = {name for command in COMMANDS.values() for p in command.params for name in (*p.opts, *p.secondary_opts)}
    named = {
        flag
        for known in FOREIGN.values()
        for hint in ([known] if isinstance(known, str) else known)
        for flag in re.findall(r"(?<!\w)--?[a-zA-Z][\w-]*", hint)
    }
    assert named <= own


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_80_columns_wide_and_cuts_no_name(name: str) -> None:
    text = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [name, "--help-all"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    for parameter in COMMANDS[name].params:
        for flag in (*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else ():
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", text)
    assert "…" not in text


def test_import_loads_nothing_heavy() -> None:
    """Nor do data classes: a program that only reads plans and manifests needs no ONNX."""
    code = "import trt_kvcache; trt_kvcache.TrtKvCacheError; trt_kvcache.CachePlan; trt_kvcache.Manifest"
    assert run_python(f"{code}; {LOADED}").stdout.strip() == "[]"


def test_every_public_name_loads_and_is_typed() -> None:
    for name in trt_kvcache.__all__:
        assert getattr(trt_kvcache, name) is not None
    tree = ast.parse(Path(trt_kvcache.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(trt_kvcache.__all__)
    for name in ("nothing", "Nothing", "VerifyReports"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(trt_kvcache, name)


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


# Flags are declared once, as dataclasses: none of a station's options may be without one.


STATIONS: list[tuple[Any, Any]] = [(PlanFlags, PlanOptions), (BuildFlags, BuildOptions), (VerifyFlags, VerifyOptions)]


@pytest.mark.parametrize(("flags", "options"), STATIONS, ids=lambda kind: kind.__name__)
def test_every_option_has_a_flag_of_the_same_default(flags: Any, options: Any) -> None:
    # A file of prompts, from which the command finds them; adapters, which say rank and modules.
    made_of = {"calibrate": "cache_ranges", "adapter": "lora_rank"}
    assert {made_of.get(f.name, f.name) for f in fields(flags)} == {f.name for f in fields(options)}
    assert flags().options() == options()


def test_zeros_are_given_and_empty_lists_are_not(tmp_path: Path) -> None:
    flags = GenerationFlags(top_k=0, temperature=1.0, seed=0, eos_token_id=[], sequence_bias=["3=-inf"])
    assert flags.config(tmp_path / "model.onnx", None) == GenerationConfig(
        do_sample=True, top_k=0, seed=0, sequence_bias={3: float("-inf")}
    )
    for given, value in (("true", True), ("false", False), ("never", "never")):
        made = BatchGenerationFlags(num_beams=2, early_stopping=given).config(tmp_path / "model.onnx", None)
        assert made.early_stopping == value
