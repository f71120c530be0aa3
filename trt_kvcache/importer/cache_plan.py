"""The plan: all changes to a model, as plain data that can be printed, and converted to and from JSON.

The rewrite, the network patch, the manifest and the runtime take all decisions from `CachePlan`. This module imports
neither ONNX nor TensorRT.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from math import prod

from trt_kvcache.importer.plan_options import CacheDtype as CacheDtype
from trt_kvcache.importer.plan_options import CacheLayout as CacheLayout
from trt_kvcache.importer.plan_options import Fallback as Fallback
from trt_kvcache.importer.plan_options import LogitPositions as LogitPositions
from trt_kvcache.importer.plan_options import PlanOptions as PlanOptions
from trt_kvcache.importer.plan_options import Sliding as Sliding
from trt_kvcache.importer.plan_options import Target as Target
from trt_kvcache.messages import human_bytes
from trt_kvcache.page import Html, table, tag

Dim = int | str
"""A dimension: a fixed size, or the name of a symbol (``"?"`` if the model gives neither)."""


class OriginalRole(str, Enum):
    """The role of an input or output of the exported model; in a plan only if inputs or outputs change."""

    TOKENS = "tokens"
    """Token ids or embeddings ``[B, S, ...]``."""
    POSITIONS = "positions"
    """Position of every new token: ``P + arange(S)``, as ``[S]``, ``[1, S]`` or ``[B, S]``."""
    PADDING_MASK = "padding_mask"
    """Ones for every token of the past and of the update: integer or bool ``[B, P + S]``."""
    PAST_LENGTH = "past_length"
    """Number of tokens in the cache before the step: ``P``, as a scalar or one number for each sequence."""
    MASK = "mask"
    """A mask from the caller over all rows of a cache: ``[B, 1, S, L]``."""
    GROWING_CACHE = "growing_cache"
    """A cache with ``P`` rows as input, ``P + S`` rows as output; fewer if it keeps only the newest rows."""
    FIXED_CACHE = "fixed_cache"
    """A cache of fixed capacity: input and output have the same length."""
    CONSTANT = "constant"
    """An input that the caller gives once, such as the output of an encoder, or keys and values from it."""
    STATE = "state"
    """State of fixed shape that every step replaces."""
    SWITCH = "switch"
    """Only in exports that merge two branches (first step, later steps): chooses one, or serves only the first."""
    LOGITS = "logits"
    OTHER = "other"


@dataclass(frozen=True)
class InterfaceChange:
    """An input or output that the rewrite changes, adds or removes, with the reason.

    Attributes:
        io: ``"input"`` or ``"output"``.
        old: name and shape in the exported model, such as ``"attention_mask [batch, P + S]"``; empty if it was added.
        new: name and shape in the rewritten model; empty if it was removed.
        why: what replaces the input or output, or what the caller gives instead.
    """

    io: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class OriginalTensor:
    """One input or output of the exported model. Plans have it only if the rewrite changes the interface.

    Attributes:
        io: ``"input"`` or ``"output"``.
        shape: shape in the exported model: fixed sizes and symbols.
        axes: the meaning of each axis: ``"batch"``, ``"sequence"`` (S), ``"past"`` (P), ``"total"`` (P + S),
            ``"capacity"``, or ``""``.
        window_rows: W if a cache keeps only the newest W rows; None: it keeps all. The past has ``min(P, W)`` rows, the
            present ``min(P + S, W)`` rows, and the cache's padding mask ``min(P, W) + S`` columns. If the axis of rows
            has a fixed size, all three have that size. Then every step shifts the rows, so that the newest tokens are
            in the last rows.
        on: for an input of role `OriginalRole.SWITCH`, the value that chooses the branch that reads caches.
    """

    name: str
    io: str
    role: OriginalRole
    dtype: str
    shape: tuple[Dim, ...]
    axes: tuple[str, ...]
    window_rows: int | None = None
    on: bool = True


@dataclass(frozen=True)
class StateUpdate:
    """A state tensor, for example of a convolution or linear attention. Every step replaces all of it.

    Attributes:
        past, present: names of the graph input and output, which have the same dtype and shape.
        reason: why past and present need two buffers.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[Dim, ...]
    reason: str


