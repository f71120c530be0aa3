"""One default for the capacity, named in each answer; and each command that an answer names as the next runs."""

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import invoke
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from typer.testing import Result

import trt_kvcache
from trt_kvcache import PlanOptions, plan_model
from trt_kvcache.cli import summary
from trt_kvcache.cli.options import SessionPlanFlags
from trt_kvcache.cli.summary import tell_next
from trt_kvcache.engine.backend import can_build, driver_present
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import Target

GROWING = Path(__file__).parents[1] / "models" / "optimum" / "llama" / "model.onnx"
DEFAULT = "96 tokens (default; --capacity)"


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export whose caches grow, and whose config names the longest text; in the working folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path("my export")
    folder.mkdir()
    shutil.copy(GROWING, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 96}))
    return folder


def run(*words: object) -> Result:
    result = invoke(*words, code=None)
    assert result.exception is None, (words, result.stderr or result.exception)
    return result


def next_of(text: str) -> list[str]:
    """The words of the next command; none where nothing is named."""
    found = re.search(r"^next +trt-kvcache (.*)$", text, re.MULTILINE)
    return shlex.split(found[1]) if found else []


def follow(words: list[str], ran: set[str]) -> None:
    """Run a command, and each that its answer names next."""
    while words and shlex.join(words) not in ran:
        ran.add(shlex.join(words))
        words = [word.replace("MODEL", "my export") for word in next_of(run(*words).stdout)]


@pytest.mark.skipif(not can_build(None), reason="no builder is installed")
def test_each_next_command_runs(export: Path) -> None:
    ran: set[str] = set()
    for command in ("plan", "plan --capacity 48 --sliding circular --recheck --max-batch 2", "plan --target tensorrt",
                    "verify", "rewrite -o rewritten.onnx", "plugins"):  # fmt: skip
        name, *options = shlex.split(command)
        follow([name, str(export), *options], ran)
    for model in (export, Path("my export-engine")):
        follow(tell(model, SessionPlanFlags()), ran)
    commands = {line.split()[0] for line in ran}
    assert {"plan", "verify", "rewrite", "plugins", "build"} <= commands
    assert commands >= ({"generate"} if driver_present() else {"inspect", "doctor"})


def tell(path: Path, flags: SessionPlanFlags) -> list[str]:
    """What a command says at a terminal after it has run a model or an engine."""
    told = io.StringIO()
    told.isatty = lambda: True  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stderr", told)
        tell_next(path, "inspect", flags)
    return next_of(told.getvalue())


def test_where_nothing_builds_the_model_runs_on_the_cpu(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "can_build", lambda _: False)
    words = next_of(run("plan", export, "--fallback", "contract", "--cache-dtype", "int8").stdout)
    assert words == ["generate", "my export", "--tokens", "1,2,3", "--cache-dtype", "int8"]
    run(*words)
    assert next_of(run("verify", export).stdout) == []
    assert tell(export, SessionPlanFlags(capacity=32)) == ["inspect", "my export", "--capacity", "32"]


def test_builders_need_a_gpu_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = trt_kvcache.engine.backend
    for installed, gpu, can in (
        ({"tensorrt_rtx"}, False, {None, Target.TENSORRT_RTX}),
        ({"tensorrt"}, False, set()),
        ({"tensorrt"}, True, {None, Target.TENSORRT}),
        (set(), True, set()),
    ):
        monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name, _there=installed: name in _there or None)
        monkeypatch.setattr(backend, "driver_present", lambda _gpu=gpu: _gpu)
        assert {target for target in (None, *Target) if can_build(target)} == can


def test_each_command_takes_and_names_the_same_default(export: Path) -> None:
    assert plan_model(export).options.capacity == 96
    for command in ("plan", "plan --all", "rewrite -o rewritten.onnx", "verify"):
        name, *options = command.split()
        assert DEFAULT in run(name, export, *options).stdout
    assert DEFAULT not in run("plan", export, "--capacity", 96).stdout
    compared = json.loads(run("verify", export, "--rewritten", "rewritten.onnx", "--json").stdout)
    assert (compared["passed"], compared["capacity"]) == (True, 96)
    asked = ["--tokens", "1,2,3", "--max-new-tokens"]
    assert ", capacity 96" in run("generate", export, *asked, 2).stderr
    assert json.loads(run("generate", export, *asked, 2, "--json").stdout)["capacity"] == 96
    assert json.loads(run("generate", export, *asked, 200, "--json").stdout)["capacity"] == 96  # the longest text
    measured = run("bench", export, "--lengths", 4, "--positions", 8, "--batches", 1, "--repeats", 1, "--warmup", 0)
    assert "capacity 96" in measured.stdout


@pytest.mark.parametrize("form", ["concat", "scatter", "shift"])
def test_caches_of_fixed_length_have_no_default(tmp_path: Path, form: str) -> None:
    import onnx

    onnx.save(make_foreign(form, DecoderConfig(layers=1, capacity=24)), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx")
    assert (plan.options.capacity, plan.caches[0].capacity) == ((4096, 4096) if form == "concat" else (None, 24))


@pytest.mark.parametrize("command", ["plan", "serve", "generate --tokens 1", "build -o engine", "verify", "bench"])
def test_a_capacity_beyond_the_models_texts_is_refused(export: Path, tmp_path: Path, command: str) -> None:
    name, *more = command.replace("engine", str(tmp_path / "engine")).split()
    result = invoke(name, export, *more, "--capacity", "128", code=1)
    assert result.stderr == (
        "error: --capacity is 128, but the model was made for texts of at most 96 tokens (max_position_embeddings in "
        "config.json); longer texts are unreliable. Give at most --capacity 96, or --beyond-length on\n"
    )


def test_a_capacity_beyond_the_models_texts_is_allowed_and_warned_of(export: Path) -> None:
    said = run("plan", export, "--capacity", 128, "--beyond-length", "on").stderr
    assert said == (
        "warning: caches hold 128 tokens, but the model was made for texts of at most 96 tokens "
        "(max_position_embeddings in config.json); longer texts are unreliable\n"
    )
    assert run("plan", export, "--capacity", 96).stderr == ""
    assert plan_model(export, PlanOptions(capacity=97, beyond_length="on")).warnings
    with pytest.raises(OptionError, match='Give at most capacity=96, or beyond_length="on"$'):
        plan_model(export, PlanOptions(capacity=97))
