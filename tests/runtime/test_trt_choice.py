"""Greedy tokens chosen on the (fake) GPU: those of the host, wherever they come from, and never from a wrong kernel."""

import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import drain, open_engine, write_engine
from runtime.fake_cuda import Machine

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import BackendError, SessionError
from trt_kvcache.plugins.choice import CHOICE_DTYPES
from trt_kvcache.runtime.generation.sampling import Sampler
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.trt import choice as trt_choice
from trt_kvcache.runtime.trt.choice import DeviceChoice, open_choice
from trt_kvcache.runtime.trt.cuda import Cuda
from trt_kvcache.runtime.trt.step_buffers import StepBuffers
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13]]
PROMPT = np.array([1, 2, 3])
GREEDY = GenerationConfig(max_new_tokens=12)
SAMPLED = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=5, seed=3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of float16; test_families has those of float32."""
    config = DecoderConfig(dtype="float16", capacity=64)
    return write_engine(write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", config))


def opened(engine: Path, **machine: Any) -> tuple[TensorRTRunner, Machine]:
    gpu = Machine(**machine)
    return open_engine(engine, gpu), gpu


def generated(runner: Any, configs: list[GenerationConfig] | GenerationConfig) -> list[list[int]]:
    with DecodeSession(runner) as session:
        if isinstance(configs, GenerationConfig):
            return [list(g.tokens) for g in session.generate(PROMPTS, configs)]
        slots = [session.add(prompt, config) for prompt, config in zip(PROMPTS, configs, strict=True)]
        tokens = drain(session)
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


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "config",
    [GenerationConfig(max_new_tokens=6, do_sample=True, top_k=0, top_p=0.9, seed=1),
     GenerationConfig(max_new_tokens=6, do_sample=True, top_k=200, seed=1),
     GenerationConfig(max_new_tokens=6, output_logprobs=True),
     GenerationConfig(max_new_tokens=6, output_logprobs=True, top_logprobs=3),
     GenerationConfig(max_new_tokens=6, repetition_penalty=1.3),
     GenerationConfig(max_new_tokens=6, presence_penalty=1.0, frequency_penalty=0.5),
     GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=2),
     GenerationConfig(max_new_tokens=6, sequence_bias={(3,): 2.0})],
    ids=["top-p", "most of all", "log-probabilities", "most probable", "penalty", "penalties", "n-grams", "bias"],
)  # fmt: skip
def test_who_looks_at_other_scores_gets_them(engine: Path, config: GenerationConfig, fetched: list[int]) -> None:
    runner, gpu = opened(engine)
    proved = gpu.launched
    tokens = generated(runner, config)
    assert gpu.launched == proved
    assert fetched
    assert tokens == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), config)


def test_sequences_of_one_step_may_want_different_things(engine: Path) -> None:
    every = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=0, temperature=2.0, seed=4)
    for third in (GenerationConfig(max_new_tokens=5), every):
        mixed = [GREEDY, SAMPLED, third]
        runner, _ = opened(engine)
        assert generated(runner, mixed) == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), mixed)


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


@pytest.mark.few(3)
@pytest.mark.parametrize(("way", "words"), [
    ("no NVRTC", r"not installed: pip install 'trt-kvcache\[plugin\]'"),
    ("old driver", "this driver is for CUDA 12.8"),
    ("unknown GPU", "NVRTC .* cannot compile for architecture 'sm_90'; give one of sm_1"),
    ("no memory", "cuMemAlloc of .* failed"),
])  # fmt: skip
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
        monkeypatch.setattr(
            "trt_kvcache.runtime.trt.step_buffers.choice_bytes", lambda *sizes: 0
        )  # others took it meanwhile
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner, gpu = opened(engine, driver=12_080) if way == "old driver" else opened(engine)
    assert re.search(words, runner.host_choice)
    assert runner.name.endswith(", tokens chosen on the host")
    tokens = generated(runner, GREEDY)
    assert gpu.launched == 0
    assert fetched
    assert tokens == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), GREEDY)


@pytest.mark.few(3)
@pytest.mark.parametrize(("fault", "words"), [
    ({"missing_candidates": 1}, "the GPU finds other highest scores"),
    ({"wrong_tokens": 1}, "among 256 scores in float16, the GPU chooses token .*, but the host chooses token"),
    ({"no_launches": "CUDA_ERROR_INVALID_IMAGE"}, "cannot launch a kernel: CUDA_ERROR_INVALID_IMAGE"),
], ids=["incomplete", "wrong", "refused"])  # fmt: skip
def test_a_kernel_that_fails_its_trial_is_never_used(engine: Path, fault: dict[str, Any], words: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"the host chooses tokens, because the GPU cannot: .*{words}"):
        runner, gpu = opened(engine, **fault)
    tried = gpu.launched
    assert re.search(words, runner.host_choice)
    assert generated(runner, GREEDY) == generated(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=3), GREEDY)
    assert gpu.launched == tried


def choice_on(gpu: Machine, dtype: Any, vocab: int, positions: int) -> tuple[DeviceChoice | None, str]:
    cuda = Cuda(0, gpu.bindings())
    size = positions * vocab * np.dtype(dtype).itemsize
    return open_choice(cuda, np.dtype(dtype), vocab, 1, cuda.allocate(size), size, cuda.allocate_pinned(size))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", CHOICE_DTYPES)
def test_the_same_tokens_are_drawn_from_few_scores_as_from_all(dtype: str) -> None:
    """Generated scores, with ties at the last place, and settings; the same seeds."""
    rng, vocab, rows, kind = np.random.default_rng(0), 2500, 3, np.dtype(CHOICE_DTYPES[dtype])
    gpu = Machine()
    cuda = Cuda(0, gpu.bindings())
    size = 4 * rows * vocab * kind.itemsize
    address, pinned = cuda.allocate(size), cuda.allocate_pinned(size)
    choice, _ = open_choice(cuda, kind, vocab, 4 * rows, address, size, pinned)
    assert choice is not None
    few = 0
    for _ in range(100):
        positions = int(rng.integers(1, 5))
        logits = rng.normal(0, rng.choice([0.5, 3, 20]), (rows, positions, vocab)).astype(kind)
        if rng.random() < 0.3:
            logits = np.round(logits.astype(np.float32)).astype(kind)  # many ties
        if rng.random() < 0.3:
            logits[rng.random(logits.shape) < 0.9] = -np.inf
        pinned.data[: logits.nbytes] = logits.reshape(-1).view(np.uint8)
        cuda.upload(address, pinned.address, logits.nbytes)
        config = GenerationConfig(
            do_sample=True, top_k=int(rng.integers(1, 30)), seed=int(rng.integers(1000)),
            temperature=float(rng.choice([1.0, 0.2, 1.7])), top_p=float(rng.choice([1.0, 0.8, 0.3])),
            min_p=float(rng.choice([0, 0.05])),
        )  # fmt: skip
        looks_at, keep = Sampler(config).looks_at(0), int(rng.integers(1, positions + 1))
        start = address + (positions - keep) * vocab * kind.itemsize
        chosen = choice.choose(start, positions * vocab * kind.itemsize, rows, keep, looks_at)
        if chosen is None:
            continue
        for i, j in np.ndindex(rows, keep):
            row = logits[i, positions - keep + j]
            assert Sampler(GREEDY).choose(chosen[i, j], PROMPT, 0) == Sampler(GREEDY).choose(row, PROMPT, 0)
            one, other = Sampler(config, i), Sampler(config, i)
            for length in (3, 4, 900):  # one after the other, and after a sequence has moved
                tokens = np.zeros(length, np.int64)
                assert one.choose(chosen[i, j], tokens, 0) == other.choose(row, tokens, 0), config
            few += 1
    assert few > 200
    cuda.close()


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.float8_e4m3fn])
def test_other_types_stay_on_the_host(dtype: Any) -> None:
    choice, reason = choice_on(Machine(), dtype, 100, 2)
    assert choice is None
    assert (
        reason
        == f"kernels that choose tokens take logits of float16, bfloat16, float32; these are {np.dtype(dtype).name}"
    )


def test_sizes_beyond_what_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_choice, "MOST_TOKENS", 99)
    assert (
        "2 positions of 100 tokens are more than the kernels that choose tokens can take"
        in choice_on(Machine(), np.float32, 100, 2)[1]
    )
    monkeypatch.undo()
    monkeypatch.setattr(trt_choice, "_MOST_BLOCKS", 1)
    assert (
        "2 positions of 100 tokens are more than the kernels that choose tokens can take"
        in choice_on(Machine(), np.float32, 100, 2)[1]
    )


@pytest.mark.parametrize("dtype", CHOICE_DTYPES)
@pytest.mark.parametrize(("vocab", "positions"), [(1, 1), (2, 3), (7, 1), (256, 1), (257, 5), (1000, 40)])
def test_every_size_can_be_tried(dtype: str, vocab: int, positions: int) -> None:
    choice, reason = choice_on(Machine(), CHOICE_DTYPES[dtype], vocab, positions)
    assert choice is not None, reason
