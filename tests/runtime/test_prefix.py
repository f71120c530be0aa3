"""The prefix cache: what is found again, what goes, and what is refused. Of real models: test_families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.engines import drain
from runtime.hash_runner import TABLE, Alone, EmbeddedRunner, HashRunner, continued, rows, with_encoder, with_state

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.runtime import cache, prefix

BLOCK = 4
BYTES = BLOCK * 8
"""Of a block of `HashRunner`."""
TEXT = [*range(30, 41)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "BLOCK", BLOCK)
    monkeypatch.setattr(cache, "BLOCK", BLOCK)


def opened(blocks: int = 99, runner: HashRunner | None = None, **more: Any) -> DecodeSession:
    return DecodeSession(runner or HashRunner(), prefix_cache=blocks * BYTES, **more)


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


def check(session: DecodeSession, text: list[int], computed: int, count: int = 3, **more: Any) -> None:
    """The tokens after a text are right, and so many of it are computed."""
    runner: Any = session._runner
    del runner.steps[:]
    slot = session.add(text, config(count, **more))
    assert drain(session)[slot] == continued(runner, text, count)
    assert sum(step.tokens.size for step in runner.steps) == computed + count - 1


def stats(session: DecodeSession) -> tuple[int, ...]:
    found = session.cache.prefix_stats
    assert found is not None
    return found.lookups, found.hits, found.saved_tokens, found.blocks, found.dropped


def test_a_text_is_computed_from_where_it_differs() -> None:
    with opened() as session:
        check(session, TEXT, 11)
        check(session, TEXT, 3)
        check(session, [*TEXT[:6], 1, 2, 3], 5)
        check(session, [1, *TEXT[1:]], 11)  # blocks are found with those before them only
        check(session, TEXT[:8], 4)  # one token has to be computed, for its logits
        assert stats(session) == (5, 3, 16, 7, 0)
        whole = [*TEXT, *continued(session._runner, TEXT, 3)]  # type: ignore[arg-type]
        check(session, [*whole, 9], 3)  # what was generated is found as well
    with DecodeSession(HashRunner()) as session:
        assert session.cache.prefix_stats is None
        check(session, TEXT, 11)
        check(session, TEXT, 11)


def test_sequences_that_run_give_and_updates_take() -> None:
    with opened() as session:
        first = session.add(TEXT, config(9))
        session.step()
        session.step()
        scores = session.update({(slot := session.cache.acquire()): TEXT}, 5)[slot]  # computed: those asked for
        assert scores.shape[0] == 5
        assert [int(s.argmax()) for s in scores] == [
            continued(session._runner, TEXT[: 7 + i], 1)[0] for i in range(5)  # type: ignore[arg-type]
        ]  # fmt: skip
        assert stats(session)[2] == 4
        assert session.update({(other := session.cache.acquire()): TEXT[:5]}, 0)[other].shape[0] == 0
        assert stats(session)[2] == 8
        assert drain(session)[first] == continued(session._runner, TEXT, 9)[1:]  # type: ignore[arg-type]


def test_what_was_used_longest_ago_goes() -> None:
    with opened(4) as session:
        check(session, TEXT, 11)  # 3 blocks
        check(session, TEXT, 3)
        check(session, [1, 2, 3, 4, 5], 5, 2)
        check(session, [5, 6, 7, 8, 9], 5, 2)  # in place of the last block of the first
        assert stats(session)[3:] == (4, 1)
        check(session, [*TEXT, 4, 4], 5, 1)
        assert stats(session)[3] == 4
        long = [*range(40)]  # more than all blocks: its first stay
        check(session, long, 40)
        check(session, long, 24)


def test_guesses_and_what_was_cut_are_not_kept() -> None:
    text = [7, 8, 7, 8, 7, 8, 7]
    with opened() as session:
        check(session, text, 7, 1)
        slot = session.add(text, config(8, prompt_lookup_num_tokens=3), keep=True)
        assert drain(session)[slot] == continued(session._runner, text, 8)  # type: ignore[arg-type]
        session.cache.crop(slot, 6)
        session.add([1, 2, 3], config(4), slot=slot)
        assert drain(session)[slot] == continued(session._runner, [*text[:6], 1, 2, 3], 4)  # type: ignore[arg-type]
        check(session, [*text[:6], 1, 2, 3, 4], 2)
        check(session, [*text, *continued(session._runner, text, 8)], 3)  # type: ignore[arg-type]


def test_embeddings_and_positions_are_not_taken_for_ids(tmp_path: Path) -> None:
    """Nor what stands behind them; what stands before them is."""
    runner = EmbeddedRunner()
    with opened(runner=runner, embeddings=TABLE) as session:

        def run(given: dict[str, Any], computed: int) -> None:
            alone = Alone.of(runner)
            alone.take(TEXT[:5])
            numbers = given["inputs_embeds"][:, 0] if "inputs_embeds" in given else TABLE[TEXT[5:], 0]
            alone.extend(numbers, given.get("positions"))
            slot = session.cache.acquire()
            del runner.steps[:]
            session.update({slot: TEXT[:5]}, 0)
            beside = {kind: {slot: value.T if kind == "positions" else value} for kind, value in given.items()}
            session.update({slot: TEXT[5:]}, 1, **beside)
            assert sum(step.tokens.size for step in runner.steps) == computed
            assert int(session.update({slot: [3]})[slot].argmax()) == follow(alone)
            session.cache.save(tmp_path / "slot", [slot])
            session.remove(slot)
            (slot,) = session.cache.load(tmp_path / "slot").values()
            session.update({slot: [4] * 5})
            session.remove(slot)

        run({"inputs_embeds": rows(range(40, 46))}, 11)
        run({"positions": np.array([[9 + i] * 3 for i in range(6)])}, 7)
        run({}, 7)
        slot = session.cache.acquire()
        session.update({slot: TEXT})
        assert stats(session)[2] == 4 + 4 + 8


def follow(alone: Alone) -> int:
    alone.take([3])
    return alone.next()


def test_it_goes_with_offloaded_sequences_and_beams() -> None:
    with opened(runner=HashRunner(max_batch=2), max_sequences=6) as session:
        for _ in range(2):
            slots = [session.add([*TEXT, i], config(5), keep=True) for i in range(5)]
            assert drain(session) == {
                slot: continued(session._runner, [*TEXT, i], 5) for i, slot in enumerate(slots)  # type: ignore[arg-type]
            }  # fmt: skip
            for slot in slots:
                session.remove(slot)
        before = stats(session)[2]
        plain = DecodeSession(HashRunner()).generate([TEXT], config(5, num_beams=2))
        assert session.generate([TEXT], config(5, num_beams=2))[0].tokens == plain[0].tokens
        assert stats(session)[2] == before + 8


def test_models_whose_rows_cannot_be_reused_are_refused() -> None:
    plain, ringed = HashRunner().plan, HashRunner((("linear", 64), ("circular", 8))).plan
    for plan, words in (
        (with_state(plain), r"the model keeps state \('past_state'\), which is known after the last token alone"),
        (ringed, r"circular cache 'cache\.1' holds the last 8 tokens of a text, and not its beginning"),
        (with_encoder(plain), r"each row depends on what the text was given beside its tokens \('encoder_output'\)"),
    ):
        runner = HashRunner()
        runner.plan = plan
        with pytest.raises(OptionError, match=f"prefix_cache cannot reuse rows of this model: {words}; leave it out"):
            DecodeSession(runner, prefix_cache=1 << 20)


def test_sizes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"prefix_cache is {BYTES - 1} bytes, and a block of {BLOCK} tokens takes {BYTES}; give at least that much"
    for size, said in ((BYTES - 1, words), (0, "prefix_cache is 0 bytes"), ("1", "prefix_cache is '1'")):
        with pytest.raises(OptionError, match=said):
            DecodeSession(HashRunner(), prefix_cache=size)  # type: ignore[arg-type]
    monkeypatch.setattr(prefix, "free_memory", lambda: 10)
    with pytest.raises(SessionError, match=r"prefix_cache is 0\.0 GB, and 0\.0 GB of host memory are free; give less"):
        DecodeSession(HashRunner(), prefix_cache=BYTES)
