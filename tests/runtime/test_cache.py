"""The cache object: what it refuses, what it copies, and its files. Any schedule of changes: test_any_schedule."""

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.engines import drain
from runtime.hash_runner import TABLE, WIDTH, EmbeddedRunner, HashRunner, continued, rows
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import CacheFileError, OptionError, OutputError, SlotError

MIXED = (("linear", 64), ("circular", 8), ("circular", 16))


@pytest.fixture
def session() -> DecodeSession:
    return DecodeSession(HashRunner(MIXED))


def start(session: DecodeSession, prompt: list[int]) -> int:
    """A slot that holds a prompt."""
    slot = session.cache.acquire()
    session.update({slot: prompt})
    return slot


def follow(session: DecodeSession, slot: int) -> list[int | None]:
    """Tokens after what the slot holds and token 7."""
    session.add([7], GenerationConfig(max_new_tokens=5), slot=slot, keep=True)
    return drain(session)[slot]


def test_refusals(session: DecodeSession) -> None:
    cache = session.cache
    for call in (
        lambda: cache.tokens(5), lambda: cache.reset(5), lambda: cache.crop(5, 0), lambda: cache.fork(5),
        lambda: cache.release(5), lambda: cache.move(5, 0), lambda: cache.save("x", [5]),
    ):  # fmt: skip
        with pytest.raises(SlotError, match=r"slot 5 is not in use \(in use: none\)"):
            call()
    one, two = start(session, [1]), start(session, [2])
    for error, words, call in (
        (OptionError, "one index for each of 2 different slots, not 1", lambda: cache.reorder([0])),
        (OptionError, r"indices 0 to 1, not \[0, 2\]", lambda: cache.reorder([0, 2])),
        (SlotError, "row 1 is in use, or not one of the 4 rows", lambda: cache.move(one, 1)),
        (SlotError, "row 4 is in use, or not one of the 4 rows", lambda: cache.move(one, 4)),
        (SlotError, "row is 'a'; it must be a whole number", lambda: cache.move(one, "a")),
        (SlotError, "slot 9 is not in use", lambda: cache.reorder([0], [9])),
        (OptionError, r"no cache 'nope'; caches are cache\.0", lambda: cache.view("nope")),
    ):
        with pytest.raises(error, match=words):
            call()
    assert cache.view("cache.0") is session._runner.buffers["cache.0"]  # type: ignore[attr-defined]
    session.add([3], slot=two)
    for call in (lambda: cache.reset(two), lambda: cache.crop(two, 1), lambda: cache.release(two),
                 lambda: cache.reorder([0, 1]), lambda: session.update({two: [1]})):  # fmt: skip
        with pytest.raises(SlotError, match=f"slot {two} is generating"):
            call()


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "numpy") as file:
        return dict(file.metadata())


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


def test_files_that_are_refused_change_nothing(tmp_path: Path) -> None:
    session = DecodeSession(HashRunner())
    slot, path = start(session, [1, 2, 3, 4]), tmp_path / "saved"
    session.cache.save(path)

    def refused(words: str, file: Path = path, runner: HashRunner | None = None) -> None:
        other = session if runner is None else DecodeSession(runner)
        before = other.cache.slots
        with pytest.raises(CacheFileError, match=words):
            other.cache.load(file)
        assert other.cache.slots == before

    strange = HashRunner()
    strange.model = "11"
    refused(r"saved with another model \(00\.\.\., this one is 11", runner=strange)
    refused("caches of other sizes, layouts or scales of the same model", runner=HashRunner([("linear", 32)]))
    (tmp_path / "text").write_text("hello " * 100)
    refused("not a saved cache", tmp_path / "text")
    refused("not a saved cache", tmp_path / "missing")
    save_file({"a": np.zeros(3)}, tmp_path / "weights")
    refused("this version cannot read format", tmp_path / "weights")
    whole, tensors, metadata = path.read_bytes(), load_file(path), metadata_of(path)
    path.write_bytes(whole[:-8])
    refused("not a saved cache")
    capacity = session.cache.capacity
    assert capacity is not None
    claims = {"slots": f'{{"{slot}": [{capacity + 1}, {capacity + 1}]}}'}
    tokens, held = f"{slot}/tokens", f"{slot}/cache.0"
    changes: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({held: tensors[held][:, :1]}, {}, r"tensor '0/cache\.0' is float32 \[1, 1, 2\]; expected float32 \[1, 4, 2\]"),
        ({tokens: np.array([1, 2, 3, -4])}, {}, f"slot {slot}: .*token id -4 is out of range"),
        ({tokens: np.array([1.0, 2.0, 3.0, 4.0])}, {}, f"slot {slot}: .*float64"),
        ({tokens: np.arange(capacity + 2) % 8}, claims,
         f"slot {slot} has {capacity + 2} tokens, the length {capacity + 1} .* {capacity} rows"),
    ]  # fmt: skip
    for change, more, words in changes:
        save_file(tensors | change, path, metadata | more)
        refused(words)
    path.write_bytes(whole)
    for _ in range(3):
        session.cache.load(path)
    with pytest.raises(SlotError, match=r"holds 1 sequence\(s\), and there is room for 0 of 4"):
        session.cache.load(path)
    assert follow(session, slot) == continued(session._runner, [1, 2, 3, 4, 7], 5)  # type: ignore[arg-type]


