"""Makes the inputs of decode steps from the tokens of the texts, and reads values of other inputs from a file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from trt_kvcache.compare.decode import Piece
from trt_kvcache.errors import OptionError
from trt_kvcache.files import open_regular
from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.drawn_inputs import DrawnInputs, Step, draw_constants, span_inputs
from trt_kvcache.input_values import place
from trt_kvcache.machine import free_memory

_KINDS = 256  # rows of a table with random numbers for token ids: id i has row i % 256
_SIZE = 0.5  # standard deviation of these numbers
_DRIVEN = (Role.CACHE, Role.STATE, Role.SPAN, Role.WRITE_INDICES, Role.VALID_LENGTHS)


class TextInputs:
    """Makes the inputs of the rewritten model for steps, except caches, from the tokens of texts.

    `limits` are upper bounds of random token ids and positions. `given` are values of other inputs by name, with batch
    size 1 or one row for each text. `table` has embeddings ``[V, H]`` if the model takes them. `rings`: True if
    the rewrite made caches circular; then valid lengths count all tokens of a text, not only those in the cache.
    """

    def __init__(
        self, plan: CachePlan, limits: IndexLimits, given: Mapping[str, Array] | None = None,
        table: Array | None = None, *, rings: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self._plan, self._limits, self._given, self._table = plan, limits, given or {}, table
        self._rings, self._seed = rings, seed
        self._inputs = {t.name: t for t in plan.tensors if t.io == "input"}

    def start(self, rows: int) -> None:
        """Start a batch of `rows` new texts without tokens."""
        self._rng = np.random.default_rng(self._seed)
        self._values = draw_constants(self._plan, rows, self._seed) | dict(self._given)

    def feeds(self, piece: Piece, starts: Sequence[int], tokens: Array | None = None) -> dict[str, Array]:
        """Return the model's inputs for the step `piece`, except the caches.

        `starts` are the numbers of tokens of its texts before the step. `tokens`: int64 ``[R, length]``; None: random.
        """
        plan, rows = self._plan, list(piece.rows)
        step = Step(piece.length, tuple(starts), tuple(start + piece.length for start in starts))
        apart = {n for n, v in self._values.items() if "batch" in self._inputs[n].axes and len(v) > 1}
        values = {n: v[rows] if n in apart else v for n, v in self._values.items() if n in self._inputs}
        inputs = DrawnInputs(plan, self._limits, values, self._rng, rings=self._rings, plain=True)
        feeds = inputs.shared(step) | span_inputs(plan, step, piece.span, piece.kept)
        if tokens is None:
            return feeds
        for name, tensor in self._inputs.items():
            if tensor.role is Role.OTHER and name not in values:
                feeds[name] = _numbers_of(name, tokens, feeds[name], tensor.axes)
            elif tensor.role is Role.TOKENS:
                given, own = feeds[name], tokens if self._table is None else self._table[tokens]
                if self._table is None and own.size != given.size:  # one value for all texts, or all texts in one row
                    own = place((tokens, ("batch", "sequence")), given.shape, tensor.axes)
                feeds[name] = own.reshape(given.shape).astype(given.dtype)
        return feeds


def token_table(plan: CachePlan, seed: int) -> Array | None:
    """Return random embeddings ``[V, H]`` of all token ids; None if the model takes tokens instead."""
    tokens = plan.tensor(Role.TOKENS)
    if tokens is None or not tokens.embedded:
        return None
    return np.random.default_rng(seed).normal(0, _SIZE, (_KINDS, int(tokens.shape[-1]))).astype(np.float32)


def _numbers_of(name: str, tokens: Array, like: Array, axes: Sequence[str]) -> Array:
    """Return values for an input of unknown role. They depend only on the `tokens`, so all runtimes get the same."""
    names = [axis if axis in ("batch", "sequence") else f"own {i}" for i, axis in enumerate(axes)]
    if "batch" not in names and len(tokens) > 1 and like.shape[:1] == (len(tokens),):  # a fixed batch
        names[0] = "batch"
    own = [(axis, n) for axis, n in zip(names, like.shape, strict=True) if axis.startswith("own")]
    rng, shape = np.random.default_rng(zlib.crc32(name.encode())), (_KINDS, *(n for _, n in own))
    table = rng.normal(0, _SIZE, shape) if like.dtype.kind == "f" else rng.integers(0, 2, shape)
    if "batch" not in names:
        tokens = np.arange(tokens.shape[1] if "sequence" in names else 1)[None]
    values = table[tokens % _KINDS]
    return place((values, ("batch", "sequence", *(axis for axis, _ in own))), like.shape, names).astype(like.dtype)


def by_position(values: Array, axes: Sequence[str], rows: int) -> Array:
    """Return an output as ``[rows, S, N]``: N numbers at each of S positions. S is 1 if an output has no positions."""
    order = [name for name in ("batch", "sequence") if name in axes]
    if len(order) == 2 and list(axes[:2]) != order and len(axes) == values.ndim:
        values = np.moveaxis(values, [list(axes).index(name) for name in order], (0, 1))
    return values.reshape(rows, -1, values.shape[-1] if values.ndim > 1 else 1)


def guessed(plan: CachePlan, given: Collection[str]) -> str:
    """Return the end of a message: which integer inputs got random, maybe illegal values; empty if none did."""
    unknown = [t for t in plan.tensors if t.io == "input" and t.role in (Role.OTHER, Role.CONSTANT)]
    drawn = [t for t in unknown if t.name not in given and "float" not in t.dtype]
    if not drawn:
        return ""
    names = ", ".join(f"'{t.name}' ({t.dtype} {list(t.shape)})" for t in drawn)
    return (
        f". The legal values of input {names} are unknown, so it got random values of 0 and 1: give values that are "
        "legal in every step in an .npz file (--inputs)"
    )


def load_inputs(path: str | None) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file by name (None: no arrays); raise `OptionError` if it is unreadable."""
    if path is None:
        return {}
    try:
        with open_regular(Path(path)) as opened:
            packed = zipfile.ZipFile(opened).infolist() if zipfile.is_zipfile(opened) else []
        size, free = sum(part.file_size for part in packed), free_memory()
        if 2 * size > free:
            raise ValueError(f"its arrays take {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of memory are free")
        file = np.load(path, allow_pickle=False, mmap_mode="r")
        if isinstance(file, np.ndarray):
            raise TypeError("it is one array without a name, as in an .npy file; np.savez writes names")
        with file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # noqa: BLE001 - zipfile, zlib and NumPy raise many kinds of errors on damaged files
        said = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        if "pickle" in said:  # NumPy takes unknown bytes for a pickle, and advises to run it
            said = "it is not an .npz file, or it holds Python objects"
        raise OptionError(f"{path}: cannot be read as an .npz file of named arrays ({said})") from None


def check_values(values: Mapping[str, Array], plan: CachePlan) -> None:
    """Raise `OptionError` if `values` name an input that does not exist, or that verification computes itself."""
    roles = {t.name: t.role for t in plan.tensors if t.io == "input"}
    for name in values:
        if name not in roles:
            raise OptionError(
                f"values are given for '{name}', which is not an input of the model; inputs are {', '.join(roles)}"
            )
        if roles[name] in _DRIVEN:
            raise OptionError(f"values are given for '{name}' ({roles[name].value}), which verification sets itself")
