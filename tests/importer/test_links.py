"""Models whose data lie behind symbolic links: a snapshot in the Hugging Face cache links to blobs elsewhere."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from onnx import TensorProto

from trt_kvcache import DecodeSession, GenerationConfig, verify_model
from trt_kvcache.importer.files.links import without_links
from trt_kvcache.importer.protos import iter_tensors

GREEDY = GenerationConfig(max_new_tokens=4)


def snapshot(folder: Path, dtype: str = "float32") -> tuple[Path, Path]:
    """A decoder as it was written, and the same in a cache."""
    plain, blobs, links = folder / "plain", folder / "blobs", folder / "snapshots" / "main"
    for made in (plain, blobs, links):
        made.mkdir(parents=True)
    model = write_decoder(plain / "model.onnx", DecoderConfig(dtype=dtype), external_threshold=64)
    for index, file in enumerate(sorted(plain.iterdir())):
        blob = blobs / f"{index:04}"
        blob.write_bytes(file.read_bytes())
        (links / file.name).symlink_to(Path("../../blobs") / blob.name)
    assert len(list(blobs.iterdir())) > 1
    return model, links / "model.onnx"


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_verify(tmp_path: Path, dtype: str) -> None:
    verify_model(snapshot(tmp_path, dtype)[1]).check()


@pytest.mark.slow
def test_sessions(tmp_path: Path) -> None:
    tokens = []
    for model in snapshot(tmp_path):
        with DecodeSession.open(model) as session:
            tokens.append(session.generate([[1, 2, 3]], GREEDY)[0].tokens)
    assert tokens[0] == tokens[1]


def test_names_lead_to_the_files_themselves(tmp_path: Path) -> None:
    for name in ("model/a.bin", "other/b/b.bin", "third.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(8))
    folder = tmp_path / "model"
    (folder / "b.bin").symlink_to("../other/b/b.bin")
    (folder / "c.bin").symlink_to(folder / "a.bin")

    def names(model: onnx.ModelProto) -> list[str]:
        return [entry.value for tensor in iter_tensors(model) for entry in tensor.external_data]

    def model(*locations: str) -> onnx.ModelProto:
        made = onnx.ModelProto()
        for location in locations:
            tensor = made.graph.initializer.add(data_location=TensorProto.EXTERNAL)
            tensor.external_data.add(key="location", value=location)
        return made

    for inside in (model(), model("a.bin"), model("a.bin", "c.bin")):
        assert without_links(inside, folder) == (inside, folder)
    given = model("a.bin", "b.bin", "b.bin")
    linked, real = without_links(given, folder)
    assert (names(linked), real) == (["model/a.bin", "other/b/b.bin", "other/b/b.bin"], tmp_path.resolve())
    assert names(given) == ["a.bin", "b.bin", "b.bin"]
    linked, real = without_links(model("b.bin"), folder)
    assert (names(linked), real) == (["b.bin"], tmp_path.resolve() / "other" / "b")
