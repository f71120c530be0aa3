"""Models that take embeddings: the tokens of the same model with token ids, whatever gives the embeddings."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from runtime.embedded_models import MODELS, Forms, Recomputed, cut, embedding_model, opened
from safetensors.numpy import save_file

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.errors import ModelError, OptionError, PromptError, SessionError, UnsupportedModelError
from trt_kvcache.runtime.embeddings import find_embeddings

PROMPTS = ([5, 9, 3], list(range(10, 29)), [60], [1, 2, 4, 8, 16, 32, 3, 6, 12, 24, 48], [7, 7, 200, 7, 7, 200, 7, 7])
STORED = {
    "static": MODELS / "mobius" / "llama_static_f32" / "model.onnx",
    "planes": MODELS / "ort-genai" / "qwen3vl_cpu_fp32" / "model.onnx",
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Forms]:
    """Each stored model with token ids, and with embeddings."""
    return {name: cut(path, tmp_path_factory.mktemp(name)) for name, path in STORED.items()}


def image(rng: np.random.Generator, width: int) -> tuple[list[int], Any, Any]:
    """A prompt of text, an image of 3 x 4 patches, text: ids, embeddings of the image, positions."""
    ids = [5, 9, 3, 1, *[7] * 12, 2, 30, 40]
    patches = np.stack(np.meshgrid(0, range(3), range(4), indexing="ij")).reshape(3, -1) + 4
    places = np.concatenate([np.tile(np.arange(4), (3, 1)), patches, np.tile(np.arange(8, 11), (3, 1))], axis=1)
    return ids, rng.standard_normal((12, width)).astype(np.float32), places


@pytest.mark.slow
def test_every_kind_of_embeddings(forms: dict[str, Forms], tmp_path: Path) -> None:
    """A model, tables in files and in memory, of other float types than the decoder's."""
    form = forms["static"]
    table, config = form.table, GenerationConfig(max_new_tokens=12)
    np.save(tmp_path / "table.npy", table)
    weights = {"head": table[:100] * 2, "norm": np.ones(4, np.float32), "model.embed_tokens.weight": table}
    save_file(weights, tmp_path / "model.safetensors")
    save_file({"wte": table, "bias": np.ones(4, np.float32)}, tmp_path / "only.safetensors")
    kinds: list[Any] = [
        tmp_path / "table.npy",
        str(tmp_path / "model.safetensors"),
        f"{tmp_path / 'model.safetensors'}:model.embed_tokens.weight",
        tmp_path / "only.safetensors",
        embedding_model(table, tmp_path / "embedding.onnx"),
        table.astype(np.float64),
        table.tolist(),
    ]
    with opened(form.ids, "cpu") as session:
        wanted = [r.tokens for r in session.generate(PROMPTS[:3], config)]
        (exact,) = session.update({session.cache.acquire(): PROMPTS[0]}).values()
    for given in kinds:
        with opened(form.embeds, "cpu", embeddings=given) as session:
            assert session.vocab == len(table)
            assert [r.tokens for r in session.generate(PROMPTS[:3], config)] == wanted, given
    for dtype in (np.float16, ml_dtypes.bfloat16):
        small = embedding_model(table.astype(dtype), tmp_path / "half.onnx") if dtype is np.float16 else None
        for given in filter(lambda g: g is not None, (table.astype(dtype), small)):
            with opened(form.embeds, "cpu", embeddings=given) as session:
                (found,) = session.update({session.cache.acquire(): PROMPTS[0]}).values()
            np.testing.assert_allclose(found, exact, rtol=0, atol=0.03 * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("merge", ["take", "scatter"])
def test_ids_of_images_have_no_embedding_of_their_own(forms: dict[str, Forms], merge: str, tmp_path: Path) -> None:
    """Zeros, or an error from deep within: refused by name where a prompt has one, or the model chooses one."""
    form = forms["static"]
    path = embedding_model(form.table, tmp_path / "embedding.onnx", merge=merge)
    seven = GenerationConfig(max_new_tokens=3, sequence_bias={7: 1e6})
    with opened(form.embeds, "cpu", embeddings=path) as session:
        assert [session.takes(token) for token in (6, 7, 8, 255, 256, -1)] == [True, False, True, True, False, False]
        with pytest.raises(PromptError, match=r"token id 7 has no embedding of its own: .* give inputs_embeds"):
            session.generate([[1, 2], [3, 7]])
        with pytest.raises(PromptError, match="token id 7 has no embedding of its own"):
            session.update({session.cache.acquire(): [7]})
        waiting = session.cache.acquire([3, 7])  # which knows nothing of embeddings
        with pytest.raises(SessionError, match="token id 7 has no embedding of its own in"):
            session.update({waiting: []})
        session.remove(waiting)
        (found,) = session.generate([[3, 7]], GenerationConfig(max_new_tokens=3), inputs_embeds=[form.table[[3, 7]]])
        with pytest.raises(SessionError, match=r"the model chose token 7, which has no embedding; .*sequence_bias"):
            session.generate([[3]], seven)
    with opened(form.ids, "cpu") as session:
        assert session.generate([[3, 7]], GenerationConfig(max_new_tokens=3))[0].tokens == found.tokens
    with opened(form.embeds, "cpu", embeddings=form.table) as session:
        assert session.generate([[3]], seven)[0].tokens == [7, 7, 7]
    with opened(form.embeds, "cpu", embeddings=form.table[:200]) as session:
        waiting = session.cache.acquire([200])
        with pytest.raises(SessionError, match="token id 200 has no embedding; the table has 0 to 199"):
            session.update({waiting: []})


def test_images_through_the_exporters_embedding_model(forms: dict[str, Forms], tmp_path: Path) -> None:
    """Its features are empty for text, and the caller's own run of it fills images in."""
    form = forms["planes"]
    path = embedding_model(form.table, tmp_path / "embedding.onnx")
    ids, patches, places = image(np.random.default_rng(5), form.table.shape[1])
    (embeds,) = ort.InferenceSession(str(path)).run(None, {"input_ids": np.array([ids]), "image_features": patches})
    with opened(form.embeds, "cpu", embeddings=path) as session:
        found = session.generate([ids], GenerationConfig(max_new_tokens=9), inputs_embeds=[embeds], positions=[places])
    assert found[0].tokens == Recomputed(form.embeds).greedy(embeds[0], places, form.table, 9)


LAYOUTS = {
    "mobius": ("decoder/model.onnx", "embedding/model.onnx", ""),
    "mobius' folder": ("decoder/model.onnx", "embedding/model.onnx", "."),
    "optimum": ("decoder_model_merged.onnx", "embed_tokens.onnx", ""),
    "a suffix": ("decoder_model_merged_fp16.onnx", "embed_tokens_fp16.onnx", ""),
    "no suffix there": ("decoder_model_merged_q4.onnx", "embed_tokens.onnx", ""),
    "genai": ("model.onnx", "my-embedding.onnx", ""),
    "genai without a config": ("model.onnx", "embeddings.onnx", ""),
    "a folder": ("model.onnx", "embedding.onnx", "."),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_exporters_write_beside_the_decoder(forms: dict[str, Forms], layout: str, tmp_path: Path) -> None:
    model, embedding, opened_as = LAYOUTS[layout]
    form = forms["static"]
    (tmp_path / model).parent.mkdir(exist_ok=True)
    (tmp_path / model).write_bytes(form.embeds.read_bytes())
    embedding_model(form.table, tmp_path / embedding)
    if "suffix" in layout:  # of another variant: not the one
        (tmp_path / "embed_tokens_int8.onnx").write_bytes(b"broken")
    if layout == "a suffix":
        (tmp_path / "embed_tokens.onnx").write_bytes(b"broken")
    if layout == "genai":
        config = {"model": {"embedding": {"filename": embedding}}}
        (tmp_path / "genai_config.json").write_text(json.dumps(config))
        (tmp_path / "embedding.onnx").write_bytes(b"broken")
    with DecodeSession.open(tmp_path / (opened_as or model), capacity=64) as session:
        found = session.generate([[1, 2]], GenerationConfig(max_new_tokens=4))[0].tokens
    with opened(form.ids, "cpu") as session:
        assert found == session.generate([[1, 2]], GenerationConfig(max_new_tokens=4))[0].tokens
    elsewhere = find_embeddings(Path(model))
    assert elsewhere is None


def identity(path: Path, name: str, kind: int, shape: list[int | str]) -> Path:
    """Write a model that gives what it takes."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], [name])],
        "identity",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(name, kind, shape)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "model_type 'gemma3'"),
        ({"model_type": "llava", "text_config": {"model_type": "gemma2"}}, "model_type 'gemma2'"),
        ({"model_type": "granite", "embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
        ({"model_type": "minicpm3", "scale_emb": 12}, "scale_emb 12"),
        ({"model_type": "bart", "scale_embedding": True}, "scale_embedding true"),
        ({"model_type": "bart", "scale_embedding": False, "scale_emb": 1, "embedding_multiplier": 1.0}, None),
        ({"model_type": "llama", "text_config": None}, None),
        ([], None),
    ],
)
def test_a_checkpoint_whose_model_scales_its_table_is_refused(
    config: Any, setting: str | None, forms: dict[str, Forms], tmp_path: Path
) -> None:
    form = forms["static"]
    save_file({"model.embed_tokens.weight": form.table}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    if setting is None:
        opened(form.embeds, "cpu", embeddings=tmp_path / "model.safetensors").close()
        return
    with pytest.raises(OptionError, match=rf"model scales embeddings \({re.escape(setting)} in config.json\)"):
        opened(form.embeds, "cpu", embeddings=tmp_path / "model.safetensors")


@pytest.mark.slow
def test_embeddings_that_do_not_fit(forms: dict[str, Forms], tmp_path: Path) -> None:
    form = forms["static"]
    table = form.table
    width = table.shape[1]
    two = {"a": table, "b": table[:9], "c": table[:, :3], "norm": np.ones(4, np.float32)}
    save_file(two, tmp_path / "two.safetensors")
    np.save(tmp_path / "narrow.npy", table[:, :8])
    (tmp_path / "broken.npy").write_bytes(b"no table")
    (tmp_path / "broken.safetensors").write_bytes(b"no table")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    (tmp_path / "weights.bin").touch()
    fixed = embedding_model(table, tmp_path / "fixed.onnx", features=(4, 0))
    shared = embedding_model(table, tmp_path / "shared.onnx", features=("length", 0))
    placed = embedding_model(table, tmp_path / "placed.onnx", place=True)
    mixed = embedding_model(table, tmp_path / "mixed.onnx", merge="mix")
    headless = identity(tmp_path / "headless.onnx", "pixels", TensorProto.FLOAT, ["n", 4])
    mute = identity(tmp_path / "mute.onnx", "ids", TensorProto.INT64, ["batch", "length"])
    cases: list[tuple[Any, type[Exception], str]] = [
        (None, OptionError, r"takes embeddings \(input 'inputs_embeds', float .* embeddings: an .onnx model"),
        (tmp_path / "none.npy", OptionError, "none.npy: there is no such file of embeddings"),
        (tmp_path / "weights.bin", OptionError, "weights.bin: cannot be read as embeddings; supported: an .onnx"),
        (tmp_path / "broken.npy", OptionError, "cannot be read as an .npy table"),
        (tmp_path / "broken.safetensors", OptionError, "cannot be read as safetensors"),
        (tmp_path / "broken.onnx", ModelError, "broken.onnx: a file with text, not a binary ONNX model"),
        (tmp_path / "narrow.npy", OptionError, rf"narrow.npy .*: the embeddings have width 8, but .* takes {width}"),
        (
            tmp_path / "two.safetensors",
            OptionError,
            "3 tables, and it is unclear which .*two.safetensors:NAME, such as a, b",
        ),
        (f"{tmp_path / 'two.safetensors'}:x", OptionError, "no tensor 'x'; name one as two.safetensors:NAME"),
        (f"{tmp_path / 'two.safetensors'}:norm", OptionError, r"norm is float32 \[4\]; embeddings are a float table"),
        (table[0], OptionError, r"the table of embeddings is float32 \[\d+\]; embeddings are a float table \[V, H\]"),
        (table.astype(np.int64), OptionError, "the table of embeddings is int64"),
        (form.ids, UnsupportedModelError, "needs values"),
        (form.embeds, UnsupportedModelError, "input 'inputs_embeds' .* needs values"),
        (headless, UnsupportedModelError, r"one input of token ids, .* this one takes 'x' \(float \['n', 4\]\)"),
        (mute, UnsupportedModelError, r"must return float \[batch, sequence, width\]; this one returns 'ids' \(int64"),
        (fixed, UnsupportedModelError, r"input 'image_features' \(float \[4, \d+\]\) of .* needs values"),
        (shared, UnsupportedModelError, "input 'image_features' .* needs values"),
        (mixed, UnsupportedModelError, "mixed.onnx: no token id has an embedding of its own"),
        (placed, UnsupportedModelError, "a token's embedding depends on the other tokens or on its position"),
    ]
    for given, kind, message in cases:
        with pytest.raises(kind, match=message):
            opened(form.embeds, "cpu", embeddings=given)
    with pytest.raises(OptionError, match="the model takes token ids; leave the embeddings out"):
        opened(form.ids, "cpu", embeddings=table)
    session = opened(form.embeds, "cpu", embeddings=table)
    with session, pytest.raises(PromptError, match="positions are int64"):
        session.add([1], positions=[[1], [2], [3]])
    with pytest.raises(OptionError, match="takes embeddings"):
        DecodeSession.open(form.embeds)
