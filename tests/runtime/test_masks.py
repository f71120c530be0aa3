"""Grammars as masks of tokens: the tokens are those of the same rule on all scores, on the CPU and the (fake) GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from numpy.typing import NDArray
from runtime.engines import drain, open_engine, write_engine
from runtime.fake_cuda import Machine
from runtime.hash_runner import HashRunner
from runtime.test_draft import Sometimes
from runtime.test_fixed_sizes import FIXED, open_twin, runner

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.runtime.draft import DraftModel
from trt_kvcache.runtime.generation.token_masks import TokenMask, pack_masks
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.trt.step_buffers import StepBuffers

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13]]


class Rule:
    """A grammar: some tokens, other ones after each text."""

    def __init__(self, vocab: int, share: float = 0.1) -> None:
        self.vocab, self.share, self.asked = vocab, share, 0

    def allowed(self, new: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.random.default_rng([7, *new[-2:].tolist()]).random(self.vocab) < self.share
        return found

    def start(self) -> TokenMask:
        return self._mask

    def _mask(self, new: NDArray[np.int64]) -> NDArray[np.int32]:
        self.asked += 1
        return pack_masks(self.allowed(new))

    def as_processor(self, prompt: list[int]) -> Any:
        def rule(tokens: NDArray[np.int64], scores: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.where(self.allowed(tokens[len(prompt) :]), scores, np.float32(-np.inf))

        return rule


class Only:
    def __init__(self, mask: Any) -> None:
        self.mask = mask

    def start(self) -> TokenMask:
        mask: TokenMask = self.mask
        return mask


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = DecoderConfig(dtype="float16", capacity=64, vocab=201, layers=1)
    return write_engine(write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", config))


def on_cpu(engine: Path, rows: int = 3) -> DecodeSession:
    return DecodeSession(OnnxRuntimeRunner(engine.with_suffix(".onnx"), max_batch=rows))


CASES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_k": 4, "seed": 1},
    {"do_sample": True, "top_k": 0, "seed": 2},
    {"do_sample": True, "top_k": 9, "top_p": 0.6, "min_p": 0.01, "temperature": 0.4, "seed": 3},
    {"prompt_lookup_num_tokens": 3},
    {"repetition_penalty": 1.4, "suppress_tokens": (3, 5)},
]


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_tokens_are_those_of_the_rule_on_all_scores(
    engine: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a rule of its own, a row with another, and one without; each as alone without masks."""
    plain = GenerationConfig(max_new_tokens=16, **settings)
    rules = [Rule(201), Rule(201, 0.02), None]
    expected = []
    with on_cpu(engine, 1) as session:
        for i, (prompt, rule) in enumerate(zip(PROMPTS, rules, strict=True)):
            own = {} if rule is None else {"logits_processor": rule.as_processor(prompt)}
            slot = session.add(prompt, plain, index=i, **own)
            expected.append(drain(session)[slot])
    fetched: list[int] = []
    monkeypatch.setattr(StepBuffers, "_fetch", _noting(StepBuffers._fetch, fetched))
    for session in (on_cpu(engine), DecodeSession(open_engine(engine, Machine()))):
        with session:
            slots = [
                session.add(prompt, plain, index=i, grammar=rule)
                for i, (prompt, rule) in enumerate(zip(PROMPTS, rules, strict=True))
            ]
            found = drain(session)
            assert [found[slot] for slot in slots] == expected
    looks_at_few = settings.get("top_k", 1) > 0 and "repetition_penalty" not in settings
    assert (fetched == []) == looks_at_few  # no scores come to the host


def _noting(fetch: Any, sizes: list[int]) -> Any:
    def noting(self: StepBuffers, *where: int) -> Any:
        sizes.append(where[-1])
        return fetch(self, *where)

    return noting


def test_models_of_fixed_sizes(tmp_path: Path) -> None:
    """Their steps have more rows and positions than there are sequences and tokens."""
    rule, settings = Rule(64, 0.3), {"max_new_tokens": 8, "prompt_lookup_num_tokens": 2}
    with DecodeSession(runner(open_twin(FIXED), tmp_path, "cpu")) as session:
        expected = [made.tokens for made in session.generate(PROMPTS[:2], grammar=rule, **settings)]
    with DecodeSession(runner(FIXED, tmp_path, "gpu")) as session:
        assert [made.tokens for made in session.generate(PROMPTS[:2], grammar=rule, **settings)] == expected


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 6, "seed": 4}], ids=["greedy", "sampled"])
def test_drafts_follow_the_grammar(settings: dict[str, Any]) -> None:
    rule, prompt = Rule(HashRunner.vocab, 0.3), [1, 2, 3]
    config = GenerationConfig(max_new_tokens=24, **settings)
    with DecodeSession(HashRunner()) as session:
        expected = session.generate(prompt, config, logits_processor=rule.as_processor(prompt)).tokens
    for draft in (HashRunner(), Sometimes()):
        with DecodeSession(HashRunner(), draft=DraftModel(draft)) as session:
            found = session.generate([prompt, [5, 2]], config, grammar=rule)
            assert found[0].tokens == expected
            assert found[0].speculation.accepted > (12 if isinstance(draft, HashRunner) and not settings else 0)


def test_shorter_masks_forbid_what_they_leave_out(engine: Path) -> None:
    few = Only(lambda new: np.array([-1], np.int32))
    for session in (on_cpu(engine), DecodeSession(open_engine(engine, Machine()))):
        with session:
            assert max(session.generate([1, 2, 3], max_new_tokens=12, grammar=few).tokens) < 32


def fails(new: NDArray[np.int64]) -> NDArray[np.int32]:
    if new.size == 2:
        raise ValueError("on purpose")
    return np.full(1, -1, np.int32)


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda new: np.full(7, -int(new.size < 2), np.int32), OptionError, "after 2 new tokens, the grammar"),
    (fails, SessionError, "the token mask failed: ValueError: on purpose"),
    (lambda new: np.ones(7), SessionError, r"the token mask is float64 \[7\]; it has to be int32 \["),
    (lambda new: np.ones(8, np.int32), SessionError, r"the token mask is int32 \[8\]; it has to be int32 \[7\]"),
    (lambda new: np.ones((1, 7), np.int32), SessionError, r"the token mask is int32 \[1, 7\]"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[2])
def test_a_mask_that_fails_ends_its_own_sequence(engine: Path, case: tuple[Any, type[Exception], str]) -> None:
    mask, kind, words = case
    for session in (on_cpu(engine), DecodeSession(open_engine(engine, Machine()))):
        with session:
            other = session.add(PROMPTS[0], GenerationConfig(max_new_tokens=6))
            session.add(PROMPTS[1], GenerationConfig(max_new_tokens=6), grammar=Only(mask))
            with pytest.raises(kind, match=words):
                drain(session)
            assert session.running == (other,)
            drain(session)


@pytest.mark.parametrize(("settings", "words"), [
    ({"grammar": 5}, r"grammar is 5; supported: a grammar that trt_kvcache.Grammars compiled"),
    ({"grammar": Rule(4), "num_beams": 2}, "num_beams=2 cannot be combined with grammar"),
])  # fmt: skip
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        GenerationConfig(**settings)
