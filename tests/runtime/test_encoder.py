"""Encoder-decoders from end to end: what the encoder reads goes in, the tokens are those of the decoder's meaning."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import encoder, first_step, heard, table
from hybrids import VOCAB, WIDTH, cross_logits, cross_model, encoder_constants, greedy, hybrid_model, write
from onnx import TensorProto

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import InvalidModelError, OptionError, PromptError, SessionError, UnsupportedModelError
from trt_kvcache.importer.families.encoders.encoder_files import decoder_start, find_encoder, find_first_step

CONFIG = GenerationConfig(max_new_tokens=10)
PROMPTS = ([5, 9, 3], [1, 2, 4, 8, 16], [60])
LENGTHS = (6, 11, 1)

# How the encoder's part of an export is written: what the decoder takes, and the files beside it.
LAYOUTS = {
    "hidden": ("hidden", {}, None),
    "keys of the encoder": ("keys", {"keys": "present"}, None),
    "keys of the encoder, same names": ("keys", {"keys": "past_key_values"}, None),
    "keys of the first step": ("keys", {}, {}),
    "keys of a first step that asks for no shape": ("keys", {}, {"shape_of": ""}),
    "keys of a first step that asks for the mask's": ("keys", {}, {"shape_of": "encoder_attention_mask"}),
    "keys of a merged one": ("keys", {}, {"merged": True}),
}


class Words:
    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def export(folder: Path, layout: str = "hidden", seen: str = "none", **options: Any) -> Path:
    """Write the files of an encoder-decoder; returns the decoder's."""
    kind, given, step = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    encoder(folder / "encoder_model.onnx", **given, **options)
    if step is not None:
        first_step(folder / ("decoder_model_merged.onnx" if step.get("merged") else "decoder_model.onnx"), **step)
    return write(folder / "decoder_with_past_model.onnx", cross_model(kind, seen))


def expected(index: int, mask: str = "none") -> list[int]:
    return greedy(lambda tokens: cross_logits(tokens, mask, LENGTHS[index], index), PROMPTS[index], 10)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["none", "ones"])
def test_each_sequence_has_its_source(layout: str, mask: str, tmp_path: Path) -> None:
    """Features of several lengths; where there are masks, they hide the last third."""
    model = export(tmp_path, layout, mask, mask=mask == "ones")
    with DecodeSession.open(model) as session:
        sources: list[dict[str, Any]] = [{"input_features": heard(n, i)} for i, n in enumerate(LENGTHS)]
        if mask == "ones":
            for i, source in enumerate(sources):
                source["attention_mask"] = encoder_constants("keys", mask, LENGTHS[i], i)["encoder_attention_mask"][0]
        made = [session.encode(source) for source in sources]
        results = session.generate(PROMPTS, CONFIG, made)
        slot = session.add(PROMPTS[0], CONFIG, constants=session.encode(sources[0]), keep=True)
        while session.running:
            session.step()
        assert session.cache.tokens(slot)[len(PROMPTS[0]) :] == results[0].tokens
    assert [result.tokens for result in results] == [expected(i, mask) for i in range(3)]


@pytest.mark.slow
def test_a_mask_that_is_left_out_is_all_ones(tmp_path: Path) -> None:
    """With and without an axis of the batch; large weights stay in their files."""
    model = export(tmp_path, "keys of the first step", "ones", mask=True)
    for name in ("encoder_model.onnx", "decoder_model.onnx"):
        loaded = onnx.load(tmp_path / name)
        onnx.save(loaded, tmp_path / name, save_as_external_data=True, location=f"{name}.data", size_threshold=200)
    with DecodeSession.open(model) as session:
        for features in (heard(6, 0), heard(6, 0)[0]):
            made = session.encode({"input_features": features})
            assert made["encoder_attention_mask"].tolist() == [[1] * 6]
            assert session.generate([PROMPTS[0]], CONFIG, [made])[0].tokens == expected(0)


def test_token_ids_and_text(tmp_path: Path) -> None:
    model = export(tmp_path, "hidden", ids=True, mask=True)
    with DecodeSession.open(model, tokenizer=Words()) as session:
        ids = [7, 60, 0]
        found = [session.encode(given)["encoder_hidden_states"] for given in ("7 60 0", ids, {"input_ids": ids})]
        for wrong in ([1.5], [], [[1], [2]]):
            with pytest.raises(PromptError, match=r"'input_ids' is .*, but the encoder takes int64 \[1, length\]"):
                session.encode(wrong)  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="'input_ids' is empty, but the encoder takes"):
            session.encode("")
        with pytest.raises(PromptError, match="'input_ids' is a list of lists of different lengths"):
            session.encode([[1], [2, 3]])  # type: ignore[list-item]
        # ONNX Runtime takes rows of a table from its end.
        with pytest.raises(PromptError, match="'input_ids' has the token id -1; ids count from 0"):
            session.encode([7, -1])
        with pytest.raises(SessionError, match="encoder_model.onnx failed"):
            session.encode([VOCAB])
    for hidden in found:
        assert np.array_equal(hidden, table()[ids][np.newaxis])


