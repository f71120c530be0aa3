"""Engines on a GPU against ONNX Runtime on the CPU, step by step.

Tolerances are shares of the largest logit: 2e-2 for float16, as `trt_kvcache.verify` has them, and 5e-3 for float32,
whose products TensorRT may round to TF32 (10 bits of mantissa) on the way. Tokens may differ where two are nearly best.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import own_loop
import pytest
from decoders import DecoderConfig
from greedy import check_greedy

from trt_kvcache.importer.cache_plan import CacheLayout, Fallback, PlanOptions
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt.cuda import cuda_bindings

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 5e-3, "float16": 2e-2}

CASES = {
    "float32": (DecoderConfig(), PlanOptions()),
    "float16": (DecoderConfig(dtype="float16"), PlanOptions()),
    "heads-major": (DecoderConfig(dtype="float16", form="heads-major"), PlanOptions()),
    "preserved bytes": (DecoderConfig(dtype="float16"), PlanOptions(cache_layout=CacheLayout.PRESERVE)),
    "whole capacity": (DecoderConfig(dtype="float16"), PlanOptions(attention_span=False)),
    "circular": (DecoderConfig(capacity=16, mode="circular"), PlanOptions(fallback=Fallback.CONTRACT)),
    "two buffers": (DecoderConfig(capacity=16, mode="circular"), PlanOptions(fallback=Fallback.FUNCTIONAL)),
}


class Walk:
    """Steps of random tokens, the same for every runner."""

    def __init__(self, vocab: int, rows: int = 3, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab
        self.lengths = np.zeros(rows, np.int64)

    def step(self, first: int, rows: int, length: int, keep: int = 1) -> StepBatch:
        tokens = self._rng.integers(0, self._vocab, (rows, length))
        batch = StepBatch(first, tokens, self.lengths[first : first + rows].copy(), keep)
        self.lengths[first : first + rows] += length
        return batch


def scores_of(runner: Any) -> Callable[[list[int]], Any]:
    """Scores after a text, step by step."""

    def scores(text: list[int]) -> Any:
        for start in range(0, len(text), runner.max_chunk):
            part = np.array([text[start : start + runner.max_chunk]])
            logits = runner.step(StepBatch(0, part, np.array([start])))
        return logits[0, -1]

    return scores


def check_close(actual: npt.NDArray[Any], expected: npt.NDArray[Any], dtype: str) -> None:
    """They agree within the tolerance of the dtype."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(actual).all()
    scale = np.abs(expected).max()
    assert np.abs(actual - expected).max() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("name", CASES)
def test_equals_onnx_runtime(workshop: Any, name: str) -> None:
    config, options = CASES[name]
    engine, reference = workshop.engine(config, options), workshop.reference(config, options)
    walk = Walk(engine.vocab)
    for first, rows, length in [(0, 2, 8), (2, 1, 4), (0, 1, 8), *[(0, 3, 1)] * 8, (1, 2, 1)]:
        batch = walk.step(first, rows, length, keep=length)
        check_close(engine.step(batch), reference.step(batch), config.dtype)
    for cache in engine.plan.caches:
        for row in range(3):
            tokens = min(int(walk.lengths[row]), cache.capacity)
            actual = engine.read_row(cache.past, row, tokens).astype(np.float32)
            check_close(actual, reference.read_row(cache.past, row, tokens).astype(np.float32), config.dtype)


