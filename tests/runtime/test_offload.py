"""More sequences than rows: who goes, who waits, and what is refused. Of real models: test_families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime.engines import drain
from runtime.hash_runner import HashRunner, continued

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import CacheFileError, OptionError, OutputError, SessionError, SlotError
from trt_kvcache.runtime import cache_file, offload

RINGED = (("linear", 64), ("circular", 8), ("circular", 16))


def config(count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, **more)


def swapping(rows: int = 2, most: int = 6) -> DecodeSession:
    return DecodeSession(HashRunner(RINGED, max_batch=rows), max_sequences=most)


def start(session: DecodeSession, prompt: list[int]) -> int:
    slot = session.cache.acquire()
    session.update({slot: prompt})
    return slot


def alone(session: DecodeSession, text: list[int], count: int) -> list[int]:
    return continued(session._runner, text, count)  # type: ignore[arg-type]


def test_idle_sequences_make_room() -> None:
    """Six chats in two rows, and four of them at a time; the one that was used longest ago goes."""
    with swapping() as session:
        runner: Any = session._runner
        chats = {start(session, [first, 2]): [first, 2] for first in range(6)}
        assert session.cache.offloaded == (0, 1, 2, 3)
        assert session.cache.free == 0
        for turn in range(3):
            for slot in [*chats][turn : turn + 4]:
                session.add([turn], config(3 + slot), slot=slot, keep=True)
            for slot, tokens in drain(session).items():
                assert tokens == alone(session, [*chats[slot], turn], 3 + slot)
                chats[slot] = session.cache.tokens(slot)
        session.remove(5)
        fork = session.cache.fork(session.cache.offloaded[0])
        session.update({slot: [9] for slot in session.cache.slots}, 0)  # more at once than there are rows
        for slot in session.cache.slots:
            assert int(session.update({slot: [8]})[slot].argmax()) == alone(session, session.cache.tokens(slot), 1)[0]
        assert fork in session.cache.slots
        for slot in session.cache.slots:
            session.remove(slot)
        assert runner.host == {}


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
        with pytest.raises(SlotError, match="6 sequences that do not run leave no room"):
            session.generate([[3]])
        for slot in session.cache.slots[1:]:
            session.remove(slot)
        results = session.generate([[3, i] for i in range(9)], config(4))
        assert [result.tokens for result in results] == [alone(session, [3, i], 4) for i in range(9)]


def test_refusals() -> None:
    for most, words in ((3, "max_sequences is 3, and max_batch is 4"), (2.5, "max_sequences is 2.5")):
        with pytest.raises(OptionError, match=words):
            DecodeSession(HashRunner(), max_sequences=most)  # type: ignore[arg-type]
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
        monkeypatch.setattr(offload, "free_memory", lambda: 10)
        words = r"2 tokens take 0\.000 GB of host memory to be offloaded, and 0\.000 GB are free; offload to a file"
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
