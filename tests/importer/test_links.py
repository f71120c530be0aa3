"""Models whose data lie behind symbolic links: a snapshot in the Hugging Face cache links to blobs elsewhere."""

from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import DecodeSession, GenerationConfig, plan_model, rewrite_model, verify_model

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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_data_with_two_names(tmp_path: Path, dtype: str) -> None:
    """As deduplication, DVC and ``cp -al`` leave them: every command reads them."""
    model, other = snapshot(tmp_path, dtype)
    for file in [*model.parent.iterdir()]:
        (tmp_path / f"other-{file.name}").hardlink_to(file)
    plan_model(model)
    rewrite_model(model, tmp_path / "rewritten.onnx")
    verify_model(model).check()
    tokens = []
    for one in (model, other):
        with DecodeSession.open(one) as session:
            tokens.append(session.generate([[1, 2, 3]], GREEDY)[0].tokens)
    assert tokens[0] == tokens[1]
