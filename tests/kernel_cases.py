"""Generated launches of the cache-update kernel, each with the outputs that the numpy reference gives."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from host_kernel import Launch
from numpy.typing import NDArray
from reference import tensor_scatter

from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import ELEMENT_BITS, KernelConfig, Quantization, Shapes, launch_params

Array = NDArray[np.generic]

GARBAGE = 0xCD
"""What the host's new buffers hold."""

FAR = [2**32, 2**32 + 1, -(2**32), 3 * 2**40 + 2, -(2**62) - 3]
"""Integers that are small ones, or others, once 32 bits are left of them."""

FLOATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float": np.dtype(np.float32)}


def all_kernels() -> Iterator[KernelConfig]:
    """One configuration for each kernel that the importer can ask for: 56."""
    quantizations = [None, *itertools.starmap(Quantization, itertools.product(FLOATS, ("int8", "float8e4m3fn")))]
    for form, mode, caches, quantization in itertools.product(UpdateForm, UpdateMode, (1, 2), quantizations):
        lengths = "int32" if form is UpdateForm.PACKED_NHD else None
        yield KernelConfig(8, form, mode, caches, "int64", lengths, quantization)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A launch, the bytes expected in each output, and what to say where they differ."""

    launch: Launch
    expected: tuple[bytes, ...]
    about: str


def quantize_linear(x: Array, scale: Array, target: str) -> Array:
    """ONNX QuantizeLinear with float32 `scale` (broadcast) and zero point 0, saturating, as bytes."""
    with np.errstate(all="ignore"):
        quotient = np.asarray(x.astype(np.float32) / scale, np.float32)
        if target == "int8":
            whole = np.where(np.isnan(quotient), np.float32(-128), np.rint(quotient))
            return np.clip(whole, -128, 127).astype(np.int8).view(np.uint8)
        return np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def refused(first: int, start: int, end: int, limit: int, capacity: int, mode: UpdateMode) -> bool:
    """True if a sequence's update is not written: bad lengths, or rows that a linear cache does not have."""
    if not 0 <= start <= end <= limit:
        return True
    return end > start and mode is UpdateMode.LINEAR and not 0 <= first <= capacity - (end - start)


def varied(rng: np.random.Generator, config: KernelConfig) -> KernelConfig:
    """The same kernel with other element sizes and integer types, which are arguments."""
    bits = int(rng.choice(ELEMENT_BITS)) if config.quantization is None else 8
    types = ["int32", "int64"]
    lengths = str(rng.choice(types)) if config.length_type else None
    return replace(config, element_bits=bits, index_type=str(rng.choice(types)), length_type=lengths)  # type: ignore[arg-type]


