"""The plan of all changes to a model: plain data, printable, and convertible to and from JSON.

`CachePlan` is the dry run of a build. Rewrite, network patch, manifest and runtime follow it, and never repeat its
decisions. Nothing here imports ONNX or TensorRT.
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
"""A dimension: a fixed size, or the name of a symbol (``"?"`` where the model gives neither)."""


class OriginalRole(str, Enum):
    """The role of an input or output of the exported model, if normalization changes the interface."""

    TOKENS = "tokens"
    """Token ids or embeddings ``[B, S, ...]``."""
    POSITIONS = "positions"
    """Position of every new token: ``P + arange(S)``, as ``[S]``, ``[1, S]`` or ``[B, S]``."""
    PADDING_MASK = "padding_mask"
    """Ones for every token of the past and of the update: integer or bool ``[B, P + S]``."""
    PAST_LENGTH = "past_length"
    """Number of tokens in the cache before the step: ``P``, a scalar or one number per sequence."""
    MASK = "mask"
    """The caller's own mask over every row of a cache: ``[B, 1, S, L]``."""
    GROWING_CACHE = "growing_cache"
    """A cache with ``P`` rows in, ``P + S`` rows out; or with fewer rows, if it keeps only the newest."""
    FIXED_CACHE = "fixed_cache"
    """A cache of fixed capacity, the same length in and out."""
    CONSTANT = "constant"
    """Given once, and then constant, such as the output of an encoder or its keys and values."""
    STATE = "state"
    """State of fixed shape that every step replaces."""
    SWITCH = "switch"
    """Chooses between the branches of a merged export; or all ones, and only the branch without a past reads it."""
    LOGITS = "logits"
    OTHER = "other"


@dataclass(frozen=True)
class InterfaceChange:
    """An input or output of the model as exported that changes or disappears.

    Attributes:
        io: ``"input"`` or ``"output"``.
        old: name and shape in the exported model, such as ``"attention_mask [batch, P + S]"``; empty: it is new.
        new: name and shape in the rewritten model; empty: it was removed.
        why: what replaces it, or what the caller gives instead.
    """

    io: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class OriginalTensor:
    """One input or output of the model as exported, where normalization changed the interface.

    Attributes:
        io: ``"input"`` or ``"output"``.
        shape: shape in the exported model: fixed sizes and symbols.
        axes: what each axis is: ``"batch"``, ``"sequence"`` (S), ``"past"`` (P), ``"total"`` (P + S),
            ``"capacity"``, or ``""``.
        window_rows: for a growing cache that keeps only this many newest rows: it has ``min(P, rows)`` rows in and
            ``min(P + S, rows)`` rows out, and a padding mask over it has ``min(P, rows) + S`` columns. If the past's
            axis has a fixed size, the cache is shifted: it always has this many rows, a mask over it this many columns,
            and tokens have the last ones. None: it keeps all rows.
        on: for a switch: the value that chooses the branch with a past.
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
    """State that is no attention cache, replaced as a whole by every step: convolution and linear-attention state.

    Attributes:
        past, present: names of the graph's input and output, of one dtype and shape.
        reason: why past and present need two buffers.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[Dim, ...]
    reason: str


@dataclass(frozen=True)
class AdapterPart:
    """Columns ``start .. stop - 1`` of a product, which one module of the checkpoint computes."""

    module: str
    start: int
    stop: int


