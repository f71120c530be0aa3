"""`generate`, `bench` and `plan` of models that take embeddings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import invoke
from runtime.embedded_models import MODELS, Forms, cut, embedding_model

from trt_kvcache import DecodeSession, GenerationConfig

CAPACITY = ["--capacity", "64"]


@pytest.fixture
def forms(tmp_path: Path) -> Forms:
    """A decoder with three planes of positions, and its embedding model beside it."""
    (tmp_path / "export").mkdir()
    made = cut(MODELS / "ort-genai" / "qwen3vl_cpu_fp32" / "model.onnx", tmp_path)
    (tmp_path / "export" / "model.onnx").write_bytes(made.embeds.read_bytes())
    embedding_model(made.table, tmp_path / "export" / "embedding.onnx")
    return Forms(made.ids, tmp_path / "export", made.table)


def call(*arguments: str, code: int = 0) -> Any:
    return invoke(*arguments, *CAPACITY, code=code)


def tokens(*arguments: str) -> list[list[int]]:
    return [s["tokens"] for s in json.loads(call("generate", *arguments, "--json").stdout)["sequences"]]


@pytest.mark.slow
def test_ids_and_embeddings(forms: Forms, tmp_path: Path) -> None:
    """The model beside it, or a table; prompts of ids before those of embeddings, each with its own positions."""
    rng = np.random.default_rng(2)
    embeds, places = rng.normal(size=(3, forms.table.shape[1])), np.array([[0, 9, 40], [0, 30, 20], [0, 21, 11]])
    np.savez(tmp_path / "a.npz", input_ids=[[7, 7, 7]], inputs_embeds=embeds[None], position_ids=places[:, None])
    np.savez(tmp_path / "b.npz", input_ids=[7, 7, 7], inputs_embeds=embeds.astype(np.float32))
    np.save(tmp_path / "table.npy", forms.table)
    given = ["--tokens", "1,2", *(f"--inputs-embeds={tmp_path / name}" for name in ("a.npz", "b.npz"))]
    found = tokens(str(forms.embeds), *given, "--max-new-tokens", "5")
    again = tokens(str(forms.embeds), *given, "--max-new-tokens=5", f"--embeddings={tmp_path / 'table.npy'}")
    with DecodeSession.open(forms.embeds, capacity=64) as session:
        expected = session.generate(
            [[1, 2], [7] * 3, [7] * 3],
            GenerationConfig(max_new_tokens=5),
            inputs_embeds=[None, embeds, embeds],
            positions=[None, places, None],
        )
    assert found == again == [result.tokens for result in expected]
    assert found[1] != found[2]
    assert found[:1] == tokens(str(forms.ids), "--tokens", "1,2", "--max-new-tokens", "5")


def test_bench(forms: Forms, tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", forms.table)
    sizes = ["--lengths", "4", "--positions", "8", "--batches", "1,2", "--repeats", "2", "--warmup", "1", "--json"]
    for more in ([], ["--embeddings", str(tmp_path / "table.npy")]):
        timings = json.loads(call("bench", str(forms.embeds), *sizes, *more).stdout)["timings"]
        assert [t["batch"] for t in timings] == [1, 1, 2]
