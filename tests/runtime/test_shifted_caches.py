"""Caches whose rows the model moves, against the model as exported, which a loop of its own drives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from shifted_graphs import LONG, ROWS, Shifted, make_shifted

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions, plan_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import UpdateMode

Array = NDArray[Any]
TOKENS = [5, 9, 3, 17, 1, 2, 30, 8, 4, 16, 7, 7, 21, 0, 12, 28, 11, 6, 19, 25, 14, 10]
FORMS = {
    "cat": (Shifted(("cat", "full")), 2),
    "cat, counted": (Shifted(("full", "cat"), mask="counted"), 2),
    "roll": (Shifted(("roll", "full"), length=1), 1),
    "roll bsnd": (Shifted(("roll",), length=1, layout="bsnd"), 1),
}


class Exported:
    """The model as exported, with caches of its own: those of shifted rows are filled from the end."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.session = ort.InferenceSession(model.SerializeToString())
        shapes = {v.name: [d if isinstance(d, int) else 1 for d in v.shape] for v in self.session.get_inputs()}
        self.masked, self.counted = "mask" in shapes, "cur_len" in shapes
        self.caches = {n: np.zeros(s, np.float32) for n, s in shapes.items() if n.startswith("past")}
        self.count = 0

    def step(self, tokens: list[int]) -> Array:
        places = self.count + np.arange(len(tokens))
        self.count += len(tokens)
        rows = self.count - ROWS + np.arange(ROWS)  # the token in each row of a shifted cache after the step
        feeds = {"input_ids": np.array([tokens]), "position_ids": places[None], **self.caches}
        if self.counted:
            feeds["cur_len"] = np.array(places[0])
        if self.masked:
            feeds["mask"] = ((rows >= 0) & (rows <= places[:, None]))[None, None]
        names = [value.name for value in self.session.get_outputs()]
        made = dict(zip(names, self.session.run(names, feeds), strict=True))
        self.caches = {name: made[name.replace("past_key_values", "present")] for name in self.caches}
        return made["logits"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMS)
def test_a_ring_holds_what_the_model_shifts(name: str, tmp_path: Path) -> None:
    """While the window fills, when it is full, and after several rounds: logits, and each token's row in each cache."""
    form, length = FORMS[name]
    model = make_shifted(form)
    onnx.save(model, tmp_path / "model.onnx")
    found = import_model(tmp_path / "model.onnx", PlanOptions(attention_span=False, logits="all"))
    rings = {c.past: c for c in found.plan.caches if c.mode is UpdateMode.CIRCULAR}
    assert {c.capacity for c in rings.values()} == {ROWS}
    assert all(c.in_place for c in rings.values())
    exported, ours = Exported(model), ort.InferenceSession(found.model.SerializeToString())
    names = [value.name for value in ours.get_outputs()]
    held = {c.past: np.full([1, *c.physical_shape[1:]], 1e4, np.float32) for c in found.plan.caches}
    for start in range(0, len(TOKENS), length):
        tokens = TOKENS[start : start + length]
        logits, end = exported.step(tokens), start + length
        given = {
            "input_ids": np.array([tokens]), "position_ids": start + np.arange(length)[None],
            "write_indices": np.array([start]), "nonpad_kv_seqlen": np.array([end]), **held,
        }  # fmt: skip
        made = dict(zip(names, ours.run(names, {v.name: given[v.name] for v in ours.get_inputs()}), strict=True))
        np.testing.assert_allclose(made["logits"], logits, rtol=1e-4, atol=1e-5)
        for cache in found.plan.caches:
            held[cache.past] = made[cache.present]
            theirs = np.moveaxis(exported.caches[cache.past], cache.sequence_axis, 0)
            own = np.moveaxis(held[cache.past], 2, 0)  # heads come first here, rows in the original's order of axes
            own = own if cache.sequence_axis == 2 else np.moveaxis(own, 2, 1)
            ring = cache.past in rings
            for token in range(max(0, end - ROWS) if ring else 0, end):
                row, place = (token % ROWS, token - end + ROWS) if ring else (token, token)
                np.testing.assert_allclose(own[row].reshape(-1), theirs[place].reshape(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMS)
def test_sessions_give_the_tokens_of_each_sequence_alone(name: str, tmp_path: Path) -> None:
    """Ragged prompts, shorter and longer than the window; the original takes them one by one."""
    model = make_shifted(FORMS[name][0])
    onnx.save(model, tmp_path / "model.onnx")
    prompts, count = [TOKENS[:3], TOKENS[:13], TOKENS[4:5]], 15
    with DecodeSession.open(tmp_path / "model.onnx", max_batch=3) as session:
        results = session.generate(prompts, GenerationConfig(max_new_tokens=count))
    for prompt, result in zip(prompts, results, strict=True):
        exported, text = Exported(model), list(prompt)
        logits = [exported.step([token]) for token in prompt][-1]
        for _ in range(count):
            text.append(int(logits[0, -1].argmax()))
            logits = exported.step(text[-1:])
        assert result.tokens == text[len(prompt) :]
    assert count + len(prompts[1]) <= LONG


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Shifted(("front",), length=1), "moves its rows in every step, by another number .* or these do not come last"),
        (
            Shifted(("roll",), length=1, mask="none"),
            r"shows the last query 8 of 8 rows .* give the mask \[B, 1, S, W\]",
        ),
        (Shifted(("still",), length=1, mask="still"), "writes rows 5 .* counts its tokens in Python, .* full"),
        (Shifted(("roll",), length=1, mask="still"), "shows the last query 6 of 8 rows .* one count for good"),
    ],
)
def test_what_is_no_ring_is_refused(form: Shifted, words: str, tmp_path: Path) -> None:
    onnx.save(make_shifted(form), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(tmp_path / "model.onnx")