def test_past_and_present_have_one_address(workshop: Any) -> None:
    engine = workshop.engine(*CASES["float16"])
    walk = Walk(engine.vocab)
    for rows, length in ((2, 8), (2, 1)):
        engine.step(walk.step(1, rows, length))
    addresses = []
    for wrapped in engine.resources.contexts:
        context = wrapped._context
        for cache in engine.plan.caches:
            assert engine.resources.trt.engine.get_aliased_input_tensor(cache.present) == cache.past
            assert context.get_tensor_address(cache.present) == context.get_tensor_address(cache.past)
        addresses.append(context.get_tensor_address(engine.plan.caches[0].past))
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("garbage", [1e4, -1e4])
def test_garbage_in_unused_rows_is_never_seen(workshop: Any, garbage: float) -> None:
    """Rows beyond the length hold large finite numbers: the logits are the same.

    On TensorRT bit for bit; TensorRT for RTX may exchange a kernel at any moment, when a better one is compiled.
    """
    clean, dirty = workshop.engine(*CASES["float16"]), workshop.engine(*CASES["float16"])
    for cache in dirty.plan.caches:
        row = dirty.read_row(cache.past, 0, cache.capacity)
        for i in range(3):
            dirty.write_row(cache.past, i, np.full_like(row, garbage))
    walk = Walk(clean.vocab)
    for length in (7, 1, 1, 4, 1):
        batch = walk.step(1, 2, length, keep=length)
        expected, actual = clean.step(batch).copy(), dirty.step(batch)
        check_close(actual, expected, "float16")
        assert clean.resources.trt.rtx or (actual == expected).all()


def test_a_thousand_steps(workshop: Any) -> None:
    """Through four span buckets, with CUDA graphs; tokens are ONNX Runtime's, so that one near tie costs one step.

    In 4 of 100 steps two tokens are closer than 0.25 % of the largest logit, which float16 rounds away.
    """
    config = DecoderConfig(capacity=1024, dtype="float16")
    engine, reference = workshop.engine(config), workshop.reference(config)
    tokens, agree, steps = np.array([[1], [2]]), 0, 1000
    for i in range(steps):
        batch = StepBatch(0, tokens, np.full(2, i, np.int64))
        expected = reference.step(batch).copy()
        actual = engine.step(batch)
        check_close(actual, expected, "float16")
        tokens = expected[:, -1].argmax(-1)[:, None]
        agree += int((actual[:, -1].argmax(-1)[:, None] == tokens).all())
    assert agree >= 0.95 * steps
    if engine.graphs.failure:
        pytest.fail(f"CUDA graphs are off: {engine.graphs.failure}")
    assert len(engine.graphs) == 4


def test_graphs_change_nothing(workshop: Any) -> None:
    config, options = CASES["float16"]
    recorded = workshop.engine(config, options)
    plain = workshop.open(workshop.built[config, options], cuda_graphs=False)
    walk = Walk(recorded.vocab)
    first = walk.step(0, 3, 8)
    check_close(recorded.step(first).copy(), plain.step(first), "float16")
    for _ in range(30):
        batch = walk.step(0, 3, 1)
        check_close(recorded.step(batch).copy(), plain.step(batch), "float16")
    assert not recorded.graphs.failure
    assert len(recorded.graphs) == 1
    assert plain.graphs is None


def test_memory_does_not_grow(workshop: Any) -> None:
    engine = workshop.engine(*CASES["float16"])
    held = engine.device_bytes

    def decode(steps: int) -> int:
        for row in range(3):
            engine.zero_rows(row, 0, 64)
        walk = Walk(engine.vocab)
        engine.step(walk.step(0, 3, 8))
        for _ in range(steps):
            engine.step(walk.step(0, 3, 1))
        free, _ = engine._cuda.free_memory()
        return int(free)

    decode(50)  # from here on graphs and contexts are there
    rtx = engine.resources.trt.rtx
    time.sleep(2 * rtx)  # and the kernels that it compiles meanwhile
    before = [decode(50) for _ in range(2)][-1]
    after = [decode(50) for _ in range(10)][-1]
    assert engine.device_bytes == held
    # The driver's smallest portion; and those of such kernels as come later, once.
    assert before - after < (16 if rtx else 2) << 20


def test_closing_gives_everything_back(workshop: Any) -> None:
    config, options = CASES["float16"]
    workshop.engine(config, options).close()
    probe = workshop.open(workshop.built[config, options])
    before, _ = probe._cuda.free_memory()
    for _ in range(5):
        workshop.open(workshop.built[config, options]).close()
    after, _ = probe._cuda.free_memory()
    assert before - after < 8 << 20


