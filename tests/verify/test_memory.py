"""Memory of a verification: its need, its way where there is little, and nothing left on the disk."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import psutil
import pytest
from decoders import DecoderConfig, make_decoder, write_decoder
from foreign_decoders import make_foreign
from verify.mistakes import swap_keys_and_values
from verify.test_catches import verify_mutated

from trt_kvcache import machine
from trt_kvcache.errors import OptionError, OutputError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.steps.contents import find_caches
from trt_kvcache.verify import VerifyOptions, verify_model
from trt_kvcache.verify.memory import Needs, needs, weigh
from trt_kvcache.verify.record import Tape
from trt_kvcache.verify.sessions import OrtSession

LARGE = {
    "layers": 4,
    "hidden": 1024,
    "query_heads": 16,
    "kv_heads": 4,
    "head_size": 64,
    "vocab": 24000,
    "capacity": 256,
}
"""Models of some hundred MB: what Python and ONNX Runtime take on their own matters little."""

_PEAK = """
import sys
from pathlib import Path
from trt_kvcache import VerifyOptions, verify_model
verify_model(sys.argv[1], verify=VerifyOptions(batch=2, chunks=(3,), tokens=2)).check()
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
"""Prints KiB. What `resource.getrusage` knows as the peak of a process begins with that of the process it came from."""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "external", "factor"),
    [("float32", 1024, 1.3), ("float16", 1024, 2.8), ("bfloat16", 1024, 2.5), ("float16", None, 5.5)],
)
def test_the_peak_is_a_small_multiple_of_the_model(
    dtype: str, external: int | None, factor: float, tmp_path: Path
) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(**LARGE, dtype=dtype), external_threshold=external)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-c", _PEAK, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < factor * size + (200 << 20), f"{int(done.stdout) * 1024 / size:.1f} x"


@pytest.mark.parametrize("foreign", [False, True])
def test_one_model_at_a_time(foreign: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[OrtSession] = weakref.WeakSet()
    opened = []
    unwatched = OrtSession.__init__

    def watched(self: OrtSession, *given: Any) -> None:
        assert not alive
        unwatched(self, *given)
        alive.add(self)
        opened.append(1)

    monkeypatch.setattr(OrtSession, "__init__", watched)
    onnx.save(
        make_foreign("concat", DecoderConfig()) if foreign else make_decoder(DecoderConfig()), tmp_path / "m.onnx"
    )
    verify_model(tmp_path / "m.onnx", PlanOptions(capacity=64) if foreign else PlanOptions()).check()
    assert len(opened) == 2


def little(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("trt_kvcache.verify.memory.spare", lambda: free)


def needed(path: Path) -> Needs:
    imported = import_model(path)
    return needs(imported.plan, find_caches(imported.plan), [weigh(imported.model)], 5, twin=False)


@pytest.mark.slow
def test_fewer_rows_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(capacity=4096))
    little(monkeypatch, needed(path).total(2))
    report = verify_model(path)
    report.check()
    assert len(report.steps[0].starts) == 2
    assert "batch 2 instead of 3: more caches would not fit into memory" in report.notes


@pytest.mark.few(2)
@pytest.mark.parametrize(("batch", "dtype"), [("batch", "float32"), (3, "float32"), ("batch", "bfloat16")])
def test_too_little_memory_is_refused_before_anything_is_opened_or_written(
    batch: str | int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(capacity=4096, batch=batch, dtype=dtype))
    little(monkeypatch, 200 << 20)
    monkeypatch.setattr("trt_kvcache.verify.entry.moved_out", None)
    with pytest.raises(
        OptionError,
        match=r"verification takes 0\.\d GB of memory beside weights.*caches of \d sequence\(s\).*and 0\.2 of this "
        r"machine's .* are to be had; verify with a smaller capacity or shorter chunks, or free memory",
    ):
        verify_model(path)


@pytest.mark.slow
def test_weights_are_converted_step_by_step_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype="float16", vocab=20000))
    plenty = verify_model(path)
    assert not any("float16" in note for note in plenty.notes)
    little(monkeypatch, needed(path).total(3))
    report = verify_model(path)
    report.check()
    assert any(note.startswith("each step converts the float16 weights anew") for note in report.notes)
    assert [s.starts for s in report.steps] == [s.starts for s in plenty.steps]


