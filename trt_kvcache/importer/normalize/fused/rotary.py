"""Rotary position embeddings as ONNX's RotaryEmbedding (opset 23).

com.microsoft::RotaryEmbedding(x, position_ids [1] or [B, S], cos, sin)
becomes
RotaryEmbedding(x, cos, sin, position_ids [B, S]; num_heads always given for a 3-D x)

com.microsoft::MRotaryEmbedding(x, position_ids [3, B, S], cos, sin, mrope_section, mrope_layout)
becomes
RotaryEmbedding(x, c, s), c and s [B, S, half]: each column of the caches at the position in the plane that owns it

A single position is the first token's. TensorRT for RTX 1.7.1 dies (SIGFPE) on a 3-D x without num_heads, so the
number of heads that ONNX Runtime derives from the width of the caches is written out. Measured: ONNX Runtime gives
the same numbers bit for bit, fp32 and fp16, with planes that differ as well.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.graph import INT64, Emitter, dims

_PLANES = 3  # of positions: time, height, width


def rotate(
    emitter: Emitter,
    x: gs.Tensor,
    cos: gs.Tensor,
    sin: gs.Tensor,
    positions: gs.Tensor | None,
    *,
    interleaved: bool,
    rotary_dim: int = 0,
    heads: int | None = None,
) -> gs.Tensor:
    """Rotate ``x`` (``[B, N, S, H]``, or ``[B, S, N*H]`` with `heads`) by its tokens' positions.

    Args:
        emitter: adds the node.
        x: queries or keys.
        cos: ``[positions, rotary_dim / 2]``, as is `sin`.
        sin: see `cos`.
        positions: int64 ``[B, S]``; None: `cos` and `sin` are those of the tokens already, ``[B, S, rotary_dim / 2]``.
        interleaved: whether pairs lie side by side instead of half a head apart.
        rotary_dim: how much of each head is rotated; 0 for all of it.
        heads: number of heads of a 3-D ``x``.
    """
    attrs = {"interleaved": int(interleaved), "rotary_embedding_dim": rotary_dim}
    if heads is not None:
        attrs["num_heads"] = heads
    inputs = [x, cos, sin] + ([positions] if positions is not None else [])
    result = emitter.op("RotaryEmbedding", inputs, "rotary", **attrs)
    result.shape = x.shape
    return result


def lower_rotary(emitter: Emitter, node: gs.Node) -> gs.Tensor:
    """ONNX's RotaryEmbedding in the place of ONNX Runtime's; returns its result.

    Raises:
        UnsupportedModelError: packed batches, a scale (ONNX Runtime's kernel ignores it), or shapes that are missing.
        InvalidModelError: sizes that contradict each other.
    """
    x, positions, cos, sin = node.inputs[:4]
    label = _checked(node)
    shape, position_shape, cache_shape = dims(x), dims(positions), dims(cos)
    if shape is None or len(shape) not in (3, 4) or position_shape is None or len(position_shape) > 2:
        raise UnsupportedModelError(
            f"{label} needs an input of known rank 3 or 4 and position ids of known rank, found "
            f"{shape} and {position_shape}: export it with shapes"
        )
    rotary_dim, heads = int(node.attrs.get("rotary_embedding_dim", 0)), None
    if len(shape) == 3:
        heads = int(node.attrs.get("num_heads", 0)) or _heads(label, shape[2], cache_shape)
    if len(position_shape) < 2:
        positions = _count_from(emitter, positions, x, 1 if len(shape) == 3 else 2)
    interleaved = bool(node.attrs.get("interleaved", 0))
    return rotate(emitter, x, cos, sin, positions, interleaved=interleaved, rotary_dim=rotary_dim, heads=heads)


def lower_planes(emitter: Emitter, node: gs.Node) -> gs.Tensor:
    """ONNX's RotaryEmbedding in the place of ONNX Runtime's MRotaryEmbedding; returns its result.

    Raises:
        UnsupportedModelError: packed batches, a scale (ONNX Runtime's kernel ignores it), another number of planes,
            another layout of their sections, or shapes that are missing.
        InvalidModelError: sizes that contradict each other.
    """
    x, positions, cos, sin = node.inputs[:4]
    label = _checked(node)
    sections = [int(n) for n in node.attrs.get("mrope_section", [])]
    layout, heads = int(node.attrs.get("mrope_layout", 0)), int(node.attrs.get("num_heads", 0))
    shape, position_shape, cache_shape = dims(x), dims(positions), dims(cos)
    if len(sections) != _PLANES or min(sections) < 0 or layout not in (0, 1) or (position_shape or (3,))[0] != _PLANES:
        raise UnsupportedModelError(
            f"{label} has mrope_section={sections}, mrope_layout={layout} and positions {list(position_shape or ())}; "
            "supported are sections of three planes, one after the other (layout 0) or interleaved (layout 1)"
        )
    if shape is None or len(shape) not in (3, 4) or (len(shape) == 3 and heads < 1):
        raise UnsupportedModelError(
            f"{label} needs an input of known rank 3 or 4, and num_heads for rank 3, found "
            f"{list(shape or ())} and {heads}: export it with shapes"
        )
    half = cache_shape[-1] if cache_shape else "?"
    if sum(sections) != half:
        raise InvalidModelError(f"{label} has sections of {sum(sections)} columns, and caches of {half}")
    owners = np.repeat(np.arange(_PLANES), sections)
    if layout == 1:
        owners = np.zeros(sum(sections), np.int64)
        for plane in (1, 2):
            owners[plane : 3 * sections[plane] : 3] = plane
    tables = [_by_planes(emitter, table, positions, owners) for table in (cos, sin)]
    return rotate(
        emitter, x, tables[0], tables[1], None, interleaved=bool(node.attrs.get("interleaved", 0)),
        rotary_dim=int(node.attrs.get("rotary_embedding_dim", 0)), heads=heads if len(shape) == 3 else None,
    )  # fmt: skip


def _by_planes(emitter: Emitter, table: gs.Tensor, positions: gs.Tensor, owners: npt.NDArray[np.int64]) -> gs.Tensor:
    """``[B, S, half]``: each column of a table at the position in the plane that owns it."""

    def make() -> gs.Tensor:
        rows = emitter.op("Gather", [table, positions], "plane_rows", axis=0)
        made: gs.Tensor | None = None
        for plane in np.unique(owners):
            column = emitter.op("Gather", [rows, emitter.ints(int(plane))], "plane", axis=0)
            owned = emitter.constant(owners == plane)
            made = column if made is None else emitter.op("Where", [owned, column, made], "planes", table.dtype)
        return made

    result: gs.Tensor = emitter.once(("planes", table.name, positions.name, owners.tobytes()), make)
    return result


def _checked(node: gs.Node) -> str:
    """What a rotation is called in messages.

    Raises:
        UnsupportedModelError: it is of packed batches, or has a scale.
    """
    label = f"{node.domain}::{node.op} '{node.name}'"
    if node.attrs.get("is_packed_batching", 0):
        raise UnsupportedModelError(f"{label} has is_packed_batching=1; supported is one row per sequence")
    if float(node.attrs.get("scale", 1.0)) != 1.0:
        raise UnsupportedModelError(
            f"{label} has scale={node.attrs['scale']}, which ONNX Runtime's own kernel ignores: fold the scale into "
            "the cos and sin caches"
        )
    return label


def _heads(label: str, width: int | str, cache_shape: tuple[int | str, ...] | None) -> int:
    half = cache_shape[-1] if cache_shape else "?"
    if not isinstance(width, int) or not isinstance(half, int):
        raise UnsupportedModelError(
            f"{label} has no num_heads, and the widths of its input ({width}) and caches ({half}) do not say it: "
            "export it with shapes"
        )
    if half < 1 or width % (2 * half):
        raise InvalidModelError(f"{label} rotates {width} values by caches for heads of {2 * half}")
    return width // (2 * half)


def _count_from(emitter: Emitter, first: gs.Tensor, x: gs.Tensor, axis: int) -> gs.Tensor:
    """``first + arange(S)`` for each row: int64 ``[B, S]``."""

    def make() -> gs.Tensor:
        batch = emitter.op("Shape", [x], "rows", INT64, start=0, end=1)
        length = emitter.op("Shape", [x], "tokens", INT64, start=axis, end=axis + 1)
        count = emitter.op("Squeeze", [length], "token_count", INT64)
        steps = emitter.op("Range", [emitter.ints(0), count, emitter.ints(1)], "steps", INT64)
        row = emitter.op("Add", [first, steps], "position_row", INT64)
        both = emitter.op("Concat", [batch, length], "positions_shape", INT64, axis=0)
        return emitter.op("Expand", [row, both], "positions", INT64)

    result: gs.Tensor = emitter.once(("count", first.name, x.name, axis), make)
    return result
