"""Memory that a verification takes, computed before anything is opened.

Weights of float32 and integers stay in their files, which the operating system maps: they take no memory that it could
not take back. What ONNX Runtime 1.31.1 does with others was measured on decoders of 0.6 to 1.7 GB:

    float16         no products on the CPU: converted to float32 once, which takes 2.6 times their size, or at each
                    step, one weight at a time, which makes a step 2 to 3 times as long (0.8 s of processor time for
                    1.35 GB; products read as float32 from a file would take 0.3 s, and twice their size in memory
                    that the system keeps of files: with less, each step would read them from the disk)
    bfloat16        nothing at all: its float32 twin is a file (`trt_kvcache.verify.twin`)
    MatMulNBits     packs its weights into as many bytes; without that a step takes 40 times as long
    experts         of 4 or 8 bits, all those of a layer become floats in each step, and those that are chosen once more
                    each time they are moved or scaled: 3.4 times the larger of both weights in float32 (64 experts, 64
                    tokens), in float16 4.1 times
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from onnx import ModelProto, TensorProto

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.importer.protos import byte_size, is_op, iter_scopes, iter_tensors
from trt_kvcache.importer.steps.contents import CacheTensor, numpy_dtype
from trt_kvcache.machine import free_memory, memory

_CONVERTED = 2.7  # of the bytes of float16 weights
_EXPERTS_RANK = 3  # [E, rows, columns]
_UNPACKED = 4.2  # of the bytes of experts in float32
_SHARE = 0.8  # of the memory that is free: other programs want some, too
_RESERVE = 256 << 20  # bytes, for engines and graphs
_COPIES = 3  # of all caches: before and after a step, and what the heap keeps of earlier ones
_WORKING = 6  # copies of the largest cache in float32 that ONNX Runtime and the comparison have at a time
_LOGITS = 32  # bytes for each number of a step's logits: those of both models, and as float64
_SCORES = 12  # bytes for each attention score: three in float32


@dataclass(frozen=True)
class Weights:
    """The weights of a model, in bytes.

    Attributes:
        size: of all.
        half: of those of float16.
        largest: of the largest of these.
        packed: engines need a copy, packed for products.
        rounds: the model rounds what it computes (QuantizeLinear), not only its weights.
        experts: the largest weight of experts that a step dequantizes, in float32.
    """

    size: int
    half: int
    largest: int
    packed: bool
    rounds: bool = False
    experts: int = 0

    @property
    def converted(self) -> int:
        """The bytes that converting all float16 weights once takes."""
        return int(_CONVERTED * self.half)

    @property
    def least(self) -> int:
        """The least bytes of a session: a packed copy; the largest weight in float32, and transposed; experts."""
        return (self.size if self.packed else 0) + 4 * self.largest + int(_UNPACKED * self.experts)


def weigh(model: ModelProto) -> Weights:
    """The weights of a model."""
    sizes = [(byte_size(t) or 0, t.data_type == TensorProto.FLOAT16) for t in iter_tensors(model)]
    halves = [size for size, half in sizes if half]
    operators = {node.op_type for scope in iter_scopes(model) for node in scope.node}
    packed, rounds = "MatMulNBits" in operators, "QuantizeLinear" in operators
    dequantized = {node.input[0] for node in model.graph.node if is_op(node, "DequantizeLinear")}
    stacked = [t.dims for t in model.graph.initializer if t.name in dequantized and len(t.dims) == _EXPERTS_RANK]
    experts = 4 * max(map(math.prod, stacked), default=0)
    return Weights(sum(size for size, _ in sizes), sum(halves), max(halves, default=0), packed, rounds, experts)


@dataclass(frozen=True)
class Needs:
    """Bytes that a verification takes beside weights.

    Attributes:
        caches: per row of the batch.
        step: per row of the batch, for logits, scores and what else a step computes.
        fixed: whatever the batch.
    """

    caches: int
    step: int
    fixed: int

    def total(self, batch: int) -> int:
        """For `batch` rows."""
        return batch * (self.caches + self.step) + self.fixed

    def rows(self, free: int) -> int:
        """Rows that `free` bytes are enough for."""
        return max(0, (free - self.fixed) // max(self.caches + self.step, 1))


def needs(
    plan: CachePlan, caches: Sequence[CacheTensor], weights: Sequence[Weights], longest: int, *, twin: bool
) -> Needs:
    """The memory that is needed, from sizes alone.

    Args:
        plan: of the model.
        caches: what is carried from step to step.
        weights: of the two models, of which one is open at a time.
        longest: tokens of the longest step.
        twin: bfloat16 is held as float32.
    """
    one = cache_bytes(caches, 1, twin=twin)
    largest = max((cache_bytes([c], 1, twin=True) for c in caches), default=0)
    vocabulary = max((_last(t.shape) for t in plan.tensors if t.io == "output" and t.role is Role.LOGITS), default=0)
    heads = max((a.query_heads for a in plan.attention if isinstance(a.query_heads, int)), default=0)
    capacity = max(c.capacity for c in plan.caches)
    step = _WORKING * largest + longest * (_LOGITS * vocabulary + _SCORES * heads * capacity)
    # An original whose interface changed runs row by row, on copies of what a row holds.
    fixed = _RESERVE + max(w.least for w in weights) + (2 * one if plan.original else 0)
    return Needs(_COPIES * one, step, fixed)


def fit(need: Needs, weights: Sequence[Weights], wanted: int, least: int) -> tuple[int, int, list[str]]:
    """Rows of the batch that fit into memory, what is left then for weights that engines convert, and what to tell.

    Args:
        need: of the verification.
        weights: of the two models.
        wanted: rows asked for.
        least: rows that it cannot do without.

    Raises:
        OptionError: not even these fit.
    """
    free = spare()
    if need.rows(free) < least:
        raise OptionError(
            f"verification takes {need.total(least) / 1e9:.1f} GB of memory beside weights that stay in files "
            f"({least * need.caches / 1e9:.1f} GB for the caches of {least} sequence(s), "
            f"{least * need.step / 1e9:.1f} GB for a step, {need.fixed / 1e9:.1f} GB for the engine and what it "
            f"converts), and {free / 1e9:.1f} of this machine's {memory() / 1e9:.1f} GB are to be had; verify with "
            "a smaller capacity or shorter chunks, or free memory that other programs hold"
        )
    batch = min(wanted, need.rows(free))
    left = free - need.total(batch)
    notes = []
    converted = max(w.converted for w in weights)
    if converted > left:
        notes.append(
            "each step converts the float16 weights anew: "
            f"{converted / 1e9:.1f} GB for all of them at once would not fit into memory"
        )
    if max(w.size for w in weights) > left:
        notes.append("weights do not fit into memory beside the rest: steps read them from their files")
    if batch < wanted:
        notes.append(f"batch {batch} instead of {wanted}: more caches would not fit into memory")
    return batch, left, notes


def _last(shape: Sequence[int | str]) -> int:
    return shape[-1] if shape and isinstance(shape[-1], int) else 0


def spare() -> int:
    """Bytes that may be taken: a share of what is free."""
    return int(_SHARE * free_memory())


def give_back() -> None:
    """Returns what is free in the heap to the system: arrays of less than 32 MiB lie there, between others."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # of glibc alone
            ctypes.CDLL(None).malloc_trim(0)


def cache_bytes(caches: Sequence[CacheTensor], batch: int, *, twin: bool) -> int:
    """Bytes of one copy of all caches."""
    return sum(math.prod(c.logical_shape(batch)) * numpy_dtype(c.role.dtype, twin=twin).itemsize for c in caches)
