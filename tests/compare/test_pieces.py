"""The steps of a decode: from empty caches over each place at which something changes."""

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache.compare.decode import DRAWN, Piece, plan_pieces
from trt_kvcache.importer.cache_plan import CachePlan
from trt_kvcache.importer.steps.drawn_inputs import Limits

PLACES = {40: "decode", 256: "span"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> CachePlan:
    from trt_kvcache import plan_model

    return plan_model(write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig(capacity=64)))


def _limits(**given: object) -> Limits:
    usual = {
        "batch": 3, "length": None, "longest": 64, "linear": None, "circular": (), "no_straddle": (), "indexed": True,
        "ragged": True, "lengths": False,
    }  # fmt: skip
    return Limits(**(usual | given))  # type: ignore[arg-type]


def _walked(pieces: tuple[Piece, ...], rows: int) -> list[tuple[Piece, list[int], list[int]]]:
    """Each piece, and the tokens of all texts before and after it."""
    ends, found = [0] * rows, []
    for piece in pieces:
        starts = [end + piece.skip * (row in piece.rows) for row, end in enumerate(ends)]
        ends = [start + piece.length * (row in piece.rows) for row, start in enumerate(starts)]
        found.append((piece, starts, ends))
    return found


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        (_limits(linear=40), ["start", "full"]),
        (_limits(linear=320), ["start", "decode 40", "span 256", "full"]),
        (_limits(linear=4096), ["start", "decode 40", "span 256", "full"]),
        (_limits(circular=(24,), longest=24), ["start", "wrap 24", "decode 40", "span 256"]),
        (_limits(circular=(512,), linear=4096), ["start", "decode 40", "span 256", "wrap 512", "full"]),
        (_limits(circular=(4096,)), ["start", "decode 40", "span 256", "wrap 4096"]),
        (_limits(linear=40, ragged=False), ["start", "full"]),
        (_limits(linear=64, length=1, longest=1), ["start", "decode 40", "full"]),
        (_limits(linear=64, length=4, longest=4, batch=1), ["start", "decode 40", "full"]),
        (_limits(linear=64, circular=(16,), no_straddle=(16,), longest=16), ["start", "wrap 16", "decode 40", "full"]),
    ],
)
def test_parts_go_on_where_the_one_before_ended(plan: CachePlan, limits: Limits, parts: list[str]) -> None:
    places = {n: name for n, name in PLACES.items() if limits.linear is None or n < limits.linear}
    pieces = plan_pieces(limits, plan, (5, 3, 1), 0, places=places, far=True, drawn=True)
    assert list(dict.fromkeys(p.part for p in pieces)) == [*parts, DRAWN]
    walked = _walked(pieces, limits.batch)
    own = [step for step in walked if step[0].part != DRAWN]
    assert all(piece.skip >= 0 for piece, _, _ in own)
    assert {p.length for p in pieces} <= ({limits.length} if limits.length else set(range(1, 65)))
    ends = own[-1][2]
    if limits.linear is not None:
        assert max(ends) == limits.linear
    if limits.ragged and limits.batch > 1:
        assert len(set(ends)) == limits.batch
    for capacity in limits.circular:
        crossing = [p.length for p, starts, after in own for a, b in zip(starts, after, strict=True)
                    if a <= capacity < b]  # fmt: skip
        assert (limits.length or 1) in crossing
    for capacity in limits.no_straddle:
        assert all(a % capacity + p.length <= capacity for p, starts, _ in walked for r, a in enumerate(starts)
                   if r in p.rows)  # fmt: skip
    drawn = [step for step in walked if step[0].part == DRAWN]
    assert [p.drawn for p, _, _ in drawn] == [True, *[False] * (len(drawn) - 1)]
    assert min(drawn[0][1]) == 2 * (limits.length or 1)


def test_far_places_are_left_out_unless_tokens_may_be(plan: CachePlan) -> None:
    limits = _limits(linear=4096, circular=(800,))
    near = plan_pieces(limits, plan, (5,), 1)
    assert {p.part for p in near} == {"start"}
    far = plan_pieces(limits, plan, (5,), 1, far=True)
    assert [p.skip > 0 for p in far if p.part in ("wrap 800", "full")].count(True) == 2