@dataclass(frozen=True)
class AdapterPart:
    """The columns ``start .. stop - 1`` of a MatMul's result; one module of the checkpoint computes these columns."""

    module: str
    start: int
    stop: int


@dataclass(frozen=True)
class AdapterProduct:
    """A MatMul ``y = x W`` of the model, to which the adapter's ``(x A[slot]) B[slot]`` is added.

    Attributes:
        a: name of the input A ``[slots + 1, inputs, rank]``.
        b: name of the input B ``[slots + 1, rank, outputs]``.
        dtype: ONNX name of the type of A and B.
        rank: the sum of the ranks of all modules in `parts` that may have an adapter.
        parts: the modules of the checkpoint that this MatMul computes. An adapter may change any of them.
        whole: name of the module that joins all parts, such as ``qkv_proj``. An adapter may change it instead of the
            parts. None if no such name is known.
        found_by: the evidence for these modules.
    """

    a: str
    b: str
    dtype: str
    rank: int
    inputs: int
    outputs: int
    parts: tuple[AdapterPart, ...]
    whole: str | None
    found_by: str


@dataclass(frozen=True)
class AdapterPlan:
    """The inputs of a model for LoRA adapters.

    Attributes:
        rank: rank of the largest adapter.
        slots: number of adapters that the inputs can hold, in slots 1 to `slots`. Slot 0 holds zeros: no adapter.
        index: name of the int64 input ``[B]``, the slot of each sequence.
        products: the MatMuls that adapters may change.
    """

    rank: int
    slots: int
    index: str
    products: tuple[AdapterProduct, ...]


class Route(str, Enum):
    """The way in which the engine updates a cache, with its guarantees, and who checks these."""

    NATIVE = "native"
    """TensorRT's IKVCacheUpdateLayer. In place: past and present share one device address.

    TensorRT enforces the alias, and the session compares it with the manifest. TensorRT drops a write outside the
    capacity without a message, so the runtime checks lengths (and `CacheUpdate.contract`) before every step.
    """

    PLUGIN = "plugin"
    """The project's own kernel.

    In place: the manifest declares the alias, because TensorRT does not report it, and the session binds the same
    address to both sides.
    """

    FUNCTIONAL = "functional"
    """Plain ONNX operators. Each step writes a whole new cache: past and present need two buffers.

    Chosen only if no update in place is possible, or on request; always with a warning.
    """


class UpdateMode(str, Enum):
    """The ``mode`` attribute of ONNX TensorScatter."""

    LINEAR = "linear"
    CIRCULAR = "circular"


class UpdateForm(str, Enum):
    """The layout of the new rows: padded ``[B, ..., S_new, ...]``, or packed ``[T, N, H]`` with lengths."""

    PADDED = "padded"
    PACKED_NHD = "packed_nhd"


class PhysicalLayout(str, Enum):
    """The order of a cache's bytes in the engine, compared with the model's logical shape."""

    AS_IS = "as-is"
    """Logical and physical shape are the same."""
    VIEW = "view"
    """The same bytes, declared as the 4-D shape ``[B, prod(before axis), S_max, prod(after axis)]``."""
    HEADS_MAJOR = "heads-major"
    """Bytes in another order: sequence-major ``[B, S_max, N, H]`` or ``[B, S_max, N*H]`` to ``[B, N, S_max, H]``."""


class AttentionKind(str, Enum):
    """The layers of TensorRT that an Attention node becomes."""

    FUSED = "fused"
    """IAttention with a dedicated kernel."""
    DECOMPOSED = "decomposed"
    """IAttention without a dedicated kernel: ``decomposable`` is set on the parsed network."""
    LOWERED = "lowered"
    """Plain MatMul, Softmax, MatMul: IAttention cannot express it."""


