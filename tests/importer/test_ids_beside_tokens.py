"""Inputs of ids beside the tokens: nothing gets values that nobody gave."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_graphs import Build, Decoder, make_decoder
from graphs import Dim
from greedy import Make, greedy
from onnx import TensorProto

from trt_kvcache import DecodeSession, plan_model
from trt_kvcache.errors import AmbiguousRoleError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import PlanOptions, Role
from trt_kvcache.verify import VerifyOptions, verify_model

PROMPT = (7, 1, 30)
PLAIN = Decoder(positions="past")
SHAPES: dict[str, tuple[Dim, ...]] = {
    "token": ("batch", "sequence"),
    "row": ("batch",),
    "one": ("batch", 1),
    "text": (),
}


def ids(name: str, shape: str = "token", rows: int = 100, kind: int = TensorProto.INT64) -> Callable[[Build, str], str]:
    """Rows of a table that are added to the hidden states."""

    def add(g: Build, x: str) -> str:
        table = g.constant(3 * np.random.default_rng(5).standard_normal((rows, 16)), np.float32)
        found = g.Gather(table, g.input(name, kind, SHAPES[shape]))
        made: str = g.Add(x, g.Unsqueeze(found, [1]) if shape == "row" else found)
        return made

    return add


def write(folder: Path, after: Callable[[Build, str], str], decoder: Decoder = PLAIN) -> Path:
    onnx.save(make_decoder(replace(decoder, after=after)), folder / "model.onnx")
    return folder / "model.onnx"


def role(model: Path, name: str, config: str | None = None) -> Role:
    return next(t.role for t in plan_model(model, PlanOptions(capacity=24, config=config)).tensors if t.name == name)


def tokens(model: Path, config: str | None = None) -> list[int]:
    with DecodeSession.open(model, plan_options=PlanOptions(capacity=24, config=config)) as session:
        return list(session.generate([PROMPT], max_new_tokens=6)[0].tokens)


def types_of(value: int) -> Make:
    return lambda _, new: np.full((1, new), value)


@pytest.mark.parametrize(
    ("name", "shape"), [("token_type_ids", "token"), ("speaker", "row"), ("speaker", "one"), ("speaker", "text")]
)
def test_ids_that_nobody_gives_are_refused_by_name(tmp_path: Path, name: str, shape: str) -> None:
    model = write(tmp_path, ids(name, shape))
    assert role(model, name) is Role.OTHER
    said = "constant" if shape in ("row", "one") else "zeros"  # a scalar is nothing that each sequence has
    with pytest.raises(
        UnsupportedModelError, match=f"input '{name}' .* has no known role .* roles: {{{said}: {name}}}"
    ):
        tokens(model)


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.INT32])
def test_ids_for_each_token_without_a_name_are_refused_with_the_config_to_write(tmp_path: Path, kind: int) -> None:
    """They are positions as likely as anything else."""
    model = write(tmp_path, ids("s", kind=kind))
    with pytest.raises(AmbiguousRoleError, match="'s': .*: roles: {tokens: input_ids, positions: s}$") as error:
        plan_model(model, PlanOptions(capacity=24))
    config = tmp_path / "roles.yaml"
    config.write_text(str(error.value)[str(error.value).index("roles: ") :])
    assert role(model, "s", str(config)) is Role.POSITIONS


def test_a_name_alone_makes_rows_of_a_table_positions(tmp_path: Path) -> None:
    model = write(tmp_path, ids("position_ids"))
    wanted = greedy(model, PROMPT, 6, position_ids=lambda done, new: np.arange(done, done + new)[np.newaxis])
    assert tokens(model) == wanted != greedy(model, PROMPT, 6, position_ids=types_of(0))


def test_the_caller_may_ask_for_zeros(tmp_path: Path) -> None:
    model = write(tmp_path, ids("speaker"))
    config = tmp_path / "roles.yaml"
    config.write_text("roles: {zeros: speaker}")
    assert tokens(model, config=str(config)) == greedy(model, PROMPT, 6, speaker=types_of(0))


@pytest.mark.parametrize("width", [(16,), ()])
def test_numbers_for_each_token_are_taken_and_refused_by_name(tmp_path: Path, width: tuple[int, ...]) -> None:
    """Hidden states for a draft, embeddings for a layer, factors."""

    def beside(g: Build, x: str) -> str:
        more = g.input("more", TensorProto.FLOAT, ["batch", "sequence", *width])
        made: str = g.Add(x, more if width else g.Unsqueeze(more, [2]))
        return made

    model = write(tmp_path, beside)
    assert role(model, "more") is Role.OTHER
    with pytest.raises(UnsupportedModelError, match="input 'more' .* has no known role .* roles: {zeros: more}"):
        tokens(model)
    config = tmp_path / "roles.yaml"
    config.write_text("roles: {zeros: more}")
    wanted = greedy(model, PROMPT, 6, more=lambda _, new: np.zeros((1, new, *width), np.float32))
    assert tokens(model, str(config)) == wanted


def test_a_mask_of_the_hidden_keys_is_none_of_the_visible_ones(tmp_path: Path) -> None:
    """It goes through Not: ones, which a session gives for tokens, would hide them all. Its name says nothing."""

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        hidden = g.input("key_padding", TensorProto.BOOL, ["batch", "total"])
        seen = g.And(g.Unsqueeze(g.Not(hidden), [1, 2]), g.to_scores(g.causal()))
        made: str = g.Attention(query, keys, values, seen)
        return made

    model = tmp_path / "model.onnx"
    onnx.save(make_decoder(replace(PLAIN, attend=attend, opset=24)), model)
    with pytest.raises(AmbiguousRoleError, match=r"'key_padding': .* mask: key_padding}$"):
        tokens(model)


def codebooks(folder: Path, name: str, axis: int) -> Path:
    """Four ids for each token, of which the first counts."""
    model = make_decoder(PLAIN)
    for node in model.graph.node:
        node.input[:] = ["first" if i == "input_ids" else i for i in node.input]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "zero"))
    model.graph.node.insert(0, onnx.helper.make_node("Gather", [name, "zero"], ["first"], "codebook", axis=axis))
    value = next(v for v in model.graph.input if v.name == "input_ids")
    value.name = name
    value.type.tensor_type.shape.dim.insert(axis, onnx.TensorShapeProto.Dimension(dim_value=4))
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("name", ["input_ids", "codes"])
def test_codebooks_before_tokens_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """The message told to export caches that grow by Concat, as these do."""
    words = rf"input '{name}' \['batch', 4, 'sequence'\] has 4 ids for each new token, .* as \[B, S, 4\]"
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(codebooks(tmp_path, name, 1), PlanOptions(capacity=24))


def test_codebooks_after_tokens_are_planned_and_no_session_fills_them(tmp_path: Path) -> None:
    """It gave the id of a token to all codebooks."""
    model = codebooks(tmp_path, "input_ids", 2)
    assert verify_model(model, PlanOptions(capacity=24), VerifyOptions(tokens=2)).passed
    with pytest.raises(UnsupportedModelError, match="'input_ids' .* takes several ids for each token"):
        DecodeSession.open(model, capacity=24)