@pytest.mark.slow
def test_an_encoder_elsewhere(tmp_path: Path) -> None:
    """Its file or its folder, where it does not lie beside the model; nothing is opened before it is used."""
    export(tmp_path / "there", "keys of the first step")
    model = write(tmp_path / "model.onnx", cross_model("keys"))
    with DecodeSession.open(model) as session, pytest.raises(OptionError, match="no encoder beside .*model.onnx"):
        session.encode({"input_features": heard(6, 0)})
    for place in (tmp_path / "there", tmp_path / "there" / "encoder_model.onnx"):
        with DecodeSession.open(model, encoder=place) as session:
            made = session.encode({"input_features": heard(6, 0)})
            assert session.generate([PROMPTS[0]], CONFIG, [made])[0].tokens == expected(0)
    missing = tmp_path / "there" / "missing.onnx"  # and another one lies beside it
    with DecodeSession.open(model, encoder=missing) as session, pytest.raises(OptionError, match="at .*missing"):
        session.encode({"input_features": heard(6, 0)})
    with DecodeSession.open(model, encoder=tmp_path) as session, pytest.raises(OptionError, match="no encoder at"):
        session.encode([1])


def test_sources_that_do_not_fit(tmp_path: Path) -> None:
    model = export(tmp_path, "keys of the first step", "ones", mask=True)
    features = heard(6, 0)
    cases: list[tuple[Any, str]] = [
        ({}, "takes 'input_features' .float32 .1, length, 32.., 'attention_mask' .*; 'input_features' is missing"),
        ({"attention_mask": np.ones(6, int)}, "'input_features' is missing"),
        ({"input_features": features, "x": 1}, "'x' is not an input of the encoder"),
        ([1, 2], "'input_ids' is not an input of the encoder"),
        ("one", "a source is text, and there is no .*tokenizer.json"),
        (
            {"input_features": features[..., 1:]},
            r"is float32 \[1, 6, 31\], but the encoder takes float32 \[1, length, 32\]",
        ),
        ({"input_features": np.repeat(features, 2, 0)}, r"is float32 \[2, 6, 32\]"),
        ({"input_features": features[:, :0]}, r"is float32 \[1, 0, 32\]"),
        ({"input_features": features, "attention_mask": np.ones(6)}, r"'attention_mask' is float64 \[6\]"),
        ({"input_features": np.zeros((1, 6, WIDTH), complex)}, "is complex128"),
    ]
    with DecodeSession.open(model) as session:
        for given, words in cases:
            with pytest.raises(PromptError, match=words):
                session.encode(given)
        for length in (1, 5):  # ONNX Runtime would spread the first over all positions
            with pytest.raises(
                PromptError,
                match=rf"'attention_mask' is \[1, {length}\], but its size 'length' is 6 in 'input_features'",
            ):
                session.encode({"input_features": features, "attention_mask": np.ones(length, int)})
    with pytest.raises(SessionError, match="closed"):
        session.encode({"input_features": features})


def test_a_mask_of_another_length(tmp_path: Path) -> None:
    """A mask of what the encoder hears says nothing of what it gives, unless it is all ones."""
    model = export(tmp_path, "keys of the encoder", "ones")
    loaded = onnx.load(tmp_path / "encoder_model.onnx")
    loaded.graph.input.append(
        onnx.helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "samples"])
    )
    onnx.save(loaded, tmp_path / "encoder_model.onnx")
    with DecodeSession.open(model) as session:
        source = {"input_features": heard(6, 0), "attention_mask": np.ones(60, int)}
        assert session.encode(source)["encoder_attention_mask"].tolist() == [[1] * 6]
        source["attention_mask"][-1] = 0
        with pytest.raises(
            PromptError, match=r"the encoder returns 6 positions, but its mask is \[1, 60\] and not all ones"
        ):
            session.encode(source)
        with pytest.raises(PromptError, match="'attention_mask' is missing"):
            session.encode({"input_features": heard(6, 0)})