class Role(str, Enum):
    """The role of an input or output in a decode loop."""

    TOKENS = "tokens"
    POSITIONS = "positions"
    WRITE_INDICES = "write_indices"
    VALID_LENGTHS = "valid_lengths"
    UPDATE_LENGTHS = "update_lengths"
    MASK = "mask"
    CACHE = "cache"
    SPAN = "span"
    STATE = "state"
    CONSTANT = "constant"
    """Given once for each sequence: the output of an encoder, keys and values from it, or its mask."""
    ZEROS = "zeros"
    """Always 0, such as the token types of a text with only one type."""
    ADAPTER = "adapter"
    """The slot of each sequence's adapter; 0: no adapter."""
    ADAPTER_WEIGHTS = "adapter_weights"
    """The factors A or B of the adapters of one product, for all slots."""
    LOGITS = "logits"
    OTHER = "other"


@dataclass(frozen=True)
class UpdateContract:
    """A promise by the caller about how it updates a circular cache.

    The engine cannot check the promise: TensorRT would drop a wrong write without a message.

    Attributes:
        no_straddle: True if no update crosses the end of the cache: ``write_index mod capacity + S_new <= capacity``.
        max_update_length: most tokens of one update; None: not limited yet (builds set it, ``--max-chunk``).
    """

    no_straddle: bool
    max_update_length: int | None = None


@dataclass(frozen=True)
class CacheUpdate:
    """One cache of the model, and how the model writes it.

    Semantics: https://onnx.ai/onnx/operators/onnx__TensorScatter.html and the TensorRT header of IKVCacheUpdateLayer.

    Attributes:
        node: name of the node that updates the cache.
        past, present: names of the cache before and after the update; if in place, a graph input and a graph output.
        update: name of the tensor ``[B, ..., S_new, ...]`` that is written (``[T, N, H]`` if packed).
        write_indices: name of the tensor, int64 ``[B]``, with the first row of each write; None: zeros.
        update_lengths: name of the cumulative lengths ``[B + 1]`` of a packed update; else None.
        dtype: ONNX name in lower case, such as ``"float16"`` or ``"bfloat16"``.
        logical_shape: the shape of the cache in the model, with the capacity filled in.
        sequence_axis: the axis of the tokens in `logical_shape`, never negative.
        physical_shape: shape of the engine's input and output; `physical_sequence_axis` is its sequence axis.
        update_length: ``S_new``: the number of new tokens, as a size or a symbol.
        contract: what the caller promises about updates of a circular cache; None: nothing.
        readers: names of the Attention nodes that read `present`.
        carried: True if past is a graph input and present a graph output, so the caller passes the cache on to each
            step.
        idiom: the operator with which the exported model writes this cache, such as ``"Concat"``.
    """

    node: str
    past: str
    present: str
    update: str
    write_indices: str | None
    update_lengths: str | None
    dtype: str
    logical_shape: tuple[Dim, ...]
    sequence_axis: int
    physical_shape: tuple[Dim, ...]
    physical_sequence_axis: int
    layout: PhysicalLayout
    mode: UpdateMode
    form: UpdateForm
    update_length: Dim
    capacity: int
    route: Route
    reason: str
    contract: UpdateContract | None = None
    readers: tuple[str, ...] = ()
    carried: bool = True
    idiom: str = "TensorScatter"

    @property
    def in_place(self) -> bool:
        """True if past and present share one buffer."""
        return self.route is not Route.FUNCTIONAL


@dataclass(frozen=True)
class Mask:
    """One attention mask. The graph computes it once for all Attention nodes that have this mask.

    Query ``i`` of sequence ``b`` sees key ``j`` if all these conditions hold. With lengths: ``j < lengths[b]``. If
    causal: ``j <= i + offset`` with ``offset = lengths[b] - S_q`` (0 without lengths). With windows: ``i + offset -
    left <= j <= i + offset + right``. If the model has a mask of its own (`mask`), that mask must not hide the key.

    Attributes:
        name: name of the mask tensor in the rewritten graph.
        causal: True if the mask is causal, aligned to the bottom right.
        lengths: name of the int64 ``[B]`` tensor of valid keys, or None.
        left_window, right_window: keys before and after the query's own; -1: unlimited (as in Attention of opset 25).
        mask: name of the model's own mask tensor, or None.
        additive: True if the result is a float bias; else it is bool (True = visible).
        span: name of the added input whose length is the number of keys to read; None: all keys.
        guarded: True if results of queries that see no key are set to zero, as ONNX defines.
    """

    name: str
    causal: bool
    lengths: str | None
    left_window: int
    right_window: int
    mask: str | None
    additive: bool
    span: str | None
    guarded: bool


