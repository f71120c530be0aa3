"""TensorScatter and Attention in plain numpy, from the text of the operator pages: what tests compare against.

Sources: https://onnx.ai/onnx/operators/onnx__TensorScatter.html and
https://onnx.ai/onnx/operators/onnx__Attention.html (versions 24 and 25).
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def tensor_scatter(
    past: Array, update: Array, write_indices: Array | None = None, axis: int = -2, mode: str = "linear"
) -> Array:
    """The present cache: `past` with each row's `update` written from its write index on, along `axis`."""
    present = past.copy()
    axis %= past.ndim
    capacity = past.shape[axis]
    for row in range(past.shape[0]):
        start = 0 if write_indices is None else int(write_indices[row])
        for step in range(update.shape[axis]):
            position = start + step
            if mode == "circular":
                position %= capacity
            assert 0 <= position < capacity, "a linear update has to fit"
            target = (row, *(slice(None) for _ in range(axis - 1)), position)
            source = (row, *(slice(None) for _ in range(axis - 1)), step)
            present[target] = update[source]
    return present


def packed_scatter(past: Array, update: Array, write_indices: Array | None, lengths: Array) -> Array:
    """The present cache `[B, N, S_max, H]` after a packed update `[T, N, H]` with cumulative `lengths` `[B + 1]`."""
    present = past.copy()
    for row in range(past.shape[0]):
        start = 0 if write_indices is None else int(write_indices[row])
        for token in range(int(lengths[row]), int(lengths[row + 1])):
            present[row, :, start + token - int(lengths[row])] = update[token]
    return present


def split_heads(tensor: Array, heads: int) -> Array:
    """`[B, S, N*H]` as `[B, N, S, H]`."""
    batch, length, hidden = tensor.shape
    return tensor.reshape(batch, length, heads, hidden // heads).transpose(0, 2, 1, 3)


def visible_keys(
    batch: int, queries: int, keys: int, lengths: Array | None, causal: bool, left: int = -1, right: int = -1
) -> NDArray[np.bool_]:
    """Which keys each query sees, `[B, 1, S_q, S_kv]`: valid length, causal frontier and window; not the mask input."""
    seen = np.ones((batch, 1, queries, keys), bool)
    for b in range(batch):
        valid = keys if lengths is None else int(lengths[b])
        offset = 0 if lengths is None else valid - queries
        for i in range(queries):
            position = offset + i
            for j in range(keys):
                seen[b, 0, i, j] = (
                    j < valid
                    and (not causal or j <= position)
                    and (left < 0 or j >= position - left)
                    and (right < 0 or j <= position + right)
                )
    return seen


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    lengths: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: int = 0,
    softcap: float = 0.0,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int | None = None,
) -> tuple[Array, Array]:
    """`Y` and `qk_matmul_output` of one Attention node, computed in float64.

    `softmax_precision` changes rounding only, which float64 does not show.
    """
    del softmax_precision
    dtype, flat = query.dtype, query.ndim == 3
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    if flat:
        q = split_heads(q, q_num_heads)
        k, v = split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    group = heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = [q @ k.transpose(0, 1, 3, 2) * (size**-0.5 if scale is None else scale)]
    scores.append(softcap * np.tanh(scores[0] / softcap) if softcap else scores[0])
    seen = visible_keys(batch, queries, keys, lengths, bool(is_causal), left_window_size, right_window_size)
    bias = np.where(seen, 0.0, -np.inf)
    if mask is not None:
        given = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
        short = keys - given.shape[-1]
        if short > 0:
            given = np.concatenate([given, np.full((*given.shape[:-1], short), -np.inf)], axis=-1)
        bias = bias + given
    scores.append(scores[1] + bias)
    top = np.max(scores[2], axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores[2] - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    scores.append(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0))
    # Rows that no query may see can hold anything, even what times zero is not zero.
    y = scores[3] @ np.where(np.isfinite(v), v, 0.0)
    if flat:
        y = y.transpose(0, 2, 1, 3).reshape(batch, queries, -1)
    return y.astype(dtype), scores[qk_matmul_output_mode].astype(dtype)
