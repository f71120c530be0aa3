"""State that is no attention cache: the same tokens as computing everything again for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hybrids import HEADS, SIZE, TAPS, VOCAB, WIDTH, greedy, hybrid_logits, hybrid_model, write
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import fake_module

from trt_kvcache import BuildOptions, DecodeSession, GenerationConfig, PlanOptions, build_engine, verify_model
from trt_kvcache.errors import CacheFileError, CapacityError, OptionError, SessionError
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner

PROMPTS = ([5, 9, 3], [1, 2, 4, 8, 16, 32, 3, 6, 12, 24, 48], [60], list(range(10, 29)), [7] * 5)
STATE_BYTES = 4 * (WIDTH * (TAPS - 1) + HEADS * SIZE * SIZE)

Open = Callable[[], DecodeSession]


def expected(tokens: list[int], count: int) -> list[int]:
    return greedy(hybrid_logits, tokens, count)


@pytest.fixture(params=["cpu", "gpu", "gpu without graphs"])
def open_(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a session over the hybrid on ONNX Runtime, or on a fake GPU with TensorRT's rules."""
    model = write(tmp_path / "model.onnx", hybrid_model())

    def make() -> DecodeSession:
        if request.param == "cpu":
            return DecodeSession(OnnxRuntimeRunner(model, max_batch=3, max_chunk=8))
        machine = Machine()
        module = fake_module(machine, rtx="without" not in request.param, version="1.7.1.116")
        backend, version = ("tensorrt-rtx", "1.7.1.116") if module.rtx else ("tensorrt", "11.4.0.106")
        module.__version__ = version
        engine = write_engine(model, backend=backend, version=version)
        runner = TensorRTRunner(
            engine, bindings=Bindings(module, machine.bindings()), cuda_graphs="without" not in request.param
        )
        return DecodeSession(runner)

    return make


@pytest.fixture
def session(open_: Open) -> Iterator[DecodeSession]:
    with open_() as opened:
        yield opened


@pytest.mark.few(2)
def test_ragged_prompts_in_chunks_more_than_rows(session: DecodeSession) -> None:
    results = session.generate(PROMPTS, GenerationConfig(max_new_tokens=24))
    for tokens, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == expected(list(tokens), 24)


def test_sequences_join_and_leave(session: DecodeSession) -> None:
    """A row is not advanced by the steps of its neighbours, whatever joins, ends or moves beside it."""
    found: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}

    def add(tokens: list[int], count: int = 20) -> int:
        slot = session.add(tokens, GenerationConfig(max_new_tokens=count))
        prompts[slot] = tokens
        return slot

    add(list(PROMPTS[0]), 4)
    gone = add(list(PROMPTS[1]))
    steps = 0
    while session.running or steps < 6:
        for event in session.step():
            if event.token is not None:
                found.setdefault(event.sequence, []).append(event.token)
        steps += 1
        if steps == 3:
            add(list(PROMPTS[3]))
        if steps == 6:
            session.remove(gone)
            add(list(PROMPTS[4]), 9)
    for slot, tokens in prompts.items():
        assert found[slot] == expected(tokens, 20)[: len(found[slot])]
    assert [len(found[slot]) for slot in prompts if slot != gone] == [4, 20, 9]


def test_fork_reset_and_reorder(session: DecodeSession) -> None:
    cache = session.cache
    first = cache.acquire()
    session.update({first: [5, 9, 3, 7]})
    second = cache.fork(first)
    for slot, more in ((first, [1, 2]), (second, [8])):
        logits = session.update({slot: more})[slot][-1]
        assert_close(logits, hybrid_logits([5, 9, 3, 7, *more]))
    cache.reorder([1, 0])
    assert_close(session.update({first: [4]})[first][-1], hybrid_logits([5, 9, 3, 7, 8, 4]))
    assert_close(session.update({second: [4]})[second][-1], hybrid_logits([5, 9, 3, 7, 1, 2, 4]))
    cache.reorder([0, 0])
    both = session.update({first: [6], second: [11]})
    assert_close(both[first][-1], hybrid_logits([5, 9, 3, 7, 8, 4, 6]))
    assert_close(both[second][-1], hybrid_logits([5, 9, 3, 7, 8, 4, 11]))
    cache.reset(first)
    assert_close(session.update({first: [40, 41]})[first][-1], hybrid_logits([40, 41]))
    cache.crop(second, 0)
    assert_close(session.update({second: [42]})[second][-1], hybrid_logits([42]))