@dataclass(frozen=True)
class AttentionPlan:
    """How one Attention node is computed.

    Attributes:
        caches: for each cache that this attention reads, the name of its past.
        mask: name of the `Mask`; None if no mask is needed.
        keys: how many keys are read: ``"span"`` (`SpanInput`), ``"mask"`` (as many as the model's own mask has) or
            ``"all"``.
    """

    node: str
    dtype: str
    query_heads: Dim
    kv_heads: Dim
    head_size: Dim
    value_head_size: Dim
    kind: AttentionKind
    reason: str
    caches: tuple[str, ...] = ()
    mask: str | None = None
    keys: str = "all"


@dataclass(frozen=True)
class SpanInput:
    """An added int64 input ``[span]``: 0, 1, ..., span - 1. Its *shape* says how many cache rows a step reads.

    The result is the same for every span from the longest valid length of the batch up to the capacity. The contents
    never change, so one constant device buffer serves every step.
    """

    name: str
    symbol: str
    capacity: int
    lengths: str


@dataclass(frozen=True)
class LogitsSpan:
    """An added int64 input ``[span]``. Its *shape* says how many of a step's last positions get logits.

    The number is 1 to S, the tokens of the step; a larger number means S. The contents of the input do not matter.

    Attributes:
        output: name of the logits, ``[B, span, V]``.
        tensor: name of the tensor ``[B, S, ...]`` of which only the last positions are kept.
        axis: axis of the positions in this tensor.
        readers: names of the nodes that read the last positions. Other nodes read the whole tensor.
    """

    name: str
    symbol: str
    output: str
    tensor: str
    axis: int
    readers: tuple[str, ...]


@dataclass(frozen=True)
class TensorRole:
    """The role of one graph input or output.

    Attributes:
        io: ``"input"`` or ``"output"`` of the rewritten model.
        shape: shape in the rewritten model.
        found_by: the evidence for the role: ``"graph: ..."``, ``"config: ..."`` or ``"added"``.
        axes: the meaning of each dynamic dimension: ``"batch"``, ``"sequence"`` (S_new), ``"span"``, ``"kept"``
            (positions with logits), ``"tokens"`` (packed T), ``"batch+1"``, ``"keys"`` (length of a mask),
            ``"encoder"`` (length of the encoder's output), or ``"?"`` if unknown. ``""`` if the size is fixed.
    """

    name: str
    io: str
    role: Role
    dtype: str
    shape: tuple[Dim, ...]
    found_by: str
    axes: tuple[str, ...]

    @property
    def embedded(self) -> bool:
        """True if tokens are embeddings ``[..., H]``, not ids."""
        return self.role is Role.TOKENS and "int" not in self.dtype


