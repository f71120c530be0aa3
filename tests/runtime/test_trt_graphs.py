"""CUDA graphs of decode steps: recorded when they repeat, equal to plain steps, and given up where they cannot be."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import open_engine, write_engine
from runtime.fake_cuda import Machine

from trt_kvcache.errors import SessionError
from trt_kvcache.importer.cache_plan import Fallback, PlanOptions
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("model")
    models = {name: write_decoder(folder / f"{name}.onnx", DecoderConfig(capacity=600)) for name in ("rtx", "full")}
    return {name: write_engine(model, backend=backend_of(name)) for name, model in models.items()}


def backend_of(name: str) -> str:
    return "tensorrt-rtx" if name == "rtx" else "tensorrt"


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def opened(engines: dict[str, Path], machine: Machine) -> Any:
    """Opens the engine of "full" TensorRT, or of TensorRT for "rtx"."""

    def open_(name: str = "full", **more: Any) -> Any:
        return open_engine(engines[name], machine, backend=backend_of(name), **more)

    return open_


def decode(runner: TensorRTRunner, steps: int, first: int = 0, rows: int = 2, start: int = 0) -> np.ndarray[Any, Any]:
    """Logits of `steps` decode steps of the same tokens every time."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(steps):
        tokens = rng.integers(0, 256, (rows, 1))
        found.append(runner.step(StepBatch(first, tokens, np.full(rows, start + i, np.int64))).copy())
    return np.stack(found)


def test_recorded_once_and_replayed(opened: Any, machine: Machine) -> None:
    with_graphs, without = opened(), opened(cuda_graphs=False)
    expected = decode(without, 12)
    np.testing.assert_array_equal(decode(with_graphs, 12), expected)
    # The first two of the twelve ran plainly; the second in the context that the third was recorded from.
    assert (machine.graphs, machine.launches, len(with_graphs.graphs)) == (1, 10, 1)


def test_one_graph_per_shape_and_row(opened: Any, machine: Machine) -> None:
    runner = opened()
    for i in range(5):  # prefill is not recorded
        runner.step(StepBatch(0, np.zeros((1, 4), np.int64), np.array([4 * i])))
    assert machine.graphs == 0
    decode(runner, 4, rows=2)
    decode(runner, 4, rows=3)
    decode(runner, 4, first=1, rows=2)
    assert machine.graphs == 3
    decode(runner, 4, start=300)  # another span bucket
    assert machine.graphs == 4
    decode(runner, 4, start=250)  # both buckets that it passes are known
    assert machine.graphs == 4


def test_two_buffers_need_a_graph_for_each_side(machine: Machine, tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=16, mode="circular"))
    two = write_engine(path, options=PlanOptions(fallback=Fallback.FUNCTIONAL), backend="tensorrt")
    sides = [open_engine(two, machine, backend="tensorrt", cuda_graphs=graphs) for graphs in (True, False)]
    np.testing.assert_array_equal(*(decode(side, 20) for side in sides))
    assert machine.graphs == 2


def test_the_oldest_graph_makes_room(opened: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = opened()
    monkeypatch.setattr("trt_kvcache.runtime.trt.context.MOST_GRAPHS", 2)
    for first in (0, 1, 0, 2):
        decode(runner, 3, first, 1)
    assert machine.graphs == len(runner.graphs) == 2
    launches = machine.launches
    decode(runner, 3, 0, 1)  # used last but one, and still there
    assert machine.launches == launches + 3
    assert len([c for c in runner.module.contexts if c() is not None]) == 4  # prefill, decode, and one for each graph


OFF = "decoding continues without CUDA graphs: .*"


@pytest.mark.parametrize(
    ("name", "faults", "words"),
    [("full", {"not_recordable": "a loop cannot be captured"}, OFF + "a loop cannot be captured"),
     ("full", {"no_context": 2}, OFF + "Requested amount of GPU memory could not be allocated"),
     ("full", {}, "CUDA: cuStreamBeginCapture failed: .*NOT_SUPPORTED"),
     # Setters of attributes do not tell.
     *(("rtx", {"no_setting": setting}, rf"without CUDA graphs: .*cannot take [A-Z_]+ as {setting}")
       for setting in ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy")),
     *(("rtx", {"no_setting": setting}, "for the next start: .*cannot keep the kernels that it compiles")
       for setting in ("create_runtime_cache", "set_runtime_cache"))],
    ids=str,
)  # fmt: skip
def test_goes_on_without(opened: Any, machine: Machine, name: str, faults: dict[str, Any], words: str) -> None:
    """Graphs, or kernels that are kept: one warning, the same numbers."""
    machine.recordable = bool(faults)
    expected = decode(opened(name, cuda_graphs=False), 8)

    def run() -> Any:
        runner = opened(name, **faults)
        return runner, decode(runner, 8)

    with pytest.warns(RuntimeWarning, match=words) as record:
        runner, found = run()
    np.testing.assert_array_equal(found, expected)
    assert len(record) == 1 or "for the next start" in words
    assert (machine.graphs, machine.templates, machine.recording) == (0, 0, None)
    assert len(runner.graphs) == ("runtime_cache" in faults.get("no_setting", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(runner, 8, rows=3)


@pytest.mark.parametrize("late", [0, 4])
def test_goes_on_where_rtx_does_not_record(opened: Any, late: int) -> None:
    """The step that fails is run again, and none is lost; also after steps that were recorded."""
    plain, runner = opened("rtx", cuda_graphs=False), opened("rtx")
    if late:
        np.testing.assert_array_equal(decode(runner, late), decode(plain, late))
    runner.module.faults["fail_graphs"] = "cannot capture"
    with pytest.warns(RuntimeWarning, match="decoding continues without CUDA graphs: .*cannot capture"):
        found = decode(runner, 8, start=late)
    np.testing.assert_array_equal(found, decode(plain, 8, start=late))
    assert len(runner.graphs) == 0
    runner.module.faults["fail_steps"] = "out of memory"
    with pytest.raises(SessionError, match="out of memory"):
        decode(runner, 1, start=8)


def test_rtx_records_by_itself(opened: Any, machine: Machine) -> None:
    runner, without = opened("rtx"), opened("rtx", cuda_graphs=False)
    np.testing.assert_array_equal(decode(runner, 10), decode(without, 10))
    assert machine.graphs == 0  # none of ours
    recording = [c() for c in runner.module.contexts if c() is not None and c()._records]
    assert len(recording) == len(runner.graphs) == 1
    # All nine steps found it as the first left it: nothing was recorded twice.
    assert len(recording[0]._replays) == 9
    assert len(set(recording[0]._replays)) == 1
    assert not [c for c in without.module.contexts if c() is not None and c()._records]