def test_weights_larger_than_memory_are_read_from_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(vocab=60000, capacity=8), external_threshold=1024)
    little(monkeypatch, needed(path).total(3) + (1 << 20))
    report = verify_model(path)
    report.check()
    assert "weights do not fit into memory beside the rest: steps read them from their files" in report.notes


@pytest.mark.slow
def test_large_models_that_grow_take_fewer_steps_over_as_many_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(make_foreign("concat", DecoderConfig()), tmp_path / "m.onnx")
    options = PlanOptions(capacity=64)
    small = verify_model(tmp_path / "m.onnx", options)
    monkeypatch.setattr("trt_kvcache.verify.decode._HEAVY", 0)
    large = verify_model(tmp_path / "m.onnx", options)
    large.check()
    ends = [{step.episode: step.valid for step in report.steps} for report in (small, large)]
    assert ends[0] == ends[1]
    assert [s.length for s in large.steps if s.episode == "decode"] == [5, 3, 20, 1, 1, 1, 1]
    assert any("20 went in one chunk" in note and "--tokens 24" in note for note in large.notes)
    asked = verify_model(tmp_path / "m.onnx", options, VerifyOptions(tokens=24))
    assert asked == small


def stand_in(monkeypatch: pytest.MonkeyPatch, files: dict[str, list[str]]) -> None:
    """A machine with 1.5 MB free whose control groups are these."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 30, available=1024000))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=512000))
    monkeypatch.setattr(machine, "_lines", lambda path: files.get(path, []))


GROUPS = [
    # A job of Slurm or a unit of systemd: the limit is that of a group around the process' own.
    ("0::/jobs/1/task", "jobs/1/memory.max", "jobs/1/memory.stat", "anon"),
    # Version 1, on the host and in a container, which sees its group as the root and has the host's name for it.
    ("4:cpu,memory:/jobs/1", "memory/jobs/1/memory.limit_in_bytes", "memory/jobs/1/memory.stat", "total_rss"),
    ("4:memory:/docker/1", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
]


@pytest.mark.parametrize(("group", "limit", "stat", "taken"), GROUPS)
def test_the_limits_of_all_groups_count(
    group: str, limit: str, stat: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = "/sys/fs/cgroup"
    files = {
        "/proc/self/cgroup": ["9:name=systemd:/elsewhere", group],
        f"{root}/{limit}": ["500000"],
        f"{root}/{stat}": [f"{taken} 100000", "cache 300000"],
        f"{root}/memory/elsewhere/memory.limit_in_bytes": ["7"],
        f"{root}/elsewhere/memory.max": ["7"],
    }
    stand_in(monkeypatch, files)
    assert (machine.memory(), machine.free_memory(), machine.free_memory(swap=True)) == (500000, 400000, 400000)
    files[f"{root}/{limit}"] = ["9223372036854771712"]  # none, in version 1
    assert machine.memory() > 500000
    assert (machine.free_memory(), machine.free_memory(swap=True)) == (1024000, 1536000)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inline_weights_are_moved_out_and_compared_all_the_same(
    dtype: str, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype=dtype))
    before = verify_model(path)
    monkeypatch.setattr("trt_kvcache.verify.inline._MANY", 0)
    assert verify_model(path) == before
    assert not verify_mutated(tmp_path, DecoderConfig(dtype=dtype), swap_keys_and_values, original=False).passed
    assert not list(scratch.iterdir())


@pytest.mark.few(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OptionError])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_left_on_the_disk(
    dtype: str, error: type[BaseException], tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype=dtype))
    monkeypatch.setattr("trt_kvcache.verify.inline._MANY", 0)
    seen = []

    def fail(*_: object) -> None:
        seen.extend(file.name for file in scratch.rglob("*.data"))
        raise error

    monkeypatch.setattr(Tape, "read", fail)
    with pytest.raises(error):
        verify_model(path)
    assert seen
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_a_full_disk_is_named(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig())
    monkeypatch.setattr("trt_kvcache.verify.inline._MANY", 0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"GB as a file, and .* has 0\.0 GB free: set TMPDIR to a folder with room"):
        verify_model(path)
    assert not list(scratch.iterdir())
    monkeypatch.setattr("trt_kvcache.verify.inline._MANY", 1 << 40)
    monkeypatch.setattr("trt_kvcache.verify.record.TemporaryFile", lambda **_: Path("/dev/full").open("wb"))  # noqa: SIM115
    with pytest.raises(
        OutputError, match=r"temporary files \(No space left on device\): verify fewer tokens, or set TMP"
    ):
        verify_model(path)
