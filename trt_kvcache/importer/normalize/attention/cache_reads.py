"""What attention reads of a cache, through the chain of operators between the two.

    cache ── Unsqueeze, Expand, Reshape (repeat_kv), Transpose, Mul ── K or V

The chain is not matched: the cache is filled with numbers, the chain is evaluated, and the result is compared with the
cache, its heads repeated, transposed, and scaled by one factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import is_op, producer
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Write
from trt_kvcache.importer.normalize.views import is_float_cast

Array = npt.NDArray[Any]

_MOVES = (
    "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Slice", "Gather",
)  # fmt: skip
_ELEMENTS = 1 << 26  # of one cache filled with numbers


@dataclass(frozen=True)
class Read:
    """How an attention reads a cache.

    Attributes:
        scale: what scales it.
        in_use: it is cut to the rows that hold tokens.
        turns: heads of the cache where these are repeated one after the other: query head h reads head ``h % turns``;
            0: each is repeated by itself, or none is.
    """

    scale: float
    in_use: bool
    turns: int


class CacheReads:
    """The caches of a model, as attention reads them.

    Args:
        writes: the caches.
        samples: of the model as exported.
    """

    def __init__(self, writes: Sequence[Write], samples: Samples) -> None:
        self._samples = samples
        self._small = smallest(samples)
        self._presents = {t.name: write for write in writes for t in (*_read(write), *write.fronts)}
        self._presents |= {t.name: write for write in writes for t, _ in write.turned}

    def behind(self, tensor: gs.Tensor) -> Write | None:
        """The cache that a tensor is made of by moving, repeating and scaling values."""
        return found[0] if (found := self._chain(tensor)) is not None else None

    def _chain(self, tensor: gs.Tensor) -> tuple[Write, float] | None:
        """The cache that a tensor is made of, and the product of the factors on the way."""
        factor = 1.0
        while tensor.name not in self._presents:
            node = producer(tensor)
            if node is None:
                return None
            if is_op(node, *_MOVES) or is_float_cast(node):
                tensor = node.inputs[0]
            elif is_op(node, "Mul", "Div") and (pair := self.factor(node)) is not None:
                tensor = pair[0]
                factor *= pair[1]
            else:
                return None
        return self._presents[tensor.name], factor

    def factor(self, node: gs.Node) -> tuple[gs.Tensor, float] | None:
        """The varying operand of a Mul or Div, and the factor that the other one is."""
        for data, other in (node.inputs, reversed(node.inputs)):
            value, last = (sample.probe.value(other.name) for sample in (self._small, self._samples.plain[-1]))
            if value is None or value.size != 1 or (is_op(node, "Div") and other is node.inputs[0]):
                continue
            if last is not None and np.array_equal(value, last) and self._small.probe.value(data.name) is None:
                number = float(value.reshape(()))
                return data, 1 / number if is_op(node, "Div") else number
        return None

    def read(
        self, name: str, tensor: gs.Tensor, write: Write, lead: Sequence[int] | None, heads: int, *, transposed: bool
    ) -> Read:
        """Guess how `tensor` is made of a cache: the cache is filled with numbers in one step.

        Args:
            name: of the attention, for messages.
            tensor: keys or values, as a product reads them.
            write: of the cache.
            lead: axes of the product before its last two; None: an Attention node reads ``[B, N, T, D]``.
            heads: of the queries.
            transposed: the last two axes are ``D, T``.

        Raises:
            UnsupportedModelError: it is not the cache with repeated heads.
        """
        chain = self._chain(tensor)
        assert chain is not None
        factor, sample = chain[1], self._small
        update = sample.probe.shape(write.update.name)
        if update is None:
            raise UnsupportedModelError(
                f"the shape of the update '{write.update.name}' of cache '{write.past.name}' is unknown"
            )
        shape = [update[i] for i in write.perm or range(len(update))]
        past = sample.probe.shape(write.past.name)
        shape[write.axis] = write.rows(sample) if write.growing or past is None else past[write.axis]
        if int(np.prod(shape)) > _ELEMENTS:
            raise UnsupportedModelError(
                f"cache '{write.past.name}' {shape} is too large to see what '{name}' reads: export it with a "
                "symbolic length"
            )
        numbers = np.random.default_rng(0).integers(1, 1000, shape)
        front = numbers[(slice(None),) * write.axis + (slice(sample.total),)]
        held = [*((t, numbers) for t in _read(write)), *((t, front) for t in write.fronts)]
        held += [(t, numbers.transpose(perm)) for t, perm in write.turned]
        given = {t.name: v.astype(onnx.helper.tensor_dtype_to_np_dtype(elem_type_of(t))) for t, v in held}
        made = sample.probe.given(given).value(tensor.name)
        if made is not None and made.ndim > 2:
            made = made.swapaxes(-1, -2) if transposed else made
            in_use = not write.growing and made.shape[-2] == sample.total
            major = _heads_major(front if in_use else numbers, write, made.shape[-1])
            turns = None if major is None else _turns(made, major.astype(np.float64) * factor, lead, heads)
            if turns is not None:
                return Read(factor, in_use, turns)
        raise UnsupportedModelError(
            f"'{tensor.name}' of '{name}' is not cache '{write.past.name}' with its heads repeated"
            f"{' and transposed' if transposed else ''} (found "
            f"{'no value' if made is None else f'shape {list(made.shape)}'} "
            f"from {shape} for {heads} query heads); supported is grouped-query attention over the cache as it is"
        )


def smallest(samples: Samples) -> Sample:
    """The step that costs least to evaluate, of several sequences if there is one."""
    return min(samples.plain, key=lambda s: (s.batch < 2, s.total * s.batch))


def _read(write: Write) -> tuple[gs.Tensor, ...]:
    """The tensors of a cache that attention may read: not a present that is cut to less than that."""
    return (write.present, *write.aliases) if write.kept is None else write.aliases


def _heads_major(numbers: Array, write: Write, size: int) -> Array | None:
    """A cache as ``[B, N, rows, D]``."""
    if write.relaid is not None:
        return numbers.transpose(write.relaid)
    if numbers.ndim == 4 and write.axis in (1, 2):
        return numbers if write.axis == 2 else numbers.swapaxes(1, 2)
    if numbers.ndim == 3 and write.axis == 1 and size and numbers.shape[2] % size == 0:
        made: Array = numbers.reshape(*numbers.shape[:2], -1, size).swapaxes(1, 2)
        return made
    return None


def _turns(made: Array, cache: Array, lead: Sequence[int] | None, heads: int) -> int | None:
    """In which order query heads share heads of a cache; None where `made` is not that cache, its heads repeated.

    Args:
        made: keys or values ``[..., T, D]`` of a product.
        cache: ``[B, N, T, D]``.
        lead: the axes of the product in place of ``...``; None: as they are.
        heads: of the queries.
    """
    batch, count, *row = cache.shape
    try:
        whole = np.broadcast_to(made, (*(made.shape[:-2] if lead is None else lead), *made.shape[-2:]))
    except ValueError:
        return None
    each, rest = divmod(whole.size, cache.size or 1)
    if rest or not each or heads % (each * count) or list(made.shape[-2:]) != row:
        return None
    if np.allclose(whole.reshape(batch, count, each, *row), cache[:, :, None], rtol=4e-3, atol=0):
        return 0  # where queries of a group are rows of one product, too
    in_turn = each * count == heads and np.allclose(whole.reshape(batch, each, *cache.shape[1:]), cache[:, None],
                                                    rtol=4e-3, atol=0)  # fmt: skip
    return count if in_turn else None


def elem_type_of(tensor: gs.Tensor) -> int:
    """The ONNX element type of a cache, which always has one."""
    dtype = tensor.dtype
    return dtype if isinstance(dtype, int) else int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
