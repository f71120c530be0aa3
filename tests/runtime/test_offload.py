"""More sequences than rows, and prefixes: who goes, who waits, what is found again. On models: test_any_schedule."""

from pathlib import Path
from typing import Any

import pytest
from runtime.engines import drain
from runtime.hash_runner import HashRunner, continued, with_encoder, with_state

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import Schedule
from trt_kvcache.errors import CacheFileError, OptionError, OutputError, SessionError, SlotError
from trt_kvcache.runtime import cache_file, cache_rows, prefix
from trt_kvcache.runtime import slot as slots

RINGED = (("linear", 64), ("circular", 8), ("circular", 16))


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


def swapping(rows: int = 2, most: int = 6) -> DecodeSession:
    return DecodeSession(HashRunner(RINGED, max_batch=rows), schedule=Schedule(max_sequences=most))


def start(session: DecodeSession, prompt: list[int]) -> int:
    slot = session.cache.acquire()
    session.update({slot: prompt})
    return slot


def alone(session: DecodeSession, text: list[int], count: int) -> list[int]:
    return continued(session._runner, text, count)  # type: ignore[arg-type]


def test_those_that_run_keep_their_rows_and_others_wait() -> None:
    with swapping() as session:
        slots = [session.add([i], config(3)) for i in range(5)]
        assert [event.sequence for event in session.step()] == slots[:2]
        scores = session.update({(kept := session.cache.acquire()): [7, 7]})  # which nothing keeps from a row
        assert int(scores[kept].argmax()) == alone(session, [7, 7], 1)[0]
        found = drain(session, {0: alone(session, [0], 1), 1: alone(session, [1], 1)})  # type: ignore[dict-item]
        assert found == {i: alone(session, [i], 3) for i in slots}
        for _ in range(5):
            session.cache.acquire()
        with pytest.raises(SlotError, match="there are 6 sequences, and max_sequences is 6; remove one, or open"):
            session.cache.acquire()
        with pytest.raises(SlotError, match="because 6 sequences that are not running"):
            session.generate([[3]])
        for slot in session.cache.slots[1:]:
            session.remove(slot)
        results = session.generate([[3, i] for i in range(9)], config(4))
        assert [result.tokens for result in results] == [alone(session, [3, i], 4) for i in range(9)]


def test_refusals() -> None:
    for most, words in ((3, "max_sequences is 3, less than max_batch, which is 4"), (2.5, "max_sequences is 2.5")):
        with pytest.raises(OptionError, match=words):
            DecodeSession(HashRunner(), schedule=Schedule(max_sequences=most))  # type: ignore[arg-type]
    session = DecodeSession(HashRunner(max_batch=1))
    cache, slot = session.cache, start(session, [1, 2])
    for call in (cache.offload, cache.restore):
        with pytest.raises(SlotError, match="slot 9 is not in use"):
            call(9)
    cache.offload(slot)
    other = session.add([3], config(2))
    for refused in (lambda: cache.restore(slot), lambda: cache.fork(slot)):
        with pytest.raises(SlotError, match="all 1 rows hold a sequence; remove or offload one"):
            refused()
    with pytest.raises(SlotError, match=f"slot {other} is generating"):
        cache.offload(other)
    assert session.add([4], config(2), slot=slot) == slot  # and waits for the other
    assert cache.offloaded == (slot,)
    assert drain(session)[slot] == alone(session, [1, 2, 4], 2)
    with pytest.raises(SlotError, match="num_beams=3 needs as many rows, and 2 of 2 are free"):
        swapping().generate([[1]], config(3, num_beams=3))


def test_without_memory_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with swapping(1, 2) as session:
        slot = start(session, [1, 2])
        monkeypatch.setattr(slots, "free_memory", lambda: 10)
        words = r"to offload 2 tokens takes 0\.000 GB of host memory, but only 0\.000 GB are free; offload to a file"
        for call in (lambda: session.cache.offload(slot), lambda: session.generate([[5]])):
            with pytest.raises(SessionError, match=words):
                call()
        assert session.cache.offloaded == ()
        assert session.cache.slots == (slot,)
        session.add([7], config(3), slot=slot)
        assert drain(session)[slot] == alone(session, [1, 2, 7], 3)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with swapping() as session:
        slot = start(session, [1, 2])

        def full(tensors: Any, path: Path, metadata: Any) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(cache_file, "save_file", full)
        with pytest.raises(OutputError, match=r"rows: cannot be written: .*No space left on device"):
            session.cache.offload(slot, tmp_path / "rows")
        assert [*tmp_path.iterdir()] == []
        assert session.cache.offloaded == ()
        session.add([7], config(3), slot=slot)
        assert drain(session)[slot] == alone(session, [1, 2, 7], 3)


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    path, session = tmp_path / "rows", DecodeSession(HashRunner())
    slot = start(session, [1, 2])
    session.cache.offload(slot, path)
    whole, other, strange = path.read_bytes(), DecodeSession(HashRunner()), HashRunner()
    strange.model = "11"
    for writer, words in (
        (DecodeSession(strange), "saved with another model"),
        (other, f"another cache was written to this file since slot {slot} was offloaded"),
    ):
        writer.cache.save(path, [start(writer, [1, 3])])
        for call in (lambda: session.cache.restore(slot), lambda: session.add([7], slot=slot),
                     lambda: session.cache.save(tmp_path / "again")):  # fmt: skip
            with pytest.raises(CacheFileError, match=words):
                call()
        assert session.cache.offloaded == (slot,)
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CacheFileError, match="the file is damaged"):
        session.cache.restore(slot)
    path.unlink()
    with pytest.raises(CacheFileError, match="not a saved cache"):
        session.cache.restore(slot)
    path.write_bytes(whole)
    session.cache.offload(slot)  # nothing to do
    session.cache.offload(slot, tmp_path / "moved")
    path.unlink()
    session.add([7], config(3), slot=slot)
    assert drain(session)[slot] == alone(session, [1, 2, 7], 3)


