"""Kept verdicts: what is found again, what never is, and the folders that are believed."""

import stat
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from onnx import numpy_helper
from verify import mistakes as m

from trt_kvcache.importer import ImportedModel, import_model, pipeline
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.check import checker, verdicts
from trt_kvcache.importer.check import region_comparison as running
from trt_kvcache.importer.check.verdicts import Verdicts, keeping, open_verdicts

PLAN = PlanOptions(capacity=256)
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has rights of another kind")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The regions that were run, by the name of what they make."""
    ran: list[str] = []
    compare = running._Run.compare

    def counting(self: running._Run) -> str:
        ran.append(next(iter(self.region.joins), "") or self.region.presents[0])
        return compare(self)

    monkeypatch.setattr(running._Run, "compare", counting)
    return ran


def imported(folder: Path, options: PlanOptions = PLAN, model: onnx.ModelProto | None = None) -> ImportedModel:
    onnx.save(model or make_decoder(Decoder()), folder / "model.onnx")
    return import_model(folder / "model.onnx", options)


def answers(made: ImportedModel, kept: Verdicts | None, edit: m.Mistake = m.nothing) -> list[str]:
    """Answers of the check in this process, after an edit of the rewritten model."""
    flat = pipeline.prepare(made.source.proto, made.plan.options)
    rewritten = deepcopy(made.model)
    edit(rewritten)
    with keeping(kept):
        found = checker.check_models(flat.reference, rewritten, made.plan, flat.weights, made.source.path.parent)
    return [verdict.answer for verdict in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "verdicts"
    made.mkdir(mode=0o700)
    return made


def other_weight(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with another number in a constant of the attention."""
    for node in model.graph.node:
        for tensor in model.graph.initializer:
            if node.op_type == "Mul" and tensor.name in node.input and tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))
                return model
    raise AssertionError("no scale")


@pytest.mark.parametrize("fault", [m.write_one_early, m.swap_keys_and_values, m.next_key_visible])
def test_faults_are_found_after_the_right_model_was_kept(fault: m.Mistake, tmp_path: Path, folder: Path) -> None:
    made = imported(tmp_path)
    assert set(answers(made, Verdicts(folder))) == {"equal"}
    for _ in range(2):  # it is not kept either
        assert "different" in answers(made, Verdicts(folder), fault)
    assert set(answers(made, Verdicts(folder))) == {"equal"}


def test_a_verdict_holds_for_these_weights_only(tmp_path: Path, folder: Path, counted: list[str]) -> None:
    """Layers share verdicts whose weights both sides read alike; a constant on one side alone does not."""
    answers(imported(tmp_path), Verdicts(folder))
    counted.clear()
    answers(imported(tmp_path, model=other_weight(make_decoder(Decoder()))), Verdicts(folder))
    assert counted


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def foreign(path: Path) -> None:
    path.write_bytes(b'{"key":"0","alive":[]}')


def empty(path: Path) -> None:
    path.write_bytes(b"")


def large(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" " * (1 << 17) + b"}")


def opened_to_others(path: Path) -> None:
    path.chmod(0o604)


def linked(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def folder_of_that_name(path: Path) -> None:
    path.unlink()
    path.mkdir()


@posix
@pytest.mark.parametrize("harm", [damage, foreign, empty, large, opened_to_others, linked, folder_of_that_name])
def test_entries_that_are_not_the_users_own_are_ignored(
    harm: Callable[[Path], None], tmp_path: Path, folder: Path, counted: list[str]
) -> None:
    made = imported(tmp_path)
    answers(made, Verdicts(folder))
    for path in list(folder.iterdir()):
        harm(path)
    counted.clear()
    assert set(answers(made, Verdicts(folder))) == {"equal"}
    assert counted


def test_a_folder_that_cannot_be_written_keeps_none(folder: Path) -> None:
    gone = folder / "gone"
    kept = Verdicts(gone)
    kept.keep("f" * 64, ["a"])
    assert kept.find("f" * 64) is None
    assert not gone.exists()


@posix
def test_verdicts_lie_in_the_users_cache_folder_and_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(verdicts.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = open_verdicts(again=False)
    assert kept is not None
    kept.keep("f" * 64, ["a"])
    (path,) = (tmp_path / "cache" / "trt-kvcache" / "verdicts").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    monkeypatch.setenv(verdicts.SWITCH, "off")
    assert open_verdicts(again=False) is None


@posix
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770])
@pytest.mark.parametrize("place", ["cache", "cache/trt-kvcache", "cache/trt-kvcache/verdicts"])
def test_no_verdict_is_believed_where_others_can_write(
    place: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(verdicts.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert open_verdicts(again=False) is not None
    (tmp_path / place).chmod(mode)
    assert open_verdicts(again=False) is None
    (tmp_path / place).chmod(0o700)
    assert open_verdicts(again=False) is not None


@posix
@pytest.mark.parametrize("given", ["", "relative/cache"])
def test_a_cache_folder_that_is_no_absolute_path_is_passed_over(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.cache_folder() == tmp_path / ".cache"


@posix
def test_plan_keeps_verdicts_and_rechecks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: what one command found, the next one believes, unless it is told not to."""
    monkeypatch.delenv(verdicts.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    onnx.save(make_decoder(Decoder()), tmp_path / "model.onnx")

    def entries(*flags: str) -> dict[Path, bytes]:
        command = ["plan", str(tmp_path / "model.onnx"), "--capacity", "24", *flags]
        subprocess.run([sys.executable, "-m", "trt_kvcache", *command], check=True, capture_output=True, timeout=120)
        return {path: path.read_bytes() for path in (tmp_path / "cache" / "trt-kvcache" / "verdicts").iterdir()}

    first = entries()
    assert first
    for path, data in first.items():
        path.write_bytes(data + b" ")  # the same to who believes it
    assert entries() == {path: data + b" " for path, data in first.items()}
    assert entries("--recheck") == first
