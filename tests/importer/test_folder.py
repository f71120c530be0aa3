"""A folder as a model: the decoder with a past is taken, and the export of the first step alone is refused."""

from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from graphs import Graph
from onnx import TensorProto

from trt_kvcache import rewrite_model
from trt_kvcache.errors import InvalidModelError, UnsupportedModelError
from trt_kvcache.importer.files.model_folder import find_model
from trt_kvcache.importer.files.source import load_source


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["model.onnx"], "model.onnx"),
        (["model.onnx", "model.onnx.data", "config.json"], "model.onnx"),
        (["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"], "decoder_with_past_model.onnx"),
        (
            ["decoder_model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx"],
            "decoder_with_past_model.onnx",
        ),
        (["decoder_model.onnx", "decoder_model_merged.onnx"], "decoder_model_merged.onnx"),
        (["encoder_model.onnx", "decoder_model_merged.onnx"], "decoder_model_merged.onnx"),
        (["decoder_model.onnx"], "decoder_model.onnx"),
        (["prefill.onnx", "decode.onnx"], "decode.onnx"),
        (["decode.onnx", "language_model.onnx", "lm_head.onnx", "vision_tower.onnx"], "decode.onnx"),
        (["encoder.onnx", "decoder.onnx"], "decoder.onnx"),
        (
            ["vision_encoder.onnx", "audio_encoder.onnx", "embed_tokens.onnx", "decoder_model_merged.onnx"],
            "decoder_model_merged.onnx",
        ),
        (["model.onnx", "embedding.onnx", "vision.onnx"], "model.onnx"),
    ],
)
def test_the_decoder_with_a_past_is_taken(tmp_path: Path, names: list[str], taken: str) -> None:
    assert find_model(touch(tmp_path, *names)) == tmp_path / taken


def test_the_decoder_lies_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in ("decoder", "encoder"):
        (tmp_path / name).mkdir()
        touch(tmp_path / name, "model.onnx")
    assert find_model(tmp_path) == tmp_path / "decoder" / "model.onnx"


def test_what_rewrite_wrote_is_passed_over(tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, form="mobius"))
    for name in ("model2.onnx", "a.onnx"):
        rewrite_model(tmp_path / "model.onnx", tmp_path / name)
    assert find_model(tmp_path) == tmp_path / "model.onnx"
    (tmp_path / "model.onnx").unlink()
    with pytest.raises(InvalidModelError, match=r"2 models may be the decoder \(a.onnx, model2.onnx\)"):
        find_model(tmp_path)


def test_several_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx", "model_quantized.onnx", "encoder_model.onnx")
    with pytest.raises(InvalidModelError, match=r"2 models .*\(model.onnx, model_quantized.onnx\); give the path"):
        find_model(tmp_path)


def test_an_encoder_alone_is_no_decoder(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"without a decoder \(it has encoder_model.onnx\)"):
        find_model(touch(tmp_path, "encoder_model.onnx"))


def first_step(*, past: bool = False, names: tuple[str, ...] = ("present.0.key", "present.0.value")) -> onnx.ModelProto:
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, ["B", "S", 8])
    if past:
        graph.input("past", TensorProto.FLOAT, ["B", 2, "P", 4])
    heads = graph.Reshape("x", [0, 0, 2, 4])
    for name in names:
        graph.Transpose(heads, out=name, perm=[0, 2, 1, 3])
        graph.output(name, TensorProto.FLOAT, ["B", 2, "S", 4])
    return graph.model()


def test_the_first_step_alone_is_refused_with_its_sibling(tmp_path: Path) -> None:
    onnx.save(first_step(), tmp_path / "decoder_model.onnx")
    with pytest.raises(
        UnsupportedModelError, match=r"'present.0.key' and 1 more\), but not as inputs.*export the decoder with"
    ):
        load_source(tmp_path)
    touch(tmp_path, "decoder_with_past_model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"use .*/decoder_with_past_model.onnx, which computes every step"):
        load_source(tmp_path / "decoder_model.onnx")


@pytest.mark.parametrize("model", [first_step(past=True), first_step(names=("mask", "image"))])
def test_what_is_no_first_step_is_not_refused(tmp_path: Path, model: onnx.ModelProto) -> None:
    onnx.save(model, tmp_path / "other.onnx")
    assert load_source(tmp_path).path == tmp_path / "other.onnx"
