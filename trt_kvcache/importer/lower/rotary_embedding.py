"""Rotary position embeddings as ONNX's RotaryEmbedding (opset 23).

A single position is that of the first token. With three planes of positions (M-RoPE: time, height, width), each column
of the caches is taken at the position in the plane that owns it. Measured: ONNX Runtime gives the same numbers bit for
bit in float32 and float16.

TensorRT for RTX 1.7.1 dies (SIGFPE) on a 3-D input without num_heads, so that the number is written out that ONNX
Runtime derives from the width of the caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trt_kvcache.errors import InvalidModelError
from trt_kvcache.importer.lower.body import AGAIN, SHAPES, Call

_PLANES = 3


def rotary_embedding(call: Call) -> str:
    """One position for each token, or that of the first one."""
    _check(call)
    positions = ""
    if len(call.known_shape("positions")) < 2:
        axis = len(call.known_shape("x")) - 2
        positions = f"""
            batch = Shape <start = 0, end = 1> (x)
            length = Shape <start = {axis}, end = {axis + 1}> (x)
            count = Squeeze (length)
            steps = Range (0, count, 1)
            positions = Add (positions, steps)
            shape = Concat <axis = 0> (batch, length)
            positions = Expand (positions, shape)
        """
    return f"""
        {positions}
        y = RotaryEmbedding <{_attributes(call, call.known_shape("x"))}> (x, cos, sin, positions)
    """


def mrotary_embedding(call: Call) -> str:
    """Positions ``[3, B, S]``."""
    _check(call)
    sections = [int(n) for n in call.attributes.get("mrope_section", [])]
    layout, positions = call.integer("mrope_layout"), call.shape("positions") or (_PLANES,)
    if len(sections) != _PLANES or min(sections) < 0 or layout not in (0, 1) or positions[0] != _PLANES:
        call.refuse(
            f"has mrope_section={sections}, mrope_layout={layout} and positions {list(positions)}; supported are "
            "sections of three planes, one after the other (layout 0) or interleaved (layout 1)",
            AGAIN,
        )
    if sum(sections) != call.width("cos"):
        call.refuse(f"has sections of {sum(sections)} columns, and caches of {call.width('cos')}", AGAIN)
    owners = np.repeat(np.arange(_PLANES), sections)
    if layout == 1:
        owners = np.zeros(sum(sections), np.int64)
        for plane in (1, 2):
            owners[plane : 3 * sections[plane] : 3] = plane
    call.constant("height", owners == 1)
    call.constant("width", owners == 2)
    return f"""
        {_by_plane("cos")}
        {_by_plane("sin")}
        y = RotaryEmbedding <{_attributes(call, call.known_shape("x"))}> (x, cos, sin)
    """


def _attributes(call: Call, x: Sequence[int | str]) -> str:
    """The attributes of ONNX's RotaryEmbedding.

    Args:
        call: of the node, with `cos`.
        x: shape of what is rotated.
    """
    part, heads, width = call.integer("rotary_embedding_dim"), call.integer("num_heads"), 2 * call.width("cos")
    stated = f"interleaved = {call.integer('interleaved')}"
    if len(x) == 4:  # no number of heads, and no part that is the whole
        return stated if part in (0, x[-1]) else f"{stated}, rotary_embedding_dim = {part}"
    if not heads:
        if not isinstance(x[-1], int) or width < 1 or x[-1] % width:
            raise InvalidModelError(f"{call.label()} rotates {x[-1]} values by caches for heads of {width}")
        heads = x[-1] // width
    return f"{stated}, rotary_embedding_dim = {part}, num_heads = {heads}"


def _by_plane(table: str) -> str:
    return f"""
        rows = Gather ({table}, positions)
        time = Gather (rows, 0)
        other = Gather (rows, 1)
        time = Where (height, other, time)
        other = Gather (rows, 2)
        {table} = Where (width, other, time)
    """


def _check(call: Call) -> None:
    if call.integer("is_packed_batching"):
        call.refuse("has is_packed_batching=1; supported is one row per sequence", AGAIN)
    if call.number("scale", 1.0) != 1:
        call.refuse(
            f"has scale={call.number('scale')}, which ONNX Runtime's own kernel ignores; supported is 1",
            "fold the scale into the cos and sin caches",
        )
    shape = call.shape("x")
    if shape is not None and len(shape) not in (3, 4):
        call.refuse(f"rotates '{call.name('x')}' {list(shape)}; supported are ranks 3 and 4", SHAPES)