def test_files_without_anything_given_are_as_they_were(tmp_path: Path) -> None:
    plain, placed, bad = tmp_path / "plain", tmp_path / "placed", tmp_path / "bad"
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        slot = session.cache.acquire()
        session.update({slot: [1, 2]})
        session.cache.save(plain)
        session.update({slot: [3]}, positions={slot: [7]})
        session.cache.save(placed)
    formats = [metadata_of(path)["format"] for path in (plain, placed)]
    assert formats == ["trt_kvcache.cache.1", "trt_kvcache.cache.2"]
    assert not [name for name in load_file(plain) if "given" in name]
    late = {"given_embeds": np.zeros((1, WIDTH), np.float32), "given_embeds_at": np.array([2])}
    changes = [({"given_positions": np.zeros(shape, kind)}, "positions are int")
               for shape, kind in (((2, 3), np.int64), ((3, 4), np.int64), ((3, 3), np.int32))]  # fmt: skip
    for change, words in [*changes, (late, "embeddings are .* its 0 waiting tokens")]:
        tensors = {f"{slot}/{name}": value for name, value in change.items()}
        save_file(load_file(placed) | tensors, bad, metadata_of(placed))
        with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
            with pytest.raises(CacheFileError, match=f"slot {slot}: {words}"):
                session.cache.load(bad)
            assert session.cache.free == 4


def saved_slot(path: Path) -> bytes:
    """A file with everything that one may have: tokens, a cache, positions, and embeddings that wait."""
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        slot = session.cache.acquire()
        session.update({slot: [4, 9]}, positions={slot: [0, 3]})
        session.add([8, 8], slot=slot, inputs_embeds=rows([150, 160]), positions=[[4, 4], [5, 6], [6, 5]])
        session.cache.save(path)
    return path.read_bytes()


def followed(path: Path) -> list[int | None]:
    """Continues after the slot of a file."""
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        (slot,) = session.cache.load(path).values()
        assert session.cache.free == 3
        session.add(config=GenerationConfig(max_new_tokens=5), slot=slot)
        return drain(session)[slot]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_bit_never_goes_unnoticed(seed: int, tmp_path: Path) -> None:
    rng, path = random.Random(seed), tmp_path / "slot"
    whole, want = saved_slot(path), followed(path)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert followed(path) == want  # where nothing depends on it
        except CacheFileError:
            refused += 1
    assert refused > 30
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    first, last = json.loads(whole[8:start])["0/cache.0"]["data_offsets"]
    damaged = bytearray(whole)
    damaged[start + rng.randrange(first, last)] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        CacheFileError,
        match="slot: the file is damaged, because its contents are not what was saved; save the cache again",
    ):
        followed(path)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E8M0", "F4", "I32", "F64", "U8", "BOOL"])
def test_tensors_of_other_types_are_refused(dtype: str, tmp_path: Path) -> None:
    """Also of those that NumPy does not have, and of those that hold as many bytes."""
    path = tmp_path / "slot"
    whole = saved_slot(path)
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    bits = {"BF16": 16, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "I32": 32, "F64": 64, "U8": 8, "BOOL": 8}[dtype]
    header = json.loads(whole[8:start])
    for name in header.keys() - {"__metadata__"}:
        first, last = header[name]["data_offsets"]
        shape = header[name]["shape"]
        other = {**header[name], "dtype": dtype, "shape": [*shape[:-1], 0]}
        other["shape"][-1] = (last - first) * 8 // bits // max(1, int(np.prod(shape[:-1])))
        made = json.dumps({**header, name: other}).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + whole[start:])
        with pytest.raises(CacheFileError):
            followed(path)
