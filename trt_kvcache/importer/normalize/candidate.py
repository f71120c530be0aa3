"""A cache update, and what the search by structure sees of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import BOOL, INT32, INT64, contains, elem_type

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
        idiom: the operator that new rows come to, with ", Slice" where rows are cut off, or ", new rows returned"; or
            "shift", or "unchanged".
        past: the graph input that holds the cache.
        present: the graph output that holds the cache and the update.
        axis: the sequence axis of the cache; None: it is not known yet.
        growing: past holds as many rows as there are tokens, present more; else both have the capacity.
        positions: names of the graph inputs that say where the rows go; empty for growing caches.
        kept: past and present hold so many rows at most, the newest ones of those; None: all.
        fixed_rows: rows of a past that always has as many, those of tokens first; None: as many as hold tokens.
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
    fixed_rows: int | None = None
    shifted: bool = False


@dataclass(frozen=True, eq=False)
class Candidate(ExportedUpdate):
    """A possible cache update.

    Attributes:
        node: the last one of the region that new rows come to.
        region: the nodes on paths from past to present, in order of execution.
        rows: what comes into the region and is not computed from positions and sizes: one tensor, if it is an update.
        updates: tensors that may be the new rows, from the projection on; the last one is `rows`.
        where: what else comes into the region.
        rows_only: present holds the new rows only, in whatever layout.
        reason: why it cannot be done in place, if that is seen; "" otherwise.
        advice: what to do about `reason`.
    """

    node: gs.Node
    _: KW_ONLY
    region: tuple[gs.Node, ...]
    rows: tuple[gs.Tensor, ...] = ()
    updates: tuple[gs.Tensor, ...] = ()
    where: tuple[gs.Tensor, ...] = ()
    rows_only: bool = False
    reason: str = ""
    advice: str = ""

    @property
    def whole(self) -> gs.Tensor:
        """Past and new rows together."""
        return self.node.outputs[0] if self.rows_only else self.present


def refusal(update: ExportedUpdate, why: str, advice: str = "") -> UnsupportedModelError:
    """The error that says what is wrong with an update."""
    how = f" by {update.node.op} '{update.node.name}'" if isinstance(update, Candidate) else ""
    return UnsupportedModelError(
        f"the update of the cache '{update.past.name}'{how} cannot be done in place: {why}. Supported are updates "
        f"that write the S new rows of a step after the P rows that the cache holds; {advice or _ADVICE}"
    )


def may_be_cache(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """True if `tensor` is an input of the graph that could hold keys or values: no mask, no indices."""
    if isinstance(tensor, gs.Constant) or not contains(graph.inputs, tensor):
        return False
    return len(tensor.shape or ()) >= 3 and elem_type(tensor) not in (BOOL, INT32, INT64)
