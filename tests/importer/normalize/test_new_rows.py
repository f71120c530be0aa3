"""Caches of which a step gives the new rows only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, Decode, rewritten
from concat_graphs import Build, Decoder, make_decoder
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from graphs import Dim
from new_row_graphs import Form, as_joined, changed, flat, give_new_rows, transposed

from trt_kvcache import verify_model
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions, Sliding
from trt_kvcache.verify import verify_import

FORMS: dict[str, tuple[Form, ...]] = {
    "as joined": (as_joined,),
    "sequence first": (transposed(0, 2, 1, 3),),
    "keys transposed": (transposed(0, 1, 3, 2), as_joined),
    "tokens first": (transposed(2, 0, 1, 3), transposed(2, 1, 0, 3)),
    "flat": (flat, transposed(0, 3, 1, 2)),
}
DECODERS = {
    "plain": Decoder(),
    "sequence major": Decoder(layout="bsnd"),
    "flat": Decoder(layout="flat"),
    "padding": Decoder(mask="padding", positions="padding"),
    "window": Decoder(window=3),
    "own mask": Decoder(mask="own", apply="where"),
    "lengths of the whole": Decoder(positions="present"),
    "float16": Decoder(dtype=np.float16),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", DECODERS)
def test_the_whole_is_updated_in_place(tmp_path: Path, name: str) -> None:
    whole = make_decoder(DECODERS[name])
    result = rewritten(give_new_rows(whole, as_joined), tmp_path)
    assert [(c.idiom, c.route.value) for c in result.plan.caches] == [("Concat, new rows returned", "native")] * 2
    Decode(whole, result.model).check(tolerance=1e-2 if name == "float16" else 1e-4)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FORMS)
def test_new_rows_in_any_layout(tmp_path: Path, name: str) -> None:
    whole = make_decoder(Decoder(layers=2))
    Decode(whole, rewritten(give_new_rows(whole, *FORMS[name]), tmp_path).model).check()


@pytest.mark.parametrize("form", [(as_joined, transposed(0, 1, 3, 2)), (flat,)])
def test_verification_writes_the_rows_itself(tmp_path: Path, form: tuple[Form, ...]) -> None:
    model = give_new_rows(make_foreign("concat-attention", DecoderConfig()), *form)
    onnx.save(model, tmp_path / "model.onnx")
    verify_model(tmp_path / "model.onnx", PlanOptions(capacity=32)).check()


def test_windows_as_circular_buffers(tmp_path: Path) -> None:
    onnx.save(give_new_rows(make_decoder(Decoder(window=3)), flat), tmp_path / "model.onnx")
    options = PlanOptions(capacity=CAPACITY, sliding=Sliding.CIRCULAR, window_chunk=3)
    result = import_model(tmp_path / "model.onnx", options)
    assert {c.capacity for c in result.plan.caches} == {5}
    verify_import(result).check()


def test_another_input_that_is_joined_is_no_cache(tmp_path: Path) -> None:
    """Such as embeddings of a prefix, in front of those of tokens."""

    def joined(g: Build, x: str) -> str:
        prefix = g.input("prefix", onnx.TensorProto.FLOAT, ["batch", "rows", 16])
        more = g.node("Concat", [prefix, x], axis=1)
        return g.node("Add", [x, g.node("ReduceMean", [more, g.constant([1])])])

    model = give_new_rows(make_decoder(Decoder(after=joined)), as_joined)
    assert len(rewritten(model, tmp_path).plan.caches) == 2


def test_changes_say_that_no_rows_are_copied(tmp_path: Path) -> None:
    plan = rewritten(give_new_rows(make_decoder(Decoder()), flat, as_joined), tmp_path).plan
    given = [(c.old, c.new, c.why) for c in plan.changes if c.io == "output" and c.old.startswith("present")]
    assert [new for _, new, _ in given] == [f"present.0.{kind} [B, 2, {CAPACITY}, 4]" for kind in ("key", "value")]
    assert {why for *_, why in given} == {"the whole cache, updated in place: copy no rows"}


@pytest.mark.parametrize("op", ["Neg", "Exp", "Abs"])
def test_other_numbers_than_what_is_joined(tmp_path: Path, op: str) -> None:
    model = give_new_rows(make_decoder(Decoder()), changed(op), as_joined)
    with pytest.raises(UnsupportedModelError, match=r"no output gives its new rows '.*' as they are joined with the p"):
        rewritten(model, tmp_path)


def test_no_output_gives_any_new_rows(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"\.onnx: updates no cache that is known here"):
        rewritten(give_new_rows(make_decoder(Decoder()), changed("Neg")), tmp_path)


def test_an_output_may_be_taken_for_one_cache_only(tmp_path: Path) -> None:
    """Values that are not given back are not taken for the keys, although another output has their shape."""
    model = give_new_rows(make_decoder(Decoder()), as_joined)
    rows = [node for node in model.graph.node if node.name.endswith("/given")]
    rows[1].input[0] = rows[0].input[0]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="'past_key_values.0.value' by Concat .* no output gives its new r"):
        import_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))


def fixed(model: onnx.ModelProto, room: int, length: Dim = "sequence") -> onnx.ModelProto:
    """The same decoder with a past that always has so many rows."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for value in made.graph.input:
        dims = value.type.tensor_type.shape.dim
        if "past_key" in value.name:
            axis = next(i for i, d in enumerate(dims) if d.dim_param == "past")
            dims[axis].dim_value = room
        elif "mask" in value.name and isinstance(length, int):
            dims[-1].dim_value = room + length
    return made