@dataclass(frozen=True, repr=False)
class CachePlan:
    """The plan of a model: all changes to caches, attention, inputs and outputs.

    Attributes:
        schema_version: version of this data, written into JSON.
        opset: the model's opset of ONNX's own domain.
        warnings: facts that the user should know before a build.
        notes: facts about the rewrite, such as the memory that a circular window saves.
        changes: inputs and outputs that the rewrite changes, adds or removes.
        original: inputs and outputs of the exported model; empty if TensorScatter already wrote its caches.
        states: tensors of fixed size that each step replaces; attention caches do not count.
        logits_span: the input that chooses the number of positions with logits; None: the same as in the export.
        prefill_in_one_step: True if the tokens of a step depend on each other. Then a whole prompt must be one step.
        adapters: inputs for LoRA adapters, and the MatMuls that they change; None: the model takes no adapters.
        weights: bytes of weights that a step with one token reads (of lookup tables, only the rows for this token);
            0: not known.
    """

    options: PlanOptions
    opset: int
    caches: tuple[CacheUpdate, ...]
    attention: tuple[AttentionPlan, ...]
    masks: tuple[Mask, ...]
    spans: tuple[SpanInput, ...]
    tensors: tuple[TensorRole, ...]
    warnings: tuple[str, ...] = ()
    inlined: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    changes: tuple[InterfaceChange, ...] = ()
    original: tuple[OriginalTensor, ...] = ()
    states: tuple[StateUpdate, ...] = ()
    logits_span: LogitsSpan | None = None
    prefill_in_one_step: bool = False
    adapters: AdapterPlan | None = None
    weights: int = 0
    schema_version: int = field(default=1)

    def __repr__(self) -> str:
        return f"<CachePlan: {self.in_place_text}, {human_bytes(self.cache_bytes())} per sequence>"

    def _repr_html_(self) -> Html:
        columns = ("caches", "shape", "dtype", "mode", "idiom", "route", "why")
        alike = Counter(
            (str(list(c.physical_shape)), c.dtype, c.mode.value, c.idiom, c.route.value, c.reason) for c in self.caches
        )
        rows = [(count, *cells) for cells, count in alike.items()]
        return tag("div", tag("p", repr(self)[1:-1]), table(columns, rows))

    @property
    def in_place_text(self) -> str:
        """The number of caches that are updated in place: ``"64 of 64 caches in place"``."""
        count = sum(cache.in_place for cache in self.caches)
        return f"{count} of {len(self.caches)} caches in place" if self.caches else "no caches"

    def cache_bytes(self, batch: int = 1) -> int:
        """Return the bytes of all caches and states for `batch` sequences; those not updated in place count twice."""
        caches = sum(cache_bytes(c, batch) * (1 if c.in_place else 2) for c in self.caches if c.carried)
        return caches + sum(2 * _bytes(s.dtype, s.shape, batch) for s in self.states)

    def adapter_bytes(self) -> int:
        """Return the bytes of one adapter's weights in an engine. An engine holds `slots` + 1 adapters of this size."""
        products = () if self.adapters is None else self.adapters.products
        return sum((p.inputs + p.outputs) * p.rank * _BITS[p.dtype] // 8 for p in products)

    @property
    def double_buffered(self) -> dict[str, str]:
        """Map present to past, for caches and states that are not updated in place and so need two buffers."""
        caches = {c.present: c.past for c in self.caches if c.carried and not c.in_place}
        return caches | {s.present: s.past for s in self.states}

    def tensor(self, role: Role, io: str = "input") -> TensorRole | None:
        """Return the only input or output with this role; None if there is no such tensor, or more than one."""
        matches = [t for t in self.tensors if t.role is role and t.io == io]
        return matches[0] if len(matches) == 1 else None


TENSORRT_DTYPES = {
    "float": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int8": "INT8", "uint8": "UINT8", "int32": "INT32",
    "int64": "INT64", "bool": "BOOL", "float8e4m3fn": "FP8", "int4": "INT4", "float4e2m1": "FP4",
}  # fmt: skip
"""TensorRT's names of the ONNX dtypes that inputs and outputs of its engines may have."""

_BITS = {
    "float": 32, "float16": 16, "bfloat16": 16, "double": 64, "int8": 8, "uint8": 8, "bool": 8, "int16": 16,
    "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64, "int4": 4, "uint4": 4, "float4e2m1": 4,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8,
    "complex64": 64, "complex128": 128,
}  # fmt: skip


def dtype_bits(dtype: str) -> int:
    """Return the number of bits of an ONNX dtype."""
    return _BITS[dtype]


def cache_bytes(cache: CacheUpdate, batch: int) -> int:
    """Return the bytes of one buffer of a cache for `batch` sequences, or for the batch that the model fixes."""
    return _bytes(cache.dtype, cache.physical_shape, batch)


def _bytes(dtype: str, shape: tuple[Dim, ...], batch: int) -> int:
    count = shape[0] if isinstance(shape[0], int) else batch
    return (count * prod(d for d in shape[1:] if isinstance(d, int)) * _BITS[dtype] + 7) // 8