def test_beams(session: DecodeSession) -> None:
    """Beams only copy rows; the best of two is at least as likely as the greedy one."""
    prompt = [5, 9, 3]
    (best,) = session.generate([prompt], GenerationConfig(max_new_tokens=6, num_beams=2))

    def score(tokens: list[int]) -> float:
        total = 0.0
        for i in range(len(tokens)):
            logits = hybrid_logits([*prompt, *tokens[:i]])
            total += float(logits[tokens[i]] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        return total

    assert score(best.tokens) >= score(expected(prompt, 6)) - 1e-4


@pytest.mark.few(2)
def test_saved_and_loaded(open_: Open, tmp_path: Path) -> None:
    with open_() as session:
        slot = session.cache.acquire()
        session.update({slot: [5, 9, 3, 7]})
        session.cache.save(tmp_path / "slot.safetensors")
    with open_() as session:
        session.update({session.cache.acquire(): [1, 2]})
        (loaded,) = session.cache.load(tmp_path / "slot.safetensors").values()
        assert_close(session.update({loaded: [6]})[loaded][-1], hybrid_logits([5, 9, 3, 7, 6]))


def test_a_cache_file_of_other_states_is_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "model.onnx", hybrid_model())
    with DecodeSession(OnnxRuntimeRunner(model)) as session:
        session.update({session.cache.acquire(): [1]})
        session.cache.save(tmp_path / "slot.safetensors")
    names = {"past_conv.1": "past_c", "present_conv.1": "present_c"}
    other = write(tmp_path / "other.onnx", hybrid_model(names))
    with DecodeSession(OnnxRuntimeRunner(other)) as session, pytest.raises(CacheFileError, match="another model"):
        session.cache.load(tmp_path / "slot.safetensors")


def test_what_cannot_go_back_is_refused(session: DecodeSession) -> None:
    slot = session.cache.acquire()
    session.update({slot: [5, 9, 3]})
    with pytest.raises(CapacityError, match=r"slot \d+ cannot be cropped to 2 tokens: the model keeps state"):
        session.cache.crop(slot, 2)
    session.cache.crop(slot, 3)
    assert_close(session.update({slot: [6]})[slot][-1], hybrid_logits([5, 9, 3, 6]))
    guess = GenerationConfig(prompt_lookup_num_tokens=3)
    for call in (
        lambda: session.generate([[1]], guess),
        lambda: session.stream([[1]], guess),
        lambda: session.add([1], guess),
    ):
        with pytest.raises(OptionError, match=r"the model keeps state \('past_conv.1'\) that every step replaces"):
            call()


def test_bytes_count_state_twice(session: DecodeSession) -> None:
    caches = 2 * 4 * HEADS * 64 * SIZE
    assert session.cache.bytes == 3 * (caches + 2 * STATE_BYTES)
    assert session.plan.cache_bytes(1) == caches + 2 * STATE_BYTES
    assert session.plan.double_buffered == {
        "present_conv.1": "past_conv.1", "present_recurrent.2": "past_recurrent.2",
    }  # fmt: skip


def test_a_failed_step_leaves_state(tmp_path: Path) -> None:
    model = write(tmp_path / "model.onnx", hybrid_model())
    engine = write_engine(model)
    machine = Machine()
    module = fake_module(machine, rtx=True, version="1.7.1.116")
    with DecodeSession(TensorRTRunner(engine, bindings=Bindings(module, machine.bindings()))) as session:
        slot = session.cache.acquire()
        session.update({slot: [5, 9, 3]})
        module.faults["fail_steps"] = "no"
        with pytest.raises(SessionError):
            session.update({slot: [7]})
        module.faults.pop("fail_steps")
        assert_close(session.update({slot: [7]})[slot][-1], hybrid_logits([5, 9, 3, 7]))


def test_a_batch_of_one(tmp_path: Path) -> None:
    model = write(tmp_path / "model.onnx", hybrid_model(batch=1))
    with DecodeSession(OnnxRuntimeRunner(model, max_batch=2)) as session:
        results = session.generate(PROMPTS[:2], GenerationConfig(max_new_tokens=8))
    assert [r.tokens for r in results] == [expected(list(p), 8) for p in PROMPTS[:2]]


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == (VOCAB,)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("convolution", [True, False])
def test_beside_caches_that_grow(tmp_path: Path, convolution: bool) -> None:
    """Normalization makes the caches fixed, and leaves the states as they are; it verifies and builds."""
    model = write(tmp_path / "model.onnx", hybrid_model(convolution=convolution, growing=True))
    options = PlanOptions(capacity=64)
    with DecodeSession(OnnxRuntimeRunner(model, options, max_batch=3, max_chunk=8)) as session:
        results = session.generate(PROMPTS, GenerationConfig(max_new_tokens=16))
        assert [s.past for s in session.plan.states] == ["past_conv.1", "past_recurrent.2"]
    assert [r.tokens for r in results] == [expected(list(p), 16) for p in PROMPTS]
    assert verify_model(model, options).passed
    manifest = build_engine(model, tmp_path / "e", options=options, build=BuildOptions(max_batch=2, max_chunk=8))
    assert set(manifest.aliases.values()) == {"past.a.key", "past.a.value"}
    assert set(manifest.double_buffered.values()) == {"past_conv.1", "past_recurrent.2"}
