"""Greedy tokens chosen on the (fake) GPU: those of the host, wherever they come from, and never from a wrong kernel."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import fake_module

from trt_kvcache.errors import BackendError, SessionError
from trt_kvcache.plugins.choice import CHOICE_DTYPES
from trt_kvcache.runtime import trt_choice
from trt_kvcache.runtime.config import GenerationConfig
from trt_kvcache.runtime.greedy import CHOICE, best
from trt_kvcache.runtime.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.runtime.trt_choice import DeviceChoice, hard_scores, open_choice
from trt_kvcache.runtime.trt_io import StepBuffers
from trt_kvcache.runtime.trt_runner import Bindings, TensorRTRunner

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13]]
GREEDY = GenerationConfig(max_new_tokens=12)
SAMPLED = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=5, seed=3)


@pytest.fixture(scope="module", params=["float32", "float16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = DecoderConfig(dtype=request.param, capacity=64)
    return write_engine(write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", config))


def opened(engine: Path, **machine: Any) -> tuple[TensorRTRunner, Machine]:
    gpu = Machine(**machine)
    runner = TensorRTRunner(engine, bindings=Bindings(fake_module(gpu), gpu.bindings()))
    return runner, gpu


def generated(runner: Any, configs: list[GenerationConfig] | GenerationConfig) -> list[list[int]]:
    with DecodeSession(runner) as session:
        if isinstance(configs, GenerationConfig):
            return [list(g.tokens) for g in session.generate(PROMPTS, configs)]
        slots = [session.add(prompt, config) for prompt, config in zip(PROMPTS, configs, strict=True)]
        tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        while session.running:
            for event in session.step():
                if event.token is not None:
                    tokens[event.sequence].append(event.token)
        return [tokens[slot] for slot in slots]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of logits that came to the host."""
    sizes: list[int] = []
    fetch = StepBuffers._fetch

    def counting(self: StepBuffers, start: int, pitch: int, width: int, height: int) -> Any:
        sizes.append(width * height)
        return fetch(self, start, pitch, width, height)

    monkeypatch.setattr(StepBuffers, "_fetch", counting)
    return sizes


def test_greedy_decoding_fetches_no_scores(engine: Path, fetched: list[int]) -> None:
    runner, gpu = opened(engine)
    assert runner.host_choice == ""
    proved = gpu.launched
    tokens = generated(runner, GREEDY)
    assert gpu.launched >= proved + 12
    assert fetched == []
    assert tokens == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), GREEDY)


def test_drafts_are_verified_on_the_gpu(engine: Path, fetched: list[int]) -> None:
    config = GenerationConfig(max_new_tokens=30, prompt_lookup_num_tokens=3)
    runner, _ = opened(engine)
    plain = generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), config)
    assert generated(runner, config) == plain
    assert fetched == []


@pytest.mark.parametrize(
    "config",
    [SAMPLED, GenerationConfig(max_new_tokens=6, output_logprobs=True),
     GenerationConfig(max_new_tokens=6, repetition_penalty=1.3),
     GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=2),
     GenerationConfig(max_new_tokens=6, sequence_bias={(3,): 2.0})],
    ids=["sampled", "log-probabilities", "penalty", "n-grams", "bias"],
)  # fmt: skip
def test_who_looks_at_other_scores_gets_them(engine: Path, config: GenerationConfig, fetched: list[int]) -> None:
    runner, gpu = opened(engine)
    proved = gpu.launched
    tokens = generated(runner, config)
    assert gpu.launched == proved
    assert fetched
    assert tokens == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), config)


def test_min_new_tokens_needs_scores_at_first_only(engine: Path, fetched: list[int]) -> None:
    config = GenerationConfig(max_new_tokens=10, min_new_tokens=4, eos_token_id=999)
    runner, gpu = opened(engine)
    proved = gpu.launched
    tokens = generated(runner, config)
    assert fetched
    assert gpu.launched > proved
    assert tokens == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), config)


def test_sequences_of_one_step_may_want_different_things(engine: Path) -> None:
    mixed = [GREEDY, SAMPLED, GenerationConfig(max_new_tokens=5)]
    runner, _ = opened(engine)
    assert generated(runner, mixed) == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), mixed)


def test_a_step_says_what_it_wants(engine: Path) -> None:
    runner, _ = opened(engine)
    tokens, starts = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.zeros(2, np.int64)
    scores = runner.step(StepBatch(0, tokens, starts, keep=3)).copy()
    chosen = runner.step(StepBatch(0, tokens, starts, keep=3, best=True))
    assert (chosen.shape, chosen.dtype) == ((2, 3), CHOICE)
    for i, j in np.ndindex(2, 3):
        assert best(chosen[i, j]) == best(scores[i, j])
    nothing = runner.step(StepBatch(0, tokens, starts, keep=0, best=True))
    assert nothing.shape[:2] == (2, 0)
    runner.close()


