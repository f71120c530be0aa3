"""CUDA graphs of decode steps: recorded when they repeat, equal to plain steps, and given up where they cannot be."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import fake_module

from trt_kvcache.errors import SessionError
from trt_kvcache.importer.plan import Fallback, PlanOptions
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig(capacity=600))
    return write_engine(path, backend="tensorrt", version="11.4.0.106")


@pytest.fixture
def machine() -> Machine:
    return Machine()


def open_(engine: Path, machine: Machine, *, rtx: bool = False, graphs: bool = True, **faults: Any) -> TensorRTRunner:
    module = fake_module(machine, rtx=rtx, version="1.7.1.116" if rtx else "11.4.0.106", **faults)
    runner = TensorRTRunner(engine, cuda_graphs=graphs, bindings=Bindings(module, machine.bindings()))
    runner.module = module  # type: ignore[attr-defined]
    return runner


def decode(runner: TensorRTRunner, steps: int, first: int = 0, rows: int = 2, start: int = 0) -> np.ndarray[Any, Any]:
    """Logits of `steps` decode steps of the same tokens every time."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(steps):
        tokens = rng.integers(0, 256, (rows, 1))
        found.append(runner.step(StepBatch(first, tokens, np.full(rows, start + i, np.int64))).copy())
    return np.stack(found)


def test_recorded_once_and_replayed(engine: Path, machine: Machine) -> None:
    with_graphs, without = open_(engine, machine), open_(engine, machine, graphs=False)
    expected = decode(without, 12)
    np.testing.assert_array_equal(decode(with_graphs, 12), expected)
    # The first two of the twelve ran plainly; the second in the context that the third was recorded from.
    assert (machine.graphs, machine.launches, len(with_graphs.graphs)) == (1, 10, 1)


def test_one_graph_per_shape_and_row(engine: Path, machine: Machine) -> None:
    runner = open_(engine, machine)
    decode(runner, 4, rows=2)
    decode(runner, 4, rows=3)
    decode(runner, 4, first=1, rows=2)
    assert machine.graphs == 3
    decode(runner, 4, start=300)  # another span bucket
    assert machine.graphs == 4
    decode(runner, 4, start=250)  # both buckets that it passes are known
    assert machine.graphs == 4


def test_prefill_is_not_recorded(engine: Path, machine: Machine) -> None:
    runner = open_(engine, machine)
    for i in range(5):
        runner.step(StepBatch(0, np.zeros((1, 4), np.int64), np.array([4 * i])))
    assert machine.graphs == 0


def test_two_buffers_need_a_graph_for_each_side(machine: Machine, tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=16, mode="circular"))
    options = PlanOptions(fallback=Fallback.FUNCTIONAL)
    two = write_engine(path, options=options, backend="tensorrt", version="11.4.0.106")
    with_graphs, without = open_(two, machine), open_(two, machine, graphs=False)
    np.testing.assert_array_equal(decode(with_graphs, 20), decode(without, 20))
    assert machine.graphs == 2


