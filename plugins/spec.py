"""Describes a cache-update kernel as plain data: its configuration, the order of its arguments, and its launch.

Shapes are those of the canonical view: caches ``[B, N, S_max, H]``; padded updates ``[B, N, S_new, H]``, packed updates
``[T, N, H]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode

IntegerType = Literal["int32", "int64"]

THREADS = 128
"""Threads in a block."""

BLOCKS_PER_MULTIPROCESSOR = 4
"""A hint for ptxas: at most 128 registers per thread. Without it, ptxas uses fewer and spills (sm_86, CUDA 13.5)."""

VECTOR_BYTES = 16
"""Bytes that one access moves, if rows and addresses allow it."""

VECTORS_PER_THREAD = 4
"""The number of accesses that a thread starts before it waits for the first one."""

HEADS_PER_THREAD = VECTORS_PER_THREAD
"""The number of heads of one packed token that a thread writes."""

BLOCK_BYTES = THREADS * VECTOR_BYTES * VECTORS_PER_THREAD
"""Bytes of the cache that one CUDA block writes at a time."""

ELEMENT_BITS = (4, 8, 16, 32, 64, 128)

_INTEGER_BYTES = {"int32": 4, "int64": 8}

_SOURCE_BITS = {"float16": 16, "bfloat16": 16, "float": 32}


@dataclass(frozen=True)
class Quantization:
    """Fused quantization on write: ``QuantizeLinear(update, scale)`` with float32 scales and zero point 0.

    Source of the semantics: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html (version 23 and later, whose
    division has the precision of the scale).

    Attributes:
        source: ONNX name of the update's type.
        target: ONNX name of the cache's type.
        per_head: one scale for each head ``[N]``; otherwise one for the tensor, ``[1]``.
    """

    source: Literal["float16", "bfloat16", "float"]
    target: Literal["int8", "float8e4m3fn"]
    per_head: bool = False

    def __post_init__(self) -> None:
        if self.source not in _SOURCE_BITS:
            raise OptionError(f"quantization from {self.source!r}: expected one of {', '.join(_SOURCE_BITS)}")
        if self.target not in ("int8", "float8e4m3fn"):
            raise OptionError(f"quantization to {self.target!r}: expected int8 or float8e4m3fn")

    @property
    def source_bits(self) -> int:
        """Bits of one element of the update."""
        return _SOURCE_BITS[self.source]


@dataclass(frozen=True)
class KernelConfig:
    """The properties in which cache-update kernels differ.

    Attributes:
        element_bits: bits of a cache element; without quantization, also of an element of the update. The kernel moves
            bytes, not numbers, so types of the same size share a kernel.
        form: layout of the updates: padded or packed.
        mode: linear or circular.
        caches: caches in one launch: 1, or 2 for a layer's K and V, which differ at most in head size.
        index_type: type of the write indices ``[B]``.
        length_type: type of the cumulative lengths ``[B + 1]`` of packed updates; None for padded updates.
        quantization: how the kernel quantizes on write; None: it does not.
    """

    element_bits: int
    form: UpdateForm = UpdateForm.PADDED
    mode: UpdateMode = UpdateMode.LINEAR
    caches: int = 1
    index_type: IntegerType = "int64"
    length_type: IntegerType | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if self.element_bits not in ELEMENT_BITS:
            raise OptionError(f"cache elements of {self.element_bits} bits: expected one of {ELEMENT_BITS}")
        if self.caches not in (1, 2):
            raise OptionError(f"{self.caches} caches in one launch: expected 1 or 2")
        if self.index_type not in ("int32", "int64"):
            raise OptionError(f"write indices of type {self.index_type!r}: expected int32 or int64")
        if self.length_type not in (None, "int32", "int64"):
            raise OptionError(f"lengths of type {self.length_type!r}: expected int32 or int64")
        if (self.form is UpdateForm.PACKED_NHD) != (self.length_type is not None):
            raise OptionError(
                "a packed update needs a type of its cumulative lengths [B + 1] (length_type); a "
                "padded update must not have one"
            )
        if self.quantization is not None and self.element_bits != 8:
            raise OptionError(f"quantization on write into elements of {self.element_bits} bits: expected 8")

    @property
    def name(self) -> str:
        """The entry function's name, a C identifier. Configurations with the same name have the same source.

        The kernel gets element size, integer types and number of scales as arguments, so the name leaves them out.
        """
        parts = ["kvcache", self.form.value.split("_")[0], self.mode.value]
        if self.quantization is not None:
            parts += [self.quantization.source, "to", self.quantization.target]
        parts.append("one" if self.caches == 1 else "two")
        return "_".join(parts)


@dataclass(frozen=True)
class Arguments:
    """The entry function's arguments, in the order in which TensorRT's AOT plugins pass them.

    Attributes:
        inputs: pointers, named as the plugin's inputs: ``cache_0[, cache_1], update_0[, update_1], write_indices,
            [lengths,] [scale_0[, scale_1]]``.
        scalars: int32 extra arguments: ``batch, heads, capacity, length`` (``S_new``, or ``T`` for a packed update),
            ``row_bytes_0[, row_bytes_1]`` (a cache row ``[H]``), ``index_bytes`` (one write index); with lengths, also
            ``length_bytes`` (one length); with quantization, also ``scale_step`` (0: one scale, 1: one for each head).
        outputs: pointers: ``present_0[, present_1]``.
    """

    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    outputs: tuple[str, ...]


def arguments(config: KernelConfig) -> Arguments:
    """Return the names of the arguments that a kernel's entry function takes, in order."""

    def each(name: str) -> list[str]:
        return [f"{name}_{i}" for i in range(config.caches)]

    inputs = [*each("cache"), *each("update"), "write_indices"]
    if config.length_type is not None:
        inputs.append("lengths")
    if config.quantization is not None:
        inputs += each("scale")
    scalars = ["batch", "heads", "capacity", "length", *each("row_bytes"), "index_bytes"]
    if config.length_type is not None:
        scalars.append("length_bytes")
    if config.quantization is not None:
        scalars.append("scale_step")
    return Arguments(tuple(inputs), tuple(scalars), tuple(each("present")))