def test_what_is_given_up_gives_back_its_memory() -> None:
    session = DecodeSession(HashRunner(RINGED))
    runner: Any = session._runner
    slots = [start(session, [*range(i, 30)]) for i in range(3)]
    for slot in slots:
        session.cache.offload(slot)
    assert len(runner.host) == 3
    session.cache.reset(slots[0])
    assert session.cache.tokens(slots[0]) == []
    session.cache.release(slots[1])
    session.cache.crop(slots[2], 27)
    assert runner.host == {}
    assert follow(session, slots[0]) == alone(session, [7], 3)
    assert follow(session, slots[2]) == alone(session, [*range(2, 29), 7], 3)


def follow(session: DecodeSession, slot: int) -> list[int | None]:
    session.add([7], config(3), slot=slot)
    return drain(session)[slot]


# The prefix cache: what is found again, what goes, and what is refused. Of real models: test_families.


BLOCK = 4
BYTES = BLOCK * 8
"""The size of a block of `HashRunner`."""
TEXT = [*range(30, 41)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "BLOCK", BLOCK)
    monkeypatch.setattr(cache_rows, "BLOCK", BLOCK)


def caching(blocks: int = 99, **more: Any) -> DecodeSession:
    return DecodeSession(HashRunner(), **more, schedule=Schedule(prefix_cache=blocks * BYTES))


def asked(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


def computes(session: DecodeSession, text: list[int], computed: int, count: int = 3, **more: Any) -> None:
    """The tokens after a text are right, and so many of it are computed."""
    runner: Any = session._runner
    del runner.steps[:]
    slot = session.add(text, asked(count, **more))
    assert drain(session)[slot] == continued(runner, text, count)
    assert sum(step.tokens.size for step in runner.steps) == computed + count - 1


def counted(session: DecodeSession) -> tuple[int, ...]:
    found = session.cache.prefix_stats
    assert found is not None
    return found.lookups, found.hits, found.saved_tokens, found.blocks, found.dropped


def test_a_text_is_computed_from_where_it_differs() -> None:
    with caching() as session:
        computes(session, TEXT, 11)
        computes(session, TEXT, 3)
        computes(session, [*TEXT[:6], 1, 2, 3], 5)
        computes(session, [1, *TEXT[1:]], 11)  # blocks are found with those before them only
        computes(session, TEXT[:8], 4)  # one token has to be computed, for its logits
        assert counted(session) == (5, 3, 16, 7, 0)
        whole = [*TEXT, *continued(session._runner, TEXT, 3)]  # type: ignore[arg-type]
        computes(session, [*whole, 9], 3)  # what was generated is found as well
    with DecodeSession(HashRunner()) as session:
        assert session.cache.prefix_stats is None
        computes(session, TEXT, 11)
        computes(session, TEXT, 11)


def test_what_was_used_longest_ago_goes() -> None:
    with caching(4) as session:
        computes(session, TEXT, 11)  # 3 blocks
        computes(session, TEXT, 3)
        computes(session, [1, 2, 3, 4, 5], 5, 2)
        computes(session, [5, 6, 7, 8, 9], 5, 2)  # in place of the last block of the first
        assert counted(session)[3:] == (4, 1)
        computes(session, [*TEXT, 4, 4], 5, 1)
        assert counted(session)[3] == 4
        long = [*range(40)]  # more than all blocks: its first stay
        computes(session, long, 40)
        computes(session, long, 24)


def test_models_whose_rows_cannot_be_reused_are_refused() -> None:
    plain, ringed = HashRunner().plan, HashRunner((("linear", 64), ("circular", 8))).plan
    for plan, words in (
        (with_state(plain), r"the model keeps state \('past_state'\) that every step replaces"),
        (ringed, r"circular cache 'cache\.1' holds the last 8 tokens of a text, and not its beginning"),
        (with_encoder(plain), r"each row also depends on an input other than the tokens \('encoder_output'\)"),
    ):
        runner = HashRunner()
        runner.plan = plan
        with pytest.raises(OptionError, match=f"prefix_cache cannot reuse rows of this model: {words}; leave it out"):
            DecodeSession(runner, schedule=Schedule(prefix_cache=1 << 20))


def test_sizes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"prefix_cache is {BYTES - 1} bytes, but a block of {BLOCK} tokens takes {BYTES}; give at least that"
    for size, said in ((BYTES - 1, words), (0, "prefix_cache is 0 bytes"), ("1", "prefix_cache is '1'")):
        with pytest.raises(OptionError, match=said):
            DecodeSession(HashRunner(), schedule=Schedule(prefix_cache=size))  # type: ignore[arg-type]
    monkeypatch.setattr(prefix, "free_memory", lambda: 10)
    with pytest.raises(
        SessionError, match=r"prefix_cache is 0\.0 GB, but only 0\.0 GB of host memory are free; give less"
    ):
        DecodeSession(HashRunner(), schedule=Schedule(prefix_cache=BYTES))