def make_case(rng: np.random.Generator, config: KernelConfig) -> Case:
    """One launch of a kernel over random sizes, contents, indices and addresses."""
    q = config.quantization
    bits = config.element_bits
    logical, axis = _logical_shape(rng, config)
    batch, heads = logical[0], int(np.prod(logical[1:axis]))
    capacity, size = logical[axis], int(np.prod(logical[axis + 1 :]))
    config = replace(config, quantization=replace(q, per_head=bool(rng.integers(2)))) if q else config
    indices_type = np.dtype(config.index_type)
    lengths_type = np.dtype(config.length_type or "int64")
    longest = int(rng.choice([1, 1, 2, capacity, capacity + 1, rng.integers(0, 2 * capacity + 1)]))
    spans, lengths, length = _lengths(rng, config, batch, longest)
    indices = _indices(rng, config, batch, capacity, max([longest, 1])).astype(indices_type)
    caches, updates, scales, presents = [], [], [], []
    sizes = [size] + [int(rng.integers(1, 5)) * 2] * (config.caches - 1)
    for i, elements in enumerate(sizes):
        shape = logical if i == 0 else (batch, heads, capacity, elements)
        where = axis if i == 0 else 2
        cache = _random_cache(rng, shape, bits)
        packed = config.form is UpdateForm.PACKED_NHD
        update_shape = (length, heads, elements) if packed else (*shape[:where], length, *shape[where + 1 :])
        update = _random_update(rng, update_shape, bits, q)
        scale = _random_scale(rng, heads, config.quantization)
        presents.append(_reference(config, cache, update, scale, indices, spans, where, length))
        caches.append(cache)
        updates.append(update)
        scales.append(scale)
    inputs = [*caches, *updates, indices]
    if config.length_type is not None:
        inputs.append(lengths.astype(lengths_type))
    if q is not None:
        inputs += scales
    in_place = (rng.random() < 0.6) ^ (rng.random(config.caches) < 0.1)  # one of two, seldom
    launch = launch_params(config, Shapes(batch, heads, capacity, length, tuple(sizes)), copies=not in_place.all())
    # Each address on its own: caches, updates and outputs are aligned to their elements' bytes, and to no more.
    shifts = [_shift(rng, each // 8) for each in (bits, q.source_bits if q else bits, bits)]
    aliases = [i if in_place[i] else -1 for i in range(config.caches)]
    expected = [present.tobytes() for present in presents]
    grid = launch.grid if rng.random() < 0.7 else config.caches * int(rng.integers(1, 9))
    return Case(
        Launch(
            config,
            grid,
            launch.block,
            inputs,
            [shifts[i // config.caches] if i < 2 * config.caches else 0 for i in range(len(inputs))],
            launch.scalars,
            [len(x) for x in expected],
            aliases,
            shifts[2],
            bool(rng.integers(2)),
        ),
        tuple(expected),
        f"{config}, cache {logical} axis {axis}, heads of {sizes}, update of {length}, indices {indices}, "
        f"lengths {lengths}, in place {in_place}, shifts {shifts}, grid {grid}",
    )


def _logical_shape(rng: np.random.Generator, config: KernelConfig) -> tuple[tuple[int, ...], int]:
    """A cache's shape and sequence axis; rows end on a byte."""
    batch, heads, capacity = (int(rng.integers(1, n)) for n in (5, 7, 20))
    # Rows of few bytes and of many, of odd sizes and of sizes that 16-byte accesses like.
    size = int(rng.choice([2, 4, 6, 8, 16, 32, 48, 64, 80])) if rng.random() < 0.8 else int(rng.integers(1, 40)) * 2
    if config.element_bits >= 8 and rng.random() < 0.2:
        size += 1
    if rng.random() < 0.02:
        size, capacity = 2112, 3  # rows longer than a block moves at once
    if rng.random() < 0.02:
        batch, heads, size = int(rng.integers(129, 300)), 1, 2  # more sequences than threads
    form = 1 if config.form is UpdateForm.PACKED_NHD else int(rng.integers(4))
    if form == 0:
        return (batch, capacity, heads * size), 1
    if form == 2:
        return (batch, capacity, heads, size), 1
    if form == 3:
        return (batch, heads, 2, capacity, size), 3
    return (batch, heads, capacity, size), 2


def _shift(rng: np.random.Generator, element: int) -> int:
    """By how many bytes an address misses an alignment of 16: often none."""
    shift = 0 if rng.random() < 0.6 else int(rng.integers(1, 16))
    return shift - shift % max(element, 1)


def _lengths(
    rng: np.random.Generator, config: KernelConfig, batch: int, longest: int
) -> tuple[list[tuple[int, int]], NDArray[np.int64], int]:
    """The tokens of each sequence, from and to, the lengths tensor, and the update's length (S_new or T)."""
    counts = rng.integers(0, longest + 1, batch)
    far = FAR if config.length_type == "int64" else []
    if config.form is UpdateForm.PACKED_NHD:
        lengths = np.concatenate([[0], np.cumsum(counts)])
        length = int(lengths[-1]) + int(rng.choice([0, 0, 3]))  # more tokens than there are sequences for
        if rng.random() < 0.2:  # the first tokens belong to no sequence, or the first sequences lie before all tokens
            lengths += int(rng.integers(-longest, longest + 1))
        if rng.random() < 0.1:
            lengths[-1] = rng.choice([2**31 - 1, *(x for x in far if x > 0)])
        return list(itertools.pairwise(lengths.tolist())), lengths, max(length, 0)
    return [(0, longest)] * batch, np.zeros(0, np.int64), longest


def _indices(
    rng: np.random.Generator, config: KernelConfig, batch: int, capacity: int, longest: int
) -> NDArray[np.int64]:
    """Write indices: mostly good, some at the edges, some far out."""
    far = FAR if config.index_type == "int64" else []
    if config.mode is UpdateMode.CIRCULAR:
        near = rng.integers(-3 * capacity, 4 * capacity, batch)
    else:
        near = rng.integers(0, max(capacity - longest, 0) + 1, batch)
    wild = rng.choice([-1, capacity, capacity - 1, 1 - longest, 2**31 - 1, -(2**31), *far], batch)
    return np.where(rng.random(batch) < 0.15, wild, near)


def _random_cache(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> Array:
    """Any bytes, NaN and all; 4-bit elements as pairs."""
    if bits == 4:
        shape = (*shape[:-1], shape[-1] // 2)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * max(bits // 8, 1)), f"V{max(bits // 8, 1)}").reshape(shape)


def _random_update(rng: np.random.Generator, shape: tuple[int, ...], bits: int, q: Quantization | None) -> Array:
    if q is None:
        return _random_cache(rng, shape, bits)
    if rng.random() < 0.3:  # any bits: infinities, NaN, subnormal numbers
        dtype = FLOATS[q.source]
        return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    values = rng.normal(0, 40, shape) if rng.random() < 0.5 else rng.integers(-600, 600, shape) / 4  # many ties
    return values.astype(FLOATS[q.source])


def _random_scale(rng: np.random.Generator, heads: int, q: Quantization | None) -> NDArray[np.float32]:
    count = heads if q is not None and q.per_head else 1
    return rng.choice([1.0, 0.5, 0.25, 0.1, 3.0, 1e-3, float(rng.random()) + 1e-3], count).astype(np.float32)


def _reference(
    config: KernelConfig,
    cache: Array,
    update: Array,
    scale: NDArray[np.float32],
    indices: Array,
    spans: list[tuple[int, int]],
    axis: int,
    length: int,
) -> Array:
    """The present cache, sequence by sequence, by the reference of TensorScatter on the logical shape."""
    if config.quantization is not None:
        update = _quantized(config, cache, update, scale, axis)
    present = cache.copy()
    for b, (start, end) in enumerate(spans):
        if refused(int(indices[b]), start, end, length, cache.shape[axis], config.mode):
            continue
        if config.form is UpdateForm.PACKED_NHD:
            rows = update[start:end].swapaxes(0, 1)[None]
        else:
            rows = update[b : b + 1].take(range(start, end), axis)
        present[b : b + 1] = tensor_scatter(cache[b : b + 1], rows, indices[b : b + 1], axis, config.mode.value)
    return present


def _quantized(config: KernelConfig, cache: Array, update: Array, scale: NDArray[np.float32], axis: int) -> Array:
    """A quantized update; the heads are all dimensions between the batch and the sequence axis."""
    assert config.quantization is not None
    heads = int(np.prod(cache.shape[1:axis]))
    # Padded [B, N, S_new * H], packed [T, N, H].
    view = update.reshape(update.shape[0], heads, int(np.prod(update.shape)) // max(update.shape[0] * heads, 1))
    return quantize_linear(view, scale.reshape(1, -1, 1), config.quantization.target).view("V1").reshape(update.shape)
