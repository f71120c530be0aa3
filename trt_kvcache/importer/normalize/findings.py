"""Findings in a model as exported: plain data between finding and rewriting."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.importer.normalize.candidate import ExportedUpdate
from trt_kvcache.importer.normalize.evidence.samples import Sample
from trt_kvcache.importer.plan import Dim, InterfaceChange, OriginalTensor, StateUpdate, TensorRole

if TYPE_CHECKING:
    from trt_kvcache.importer.extensions.position_biases import RelativeBias

Array = npt.NDArray[Any]
Sinks: TypeAlias = "gs.Tensor | Array"
"""The logits ``[H]`` beside scores: a weight with as many elements, in whatever shape, or numbers."""


@dataclass(frozen=True, eq=False)
class Write(ExportedUpdate):
    """A cache update that was read.

    Attributes:
        update: the new rows.
        node: name of the node that writes, for messages.
        perm: the permutation that brings `update` to the axis order of the cache; None: it has that order.
        circular: rows wrap around the capacity; `shifted` ones become so.
        aliases: tensors with the same contents as `present` in the same layout, which attention may read instead; where
            rows are cut off, with past and new rows before they are.
        turned: tensors with the same contents as `aliases` in another order of axes, and the permutation to it.
        fronts: tensors with the first rows of `present` in the same layout, as many as there are tokens.
        new_rows: present as exported holds the new rows only: the axes of the cache in the order in which they lie in
            it, which may merge some. None: it holds the whole cache.
    """

    update: gs.Tensor
    node: str
    _: KW_ONLY
    axis: int
    perm: tuple[int, ...] | None = None
    circular: bool = False
    aliases: tuple[gs.Tensor, ...] = ()
    turned: tuple[tuple[gs.Tensor, tuple[int, ...]], ...] = ()
    fronts: tuple[gs.Tensor, ...] = ()
    new_rows: tuple[int, ...] | None = None

    @property
    def relaid(self) -> tuple[int, ...] | None:
        """The order of axes ``[B, N, D, P]`` that a growing cache does not keep: it becomes ``[B, N, L, D]``."""
        return (0, 1, 3, 2) if self.growing and self.axis == 3 and len(self.past.shape) == 4 else None

    def rows(self, sample: Sample) -> int:
        """Rows that attention reads in a sample, where the cache grows or is shifted."""
        if self.shifted and self.kept is not None:
            return self.kept
        return (sample.rows_in_cache(self.kept) if self.fixed_rows is None else self.fixed_rows) + sample.length


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys that a query sees. A key row ``j`` is visible to query ``i`` where every given condition holds.

    Attributes:
        causal: ``j <= write_index + i``.
        window: ``j > write_index + i - window``: as many keys, the query's own included; None: all.
        own: the caller's own mask over the rows of the cache, bool (True = visible) or added to the scores; None: none.
        bias: a relative position bias, added to the scores; None: none.
        slopes: float32 ``[H or 1]``, added times key position minus query position; None: none.
        bounded: rows at and beyond ``write_index + S`` are hidden (always so where `causal`).
        by_position: ``j <= write_index + i``, as a mask: the write index goes on after the end of a circular cache.
    """

    causal: bool = True
    window: int | None = None
    own: gs.Tensor | None = None
    bias: RelativeBias | None = None
    slopes: Array | None = None
    bounded: bool = True
    by_position: bool = False


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention over caches.

    Attributes:
        node: name of the node that stands for it in messages and plans.
        output: the tensor ``[B, Hq, S, Dv]`` that it makes.
        query: ``[B, Hq, S, D]``.
        key, value: the writes whose present it reads.
        scale: factor of the scores.
        softcap: 0: none.
        heads, head_size, value_size: Hq, D and Dv.
        query_type, output_type: ONNX element types; where they are not that of the attention, casts stand around it.
        wide: products of queries and keys are computed in float32, whatever the caches are. The model as exported does
            so, or in double, or in the one of float16 and bfloat16 that the caches are not.
        wide_weights: the softmax is, or the product of what it makes and values.
        sinks: logits beside the scores; None: none.
        precision: ONNX element type of the softmax; 0: that of the queries.
        query_is_flat: `query` has the same numbers in another shape, of which the editor makes `[B, Hq, S, D]`.
        output_shape: the shape of `output` where it is another one: "batch" and "sequence" are those of the tokens, "?"
            is what is left.
    """

    node: str
    output: gs.Tensor
    query: gs.Tensor
    key: Write
    value: Write
    scale: float
    softcap: float
    visibility: Visibility
    heads: int
    head_size: int
    value_size: int
    query_type: int
    output_type: int
    sinks: Sinks | None = None
    precision: int = 0
    wide: bool = False
    wide_weights: bool = False
    query_is_flat: bool = False
    output_shape: tuple[Dim, ...] | None = None


@dataclass(frozen=True)
class Findings:
    """The work of normalization on a model, for the plan.

    Attributes:
        idioms: by name of the cache input.
        original: inputs and outputs as exported; empty: the model was canonical already.
        roles: the same, and those of the inputs that normalization added, for the canonical model.
        states: state that is no cache.
        longest: the most tokens of one update, of caches that became circular.
        capacity: tokens per sequence, where the model leaves them open.
    """

    idioms: dict[str, str]
    changes: tuple[InterfaceChange, ...] = ()
    original: tuple[OriginalTensor, ...] = ()
    roles: tuple[TensorRole, ...] = ()
    states: tuple[StateUpdate, ...] = ()
    notes: tuple[str, ...] = ()
    longest: dict[str, int] = field(default_factory=dict)
    capacity: int | None = None