def test_rows_can_be_moved(workshop: Any) -> None:
    for config, options in (CASES["float16"], CASES["two buffers"]):
        engine, reference = workshop.engine(config, options), workshop.reference(config, options)
        walk = Walk(engine.vocab)
        for first, rows, length in ((0, 1, 4), (1, 2, 2)):
            batch = walk.step(first, rows, length)
            check_close(engine.step(batch), reference.step(batch), config.dtype)
        for runner in (engine, reference):
            runner.copy_rows(0, 2, 4)
            runner.zero_rows(1, 0, 16)
        walk.lengths[:] = 4, 0, 4
        for first, rows in ((2, 1), (0, 3), (0, 3)):
            batch = walk.step(first, rows, 1)
            check_close(engine.step(batch), reference.step(batch), config.dtype)


def test_a_cache_is_seen_without_a_copy(workshop: Any) -> None:
    engine = workshop.engine(*CASES["float16"])
    engine.step(Walk(engine.vocab).step(0, 3, 8))
    view = engine.view(engine.plan.caches[0].past)
    assert tuple(view.shape) == (3, *engine.plan.caches[0].physical_shape[1:])
    assert view.__dlpack_device__()[0] == (2 if engine._cuda._core is cuda_bindings().core else 1)


def test_compiled_kernels_are_kept(workshop: Any) -> None:
    config, options = CASES["float16"]
    engine = workshop.engine(config, options)
    if not engine.resources.trt.rtx:
        pytest.skip("TensorRT compiles when it builds")
    engine.step(Walk(engine.vocab).step(0, 3, 8))
    engine.close()
    again = workshop.open(workshop.built[config, options])
    assert again.resources.factory.kernels.loaded


def test_sessions_write_the_same_tokens(workshop: Any) -> None:
    from trt_kvcache.runtime.generation.generation_config import GenerationConfig
    from trt_kvcache.runtime.session import DecodeSession

    config, options = CASES["float32"]
    greedy = GenerationConfig(max_new_tokens=12)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9], list(range(20))]
    with DecodeSession(workshop.engine(config, options)) as session:
        actual = [list(g.tokens) for g in session.generate(prompts, greedy)]
    for prompt, tokens in zip(prompts, actual, strict=True):
        assert len(tokens) == 12
        check_greedy(prompt, tokens, scores_of(workshop.reference(config, options)), TOLERANCE["float32"])


def test_the_loop_without_the_package_writes_them_too(workshop: Any) -> None:
    """In a process of its own: TensorRT takes one logger in each."""
    config, options = CASES["float32"]
    workshop.engine(config, options).close()
    prompt = [str(token) for token in range(20)]
    code = f"import sys; sys.path.append({str(Path(own_loop.__file__).parent)!r}); import own_loop; own_loop.main()"
    command = [sys.executable, "-c", code, workshop.built[config, options], *prompt, "--max-new-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens = [int(token) for token in done.stdout.splitlines()[-1].split()]
    assert len(tokens) == 12
    check_greedy(range(20), tokens, scores_of(workshop.reference(config, options)), TOLERANCE["float32"])


def test_tokens_are_those_that_the_host_chooses(workshop: Any) -> None:
    """The best and the highest scores found on the GPU, against the same engine with all scores on the host.

    TensorRT for RTX may exchange a kernel between the two: greedy tokens alone, and but for near ties.
    """
    from trt_kvcache.runtime.generation.generation_config import GenerationConfig
    from trt_kvcache.runtime.session import DecodeSession

    config, options = CASES["float32"]
    chooses = workshop.engine(config, options)
    if chooses.host_choice:
        pytest.skip(f"the host chooses: {chooses.host_choice}")
    fetches = workshop.open(workshop.built[config, options])
    fetches._buffers._choice = None
    for settings in ({}, {"do_sample": True, "top_k": 9, "top_p": 0.9, "seed": 1}):
        found = []
        for runner in (chooses, fetches):
            session = DecodeSession(runner)
            generated = session.generate([[1, 2, 3], list(range(20))], GenerationConfig(max_new_tokens=12, **settings))
            found.append([list(g.tokens) for g in generated])
        if not chooses.resources.trt.rtx:
            assert found[0] == found[1]
        elif not settings:
            scores = scores_of(workshop.reference(config, options))
            for tokens in found:
                check_greedy([1, 2, 3], tokens[0], scores, TOLERANCE["float32"])
                check_greedy(range(20), tokens[1], scores, TOLERANCE["float32"])
