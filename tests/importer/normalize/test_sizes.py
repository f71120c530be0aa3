"""Sizes that data decide, in front of a cache: refused by the operator that makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from concat_decode import rewritten
from concat_graphs import Build, Decoder, _attend, make_decoder

from trt_kvcache.errors import UnsupportedModelError

ADVICE = r'model\.set_experts_implementation\("batched_mm"\)'


def _experts(g: Build, query: str, keys: str, values: str, by: str = "Range") -> str:
    """Attention, and behind it two experts that take some of the tokens each, as transformers' grouped_mm does."""
    output = _attend(g, query, keys, values)
    size = g.decoder.heads * g.decoder.size
    flat = g.node("Reshape", [g.node("Transpose", [output], perm=[0, 2, 1, 3]), g.constant([-1, size])])
    first = g.node("Less", [g.node("Reshape", [g.tokens, g.constant([-1])]), g.constant(16)])
    total, order = g.node("Shape", [first]), f"order_{len(g.nodes)}"
    g.node("TopK", [g.node("Cast", [first], to=1), total], ["", order])
    whole = g.node("Squeeze", [total])
    count = g.node("ReduceSum", [g.node("Cast", [first], to=7)], keepdims=0)
    parts = []
    for start, end in ((g.constant(0), count), (count, whole)):
        if by == "Range":
            places = g.node("Range", [start, end, g.constant(1)])
        else:
            bounds = [g.node("Unsqueeze", [n, g.constant([0])]) for n in (start, end)]
            places = g.node("Slice", [g.node("Range", [g.constant(0), whole, g.constant(1)]), *bounds])
        rows = g.node("Gather", [flat, g.node("Gather", [order, places])])
        parts.append(g.node("MatMul", [rows, g.weight(size, size)]))
    made = g.node("Concat", parts, axis=0)
    length = g.node("Unsqueeze", [g.length, g.constant([0])])
    split = g.node("Reshape", [made, g.node("Concat", [g.constant([-1]), length, g.constant([4, 4])], axis=0)])
    return g.node("Transpose", [split], perm=[0, 2, 1, 3])


@pytest.mark.parametrize("by", ["Range", "Slice"])
def test_experts_that_take_as_many_tokens_as_data_say(tmp_path: Path, by: str) -> None:
    model = make_decoder(Decoder(layers=2, attend=lambda *operands: _experts(*operands, by)))
    said = f"{by} 'node_.* combines .* or tokens or weights decide how much it gives.*{ADVICE}"
    with pytest.raises(UnsupportedModelError, match=said):
        rewritten(model, tmp_path)


def test_experts_that_leave_tokens_in_another_order_are_refused(tmp_path: Path) -> None:
    """Tokens of all sequences come in the order of their experts, and nothing puts them back."""
    with pytest.raises(UnsupportedModelError, match="depends on the other sequences"):
        rewritten(make_decoder(Decoder(attend=_experts)), tmp_path)
