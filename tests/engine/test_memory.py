"""A build that would not fit into memory is refused before it starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import psutil
import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder

from trt_kvcache import BuildOptions, build_engine, machine
from trt_kvcache.engine import engine_build
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import Target

GB = 1_000_000_000


def little(monkeypatch: pytest.MonkeyPatch, free: int, swap: int = 0) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * free, available=free))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=swap))
    monkeypatch.setattr(machine, "_lines", lambda path: [])


def check(weights: int, flipped: int = 0, *, twice: bool = False) -> None:
    model = onnx.ModelProto()
    model.graph.initializer.add(data_type=onnx.TensorProto.FLOAT, dims=[weights // 4])
    part: Any = SimpleNamespace(model=[model], flipped=[SimpleNamespace(length=flipped)])
    setup: Any = SimpleNamespace(build=BuildOptions(), backend=SimpleNamespace(target=Target.TENSORRT_RTX))
    engine_build._check_memory(part, setup, twice=twice)


@pytest.mark.parametrize("external", [None, 1024])
def test_nothing_is_started(external: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1), external_threshold=external)
    monkeypatch.setattr(engine_build, "run_worker", None)
    little(monkeypatch, GB // 2)
    before = set(tmp_path.iterdir())
    with pytest.raises(OptionError, match=r"memory_check=False skips this check"):
        build_engine(model, tmp_path / "model.engine")
    done = invoke("build", model, "-o", tmp_path / "model.engine", code=None)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: this build takes about 0.5 GB of memory (0.0 GB of weights")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_who_knows_better_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    little(monkeypatch, GB // 2)
    assert build_engine(model, tmp_path / "a.engine", build=BuildOptions(memory_check=False)).engine.size
    invoke("build", model, "-o", tmp_path / "b.engine", "--no-memory-check")


@pytest.mark.slow
def test_the_build_process_is_the_first_to_go(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    seen: list[str] = []

    def look(_: object) -> None:
        workers = [p for p in psutil.Process().children() if str(tmp_path) in " ".join(p.cmdline())]
        seen.extend(Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip() for worker in workers)

    build_engine(model, tmp_path / "model.engine", build=BuildOptions(proof="off"), progress=look)
    assert seen
    assert set(seen) == {"1000"}