def test_numbers_that_are_none_end_their_sequence(engine: Path) -> None:
    """As on the host; the others go on."""
    runner, _ = opened(engine)
    with DecodeSession(runner) as session:
        slots = [session.add(prompt, GREEDY) for prompt in PROMPTS]
        while len(session.cache.lengths) < 3 or min(session.cache.lengths.values()) < 10:
            session.step()
        row = session.cache.slot(slots[1]).row
        for cache in runner.plan.caches:
            runner.write_row(cache.past, row, np.full_like(runner.read_row(cache.past, row, 1), np.nan))
        with pytest.raises(SessionError, match="the model's logits hold nan"):
            session.step()
        assert set(session.running) == {slots[0], slots[2]}
        assert {event.sequence for event in session.step()} == {slots[0], slots[2]}


# Wherever the kernel cannot be had, the host chooses.


@pytest.mark.parametrize(
    ("way", "words"),
    [("no NVRTC", r"not installed: pip install 'trt-kvcache\[plugin\]'"), ("old driver", "the driver is for CUDA 12.8"),
     ("unknown GPU", "architecture 'sm_90': NVRTC .* knows sm_1"), ("no memory", "cuMemAlloc of .* failed")],
)  # fmt: skip
def test_without_the_kernel_the_host_chooses(
    engine: Path, way: str, words: str, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "no NVRTC":
        from trt_kvcache.plugins import compile as compiling

        message = "NVRTC, which compiles kernels, is not installed: pip install 'trt-kvcache[plugin]'"

        def absent() -> None:
            raise BackendError(message)

        monkeypatch.setattr(compiling, "nvrtc_version", absent)
    elif way == "unknown GPU":
        monkeypatch.setattr("trt_kvcache.plugins.compile.supported_archs", lambda: ("sm_1",))
    elif way == "no memory":
        monkeypatch.setattr(trt_choice, "_KEY_BYTES", 1 << 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner, gpu = opened(engine, driver=12_080) if way == "old driver" else opened(engine)
    assert re.search(words, runner.host_choice)
    assert runner.name.endswith(", tokens chosen on the host")
    tokens = generated(runner, GREEDY)
    assert gpu.launched == 0
    assert fetched
    assert tokens == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), GREEDY)


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"wrong_tokens": 1}, "of 256 scores in float(32|16) the GPU finds token .*, and the host token"),
     ({"no_launches": "CUDA_ERROR_INVALID_IMAGE"}, "cannot launch a kernel: CUDA_ERROR_INVALID_IMAGE")],
    ids=["wrong", "refused"],
)  # fmt: skip
def test_a_kernel_that_fails_its_trial_is_never_used(engine: Path, fault: dict[str, Any], words: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"the host chooses tokens, because the GPU does not: .*{words}"):
        runner, gpu = opened(engine, **fault)
    tried = gpu.launched
    assert re.search(words, runner.host_choice)
    assert generated(runner, GREEDY) == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), GREEDY)
    assert gpu.launched == tried


# The trial itself.


def choice_on(gpu: Machine, dtype: Any, vocab: int, positions: int) -> tuple[DeviceChoice | None, str]:
    from trt_kvcache.runtime.cuda import Cuda

    cuda = Cuda(0, gpu.bindings())
    size = positions * vocab * np.dtype(dtype).itemsize
    return open_choice(cuda, np.dtype(dtype), vocab, positions, cuda.allocate(size), size, cuda.allocate_pinned(size))


@pytest.mark.parametrize("dtype", CHOICE_DTYPES)
@pytest.mark.parametrize(("vocab", "positions"), [(1, 1), (2, 3), (7, 1), (256, 1), (257, 5), (1000, 40)])
def test_every_size_can_be_tried(dtype: str, vocab: int, positions: int) -> None:
    choice, reason = choice_on(Machine(), CHOICE_DTYPES[dtype], vocab, positions)
    assert choice is not None, reason


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.float8_e4m3fn])
def test_other_types_stay_on_the_host(dtype: Any) -> None:
    choice, reason = choice_on(Machine(), dtype, 100, 2)
    assert choice is None
    assert reason == f"the kernel takes float16, bfloat16, float32, and these logits are {np.dtype(dtype).name}"


def test_sizes_beyond_what_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_choice, "MOST_TOKENS", 99)
    assert "2 positions of 100 tokens are more" in choice_on(Machine(), np.float32, 100, 2)[1]
    monkeypatch.undo()
    monkeypatch.setattr(trt_choice, "_MOST_BLOCKS", 1)
    assert "2 positions of 100 tokens are more" in choice_on(Machine(), np.float32, 100, 2)[1]


@pytest.mark.parametrize("dtype", CHOICE_DTYPES)
def test_hard_scores_are_hard(dtype: str) -> None:
    scores = hard_scores(np.dtype(CHOICE_DTYPES[dtype]), 8, 1, 501, 0)[:, 0].astype(np.float32)
    tops = [best(row) for row in scores]
    assert sum(np.isnan(top) for _, top in tops) == 1
    assert sum(np.isinf(top) for _, top in tops) == 1
    assert sum(0 < top < 1e-4 for _, top in tops) == 2  # subnormal ones
    ties = [int((row == top).sum()) for row, (_, top) in zip(scores, tops, strict=True)]
    assert sum(count > 1 for count in ties) >= 4
    assert len({token for token, _ in tops}) >= 5
