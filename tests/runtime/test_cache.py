"""The cache object: every change of slots and rows, seen through the tokens that follow."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from runtime.engines import drain
from runtime.hash_runner import HashRunner, continued
from safetensors.numpy import load_file, save_file

from trt_kvcache.errors import CacheFileError, CapacityError, OptionError, OutputError, SessionError, SlotError
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

KINDS = {
    "linear": (("linear", 64),),
    "circular": (("circular", 8),),
    "mixed": (("linear", 64), ("circular", 8), ("circular", 16)),
}


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest) -> HashRunner:
    return HashRunner(KINDS[request.param])


@pytest.fixture
def session(runner: HashRunner) -> DecodeSession:
    return DecodeSession(runner)


def follow(session: DecodeSession, slot: int, count: int = 5) -> list[int]:
    """Tokens after what the slot holds; the last one chosen waits to be written."""
    session.add((), GenerationConfig(max_new_tokens=count), slot=slot, keep=True)
    return drain(session)[slot]


def start(session: DecodeSession, prompt: list[int], written: int | None = None) -> int:
    """A slot that holds a prompt, all but the last token of it written."""
    slot = session.cache.acquire()
    written = len(prompt) - 1 if written is None else written
    if written:
        session.update({slot: prompt[:written]})
    session.cache.slot(slot).tokens.extend(prompt[written:])
    return slot


def test_fork_shares_a_prefix_and_then_goes_its_own_way(session: DecodeSession, runner: HashRunner) -> None:
    prompt = list(range(1, 20))
    base = start(session, prompt)
    forks = [session.cache.fork(base) for _ in range(2)]
    session.cache.slot(forks[0]).tokens[-1] = 50
    assert follow(session, forks[0]) == continued(runner, [*prompt[:-1], 50], 5)
    assert follow(session, forks[1]) == continued(runner, prompt, 5)
    assert follow(session, base) == continued(runner, prompt, 5)


def test_crop_rolls_back(runner: HashRunner, session: DecodeSession) -> None:
    short = 7  # no circular cache has wrapped
    slot = start(session, [1, 2, 3, 4, 5, 6, 7, 8], written=short)
    session.cache.crop(slot, 3)
    assert session.cache.tokens(slot) == [1, 2, 3]
    assert session.cache.lengths[slot] == 3
    session.cache.slot(slot).tokens.extend([9, 9])
    assert follow(session, slot, 20) == continued(runner, [1, 2, 3, 9, 9], 20)


def test_crop_of_a_wrapped_cache_goes_back_one_token_and_no_further() -> None:
    runner = HashRunner(KINDS["mixed"])
    session = DecodeSession(runner)
    prompt = list(range(30))
    slot = start(session, prompt, written=30)
    session.cache.crop(slot, 29)
    with pytest.raises(
        CapacityError, match=r"cannot be cropped to 28 tokens: circular cache 'cache\.1' holds the last 8"
    ):
        session.cache.crop(slot, 28)
    session.cache.slot(slot).tokens.append(77)
    assert follow(session, slot) == continued(runner, [*prompt[:29], 77], 5)


@pytest.mark.parametrize("length", [-1, 9])
def test_crop_out_of_range(session: DecodeSession, length: int) -> None:
    slot = start(session, [1, 2, 3])
    with pytest.raises(CapacityError, match=f"slot {slot} has 3 tokens; it cannot be cropped to {length}"):
        session.cache.crop(slot, length)


def test_reset_leaves_nothing_behind(session: DecodeSession, runner: HashRunner) -> None:
    slot = start(session, [1, 2, 3, 4])
    row = session.cache.slot(slot).row
    for buffer in runner.buffers.values():
        buffer[row, :, :2] = np.nan  # a sequence that overflowed
    session.cache.reset(slot)
    assert session.cache.lengths == {slot: 0}
    session.cache.slot(slot).tokens.extend([5, 6])
    assert follow(session, slot) == continued(runner, [5, 6], 5)


def test_a_row_is_clean_for_its_next_sequence(session: DecodeSession, runner: HashRunner) -> None:
    for _ in range(6):
        slot = start(session, [1, 2, 3, 4])
        row = session.cache.slot(slot).row
        for buffer in runner.buffers.values():
            buffer[row, :, :3] = np.nan
        session.cache.release(slot)
        other = start(session, [7])
        assert session.cache.slot(other).row == row
        assert follow(session, other) == continued(runner, [7], 5)
        session.cache.release(other)


@pytest.mark.parametrize("indices", [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 2, 2], [1, 0, 1], [0, 0, 0]])
def test_reorder(session: DecodeSession, runner: HashRunner, indices: list[int]) -> None:
    prompts = [[1, 2, 3], list(range(20)), [9, 8, 7, 6]]
    slots = [start(session, prompt) for prompt in prompts]
    session.cache.reorder(indices)
    for slot, index in zip(slots, indices, strict=True):
        assert session.cache.tokens(slot) == prompts[index]
    for slot, index in zip(slots, indices, strict=True):
        assert follow(session, slot) == continued(runner, prompts[index], 5)
    assert sorted(s.row for s in map(session.cache.slot, slots)) == [0, 1, 2]


def test_reorder_copies_only_what_is_needed_twice() -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    slots = [start(session, [i, i]) for i in range(4)]
    copied = []
    runner.copy_rows = lambda source, target, tokens: copied.append((source, target))  # type: ignore[method-assign]
    session.cache.reorder([3, 2, 1, 0], slots)
    assert copied == []
    session.cache.reorder([0, 0, 1, 2], slots)
    assert len(copied) == 1


def test_reorder_refusals(session: DecodeSession) -> None:
    start(session, [1])
    start(session, [2])
    with pytest.raises(OptionError, match="one index for each of 2 different slots, not 1"):
        session.cache.reorder([0])
    with pytest.raises(OptionError, match=r"indices 0 to 1, not \[0, 2\]"):
        session.cache.reorder([0, 2])
    with pytest.raises(SlotError, match="slot 9 is not in use"):
        session.cache.reorder([0], [9])


def test_move_and_compact(session: DecodeSession, runner: HashRunner) -> None:
    prompts = [[1, 2, 3], [4, 5], list(range(20)), [6]]
    slots = [start(session, prompt) for prompt in prompts]
    session.cache.release(slots[0])
    session.cache.release(slots[1])
    session.cache.compact()
    assert sorted(session.cache.slot(s).row for s in slots[2:]) == [0, 1]
    session.cache.move(slots[3], 3)
    assert session.cache.slot(slots[3]).row == 3
    with pytest.raises(SlotError, match="row 3 is in use, or not one of the 4 rows"):
        session.cache.move(slots[2], 3)
    with pytest.raises(SlotError, match="row 4 is in use, or not one of the 4 rows"):
        session.cache.move(slots[2], 4)
    for slot, prompt in zip(slots[2:], prompts[2:], strict=True):
        assert follow(session, slot) == continued(runner, prompt, 5)


def test_save_and_load(session: DecodeSession, runner: HashRunner, tmp_path: Path) -> None:
    prompts = [[1, 2, 3], list(range(20))]
    slots = [start(session, prompt) for prompt in prompts]
    slots.append(start(session, list(range(12)), written=12))
    session.cache.crop(slots[2], 11)  # a circular cache may have wrapped
    session.cache.slot(slots[2]).tokens.append(77)
    prompts.append([*range(11), 77])
    session.cache.save(tmp_path / "cache.safetensors")
    expected = [follow(session, slot) for slot in slots]
    fresh = DecodeSession(HashRunner([(c.mode.value, c.capacity) for c in session.plan.caches], max_batch=3))
    loaded = fresh.cache.load(tmp_path / "cache.safetensors")
    assert list(loaded) == slots
    for old, prompt, tokens in zip(slots, prompts, expected, strict=True):
        assert fresh.cache.tokens(loaded[old]) == prompt
        assert follow(fresh, loaded[old]) == tokens == continued(runner, prompt, 5)


def test_load_needs_rows(session: DecodeSession, tmp_path: Path) -> None:
    start(session, [1, 2])
    start(session, [3, 4])
    session.cache.save(tmp_path / "two")
    session.cache.load(tmp_path / "two")
    with pytest.raises(SlotError, match=r"holds 2 sequence\(s\), and 0 of 4 rows are free"):
        session.cache.load(tmp_path / "two")
    assert len(session.cache.slots) == 4


def test_load_refuses_other_models_and_files(session: DecodeSession, tmp_path: Path) -> None:
    start(session, [1, 2, 3])
    path = tmp_path / "saved"
    session.cache.save(path)
    other = HashRunner([(c.mode.value, c.capacity) for c in session.plan.caches])
    other.model = "11"
    with pytest.raises(CacheFileError, match=r"saved with another model \(00\.\.\., this one is 11"):
        DecodeSession(other).cache.load(path)
    with pytest.raises(CacheFileError, match="caches of other sizes or layouts of the same model"):
        DecodeSession(HashRunner([("linear", 32)])).cache.load(path)
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(CacheFileError, match="not a saved cache"):
        session.cache.load(tmp_path / "text")
    with pytest.raises(CacheFileError, match="not a saved cache"):
        session.cache.load(tmp_path / "missing")
    save_file({"a": np.zeros(3)}, tmp_path / "weights")
    with pytest.raises(CacheFileError, match="not a cache that this version saved"):
        session.cache.load(tmp_path / "weights")
    assert len(session.cache.slots) == 1


def test_load_refuses_a_damaged_file_and_changes_nothing(tmp_path: Path) -> None:
    runner = HashRunner()
    session = DecodeSession(runner)
    slot = start(session, [1, 2, 3, 4])
    path = tmp_path / "saved"
    session.cache.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(CacheFileError, match="not a saved cache"):
        session.cache.load(path)
    path.write_bytes(whole)
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    tensors[f"{slot}/cache.0"] = tensors[f"{slot}/cache.0"][:, :1]
    save_file(tensors, path, metadata)
    with pytest.raises(CacheFileError, match=r"tensor '0/cache\.0' is float32 \[1, 1, 2\], where float32 \[1, 3, 2\]"):
        session.cache.load(path)
    tensors = load_file(path)
    for ids, words in (([1, 2, 3, -4], "token id -4 is out of range"), ([1.0, 2.0, 3.0, 4.0], "float64")):
        tensors[f"{slot}/tokens"] = np.array(ids)
        save_file(tensors, path, metadata)
        with pytest.raises(CacheFileError, match=f"slot {slot}: .*{words}"):
            session.cache.load(path)
    rows = session.cache.capacity
    assert rows is not None
    longer = np.arange(rows + 2) % 8
    save_file(
        tensors | {f"{slot}/tokens": longer}, path, metadata | {"slots": f'{{"{slot}": [{rows + 1}, {rows + 1}]}}'}
    )
    with pytest.raises(CacheFileError, match=f"slot {slot} has {rows + 2} tokens and claims {rows + 1}.* {rows} rows"):
        session.cache.load(path)
    assert session.cache.slots == (slot,)
    assert follow(session, slot) == continued(runner, [1, 2, 3, 4], 5)


def test_save_is_all_or_nothing(session: DecodeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    start(session, [1, 2, 3])
    session.cache.save(path)
    before = path.read_bytes()
    start(session, [4, 5, 6])

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        session.cache.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(OutputError, match="no such folder"):
        session.cache.save(tmp_path / "none" / "saved")


def test_view_is_the_buffer_itself(session: DecodeSession, runner: HashRunner) -> None:
    assert session.cache.view("cache.0") is runner.buffers["cache.0"]
    with pytest.raises(OptionError, match=r"no cache 'nope'; caches are cache\.0"):
        session.cache.view("nope")


def test_a_generating_slot_is_left_alone(session: DecodeSession) -> None:
    slot = session.add([1, 2, 3], GenerationConfig(max_new_tokens=9))
    session.step()
    cache = session.cache
    for change in (lambda: cache.reset(slot), lambda: cache.crop(slot, 1), lambda: cache.release(slot),
                   lambda: cache.reorder([0]), lambda: session.update({slot: [1]})):  # fmt: skip
        with pytest.raises(SlotError, match=f"slot {slot} is generating"):
            change()


def test_unknown_and_closed(session: DecodeSession) -> None:
    cache = session.cache
    calls = [lambda: cache.tokens(5), lambda: cache.reset(5), lambda: cache.crop(5, 0), lambda: cache.fork(5),
             lambda: cache.release(5), lambda: cache.move(5, 0), lambda: cache.save("x", [5])]  # fmt: skip
    for call in calls:
        with pytest.raises(SlotError, match=r"slot 5 is not in use \(in use: none\)"):
            call()
    session.close()
    for call in [*calls, lambda: cache.lengths, lambda: cache.view("cache.0"), lambda: cache.load("x"), cache.acquire]:
        with pytest.raises(SessionError, match="the session is closed"):
            call()
