"""A cache update, and what the search by structure sees of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import BOOL, INT32, INT64, contains, elem_type, is_op

FOR_GOOD = (
    "transformers' StaticSlidingWindowLayer counts its tokens in Python, so that an export holds one count for good: "
    "export it with layers that are full (cumulative_length_int = W), one token a step, and give the masks as inputs: "
    "attention_mask={'sliding_attention': mask, ...}"
)
"""A note on updates and masks that are the same whatever the past."""
_ADVICE = (
    "export the model with Concat(past, new), or with index_copy, index_put or a slice at write position + 0 .. S - 1"
)


@dataclass(frozen=True, eq=False)
class ExportedUpdate:
    """One cache and its update.

    Attributes:
        idiom: the operator that writes, or ``"Concat, Slice"``, ``"Concat, new rows returned"``, ``"one-hot"``,
            ``"shift"``, ``"rolling"``, ``"unchanged"``.
        past: the graph input that holds the cache.
        present: the graph output that holds the cache and the update.
        axis: the sequence axis of the cache; None: it is not known yet.
        growing: past holds as many rows as there are tokens, present more; else both have the capacity.
        positions: names of the graph inputs that say where the rows go; empty for growing caches.
        kept: past and present hold so many rows at most, the newest ones of those; None: all.
        room: rows of a past that always has as many, those of tokens first; None: as many as hold tokens.
        shifted: past and present always have `kept` rows: the oldest go as new ones come, and those of tokens are last.
    """

    idiom: str
    past: gs.Tensor
    present: gs.Tensor
    _: KW_ONLY
    axis: int | None = None
    growing: bool = False
    positions: tuple[str, ...] = ()
    kept: int | None = None
    room: int | None = None
    shifted: bool = False


@dataclass(frozen=True, eq=False)
class Candidate(ExportedUpdate):
    """A possible cache update.

    Attributes:
        node: the node that writes; None: nothing does.
        region: the nodes on paths from past to present, in order of execution.
        views: those of them from past to what `node` reads, if only these are between.
        updates: the tensors that come into the region from elsewhere: one, the new rows, if it is an update.
        masks: other operands of products and choices in the region.
        rows_only: present holds the new rows only, in whatever layout.
        reason: why it cannot be done in place, if the search already sees that; "" otherwise.
        advice: what to do about `reason`.
    """

    node: gs.Node | None
    _: KW_ONLY
    region: tuple[gs.Node, ...] = ()
    views: tuple[gs.Node, ...] = ()
    updates: tuple[gs.Tensor, ...] = ()
    masks: tuple[gs.Tensor, ...] = ()
    rows_only: bool = False
    reason: str = ""
    advice: str = ""

    @property
    def is_cut(self) -> bool:
        """True if rows may be cut off between past and present."""
        return self.growing and not self.shifted and any(is_op(node, "Slice") for node in self.region)

    @property
    def whole(self) -> gs.Tensor:
        """Past and new rows together."""
        assert self.node is not None
        return self.node.outputs[0] if self.rows_only else self.present

    def refusal(self, why: str, advice: str = "") -> UnsupportedModelError:
        """The error that says what is wrong with this update."""
        how = "" if self.node is None else f" by {self.node.op} '{self.node.name}'"
        advice = advice or self.advice or _ADVICE
        return UnsupportedModelError(
            f"the update of the cache '{self.past.name}'{how} cannot be done in place: {why}. Supported are updates "
            f"that write the S new rows of a step after the P rows that the cache holds; {advice}"
        )


def may_be_cache(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """True if `tensor` is an input of the graph that could hold keys or values: no mask, no indices."""
    if isinstance(tensor, gs.Constant) or not contains(graph.inputs, tensor):
        return False
    return len(tensor.shape or ()) >= 3 and elem_type(tensor) not in (BOOL, INT32, INT64)