@pytest.mark.slow
def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    source = {"input_features": heard(6, 0)}

    def refused(match: str, error: type[Exception] = UnsupportedModelError) -> None:
        with DecodeSession.open(model) as session, pytest.raises(error, match=match):
            session.encode(source)

    model = export(tmp_path, "keys of the first step")
    first_step(tmp_path / "decoder_model.onnx", reads="input_ids")
    refused("the encoder's keys and values depend on the text")
    first_step(tmp_path / "decoder_model.onnx", reads="speaker")
    refused("the encoder's keys and values depend on 'speaker'")
    step = onnx.load(first_step(tmp_path / "decoder_model.onnx"))
    del step.graph.output[0]
    onnx.save(step, tmp_path / "decoder_model.onnx")
    refused("'past_key_values.a.encoder.key', but .*encoder_model.onnx does not compute it, and .*decoder_model.onnx")
    (tmp_path / "decoder_model.onnx").write_bytes(b"nothing")
    refused("decoder_model.onnx", InvalidModelError)
    (tmp_path / "decoder_model.onnx").unlink()
    refused("does not compute it, and there is no decoder_model.onnx beside it")
    (tmp_path / "encoder_model.onnx").write_bytes(b"nothing")
    refused("encoder_model.onnx: ONNX Runtime .* cannot run it")
    encoder(tmp_path / "encoder_model.onnx", hidden="x", more=["y"])
    refused(r"an encoder must have one output float \[batch, length, width\], but this model has 'x' .*, 'y'")
    model = write(tmp_path / "alone.onnx", hybrid_model())
    refused("takes no inputs from an encoder", OptionError)


@pytest.mark.parametrize(
    ("model", "files", "found"),
    [
        ("decoder_with_past_model.onnx", ["encoder_model.onnx"], "encoder_model.onnx"),
        (
            "decoder_model_merged_fp16.onnx",
            ["encoder_model.onnx", "encoder_model_fp16.onnx"],
            "encoder_model_fp16.onnx",
        ),
        ("decoder_model_merged_fp16.onnx", ["encoder_model.onnx"], "encoder_model.onnx"),
        ("decoder.onnx", ["encoder.onnx"], "encoder.onnx"),
        ("decoder.onnx", ["encoder.onnx", "whisper_encoder.onnx", "genai_config.json"], "whisper_encoder.onnx"),
        ("decoder/model.onnx", ["encoder/model.onnx"], "encoder/model.onnx"),
        ("model.engine", ["encoder_model.onnx"], "encoder_model.onnx"),
        ("model.engine", [], None),
    ],
)
def test_where_encoders_lie(model: str, files: list[str], found: str | None, tmp_path: Path) -> None:
    for name in (model, *files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if "genai_config.json" in files:
        named = {"model": {"encoder": {"filename": "whisper_encoder.onnx"}, "decoder": {"filename": model}}}
        (tmp_path / "genai_config.json").write_text(json.dumps(named))
    wanted = None if found is None else tmp_path / found
    assert find_encoder(tmp_path / model) == wanted
    if "/" not in model:
        assert find_encoder(tmp_path) in (wanted, tmp_path / "encoder_model.onnx")


def test_which_first_step(tmp_path: Path) -> None:
    names = ["decoder_model_merged.onnx", "decoder_model.onnx", "decoder_model_merged_q4.onnx", "decoder_model_q4.onnx"]
    found = []
    for name in names:
        (tmp_path / name).touch()
        found.append(
            [find_first_step(tmp_path / m) for m in ("encoder_model.onnx", "encoder_model_q4.onnx", "x.engine")]
        )
    assert [[path.name if path else None for path in row] for row in found] == [
        ["decoder_model_merged.onnx"] * 3,
        ["decoder_model.onnx"] * 3,
        ["decoder_model.onnx", "decoder_model_merged_q4.onnx", "decoder_model.onnx"],
        ["decoder_model.onnx", "decoder_model_q4.onnx", "decoder_model.onnx"],
    ]


@pytest.mark.parametrize(
    ("file", "content", "start"),
    [
        ("generation_config.json", {"decoder_start_token_id": 7}, 7),
        ("config.json", {"decoder_start_token_id": 0}, 0),
        ("config.json", {"decoder": {"decoder_start_token_id": 3}}, 3),
        ("genai_config.json", {"model": {"decoder_start_token_id": 5}}, 5),
        ("config.json", {"decoder_start_token_id": None}, None),
        ("config.json", [1], None),
        ("config.json", {"bos_token_id": 1}, None),
    ],
)
def test_where_the_text_starts(file: str, content: Any, start: int | None, tmp_path: Path) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "decoder").mkdir()
    for model in (tmp_path, tmp_path / "model.onnx", tmp_path / "decoder" / "model.onnx"):
        assert decoder_start(model) == start