@dataclass(frozen=True)
class Shapes:
    """The sizes of the tensors in one launch: integers, or symbolic sizes of TensorRT (``ShapeExpr``).

    `length` is ``S_new``, or ``T`` if packed; `head_sizes` are ``H`` of each cache, in elements. Code that computes
    with sizes uses only operators that both types have.
    """

    batch: Any
    heads: Any
    capacity: Any
    length: Any
    head_sizes: tuple[Any, ...]


@dataclass(frozen=True)
class LaunchParams:
    """The launch parameters: blocks and threads along x (y and z are 1), and the int32 `Arguments.scalars`."""

    grid: Any
    block: int
    scalars: tuple[Any, ...]


def launch_params(config: KernelConfig, shapes: Shapes, *, copies: bool = False) -> LaunchParams:
    """Return the launch parameters of a kernel for tensors of these sizes, as expressions of the sizes.

    The kernel is correct with any grid, and fast with this one. `copies`: True if outputs and caches are different
    buffers. Then the grid follows the size of the cache, otherwise the size of the update. Raises `OptionError` for an
    unsupported size.
    """
    if len(shapes.head_sizes) != config.caches:
        raise OptionError(
            f"got {len(shapes.head_sizes)} head sizes for {config.caches} caches: give one for each cache"
        )
    rows = tuple(_row_bytes(config.element_bits, size) for size in shapes.head_sizes)
    planes, heads = shapes.batch * shapes.heads, (shapes.heads + (HEADS_PER_THREAD - 1)) // HEADS_PER_THREAD
    if copies:
        blocks = planes * _blocks(shapes.capacity * rows[0], BLOCK_BYTES)
    elif config.form is UpdateForm.PADDED:
        blocks = planes * _blocks(shapes.length * rows[0], BLOCK_BYTES)
    else:
        blocks = heads * _blocks(shapes.length * rows[0], THREADS * VECTOR_BYTES)
    grid = blocks * config.caches
    scalars = (shapes.batch, shapes.heads, shapes.capacity, shapes.length, *rows)
    for value in (*scalars, grid):
        if isinstance(value, int) and not 0 <= value < 2**31:
            raise OptionError(f"a launch of {grid} blocks over {shapes}: sizes and blocks have to be below 2^31")
    options = [_INTEGER_BYTES[kind] for kind in (config.index_type, config.length_type) if kind is not None]
    if config.quantization is not None:
        options.append(1 if config.quantization.per_head else 0)
    return LaunchParams(grid, THREADS, (*scalars, *options))


def _row_bytes(bits: int, size: Any) -> Any:
    if bits % 8 == 0:
        return size * (bits // 8)
    if isinstance(size, int) and size * bits % 8:
        raise OptionError(
            f"rows of {size} elements of {bits} bits do not end at a full byte: the number of elements must be even"
        )
    return size * bits // 8


def _blocks(size: Any, each: int) -> Any:
    # This is one block too many if `each` divides the size. In return, the result is never zero, and no intermediate
    # number is negative.
    return size // each + 1
