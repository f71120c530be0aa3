"""Caches of which a step gives the new rows only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_decode import CAPACITY, Decode, rewritten
from concat_graphs import Decoder, make_decoder
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from new_row_graphs import Form, as_joined, changed, flat, give_new_rows, transposed

from trt_kvcache import verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions

FORMS: dict[str, tuple[Form, ...]] = {
    "as joined": (as_joined,),
    "sequence first": (transposed(0, 2, 1, 3),),
    "keys transposed": (transposed(0, 1, 3, 2), as_joined),
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


@pytest.mark.parametrize("name", DECODERS)
def test_the_whole_is_updated_in_place(tmp_path: Path, name: str) -> None:
    whole = make_decoder(DECODERS[name])
    result = rewritten(give_new_rows(whole, as_joined), tmp_path)
    assert [(c.idiom, c.route.value) for c in result.plan.caches] == [("Concat, new rows returned", "native")] * 2
    Decode(whole, result.model).run(tolerance=1e-2 if name == "float16" else 1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_new_rows_in_any_layout(tmp_path: Path, name: str) -> None:
    whole = make_decoder(Decoder(layers=2))
    result = rewritten(give_new_rows(whole, *FORMS[name]), tmp_path)
    Decode(whole, result.model).run()
    verify_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY)).check()


@pytest.mark.parametrize("form", ["concat", "concat-attention"])
def test_verification_writes_the_rows_itself(tmp_path: Path, form: str) -> None:
    model = give_new_rows(make_foreign(form, DecoderConfig()), as_joined, transposed(0, 2, 1, 3))
    onnx.save(model, tmp_path / "model.onnx")
    verify_model(tmp_path / "model.onnx", PlanOptions(capacity=32)).check()


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
    with pytest.raises(UnsupportedModelError, match="updates no cache that is known here"):
        rewritten(give_new_rows(make_decoder(Decoder()), changed("Neg")), tmp_path)


def test_an_output_may_be_taken_for_one_cache_only(tmp_path: Path) -> None:
    """Values that are not given back are not taken for the keys, although another output has their shape."""
    model = give_new_rows(make_decoder(Decoder()), as_joined)
    rows = [node for node in model.graph.node if node.name.endswith("/given")]
    rows[1].input[0] = rows[0].input[0]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="'past_key_values.0.value' by Concat .* no output gives its new r"):
        import_model(tmp_path / "model.onnx", PlanOptions(capacity=CAPACITY))
