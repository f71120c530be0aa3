"""Reads and writes a proof: a recorded decode that an engine must repeat, with allowed differences.

The recording is a decode of the rewritten model in float32. A piece is one step, and a part is a group of steps. The
file is safetensors. Its header has the `Facts`, as JSON. Its arrays, for R texts and S tokens of a piece:

<piece>/tokens    int32 [R, S]
<piece>/logits    float32 [R, K, C]: logits of C tokens at the last K positions
<piece>/columns   int32 [R, K, C]: the ids of these C tokens; absent: all tokens
<part>/<past>     float32 [R, T, W]: after a part, W numbers of the cache rows of the T newest tokens; T is 1 for states
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import msgspec
import numpy as np
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.differences import Share
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.cache_contents import CacheTensor

FORMAT = "trt_kvcache.proof.4"
LOGITS = "logits"
"""The name of the logits among the compared outputs. A cache has the name of its past input."""

_MOST = 1 << 31  # largest number of tokens, rows and so on that is accepted


@dataclass(frozen=True)
class Facts:
    """The contents of a proof (a recorded decode) except its arrays.

    Attributes:
        recorded_on: the runtime that ran the model.
        dtype: the type whose rounding was measured: ``"float32"`` (rounded to TF32), ``"float16"`` or ``"bfloat16"``.
        vocab: number of logits of a position.
        seed: seed of garbage, constants and embeddings.
        garbage: magnitude of values in cache rows without a token.
        encoder: length of an encoder's output, used only if the model has no fixed length for it.
        pieces: the steps of the decode. Only the last `Piece.kept` positions of each step are compared.
        chooses: True for a mixture of experts: rounding may choose another expert, so a row may differ.
        digest: digest of numbers drawn from the seed, because another version of NumPy may draw other numbers.
        allowed: allowed differences, by part and output. No entry: not compared, because rounding hides faults in it.
        uneven: in each part, one row may differ by this many times the allowed difference.
        note: why an output cannot show a fault; empty if all outputs can.
    """

    recorded_on: str
    dtype: str
    vocab: int
    seed: int
    garbage: float
    encoder: int
    pieces: tuple[Piece, ...]
    chooses: bool
    digest: str
    allowed: dict[str, dict[str, Share]]
    uneven: float
    note: str = ""

    @property
    def rows(self) -> int:
        """Number of texts that the proof decodes."""
        return max(len(p.rows) for p in self.pieces)

    @property
    def chunk(self) -> int:
        """Number of tokens of the longest step."""
        return max(p.length for p in self.pieces)

    @property
    def lengths(self) -> list[int]:
        """For all texts and steps, the number of tokens of the text before and after the step."""
        ends, found = [0] * self.rows, list[int]()
        for piece in self.pieces:
            for row in piece.rows:
                found += ends[row] + piece.skip, ends[row] + piece.skip + piece.length
                ends[row] = found[-1]
        return found

    @property
    def lasts(self) -> frozenset[int]:
        """The index of the last piece (step) of each part of the decode."""
        return frozenset([*group][-1][0] for _, group in groupby(enumerate(self.pieces), lambda at: at[1].part))


@dataclass(frozen=True, eq=False)
class Proof:
    """A proof (a recorded decode): its facts, and its arrays by name."""

    facts: Facts
    arrays: dict[str, Array] = field(default_factory=dict)


def encode_proof(proof: Proof, engine: str) -> bytes:
    """Return the bytes of the file of a proof (a recorded decode); `engine` is the BLAKE3 (hex) of its engine."""
    facts = msgspec.json.encode(proof.facts).decode()
    return bytes(save(proof.arrays, {"format": FORMAT, "engine": engine, "facts": facts}))


def decode_proof(content: bytes) -> tuple[Proof, str]:
    """Read a proof (a recorded decode) and its engine's BLAKE3 (hex). Raises `ValueError` for other bytes."""
    try:
        size = int.from_bytes(content[:8], "little")
        header = msgspec.json.decode(content[8 : 8 + size])["__metadata__"]
        if header["format"] != FORMAT:
            raise ValueError(f"of format {header['format']}, but this version of trt_kvcache reads format {FORMAT}")
        proof = Proof(msgspec.json.decode(header["facts"], type=Facts), load(content))
        if faults := [*_faults(proof)]:
            raise ValueError(f"contradicting itself ({'; '.join(faults[:3])})")
        return proof, str(header["engine"])
    except (SafetensorError, msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a readable proof file ({' '.join(str(error).split())})") from None


def _faults(proof: Proof) -> Iterator[str]:
    facts = proof.facts
    sizes = [(facts.vocab, 1), (facts.seed, 0), (facts.encoder, 1), (facts.garbage, 0), (facts.uneven, 1)]
    sizes += [(n, least) for p in facts.pieces for n, least in ((p.length, 1), (p.kept or 0, 1), (abs(p.skip), 0))]
    if not all(least <= number < _MOST for number, least in sizes):
        yield "one of its numbers is out of range"
    if not facts.pieces or any(p.rows != tuple(range(len(p.rows))) or not p.rows for p in facts.pieces):
        yield "it has no steps, or a step that does not run the first texts in their order"
    elif min(facts.lengths) < 0 or any(p.drawn and len(p.rows) != facts.rows for p in facts.pieces):
        yield "a text has a negative length, or a step with random caches does not run all texts"
    if any(not min(s.largest, s.typical) > 0 for shares in facts.allowed.values() for s in shares.values()):
        yield "an allowed difference is not above 0"
    if any(array.dtype.kind not in "if" or array.ndim < 2 for array in proof.arrays.values()):
        yield "one of its arrays has no rows"


def draws_digest(seed: int) -> str:
    """Return a digest (hex) of random numbers, which shows if two versions of NumPy draw the same numbers."""
    rng = np.random.default_rng([seed, 3])
    floats = rng.uniform(-1, 1, 64), rng.random(64, np.float32), rng.normal(0, 1, 64)
    integers = rng.integers(-9, 9, 64), rng.integers(-9, 9, 64, np.int8)
    return blake3(b"".join(drawn.tobytes() for drawn in (*floats, *integers))).hexdigest()


def numbers_of_cache(cache: CacheTensor, values: Array, end: int, count: int, width: int) -> Array:
    """Return W numbers of each of the newest T cache rows of one text, ``[T, W]``, spread over all heads.

    `values`, ``[*physical_shape[1:]]``, is the cache of a text of `end` tokens. T is `count` (states: 1); W <= `width`.
    """
    rows = cache.physical_rows(values[None])[0]
    rows = rows.reshape(1 if cache.update is None else len(rows), -1)
    size, width = rows.shape[1], min(rows.shape[1], width)
    columns = np.arange(width) * size // width + np.arange(width) * 7 % max(size // width, 1)
    places = np.zeros(1, int) if cache.update is None else np.arange(end - count, end) % len(rows)
    return np.asarray(rows[places][:, columns], np.float32)
