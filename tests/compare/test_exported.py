"""The model as exported decodes by itself: no cut of a text changes its logits, and a session gives the same."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from foreign_decoders import FORMS, make_foreign
from stored import MODELS

from trt_kvcache import CachePlan, DecodeSession, PlanOptions, plan_model
from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.exported_model import Exported
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.steps.drawn_inputs import draw_constants

CAPACITY = 64
LENGTH = 12
REFUSED = "narrow_copy_legacy_op17"  # whose exporter lost a write
STORED = sorted(p.parent for p in MODELS.glob("*/*/model.onnx") if p.parent.name != REFUSED)


def planned(path: Path) -> CachePlan:
    return plan_model(path, PlanOptions(capacity=CAPACITY if _grows(path) else None))


def _grows(path: Path) -> bool:
    file = path / "model.onnx" if path.is_dir() else path
    inputs = onnx.load(file, load_external_data=False).graph.input
    past = next(i for i in inputs if len(i.type.tensor_type.shape.dim) > 3 or "cache" in i.name or "past" in i.name)
    return not any(d.dim_value == CAPACITY for d in past.type.tensor_type.shape.dim)


def step(runner: Exported, pieces: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """The logits of the next tokens of each text, of which some may rest."""
    return [
        runner.step(Piece(len(tokens), (row,)), np.array([tokens]))[0] for row, tokens in enumerate(pieces) if tokens
    ]


def decoded(runner: Exported, cuts: list[int], texts: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    runner.start(len(texts))
    steps, at = [], 0
    for cut in cuts:
        steps.append(step(runner, [text[at : at + cut] for text in texts]))
        at += cut
    return [np.concatenate(rows) for rows in zip(*steps, strict=True)]


def texts_of(runner: Exported) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, min(runner.vocabulary or 60, 60), LENGTH).tolist() for _ in range(2)]


def check_cuts(path: Path, plan: CachePlan, **more: object) -> None:
    """One step of all tokens, which reads no cache, gives what single steps give, which read little else."""
    runner = Exported(path, plan, **more)  # type: ignore[arg-type]
    texts = texts_of(runner)
    singly = decoded(runner, [1] * LENGTH, texts)
    cut = decoded(runner, [7, 4, 1], texts)
    for one, other in zip(singly, cut, strict=True):
        assert (one.dtype, len(one)) == (np.float32, LENGTH)
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(one[-1], other[-1], rtol=0, atol=1e-5 * np.abs(one).max())
        if len(other) == LENGTH:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(one).max())
    assert np.abs(singly[0] - singly[1]).max() > 1e-3, "two texts"


@pytest.mark.few(10)
@pytest.mark.parametrize("model", STORED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_stored_exports_decode(model: Path) -> None:
    plan = planned(model)
    given = draw_constants(plan, 1, 0)
    check_cuts(model, plan, given=given)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_caches_decode(form: str, tmp_path: Path) -> None:
    onnx.save(make_foreign(form, DecoderConfig(layers=1)), tmp_path / "model.onnx")
    check_cuts(tmp_path, planned(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(dtype="bfloat16"),
        DecoderConfig(form="five-d", mask="float"),
        DecoderConfig(form="seq-major", mask="bool", lengths=False, causal=False),
        DecoderConfig(batch=2),
        DecoderConfig(mode="circular", capacity=8, sequence=1),
        DecoderConfig(mode="circular", capacity=8),
    ],
    ids=lambda config: f"{config.dtype}-{config.form}-{config.mode}-{config.mask}-{config.batch}-{config.sequence}",
)
def test_canonical_models_decode(config: DecoderConfig, tmp_path: Path) -> None:
    """And are what a session decodes, which shares no code with this but the plan."""
    write_decoder(tmp_path / "model.onnx", config)
    plan = plan_model(tmp_path)
    runner = Exported(tmp_path, plan)
    texts = texts_of(runner)
    cuts = [1] * LENGTH if config.mode == "circular" else [7, 4, 1]
    ours = decoded(runner, cuts, texts)
    if config.mode != "circular":
        check_cuts(tmp_path, plan)
    with DecodeSession.open(tmp_path, max_batch=2, tokenizer=False) as session:
        slots = [session.cache.acquire() for _ in texts]
        at = 0
        for cut in cuts:
            got = session.update(dict(zip(slots, [t[at : at + cut] for t in texts], strict=True)))
            at += cut
            for slot, rows in zip(slots, ours, strict=True):
                scale = np.abs(rows).max() * (2e-2 if config.dtype == "bfloat16" else 1e-5)
                np.testing.assert_allclose(np.atleast_2d(got[slot])[-1], rows[at - 1], rtol=0, atol=scale)


def test_a_text_rests_and_others_begin_anew(tmp_path: Path) -> None:
    onnx.save(make_foreign("concat", DecoderConfig(layers=1)), tmp_path / "model.onnx")
    runner = Exported(tmp_path, planned(tmp_path))
    first, second = texts_of(runner)
    together = decoded(runner, [7, 5], [first, second])
    runner.start(2)
    step(runner, [first[:7], []])
    step(runner, [[], second[:7]])
    np.testing.assert_array_equal(step(runner, [first[7:], second[7:]]), [rows[7:] for rows in together])


def test_caches_that_grow_take_no_room_for_the_capacity(tmp_path: Path) -> None:
    onnx.save(make_foreign("concat", DecoderConfig(layers=1)), tmp_path / "model.onnx")
    runner = Exported(tmp_path, plan_model(tmp_path, PlanOptions(capacity=1 << 22, beyond_length=True)))
    runner.start(3)
    assert sum(values.nbytes for text in runner._texts for values in text.values()) == 0


def test_what_it_cannot_decode(tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, sequence=4))
    runner = Exported(tmp_path, plan_model(tmp_path))
    with pytest.raises(UnsupportedModelError, match="takes exactly 4 tokens in each step; got 6"):
        decoded(runner, [6], [[3] * 6])
    assert decoded(runner, [4, 8], [[5] * 12])[0].shape == (12, 256)
    with pytest.raises(
        UnsupportedModelError, match="ONNX Runtime cannot run a step of 4 tokens after a past of 0 tokens: .*indices"
    ):
        decoded(runner, [4], [[1000] * 4])
