"""Files of proofs: read as regular files of a bounded size, and checked as a whole."""

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from proof_engines import write_proved
from safetensors.numpy import load, save

from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.compare.proof import FORMAT, Proof, decode_proof, encode_proof
from trt_kvcache.compare.proof_recording import record_proof
from trt_kvcache.engine.manifest import load_manifest, proof_path
from trt_kvcache.errors import ManifestError, TrtKvCacheError
from trt_kvcache.importer import import_model
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.proof_check import load_proof
from trt_kvcache.runtime.replay import replay

OTHERS = (-1, 0, 1 << 40, 2.5, float("nan"), "x", None, [], {})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Proof]:
    path = write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig(capacity=32, layers=1))
    return path, record_proof(import_model(path), Bounds(3, 8, 4))


def _leaves(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _leaves(inner, (*way, key))


def _edited(facts: Any, way: tuple[Any, ...], other: Any) -> Any:
    if not way:
        return other
    copy = facts.copy()
    copy[way[0]] = _edited(copy[way[0]], way[1:], other)
    return copy


def _survives(path: Path, content: bytes) -> None:
    """Whatever is in a proof, it is refused by name, or it is replayed: nothing else is raised."""
    try:
        proof, _ = decode_proof(content)
    except ValueError:
        proof = None
    if proof is not None:
        runner = OnnxRuntimeRunner(path, max_batch=4, max_chunk=8)
        with closing(runner), suppress(TrtKvCacheError):
            replay(runner, proof)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
def test_edited_facts_are_refused_or_replayed(recorded: tuple[Path, Proof], seed: int) -> None:
    path, proof = recorded
    facts = msgspec.json.decode(msgspec.json.encode(proof.facts))
    ways = [way for way in _leaves(facts) if way]
    rng = np.random.default_rng(seed)
    for _ in range(25):
        other = OTHERS[rng.integers(len(OTHERS))]
        made = _edited(facts, ways[rng.integers(len(ways))], other)
        text = msgspec.json.encode(made).decode()
        _survives(path, save(proof.arrays, {"format": FORMAT, "engine": "e", "facts": text}))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_edited_arrays_are_refused_or_replayed(recorded: tuple[Path, Proof], seed: int) -> None:
    path, proof = recorded
    rng, names = np.random.default_rng(seed), sorted(proof.arrays)
    for _ in range(12):
        arrays = dict(load(encode_proof(proof, "e")))
        name = names[rng.integers(len(names))]
        match rng.integers(5):
            case 0:
                del arrays[name]
            case 1:
                arrays[name] = arrays[name][:1]
            case 2:
                arrays[name] = arrays[name].astype(np.float64)
            case 3:
                arrays[name] = np.full_like(arrays[name], 1 << 20)
            case _:
                arrays[name] = arrays[name].reshape(-1)
        facts = msgspec.json.encode(proof.facts).decode()
        _survives(path, save(arrays, {"format": FORMAT, "engine": "e", "facts": facts}))


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a large file"])
def test_what_is_no_file_of_a_proof_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    engine = write_proved(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=32, layers=1)))
    path = proof_path(engine)
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 33)
    with pytest.raises(ManifestError, match="the proof that was built with .* cannot be read"):
        load_proof(load_manifest(engine), engine)