@dataclass(frozen=True)
class AdapterProduct:
    """A product ``y = x W`` of the model, to which ``(x A[slot]) B[slot]`` is added.

    Attributes:
        a: name of the input A ``[slots + 1, inputs, rank]``.
        b: name of the input B ``[slots + 1, rank, outputs]``.
        dtype: ONNX name of the type of A and B.
        rank: rank of all parts together; each part has at least `AdapterPlan.rank`.
        parts: the module, or the modules that were fused; an adapter may change any of them.
        whole: name of the fused module, which an adapter may also change; None: there is only one part.
        found_by: what showed which module it is.
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
    """The adapters that a model takes as inputs.

    Attributes:
        rank: rank of the largest adapter.
        slots: number of adapters at a time, in slots 1 to `slots`. Slot 0 holds zeros: the model without an adapter.
        index: name of the int64 input ``[B]``, the slot of each sequence.
        products: the products that adapters may change.
    """

    rank: int
    slots: int
    index: str
    products: tuple[AdapterProduct, ...]


class Route(str, Enum):
    """How a cache update reaches the engine, what this guarantees, and who enforces it."""

    NATIVE = "native"
    """TensorRT's IKVCacheUpdateLayer. In place: past and present share one device address; TensorRT enforces it, and
    the session checks the alias against the manifest. A write outside the capacity is dropped silently by TensorRT, so
    the runtime checks lengths (and the update's contract, if it has one) before every step."""

    PLUGIN = "plugin"
    """The project's own kernel. In place: the manifest declares the alias (TensorRT does not report it) and the session
    binds one address to both sides."""

    FUNCTIONAL = "functional"
    """Plain ONNX operators. Correct, but writes a whole new cache each step: past and present need two buffers. Chosen
    only where nothing in-place is possible, always with a warning."""


class UpdateMode(str, Enum):
    """The ``mode`` attribute of ONNX TensorScatter."""

    LINEAR = "linear"
    CIRCULAR = "circular"


class UpdateForm(str, Enum):
    """The layout of the update: padded ``[B, ..., S_new, ...]``, or packed tokens ``[T, N, H]`` with lengths."""

    PADDED = "padded"
    PACKED_NHD = "packed_nhd"


class PhysicalLayout(str, Enum):
    """The order of a cache's bytes in the engine, compared with the model's logical shape."""

    AS_IS = "as-is"
    """Logical and physical shape are the same."""
    VIEW = "view"
    """The same bytes, declared as the 4-D view ``[B, prod(before axis), S_max, prod(after axis)]``."""
    HEADS_MAJOR = "heads-major"
    """Bytes reordered: sequence-major ``[B, S_max, N, H]`` or ``[B, S_max, N*H]`` as ``[B, N, S_max, H]``."""


class AttentionKind(str, Enum):
    """How an Attention node reaches the engine."""

    FUSED = "fused"
    """IAttention with a dedicated kernel."""
    DECOMPOSED = "decomposed"
    """IAttention that no dedicated kernel covers: ``decomposable`` is set on the parsed network."""
    LOWERED = "lowered"
    """Plain MatMul, Softmax, MatMul: IAttention cannot express it."""


class Role(str, Enum):
    """The role of an input or output of the model in a decode loop."""

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
    """Given once per sequence, and then constant: the output of an encoder, its keys and values, its mask."""
    ZEROS = "zeros"
    """Always 0, such as the token types of a text that has one kind."""
    ADAPTER = "adapter"
    """The slot of each sequence's adapter; 0: no adapter."""
    ADAPTER_WEIGHTS = "adapter_weights"
    """The factors A or B of one product's adapters, of all slots."""
    LOGITS = "logits"
    OTHER = "other"


@dataclass(frozen=True)
class UpdateContract:
    """A contract that the caller must keep. The engine cannot enforce it: TensorRT would drop the write silently.

    Attributes:
        no_straddle: no update may cross the end of the buffer: ``write_index mod capacity + S_new <= capacity``.
        max_update_length: the most tokens in one update; None until a build bounds it (``--max-chunk``).
    """

    no_straddle: bool
    max_update_length: int | None = None


@dataclass(frozen=True)
class CacheUpdate:
    """One cache of the model, and how the model writes it.

    Semantics: https://onnx.ai/onnx/operators/onnx__TensorScatter.html and the TensorRT header of IKVCacheUpdateLayer.

    Attributes:
        node: name of the node that updates the cache.
        past, present: names of the cache tensor before and after the update; if the route is in place, of the graph's
            input and output.
        update: name of the tensor ``[B, ..., S_new, ...]`` that is written (packed: ``[T, N, H]``).
        write_indices: name of the int64 ``[B]`` tensor of first positions, or None (zeros).
        update_lengths: packed form only: name of the cumulative lengths ``[B + 1]``.
        dtype: ONNX name in lower case, such as ``"float16"`` or ``"bfloat16"``.
        logical_shape: the model's shape of the cache, with the capacity filled in.
        sequence_axis: index into `logical_shape`, never negative.
        physical_shape: the shape of the engine's input and output; its sequence axis is `physical_sequence_axis`.
        update_length: ``S_new``: a size, or a symbol.
        readers: names of the Attention nodes that read `present`.
        carried: past is an input and present an output of the graph, so the caller keeps it from step to step.
        idiom: how the exported model writes this cache, such as ``"Concat"``; ``"TensorScatter"`` needs no change.
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
        """True if past and present are one buffer."""
        return self.route is not Route.FUNCTIONAL


@dataclass(frozen=True)
class Mask:
    """One attention mask, computed once in the graph and shared by every node that names it.

    A key ``j`` is visible to query ``i`` of row ``b`` where each of these conditions holds: ``j < lengths[b]``; causal:
    ``j <= i + offset``, ``offset = lengths[b] - S_q`` (0 without lengths); windows: ``i + offset - left <= j <= i +
    offset + right``; and the model's own mask.

    Attributes:
        name: name of the mask tensor in the rewritten graph.
        causal: bottom-right aligned causal frontier.
        lengths: name of the int64 ``[B]`` tensor of valid keys, or None.
        left_window, right_window: -1 where unbounded (Attention-25).
        mask: name of the model's own mask tensor, or None.
        additive: the result is a float bias; otherwise it is bool, True = visible.
        span: name of the span input that gives the number of keys, or None (all keys).
        guarded: rows that see no key are set to zero after attention, as ONNX defines.
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
        caches: names of the past tensors of the caches that it reads.
        mask: name of the `Mask`, or None where no mask is needed.
        keys: ``"span"`` (rows up to the span), ``"mask"`` (as many rows as the model's own, shorter mask has) or
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
    """An added int64 input ``[span]`` that holds 0, 1, ..., span - 1: its *shape* says how many cache rows are read.

    Any span from the longest valid length in the batch up to the capacity gives the same numbers; the contents never
    change, so one constant device buffer serves every step, and only its shape is set.
    """

    name: str
    symbol: str
    capacity: int
    lengths: str


@dataclass(frozen=True)
class LogitsSpan:
    """An added int64 input ``[span]``: its *shape* is the number of last positions of a step that get logits.

    The number is from 1 to S; a larger number means S. The contents do not matter.

    Attributes:
        output: name of the logits, ``[B, span, V]``.
        tensor: name of the value ``[B, S, ...]`` that is sliced to its last positions.
        axis: axis of the positions in this tensor.
        readers: names of the nodes that read the slice; other nodes read the whole tensor.
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
        found_by: what showed the role: ``"graph: ..."``, ``"config: ..."`` or ``"added"``.
        axes: for dynamic dimensions, which size of a decode loop each axis is: ``"batch"``, ``"sequence"`` (S_new),
            ``"span"``, ``"kept"`` (positions that have logits), ``"tokens"`` (packed T), ``"batch+1"``, ``"keys"``
            (length of a mask), ``"encoder"`` (length of the encoder's output), ``""`` if the size is fixed, or ``"?"``
            if unknown.
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
        """True for tokens as embeddings ``[..., H]``, not as ids."""
        return self.role is Role.TOKENS and "int" not in self.dtype


@dataclass(frozen=True, repr=False)
class CachePlan:
    """All changes to one model.

    Attributes:
        schema_version: version of this data, written into JSON.
        opset: the model's opset of ONNX's own domain.
        warnings: what the user should know before building.
        notes: what normalization did, such as what a circular window saves.
        changes: inputs and outputs of the exported model that change or disappear.
        original: the interface of the exported model; empty if normalization did not change it.
        states: state that is no attention cache.
        logits_span: the input that chooses the number of positions with logits; None: the same positions as in the
            exported model.
        prefill_in_one_step: True if tokens of one step depend on each other, so that a prompt must be one step.
        adapters: the products that adapters (LoRA) change; None: the model takes no adapters.
        weights: bytes of weights that a step of one token reads. A lookup table, such as embeddings, counts with the
            rows for one token. 0: not counted.
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
        """Bytes of all carried caches and states for `batch` sequences. Those that are not in place count twice."""
        caches = sum(cache_bytes(c, batch) * (1 if c.in_place else 2) for c in self.caches if c.carried)
        return caches + sum(2 * _bytes(s.dtype, s.shape, batch) for s in self.states)

    def adapter_bytes(self) -> int:
        """Bytes of the weights of one adapter in an engine. An engine needs them `slots` + 1 times."""
        products = () if self.adapters is None else self.adapters.products
        return sum((p.inputs + p.outputs) * p.rank * _BITS[p.dtype] // 8 for p in products)

    @property
    def double_buffered(self) -> dict[str, str]:
        """Present -> past of all caches and states that are carried from step to step in two buffers."""
        caches = {c.present: c.past for c in self.caches if c.carried and not c.in_place}
        return caches | {s.present: s.past for s in self.states}

    def tensor(self, role: Role, io: str = "input") -> TensorRole | None:
        """The only tensor with this role, or None. For roles of several tensors (caches, spans) filter `tensors`."""
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
    """Bits of one number of an ONNX dtype."""
    return _BITS[dtype]


def cache_bytes(cache: CacheUpdate, batch: int) -> int:
    """Bytes of one buffer of this cache for `batch` sequences, or for the model's batch size if it is fixed."""
    return _bytes(cache.dtype, cache.physical_shape, batch)


def _bytes(dtype: str, shape: tuple[Dim, ...], batch: int) -> int:
    count = shape[0] if isinstance(shape[0], int) else batch
    return (count * prod(d for d in shape[1:] if isinstance(d, int)) * _BITS[dtype] + 7) // 8
