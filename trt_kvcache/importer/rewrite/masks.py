"""Attention masks, computed once per geometry and shared by every layer.

    key position  k = 0 .. keys - 1                       [1, 1, 1, K]
    frontier      f = lengths - S_q + i   (i without lengths)   [B, 1, S_q, 1]
    visible         = k <= f and k >= f - left and ... and the model's own mask

TensorRT drops `nonpad_kv_seqlen` and aligns `is_causal` to the upper left corner, so the mask says explicitly what ONNX
means (bottom right, ragged lengths). An explicit mask is the one form that every supported TensorRT version gets right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import BOOL, INT32, INT64, Emitter, dims
from trt_kvcache.importer.plan import AttentionPlan, MaskGeometry
from trt_kvcache.importer.planning.attention import sequence_source
from trt_kvcache.importer.planning.attention_facts import AttentionFacts
from trt_kvcache.importer.planning.rows_in_use import cut_rows


@dataclass(frozen=True)
class Mask:
    """A built mask.

    Attributes:
        bias: bool (True = visible) or float (added to the scores), ``[B or 1, N or 1, S_q or 1, K]``; None: no mask.
        row_visible: bool, broadcastable to ``[B, N, S_q, 1]``: the query sees at least one key; None: it always does.
        end: int64 ``[1]``: how many keys take part; None: all.
    """

    bias: gs.Tensor | None
    row_visible: gs.Tensor | None
    end: gs.Tensor | None


def build_mask(emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan, geometry: MaskGeometry | None) -> Mask:
    """The mask of one Attention node; nodes with the same geometry share it."""
    if geometry is None:
        return Mask(None, None, None)
    return emitter.once(("mask", geometry.name), _Builder(emitter, facts, plan, geometry).build)


class _Builder:
    """One mask, part by part."""

    def __init__(self, emitter: Emitter, facts: AttentionFacts, plan: AttentionPlan, geometry: MaskGeometry) -> None:
        self.emitter, self.facts, self.plan, self.geometry = emitter, facts, plan, geometry
        self.windowed = geometry.left_window >= 0 or geometry.right_window >= 0
        self.span = next((t for t in emitter.graph.inputs if t.name == geometry.span), None)
        self.end: gs.Tensor | None = None

    def build(self) -> Mask:
        """All of the mask."""
        emitter, facts, geometry = self.emitter, self.facts, self.geometry
        self.end = self._end()
        bias, row_visible = self._by_position()
        if facts.mask is not None:
            own, row_visible = self._own_mask(facts.mask), None
            if bias is None:
                bias = own
            elif geometry.additive:
                bias = self._hidden_where_not(bias, own)
            else:
                bias = emitter.op("And", [bias, own], "visible_and_own", BOOL)
        if geometry.guarded and row_visible is None and bias is not None:
            row_visible = self._row_visible(bias)
        if bias is not None and self._has_one_row():
            # ONNX lets a mask of one row serve every query; ONNX Runtime 1.31 insists on a row per query.
            sizes = [emitter.ints([1, 1]), self._query_count(), emitter.ints([1])]
            shape = emitter.op("Concat", sizes, "mask_rows", INT64, axis=0)
            bias = emitter.op("Expand", [bias, shape], "mask", facts.dtype if geometry.additive else BOOL)
        if bias is not None:  # the name that the plan gave
            bias.name = geometry.name
        return Mask(bias, row_visible if geometry.guarded else None, self.end)

    def _end(self) -> gs.Tensor | None:
        """The number of keys that take part: the span, or the length of a mask that is shorter, or both."""
        emitter, facts, span = self.emitter, self.facts, self.span
        ends: list[gs.Tensor] = []
        if span is not None:
            shape = partial(emitter.op, "Shape", [span], f"{span.name}_end", INT64)
            ends.append(emitter.once(("end", span.name), shape))
        if facts.mask is not None and self.plan.keys != "all":
            length = (dims(facts.mask) or ("?",))[-1]
            if not isinstance(length, int):
                ends.append(emitter.op("Shape", [facts.mask], "mask_keys", INT64, start=-1))
            elif length != facts.keys:
                ends.append(emitter.ints([length]))
        if not ends:
            return None
        return ends[0] if len(ends) == 1 else emitter.op("Min", ends, "end", INT64)

    def _by_position(self) -> tuple[gs.Tensor | None, gs.Tensor | None]:
        """Visibility by position alone, and whether a row sees any key (None: decided from the mask itself)."""
        emitter, geometry = self.emitter, self.geometry
        length = self._length()
        if not geometry.causal and length is None and not self.windowed:
            return None, None
        keys = self._keys()
        parts: list[gs.Tensor] = []
        row_visible = None
        if geometry.causal or self.windowed:
            frontier = self._frontier()
        if geometry.causal:
            parts.append(emitter.op("LessOrEqual", [keys, frontier], "causal", BOOL))
            row_visible = emitter.op("GreaterOrEqual", [frontier, emitter.ints(0)], "row_visible", BOOL)
        elif length is not None:
            parts.append(emitter.op("Less", [keys, length], "valid", BOOL))
            row_visible = emitter.op("Greater", [length, emitter.ints(0)], "row_visible", BOOL)
        if geometry.left_window >= 0:
            oldest = emitter.op("Sub", [frontier, emitter.ints(geometry.left_window)], "oldest", INT64)
            parts.append(emitter.op("GreaterOrEqual", [keys, oldest], "left_window", BOOL))
        if geometry.right_window >= 0:
            newest = emitter.op("Add", [frontier, emitter.ints(geometry.right_window)], "newest", INT64)
            parts.append(emitter.op("LessOrEqual", [keys, newest], "right_window", BOOL))
        visible = parts[0]
        for part in parts[1:]:
            visible = emitter.op("And", [visible, part], "visible", BOOL)
        return visible, None if self.windowed else row_visible

    def _hidden_where_not(self, visible: gs.Tensor, bias: gs.Tensor) -> gs.Tensor:
        """Minus infinity where a key is hidden."""
        dtype = self.facts.dtype
        hidden = self.emitter.scalar(float("-inf"), dtype)
        return self.emitter.op("Where", [visible, bias, hidden], "bias", dtype)

    def _length(self) -> gs.Tensor | None:
        """The valid lengths, int64 ``[B, 1, 1, 1]``."""
        lengths = self.facts.lengths
        if lengths is None:
            return None
        axes = self.emitter.ints([1, 2, 3])
        unsqueeze = partial(self.emitter.op, "Unsqueeze", [lengths, axes], f"{lengths.name}_4d", INT64)
        return self.emitter.once(("length", lengths.name), unsqueeze)

    def _has_one_row(self) -> bool:
        """True if the mask is the same for all of several queries, and so has only one row for them."""
        if self.facts.queries == 1 or self.geometry.causal or self.windowed:
            return False
        shape = dims(self.facts.mask) if self.facts.mask is not None else ()
        return shape is not None and (len(shape) < 2 or shape[-2] == 1)

    def _query_count(self) -> gs.Tensor:
        """The number of queries, int64 ``[1]``."""
        emitter, query = self.emitter, self.facts.node.inputs[0]
        source = sequence_source(emitter.graph, self.facts)
        if isinstance(source, int):
            return emitter.ints([source])
        name, axis = source
        tensor = query if query.name == name else emitter.graph.tensors()[name]
        shape = partial(emitter.op, "Shape", [tensor], "queries", INT64, start=axis, end=axis + 1)
        return emitter.once(("queries", source), shape)

    def _frontier(self) -> gs.Tensor:
        """The last key that each query sees under bottom-right alignment: ``i + lengths - S_q``; no lengths: ``i``."""
        emitter, length = self.emitter, self._length()
        source = sequence_source(emitter.graph, self.facts)

        def make() -> gs.Tensor:
            count = self._query_count()
            if isinstance(source, int):
                steps: gs.Tensor = emitter.constant(np.arange(source, dtype=np.int64).reshape(1, 1, source, 1))
            else:
                steps = self._counted(count, "query_count", "steps")
                steps = emitter.op("Unsqueeze", [steps, emitter.ints([0, 1, 3])], "steps_4d", INT64)
            if length is None:
                return steps
            offset = emitter.op("Sub", [length, count], "offset", INT64)
            return emitter.op("Add", [offset, steps], "frontier", INT64)

        return emitter.once(("frontier", source, length.name if length is not None else None), make)

    def _keys(self) -> gs.Tensor:
        """Positions of the keys, int64 ``[1, 1, 1, K]``."""

        def make() -> gs.Tensor:
            axes = self.emitter.ints([0, 1, 2])
            return self.emitter.op("Unsqueeze", [self._key_positions(), axes], "keys", INT64)

        return self.emitter.once(("keys", self.geometry.name), make)

    def _key_positions(self) -> gs.Tensor:
        """0, 1, ... up to the number of keys that take part."""
        emitter, facts, end = self.emitter, self.facts, self.end
        if self.span is not None and facts.mask is None:
            return self.span
        if self.span is not None:
            return emitter.op("Slice", [self.span, emitter.ints([0]), end, emitter.ints([0])], "span_keys", INT64)
        if end is None and isinstance(facts.keys, int):
            return emitter.ints(list(range(facts.keys)))
        if end is None:
            end = emitter.op("Shape", [facts.node.inputs[1]], "key_shape", INT64, start=2, end=3)
        return self._counted(end, "key_count", "key_positions")

    def _counted(self, count: gs.Tensor, scalar: str, name: str) -> gs.Tensor:
        """0, 1, ... count - 1, of a count int64 ``[1]``."""
        number = self.emitter.op("Squeeze", [count], scalar, INT64)
        return self.emitter.op("Range", [self.emitter.ints(0), number, self.emitter.ints(1)], name, INT64)

    def _own_mask(self, mask: gs.Tensor) -> gs.Tensor:
        """The model's mask as 4-D, sliced to the keys that take part."""
        emitter = self.emitter
        rank = len(dims(mask) or (0,) * 4)
        dtype = self.facts.dtype if self.geometry.additive else BOOL
        if self.end is not None and cut_rows(mask, self.end):
            mask.shape = None
        elif self.span is not None:
            mask = emitter.op("Slice", [mask, emitter.ints([0]), self.end, emitter.ints([-1])], "own_mask_cut", dtype)
        if rank < 4:
            mask = emitter.op("Unsqueeze", [mask, emitter.ints(list(range(4 - rank)))], "own_mask", dtype)
        elif self.span is None:
            mask = emitter.op("Identity", [mask], "own_mask", dtype)
        return mask

    def _row_visible(self, bias: gs.Tensor) -> gs.Tensor:
        """True for the rows of the finished mask that let any key through."""
        emitter, dtype = self.emitter, self.facts.dtype if self.geometry.additive else INT32
        scores = bias if self.geometry.additive else emitter.op("Cast", [bias], "flags", INT32, to=INT32)
        best = emitter.op("ReduceMax", [scores, emitter.ints([-1])], "best", dtype, keepdims=1)
        if self.geometry.additive:
            return emitter.op("Greater", [best, emitter.scalar(float("-inf"), dtype)], "row_visible", BOOL)
        return emitter.op("Cast", [best], "row_visible", BOOL, to=BOOL)
