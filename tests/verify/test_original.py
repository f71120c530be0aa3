"""Models whose interface normalization changes: the original in its own interface against the rewritten one.

The pairs are made by hand, so that nothing here rests on normalization itself; a wrong rewrite must show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from decoders import DecoderConfig
from onnx import ModelProto, TensorProto, helper
from originals import Editor, OriginalConfig, import_pair

from trt_kvcache.errors import OptionError, UnsupportedModelError, VerificationError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.check.original import OriginalInterface
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.verify import VerifyOptions, VerifyReport, verify_import

HEADS = DecoderConfig(form="heads-major")
CONCAT = OriginalConfig(HEADS)
ASSIGN = replace(CONCAT, cache="assign")
MASKED = OriginalConfig(replace(HEADS, mask="bool", causal=False, lengths=False), cache="assign")
HALF = OriginalConfig(replace(HEADS, dtype="float16"))
WINDOW = replace(CONCAT, window=7)
ROLLING = OriginalConfig(replace(HEADS, mode="circular", sequence=1, capacity=9), window=9)


def verify(
    folder: Path,
    config: OriginalConfig,
    mistake: Callable[[ModelProto], None] = lambda model: None,
    options: VerifyOptions | None = None,
) -> VerifyReport:
    return verify_import(import_pair(folder, config, mistake), options or VerifyOptions())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "config",
    [
        CONCAT, ASSIGN, MASKED, HALF, WINDOW, ROLLING,
        replace(HALF, cache="assign"),
        replace(ASSIGN, window=7),
        replace(CONCAT, embedded=True),
        replace(CONCAT, extras=True),
        replace(CONCAT, batch=2),
        replace(ASSIGN, batch=1),
        OriginalConfig(replace(HEADS, mask="float", causal=False, lengths=False), cache="assign"),
        OriginalConfig(replace(HEADS, sequence=1)),
        OriginalConfig(replace(HEADS, dtype="bfloat16")),
    ],
)  # fmt: skip
def test_a_right_rewrite_passes(tmp_path: Path, config: OriginalConfig) -> None:
    report = verify(tmp_path, config)
    report.check()
    prompt = 8
    decoded = [s for s in report.steps if s.episode == "decode"]
    assert sum(s.length for s in decoded) >= 3 * prompt
    names = {o.name for o in report.outputs}
    assert {"logits", "updated_key_cache.0", "updated_value_cache.1"} <= names
    assert report.float32_twin == (config.decoder.dtype == "bfloat16")
    assert any("no valid lengths" in note for note in report.notes)
    assert any("total_length" in note for note in report.notes)


def test_rows_are_ragged_and_reach_the_last_row(tmp_path: Path) -> None:
    report = verify(tmp_path, CONCAT)
    assert {s.episode for s in report.steps} == {"decode", "full"}
    assert report.steps[0].starts == (0, 5, 10)
    assert max(max(s.valid) for s in report.steps) == 64
    assert all(v == s + step.length for step in report.steps for s, v in zip(step.starts, step.valid, strict=True))
    assert report.garbage >= 1e9


def test_rows_of_a_fixed_batch_start_together(tmp_path: Path) -> None:
    report = verify(tmp_path, replace(CONCAT, batch=2))
    assert all(len(set(step.starts)) == 1 and len(step.starts) == 2 for step in report.steps)
    assert any("2 rows that start together" in note for note in report.notes)


def test_a_window_that_became_circular_wraps(tmp_path: Path) -> None:
    report = verify(tmp_path, ROLLING)
    assert max(max(s.valid) for s in report.steps) > 2 * 9
    assert {s.episode for s in report.steps} == {"decode", "wrap"}


def test_the_caller_decides_how_long_to_decode(tmp_path: Path) -> None:
    report = verify(tmp_path, CONCAT, options=VerifyOptions(chunks=(2,), tokens=1, batch=1))
    assert [s.length for s in report.steps if s.episode == "decode"] == [2, 1]


def insert(model: ModelProto, op: str, place: int, new: str, *others: str, only: int | None = None,
           **attributes: int) -> None:  # fmt: skip
    """An operator in front of one input of all nodes of a kind, or of one of them."""
    nodes = Editor(model).nodes(op)
    assert nodes
    for number, node in enumerate(nodes):
        if only in (None, number):
            name = f"mistake/{new}/{node.name}/{place}"
            model.graph.node.insert(
                list(model.graph.node).index(node),
                helper.make_node(new, [node.input[place], *others], [name], name=name, **attributes),
            )
            node.input[place] = name


def constant(model: ModelProto, values: object, dtype: type = np.int64) -> str:
    return Editor(model).constant(values, dtype)


def attribute(model: ModelProto, op: str, name: str, value: object) -> None:
    for node in Editor(model).nodes(op):
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])


def one_key_too_many(model: ModelProto) -> None:
    insert(model, "Attention", 6, "Add", constant(model, [1]))


def one_key_too_few(model: ModelProto) -> None:
    insert(model, "Attention", 6, "Sub", constant(model, [1]))


def not_causal(model: ModelProto) -> None:
    attribute(model, "Attention", "is_causal", 0)


def swap_heads(model: ModelProto) -> None:
    insert(model, "TensorScatter", 1, "Gather", constant(model, [1, 0]), only=0, axis=1)


def swap_query_heads(model: ModelProto) -> None:
    insert(model, "Attention", 0, "Gather", constant(model, [2, 3, 0, 1]), only=0, axis=1)


def write_one_late(model: ModelProto) -> None:
    insert(model, "TensorScatter", 2, "Sub", constant(model, [1]))
    insert(model, "TensorScatter", 2, "Abs")


def positions_from_zero(model: ModelProto) -> None:
    insert(model, "Unsqueeze", 0, "Mul", constant(model, 0), only=0)


def other_window(model: ModelProto) -> None:
    attribute(model, "Attention", "left_window_size", 7)


def no_window(model: ModelProto) -> None:
    attribute(model, "Attention", "left_window_size", -1)


def no_mask(model: ModelProto) -> None:
    for node in Editor(model).nodes("Attention"):
        node.input[3] = ""


def window_read_too_short(model: ModelProto) -> None:
    insert(model, "Attention", 6, "Min", constant(model, [8]))


def state_kept(model: ModelProto) -> None:
    next(n for n in model.graph.node if n.output[0] == "state_out").input[1] = "extra.decayed"


def constant_ignored(model: ModelProto) -> None:
    next(n for n in model.graph.node if n.output[0] == "extra.sum").input[1] = "state_out"


MASK_ONLY = replace(MASKED, decoder=replace(MASKED.decoder, lengths=True))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("config", "mistake", "outputs"),
    [
        (CONCAT, one_key_too_many, {"logits"}),
        (CONCAT, one_key_too_few, {"logits"}),
        (CONCAT, not_causal, {"logits"}),
        (CONCAT, swap_heads, {"logits", "updated_key_cache.0"}),
        (CONCAT, swap_query_heads, {"logits"}),
        (CONCAT, write_one_late, {"logits", "updated_value_cache.0"}),
        (CONCAT, positions_from_zero, {"logits", "updated_key_cache.0"}),
        (HALF, one_key_too_many, {"logits"}),
        (HALF, one_key_too_few, {"logits"}),
        (HALF, swap_query_heads, {"logits"}),
        (HALF, positions_from_zero, {"logits", "updated_key_cache.0"}),
        (ASSIGN, one_key_too_few, {"logits"}),
        (ASSIGN, write_one_late, {"logits"}),
        (MASK_ONLY, no_mask, {"logits"}),
        (WINDOW, other_window, {"logits"}),
        (WINDOW, no_window, {"logits"}),
        (ROLLING, window_read_too_short, {"logits"}),
        (ROLLING, write_one_late, {"logits", "updated_value_cache.0"}),
        (replace(CONCAT, extras=True), state_kept, {"logits", "state_out"}),
        (replace(CONCAT, extras=True), constant_ignored, {"logits"}),
        (replace(CONCAT, batch=2), swap_heads, {"logits", "updated_key_cache.0"}),
    ],
)
def test_a_wrong_rewrite_fails(
    tmp_path: Path, config: OriginalConfig, mistake: Callable[[ModelProto], None], outputs: set[str]
) -> None:
    report = verify(tmp_path, config, mistake)
    assert not report.passed
    assert {o.name for o in report.outputs if not o.passed} >= outputs
    with pytest.raises(VerificationError, match="does not give the original's numbers"):
        report.check()


@pytest.mark.parametrize("config", [CONCAT, ASSIGN])
def test_stale_rows_must_stay(tmp_path: Path, config: OriginalConfig) -> None:
    imported = import_pair(tmp_path, config)
    wrong = ModelProto.FromString(imported.model.SerializeToString())
    insert(wrong, "TensorScatter", 0, "Mul", constant(wrong, 0, np.float32), only=2)
    report = verify_import(replace(imported, model=wrong), VerifyOptions())
    (cleared,) = [o for o in report.outputs if o.stale_rows_changed]
    assert cleared.stale_rows_changed > 100
    assert cleared.max_relative is not None
    assert cleared.max_relative <= cleared.tolerance
    assert not report.passed


def test_what_an_original_leaves_beyond_the_tokens_means_nothing(tmp_path: Path) -> None:
    imported = import_pair(tmp_path, ASSIGN)
    original = ModelProto.FromString(imported.source.proto.SerializeToString())
    zero = constant(original, 0, np.float32)
    for node in Editor(original).nodes("Concat"):
        if node.input[-1].endswith("/after"):
            place = list(original.graph.node).index(node)
            cleared = helper.make_node("Mul", [node.input[2], zero], [f"{node.input[2]}/cleared"], name=node.input[2])
            original.graph.node.insert(place, cleared)
            node.input[2] += "/cleared"
    onnx.save(original, tmp_path / "original.onnx")
    verify_import(replace(imported, source=load_source(tmp_path / "original.onnx")), VerifyOptions()).check()


def test_greedy_tokens_are_counted(tmp_path: Path) -> None:
    right = verify(tmp_path, CONCAT)
    (note,) = [n for n in right.notes if n.startswith("greedy")]
    same, clear = (int(word) for word in note.split() if word.isdecimal())
    assert same == clear > 100
    wrong = verify(tmp_path, CONCAT, swap_query_heads, VerifyOptions(tolerance=0.0))
    (note,) = [n for n in wrong.notes if n.startswith("greedy")]
    same, clear = (int(word) for word in note.split() if word.isdecimal())
    assert same < clear


def test_what_the_original_is_given(tmp_path: Path) -> None:
    plan = import_pair(tmp_path, CONCAT).plan
    interface = OriginalInterface(plan, twin=False)
    cache = np.arange(2 * 2 * 64 * 16, dtype=np.float32).reshape(2, 2, 64, 16)
    feeds = {
        "input_ids": np.array([[1, 2, 3], [4, 5, 6]]),
        "write_indices": np.array([4, 0]),
        "nonpad_kv_seqlen": np.array([7, 3]),
        **{t.name: cache for t in plan.original if t.name.endswith(("cache.0", "cache.1")) and t.io == "input"},
    }
    assert interface.groups(feeds) == [(slice(0, 1), 4), (slice(1, 2), 0)]
    first = interface.feeds(feeds, slice(0, 1), 4)
    np.testing.assert_array_equal(first["input_ids"], [[1, 2, 3]])
    np.testing.assert_array_equal(first["position_ids"], [[4, 5, 6]])
    np.testing.assert_array_equal(first["attention_mask"], np.ones((1, 7)))
    np.testing.assert_array_equal(first["key_cache.0"], cache[:1, :, :4])
    second = interface.feeds(feeds, slice(1, 2), 0)
    assert second["key_cache.0"].shape == (1, 2, 0, 16)
    np.testing.assert_array_equal(second["position_ids"], [[0, 1, 2]])


def test_rows_that_start_apart_are_refused_where_the_batch_is_fixed(tmp_path: Path) -> None:
    plan = import_pair(tmp_path, replace(CONCAT, batch=2)).plan
    with pytest.raises(OptionError, match=r"exported for 2 rows that start together, not at \[4, 0\]"):
        OriginalInterface(plan, twin=False).groups({"write_indices": np.array([4, 0])})


def test_outputs_as_long_as_each_text_are_refused(tmp_path: Path) -> None:
    """It ended with an error of NumPy's: rows that the original runs one by one have other lengths."""
    model = make_decoder(Decoder(mask="own", apply="where"))
    model.graph.node.append(helper.make_node("Not", ["mask"], ["hidden"], "node_hidden"))
    shape = ["batch", 1, "sequence", "total"]
    model.graph.output.append(helper.make_tensor_value_info("hidden", TensorProto.BOOL, shape))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedModelError, match="output 'hidden' of the rewritten model is computed in another way"
    ):
        import_model(tmp_path / "model.onnx", PlanOptions(capacity=20))