ROOM = 20
MASKED = {
    "padding": Decoder(mask="padding", positions="padding"),
    "padding and given positions": Decoder(mask="padding"),
    "own mask": Decoder(mask="own", apply="where"),
    "own mask, added": Decoder(mask="own", own_type=np.float32),
    "one token at a time": Decoder(mask="own", own_type=np.float32, sequence=1),
    "four tokens at a time": Decoder(mask="padding", sequence=4),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MASKED)
def test_a_past_that_always_has_as_many_rows(tmp_path: Path, name: str) -> None:
    """Where a mask hides the rows that hold nothing, the order of the rows is nothing to attention."""
    whole = make_decoder(MASKED[name])
    capacity = ROOM + (MASKED[name].sequence if isinstance(MASKED[name].sequence, int) else 1)
    model = fixed(give_new_rows(whole, as_joined), ROOM, MASKED[name].sequence)
    onnx.save(model, tmp_path / "model.onnx")
    result = import_model(tmp_path / "model.onnx", PlanOptions())
    assert {c.capacity for c in result.plan.caches} == {capacity}
    Decode(whole, result.model, capacity).check((1,) * 8, prompts=(5, 2, 0))
    verify_import(result).check()


def test_columns_of_a_mask_are_rows_of_the_cache(tmp_path: Path) -> None:
    onnx.save(fixed(give_new_rows(make_decoder(MASKED["own mask"]), as_joined), ROOM), tmp_path / "model.onnx")
    changes = import_model(tmp_path / "model.onnx", PlanOptions()).plan.changes
    said = [c.why for c in changes if c.old == "mask [B, 1, S, 20 + S]"]
    assert said == [
        "a column is a row of the cache: those of new tokens begin at write_indices, not behind all rows of the past"
    ]


REFUSED = {
    "no mask": (Decoder(mask="none"), "always has 20 rows: supported are masks that hide those that hold no token"),
    "causal by place": (Decoder(mask="past"), "always has 20 rows: supported are masks that hide those"),
    "window by place": (Decoder(mask="padding", window=3), "always has 20 rows: supported are masks that hide those"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_hold_nothing_and_are_visible(tmp_path: Path, name: str) -> None:
    decoder, why = REFUSED[name]
    onnx.save(fixed(give_new_rows(make_decoder(decoder), as_joined), ROOM), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=why):
        import_model(tmp_path / "model.onnx", PlanOptions())


def test_capacity_is_that_of_the_model(tmp_path: Path) -> None:
    onnx.save(fixed(give_new_rows(make_decoder(MASKED["padding"]), as_joined), ROOM), tmp_path / "model.onnx")
    with pytest.raises(
        OptionError, match=r"has 20 rows of a past beside the new ones, 21 in all: leave the option out"
    ):
        import_model(tmp_path / "model.onnx", PlanOptions(capacity=64))


def test_pasts_of_several_lengths(tmp_path: Path) -> None:
    model = fixed(give_new_rows(make_decoder(Decoder(mask="padding")), as_joined), ROOM)
    values = next(v for v in model.graph.input if v.name.endswith("value"))
    values.type.tensor_type.shape.dim[2].dim_value = ROOM + 1
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="some caches have another fixed length, or none"):
        import_model(tmp_path / "model.onnx", PlanOptions())
