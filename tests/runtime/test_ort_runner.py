"""ONNX Runtime behind the runner interface: in place, rows apart, refusals."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from decoders import DecoderConfig, make_decoder, write_decoder
from graphs import Graph
from onnx import TensorProto, helper

from trt_kvcache import machine
from trt_kvcache.errors import OptionError, SessionError, UnsupportedModelError
from trt_kvcache.importer import pipeline
from trt_kvcache.importer.check import Checked
from trt_kvcache.runtime.ort import ort_runner as runner_module
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch

BASE = DecoderConfig(capacity=32, vocab=64)
TOKENS = np.array([[3, 1, 4, 1], [5, 9, 2, 6]])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "model.onnx", BASE)


def batch(first_row: int, tokens: np.ndarray) -> StepBatch:
    return StepBatch(first_row, tokens, np.zeros(len(tokens), np.int64), tokens.shape[1])


@pytest.mark.slow
def test_external_weights_are_read_by_onnx_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_decoder(tmp_path / "model.onnx", BASE, 64)
    inside = write_decoder(tmp_path / "inside.onnx", BASE)
    monkeypatch.chdir(Path(__file__).parent)
    runner, other = OnnxRuntimeRunner(path, max_batch=2), OnnxRuntimeRunner(inside, max_batch=2)
    np.testing.assert_array_equal(runner.step(batch(0, TOKENS)), other.step(batch(0, TOKENS)))
    assert runner.identity() != other.identity()
    assert runner.identity() == OnnxRuntimeRunner(path).identity()


@pytest.mark.parametrize("opens", [True, False])
def test_weights_are_loaded_beside_the_check_and_no_step_runs_before_its_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    """A refusal of the check comes before one of ONNX Runtime."""
    opened, ran = threading.Event(), []
    real = runner_module.open_on_cpu

    def open_on_cpu(*given: Any, **options: Any) -> Any:
        opened.set()
        if not opens:
            raise UnsupportedModelError("no kernel")
        return real(*given, **options)

    def check(*_: Any, **__: Any) -> Checked:
        assert opened.wait(60)
        ran.append(True)
        raise UnsupportedModelError("another meaning")

    monkeypatch.setattr(runner_module, "open_on_cpu", open_on_cpu)
    monkeypatch.setattr(OnnxRuntimeRunner, "_look_for_vocabulary", lambda *_: ran and 64)
    monkeypatch.setattr(pipeline, "check_rewrite", check)
    with pytest.raises(UnsupportedModelError, match="another meaning"):
        OnnxRuntimeRunner(model)
    monkeypatch.setattr(pipeline, "check_rewrite", lambda *_, **__: Checked(("said of the check",)))
    if opens:
        assert "said of the check" in OnnxRuntimeRunner(model).plan.notes


@pytest.mark.few(1)
@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
def test_a_model_that_was_replaced_has_no_identity(tmp_path: Path, file: str) -> None:
    """Caches of the one would be saved as those of the other."""
    path = write_decoder(tmp_path / "model.onnx", BASE, external_threshold=64)
    runner, known = OnnxRuntimeRunner(path), OnnxRuntimeRunner(path)
    known.identity()
    replaced = tmp_path / file
    replaced.write_bytes(replaced.read_bytes())
    with pytest.raises(SessionError, match=f"{file}: the file has changed since the session was opened"):
        runner.identity()
    assert known.identity() == OnnxRuntimeRunner(path).identity()


def test_a_failing_step_is_our_error(model: Path) -> None:
    runner = OnnxRuntimeRunner(model, max_batch=2)
    with pytest.raises(SessionError, match=r"ONNX Runtime .* failed: .*indices"):
        runner.step(batch(0, TOKENS + 1000))
    assert runner.step(batch(0, TOKENS)).shape == (2, 4, 64)
    for _ in range(2):
        runner.close()
    with pytest.raises(SessionError, match="the runner is closed"):
        runner.step(batch(0, TOKENS))


def test_out_of_memory_is_our_error_and_passes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = OnnxRuntimeRunner(model, max_batch=2)
    with monkeypatch.context() as patched:

        def exhausted(*_: object, **__: object) -> None:
            raise MemoryError

        patched.setattr(np, "empty", exhausted)
        with pytest.raises(SessionError, match="out of memory for a step of 2 x 4 tokens; lower max_chunk"):
            runner.step(batch(0, TOKENS))
    assert runner.step(batch(0, TOKENS)).shape == (2, 4, 64)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("config", "options", "error", "words"),
    [
        (replace(BASE, batch=4), {"max_batch": 2}, OptionError, "max_batch is 2, but this model computes 4 sequences"),
        (replace(BASE, sequence=3), {"max_chunk": 4}, OptionError, "this model takes at most 3 tokens per update"),
        (BASE, {"max_batch": 0}, OptionError, "max_batch is 0; it must be at least 1"),
        (BASE, {"max_chunk": 33}, OptionError, "max_chunk is 33, but this model takes at most 32 tokens per update"),
        (BASE, {"threads": -1}, OptionError, "threads is -1"),
        (BASE, {"max_batch": 10**12}, SessionError, r"take .* GB .*; lower max_batch"),
    ],
)
def test_refusals(
    tmp_path: Path, config: DecoderConfig, options: dict[str, int], error: type[Exception], words: str
) -> None:
    path = write_decoder(tmp_path / "model.onnx", config)
    with pytest.raises(error, match=words):
        OnnxRuntimeRunner(path, **options)


def test_an_input_without_a_role_is_refused_by_name(tmp_path: Path) -> None:
    proto = make_decoder(BASE)
    proto.graph.input.append(helper.make_tensor_value_info("temperature", TensorProto.FLOAT, [1]))
    scaled = helper.make_node("Mul", ["logits", "temperature"], ["scaled_logits"])
    proto.graph.node.append(scaled)
    proto.graph.output.append(helper.make_tensor_value_info("scaled_logits", TensorProto.FLOAT, ["batch", "s", 64]))
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedModelError, match=r"input 'temperature' \(float \[1\]\) has no known role in decoding"
    ):
        OnnxRuntimeRunner(tmp_path / "model.onnx")


def test_packed_updates_reach_their_rows(tmp_path: Path) -> None:
    """Tokens of all rows in one axis, with cumulative lengths: no padding, and not in place on ONNX Runtime."""
    g = Graph()
    ids = g.input("input_ids", TensorProto.INT64, ["T"])
    indices = g.input("write_indices", TensorProto.INT64, ["B"])
    lengths = g.input("lengths", TensorProto.INT32, ["B1"])
    past = g.input("key_cache", TensorProto.FLOAT, ["B", 1, 16, 8])
    rows = g.node("Gather", [g.constant(np.arange(64).reshape(8, 8), np.float32), ids])
    new = g.node("Unsqueeze", [rows, g.constant([1])])
    g.node("TRT_KVCacheUpdate", [past, new, indices, lengths], "present", update_form="packed_nhd")
    g.output("present", TensorProto.FLOAT, ["B", 1, 16, 8])
    g.node("Neg", [rows], "logits")
    g.output("logits", TensorProto.FLOAT, ["T", 8])
    onnx.save(g.model(), tmp_path / "model.onnx")
    runner = OnnxRuntimeRunner(tmp_path / "model.onnx", max_batch=4)
    logits = runner.step(StepBatch(1, np.array([[1, 2], [3, 4]]), np.array([0, 5]), 2))
    np.testing.assert_array_equal(logits[..., 0], [[-8, -16], [-24, -32]])
    expected = np.zeros((4, 16))
    expected[1, :2], expected[2, 5:7] = [8, 16], [24, 32]
    np.testing.assert_array_equal(runner.view("key_cache")[:, 0, :, 0], expected)


# Models whose weights do not fit into memory are refused before ONNX Runtime is started, which would be killed.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "factor", "why"),
    [("float32", 0.8, "packs them for products"), ("float16", 2.5, "computes 16-bit floats in float32")],
)
def test_weights_that_do_not_fit_are_refused(
    dtype: str, factor: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(dtype=dtype, hidden=256), 1024)
    need = int(factor * (tmp_path / "m.onnx.data").stat().st_size)
    monkeypatch.setattr(machine, "free_memory", lambda *, swap: int(1.1 * need))
    assert OnnxRuntimeRunner(path).name.startswith("ONNX Runtime")
    monkeypatch.setattr(machine, "free_memory", lambda *, swap: int(0.9 * need))
    monkeypatch.delattr(ort, "InferenceSession")
    with pytest.raises(SessionError, match=f"take at least 0.0 GB of memory .*{why}.* are free; free memory"):
        OnnxRuntimeRunner(path)