def test_the_oldest_graph_makes_room(engine: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_(engine, machine)
    monkeypatch.setattr(runner.graphs, "_most", 2)
    for first in (0, 1, 0, 2):
        decode(runner, 3, first, 1)
    assert machine.graphs == len(runner.graphs) == 2
    launches = machine.launches
    decode(runner, 3, 0, 1)  # used last but one, and still there
    assert machine.launches == launches + 3
    contexts = [c for c in runner.module.contexts if c() is not None]  # type: ignore[attr-defined]
    assert len(contexts) == 4  # prefill, decode, and one for each graph


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"not_recordable": "a loop cannot be captured"}, "a loop cannot be captured"),
        ({"no_context": 2}, "Requested amount of GPU memory could not be allocated"),
    ],
)
def test_goes_on_without_graphs(engine: Path, machine: Machine, faults: dict[str, Any], words: str) -> None:
    expected = decode(open_(engine, machine, graphs=False), 8)
    runner = open_(engine, machine, **faults)
    with pytest.warns(RuntimeWarning, match="decoding goes on without CUDA graphs: .*" + words) as record:
        found = decode(runner, 8)
    np.testing.assert_array_equal(found, expected)
    assert len(record) == 1
    assert runner.graphs is not None
    assert (machine.graphs, len(runner.graphs), machine.templates, machine.recording) == (0, 0, 0, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(runner, 8, rows=3)


@pytest.mark.parametrize("late", [0, 4])
def test_goes_on_where_rtx_does_not_record(machine: Machine, late: int, tmp_path: Path) -> None:
    """The step that fails is run again, and none is lost; also after steps that were recorded."""
    rtx = write_engine(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=600)))
    plain, runner = open_(rtx, machine, rtx=True, graphs=False), open_(rtx, machine, rtx=True)
    if late:
        np.testing.assert_array_equal(decode(runner, late), decode(plain, late))
    runner.module.faults["fail_graphs"] = "cannot capture"  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="decoding goes on without CUDA graphs: .*cannot capture"):
        found = decode(runner, 8, start=late)
    np.testing.assert_array_equal(found, decode(plain, 8, start=late))
    assert runner.graphs is not None
    assert len(runner.graphs) == 0
    runner.module.faults["fail_steps"] = "out of memory"  # type: ignore[attr-defined]
    with pytest.raises(SessionError, match="out of memory"):
        decode(runner, 1, start=8)


@pytest.mark.parametrize("setting", ["cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"])
def test_a_setting_that_rtx_does_not_take_is_said(machine: Machine, setting: str, tmp_path: Path) -> None:
    """Setters of attributes do not tell."""
    rtx = write_engine(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=600)))
    runner = open_(rtx, machine, rtx=True, no_setting=setting)
    with pytest.warns(RuntimeWarning, match=f"without CUDA graphs: .*cannot take [A-Z_]+ as {setting}"):
        found = decode(runner, 8)
    np.testing.assert_array_equal(found, decode(open_(rtx, machine, rtx=True, graphs=False), 8))


@pytest.mark.parametrize("setting", ["create_runtime_cache", "set_runtime_cache"])
def test_kernels_that_cannot_be_kept_are_said(machine: Machine, setting: str, tmp_path: Path) -> None:
    rtx = write_engine(write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1)))
    with pytest.warns(RuntimeWarning, match="for the next start: .*cannot keep the kernels that it compiles"):
        found = decode(open_(rtx, machine, rtx=True, no_setting=setting), 8)
    np.testing.assert_array_equal(found, decode(open_(rtx, machine, rtx=True), 8))


def test_goes_on_where_cuda_records_nothing(engine: Path, machine: Machine) -> None:
    machine.recordable = False
    expected = decode(open_(engine, machine, graphs=False), 5)
    runner = open_(engine, machine)
    with pytest.warns(RuntimeWarning, match="CUDA: cuStreamBeginCapture failed: .*NOT_SUPPORTED"):
        found = decode(runner, 5)
    np.testing.assert_array_equal(found, expected)


def test_rtx_records_by_itself(engine: Path, machine: Machine, tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=600))
    rtx = write_engine(path)
    runner, without = open_(rtx, machine, rtx=True), open_(rtx, machine, rtx=True, graphs=False)
    np.testing.assert_array_equal(decode(runner, 10), decode(without, 10))
    assert machine.graphs == 0  # none of ours
    live = [c() for c in runner.module.contexts if c() is not None]  # type: ignore[attr-defined]
    recording = [c for c in live if c._records]
    assert len(recording) == len(runner.graphs) == 1
    # All nine steps found it as the first left it: nothing was recorded twice.
    assert len(recording[0]._replays) == 9
    assert len(set(recording[0]._replays)) == 1
    assert not [c for c in without.module.contexts if c() is not None and c()._records]  # type: ignore[attr-defined]
