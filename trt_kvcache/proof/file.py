"""The file of a proof: safetensors, with what is no array as JSON in its header.

columns                  int64 [C]: columns of the logits that are kept; absent: all
<episode>/<step>/tokens  int32 [R, S]
<episode>/<step>/logits  float32 [R, K, C]: of the last K positions
<episode>/<step>/high    int32 [R, K, 64], and ``.../highest`` float32: the highest logits; absent where all are kept
<episode>/rows/<past>    float32 [R, T, W]: W numbers of the cache rows of the T last tokens of steps; NaN: not known
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trt_kvcache.engine.manifest import Manifest, proof_path
from trt_kvcache.errors import ManifestError
from trt_kvcache.files import read_file

__all__ = [
    "FORMAT",
    "Episode",
    "Facts",
    "Proof",
    "Share",
    "columns_of",
    "decode_proof",
    "encode_proof",
    "load_proof",
    "share_of",
]

Array = npt.NDArray[Any]

FORMAT = "trt_kvcache.proof.3"
_NEWEST = 4
_LARGEST = 4 << 20  # bytes of a file
_MOST = 1 << 31  # tokens, rows, and what else is counted
_AGAIN = "copy engine, manifest and proof together, or build again"


@dataclass(frozen=True)
class Episode:
    """Steps; each starts where the one before ended.

    Attributes:
        name: episodes of one name have the same tolerances.
        starts: tokens in each row before the first step. 0: its caches are empty; as many as after the episode before:
            they hold what they held then; more: the rows in between are copies of those before.
        lengths: tokens of each step.
        keep: of how many of the last positions of each step the logits are kept; 0: the step is not compared.
    """

    name: str
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    keep: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens in each row after the last step."""
        return tuple(start + sum(self.lengths) for start in self.starts)

    @property
    def newest(self) -> Array:
        """The last tokens of each compared step, whose cache rows are compared, as numbers in the episode."""
        steps = zip(np.cumsum(self.lengths), self.lengths, self.keep, strict=True)
        return np.concatenate([np.arange(end - min(n, _NEWEST), end) for end, n, keep in steps if keep])


@dataclass(frozen=True)
class Share:
    """A difference between two outputs in one row of a step, as a share of the first one.

    Attributes:
        largest: of the largest number.
        typical: root of the mean square, of that of all numbers.
    """

    largest: float
    typical: float

    def most(self, other: Share) -> Share:
        """The larger of both in each."""
        return Share(max(self.largest, other.largest), max(self.typical, other.typical))

    def within(self, other: Share) -> bool:
        """Neither is larger than in the other."""
        return self.largest <= other.largest and self.typical <= other.typical


def share_of(expected: Array, actual: Array) -> Share:
    """The distance of two arrays: infinite where one is finite and the other is not. Two NaN are equal.

    Args:
        expected: float32.
        actual: float32, of the same shape.
    """
    known = np.isfinite(expected)
    a, b = expected[known].astype(np.float64), actual[known].astype(np.float64)
    if not np.array_equal(expected[~known], actual[~known], equal_nan=True) or not np.isfinite(b).all():
        return Share(math.inf, math.inf)
    difference, scale = np.abs(a - b), np.abs(a)
    if not difference.size or not difference.max():
        return Share(0.0, 0.0)
    if not scale.max():
        return Share(math.inf, math.inf)
    return Share(float(difference.max() / scale.max()), float(np.sqrt((difference**2).mean() / (scale**2).mean())))


@dataclass(frozen=True)
class Facts:
    """A proof without its arrays.

    Attributes:
        recorded_on: what ran the original.
        dtype: that the rounding was measured for: ``"float32"`` (as TF32 rounds it), ``"float16"`` or ``"bfloat16"``.
        vocab: numbers of a position's logits.
        seed: of garbage, constants and embeddings.
        garbage: magnitude of what lies in cache rows without a token.
        encoder: length of an encoder's output, where it is open.
        chooses: the model chooses experts: where two are nearly equal, rounding decides, and a row comes out otherwise.
        digest: of what the seed gives: another version of NumPy could give something else.
        tolerances: what an output may differ by, by names of episode and output; others show nothing, and are not
            compared.
        note: why some output shows nothing; empty where all do.
        rounding: the difference that rounding made, likewise.
    """

    recorded_on: str
    dtype: str
    vocab: int
    seed: int
    garbage: float
    encoder: int
    episodes: tuple[Episode, ...]
    chooses: bool
    digest: str
    tolerances: dict[str, dict[str, Share]]
    rounding: dict[str, dict[str, Share]]
    note: str = ""

    @property
    def rows(self) -> int:
        """Rows of the batch in a step."""
        return max(len(e.starts) for e in self.episodes)

    @property
    def chunk(self) -> int:
        """Tokens of the longest step."""
        return max(n for e in self.episodes for n in e.lengths)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(len(e.lengths) for e in self.episodes)


