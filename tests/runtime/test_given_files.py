"""Saved slots: what they were given goes with them, and files of slots that were given nothing are as they were."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from runtime.embedded_runner import TABLE, WIDTH, Alone, EmbeddedRunner, rows
from runtime.engines import drain

from trt_kvcache.errors import CacheFileError
from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession


def test_what_waits_is_saved_with_its_embeddings(tmp_path: Path) -> None:
    runner = EmbeddedRunner()
    alone = Alone.of(runner)
    alone.extend([TABLE[4, 0], 150, 160], [(0, 0, 0), (1, 2, 3), (1, 3, 2)])
    with DecodeSession(runner, embeddings=TABLE) as session:
        slot = session.cache.acquire()
        session.update({slot: [4]}, positions={slot: [0]})
        session.add(
            [8, 8],
            GenerationConfig(max_new_tokens=2),
            slot=slot,
            inputs_embeds=rows([150, 160]),
            positions=[[1, 1], [2, 3], [3, 2]],
        )
        session.cache.save(tmp_path / "slot")
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        new = session.cache.load(tmp_path / "slot")[slot]
        assert session.cache.tokens(new) == [4, 8, 8]
        session.add(config=GenerationConfig(max_new_tokens=5), slot=new)
        found = drain(session).popitem()[1]
    assert found == alone.continued(5)


def test_files_without_anything_given_are_as_they_were(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    def format_of(path: Path) -> str:
        with safe_open(path, "numpy") as file:
            return str(file.metadata()["format"])

    plain, placed = tmp_path / "plain", tmp_path / "placed"
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        slot = session.cache.acquire()
        session.update({slot: [1, 2]})
        session.cache.save(plain)
        session.update({slot: [3]}, positions={slot: [7]})
        session.cache.save(placed)
    assert (format_of(plain), format_of(placed)) == ("trt_kvcache.cache.1", "trt_kvcache.cache.2")
    assert not [name for name in load_file(plain) if "given" in name]
    with safe_open(placed, "numpy") as file:
        metadata = file.metadata()
    tensors = load_file(placed)
    for wrong in (np.zeros((2, 3), np.int64), np.zeros((3, 4), np.int64), np.zeros((3, 3), np.int32)):
        save_file(tensors | {f"{slot}/given_positions": wrong}, tmp_path / "bad", metadata)
        with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
            with pytest.raises(CacheFileError, match=f"slot {slot}: positions int"):
                session.cache.load(tmp_path / "bad")
            assert session.cache.free == 4
    late = {f"{slot}/given_embeds": np.zeros((1, WIDTH), np.float32), f"{slot}/given_embeds_at": np.array([2])}
    save_file(tensors | late, tmp_path / "bad", metadata)
    session = DecodeSession(EmbeddedRunner(), embeddings=TABLE)
    with session, pytest.raises(CacheFileError, match=f"slot {slot}: embeddings .* of 0 tokens"):
        session.cache.load(tmp_path / "bad")


def saved_slot(path: Path) -> bytes:
    """A file with everything that one may have: tokens, a cache, positions, and embeddings that wait."""
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        slot = session.cache.acquire()
        session.update({slot: [4, 9]}, positions={slot: [0, 3]})
        session.add([8, 8], slot=slot, inputs_embeds=rows([150, 160]), positions=[[4, 4], [5, 6], [6, 5]])
        session.cache.save(path)
    return path.read_bytes()


def followed(path: Path) -> list[int | None]:
    """What comes after the slot of a file."""
    with DecodeSession(EmbeddedRunner(), embeddings=TABLE) as session:
        try:
            (slot,) = session.cache.load(path).values()
        finally:
            free = session.cache.free
        session.add(config=GenerationConfig(max_new_tokens=5), slot=slot)
        assert free == 3
        found = []
        while session.running:
            found += [event.token for event in session.step()]
    return found


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
    with pytest.raises(CacheFileError, match="slot: not what was saved: the file is damaged; save the cache again"):
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