@dataclass(frozen=True, eq=False)
class Proof:
    """A proof."""

    facts: Facts
    arrays: dict[str, Array] = field(default_factory=dict)


def encode_proof(proof: Proof, engine: str) -> bytes:
    """The bytes of a proof's file.

    Args:
        proof: the proof.
        engine: BLAKE3 (hex) of the engine that it is of.
    """
    facts = msgspec.json.encode(proof.facts).decode()
    content: bytes = save(proof.arrays, {"format": FORMAT, "engine": engine, "facts": facts})
    return content


def decode_proof(content: bytes) -> tuple[Proof, str]:
    """A proof and the BLAKE3 of its engine, from the bytes of its file.

    Raises:
        ValueError: they are none.
    """
    try:
        size = int.from_bytes(content[:8], "little")
        header = msgspec.json.decode(content[8 : 8 + size])["__metadata__"]
        if header["format"] != FORMAT:
            raise ValueError(f"of format {header['format']}, and this version of trt_kvcache knows {FORMAT}")
        facts = msgspec.json.decode(header["facts"], type=Facts)
        proof = Proof(facts, load(content))
        if faults := [*_faults(facts), *_unfit(proof)]:
            raise ValueError(f"contradicting itself ({'; '.join(faults[:3])})")
        return proof, str(header["engine"])
    except (SafetensorError, msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not readable as one ({' '.join(str(error).split())})") from None


def _faults(facts: Facts) -> Iterator[str]:
    """What facts say that cannot be, each in words. All readers rely on the rest."""
    if not facts.episodes or not facts.episodes[0].starts:
        yield "it has no steps"
        return
    for name, number, least in (("vocab", facts.vocab, 1), ("seed", facts.seed, 0), ("encoder", facts.encoder, 1)):
        if not least <= number < _MOST:
            yield f"its {name} is {number}"
    if not 0 <= facts.garbage < _MOST:
        yield f"its garbage is {facts.garbage}"
    for episode in facts.episodes:
        numbers = (*episode.starts, *episode.lengths, *episode.keep)
        if not all(0 <= n < _MOST for n in numbers) or not all(episode.lengths) or not episode.lengths:
            yield f"'{episode.name}' has a step of no size"
        elif len(episode.keep) != len(episode.lengths) or len(episode.starts) != facts.rows:
            yield f"'{episode.name}' has other steps, or other rows, than it says"
        elif any(keep > length for keep, length in zip(episode.keep, episode.lengths, strict=True)):
            yield f"'{episode.name}' keeps logits of more tokens than a step has"
        elif not any(episode.keep):
            yield f"'{episode.name}' compares nothing"
    if any(not min(s.largest, s.typical) > 0 for shares in facts.tolerances.values() for s in shares.values()):
        yield "it allows no difference"
    if any(not min(s.largest, s.typical) >= 0 for shares in facts.rounding.values() for s in shares.values()):
        yield "it says that rounding made less than nothing"


def _unfit(proof: Proof) -> Iterator[str]:
    """What arrays say that cannot be: their names and sizes are compared with an engine when it is replayed."""
    kinds = {"tokens": "i", "high": "i", "columns": "i", "logits": "f", "highest": "f"}
    for name, array in proof.arrays.items():
        last = name.rsplit("/", 1)[-1]
        kind = "f" if "/rows/" in name else kinds.get(last, "")
        if array.dtype.kind != kind:
            yield f"'{name}' is of {array.dtype}"
        elif kind == "i" and array.size and not 0 <= array.min() <= array.max() < proof.facts.vocab:
            yield f"'{name}' names tokens that there are not"


def load_proof(manifest: Manifest, engine: Path) -> Proof:
    """The proof that was built with an engine.

    Raises:
        ManifestError: there is none, it is not the one that the manifest names, or of another engine.
    """
    path = proof_path(engine)
    if manifest.proof is None:
        raise ManifestError(f"{engine}: was built without a proof: {manifest.no_proof}")
    try:
        content = read_file(path, _LARGEST)
    except OSError as error:
        raise ManifestError(
            f"{path}: the proof that was built with {engine.name} cannot be read ({error.strerror}); {_AGAIN}; "
            "--check off opens the engine without it"
        ) from None
    if (len(content), blake3(content).hexdigest()) != (manifest.proof.size, manifest.proof.blake3):
        raise ManifestError(f"{path}: not the proof that was built with {engine.name}: it was cut or changed; {_AGAIN}")
    try:
        proof, of = decode_proof(content)
    except ValueError as error:
        raise ManifestError(f"{path}: the proof is {error}; {_AGAIN}") from None
    if of != manifest.engine.blake3:
        raise ManifestError(f"{path}: the proof of another engine, {of[:16]}; {_AGAIN}")
    return proof


def columns_of(proof: Proof) -> Array:
    """The columns of the logits that a proof keeps."""
    return proof.arrays.get("columns", np.arange(proof.facts.vocab))
