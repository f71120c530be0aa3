"""Roles come from the graph, whatever things are called; names decide only where the graph does not."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import Dim, Graph
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from trt_kvcache.errors import AmbiguousRoleError, OptionError, UnsupportedModelError
from trt_kvcache.importer.plan import Role, TensorRole
from trt_kvcache.importer.roles import GraphFacts, find_roles
from trt_kvcache.importer.roles.config import example, load_patterns, shipped_patterns

B, S = "batch", "sequence_len"
HIDDEN, HEADS, SIZE, CAPACITY, VOCAB, POSITIONS = 32, 2, 8, 16, 100, 64
FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL


class Decoder(Graph):
    """A decoder of one layer, built part by part; what a test leaves out takes its usual form.

    Structure of mobius-onnx with static caches: 3-D caches, axis 1, 3-D Attention.
    """

    def __init__(self, batch: Dim = B, sequence: Dim = S) -> None:
        super().__init__()
        self.batch, self.sequence = batch, sequence
        self.facts: dict[str, set[str]] = {"write_indices": set(), "valid_lengths": set(), "masks": set()}

    def weight(self, *shape: int) -> str:
        return self.constant(np.zeros(shape), np.float32)

    def ids(self, name: str = "input_ids") -> str:
        return self.input(name, INT64, [self.batch, self.sequence])

    def embed(self, ids: str, rows: int = VOCAB, columns: int = HIDDEN) -> str:
        return self.node("Gather", [self.weight(rows, columns), ids])

    def rotary(self, x: str, positions: str) -> str:
        tables = [self.node("Gather", [self.weight(POSITIONS, SIZE // 2), positions]) for _ in range(2)]
        return self.node("RotaryEmbedding", [x, *tables], num_heads=HEADS)

    def finish(
        self,
        hidden: str,
        positions: str | None = None,
        indices: str | None = None,
        lengths: str | None = None,
        mask: str = "",
        logits: bool = True,
    ) -> Decoder:
        """Append the layer and the logits."""
        positions = self.ids("position_ids") if positions is None else positions
        indices = self.input("write_indices", INT64, [self.batch]) if indices is None else indices
        if lengths is None:
            lengths = self.input("nonpad_kv_seqlen", INT64, [self.batch])
        width = HEADS * SIZE
        query, key, value = (self.node("MatMul", [hidden, self.weight(HIDDEN, width)]) for _ in range(3))
        if positions:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        for kind, update in (("key", key), ("value", value)):
            past = self.input(f"{kind}_cache.0", FLOAT, [self.batch, CAPACITY, width])
            self.node("TensorScatter", [past, update, indices], f"updated_{past}", axis=1)
            self.output(f"updated_{past}", FLOAT, [self.batch, CAPACITY, width])
        inputs = [query, "updated_key_cache.0", "updated_value_cache.0", mask, "", "", lengths]
        y = self.node("Attention", inputs, q_num_heads=HEADS, kv_num_heads=HEADS)
        x = self.node("Add", [hidden, self.node("MatMul", [y, self.weight(width, HIDDEN)])])
        if logits:
            self.node("MatMul", [x, self.weight(HIDDEN, VOCAB)], "logits")
            self.output("logits", FLOAT, [self.batch, self.sequence, VOCAB])
        else:
            self.node("Identity", [x], "hidden_out")
            self.output("hidden_out", FLOAT, [self.batch, self.sequence, HIDDEN])
        self.facts["write_indices"].add(indices)
        self.facts["valid_lengths"].update([lengths] if lengths else [])
        self.facts["masks"].update([mask] if mask else [])
        return self

    def roles(
        self,
        config: str | None = None,
        rename: Callable[[str], str] = lambda name: name,
        order: list[int] | None = None,
        update_lengths: frozenset[str] = frozenset(),
    ) -> dict[str, TensorRole]:
        """Roles by original name, found after renaming everything and reordering the inputs."""
        graph = Graph()
        graph.__dict__.update(self.__dict__)
        graph.inputs = [self.inputs[i] for i in order] if order else self.inputs
        model = onnx.shape_inference.infer_shapes(graph.model(), data_prop=True)
        names: dict[str, str] = {}
        for info in (*model.graph.input, *model.graph.output):
            names[info.name] = info.name = rename(info.name)
        original = {new: old for old, new in names.items() if new}
        names = {old: new for new, old in original.items()}
        for node in model.graph.node:
            for values in (node.input, node.output):
                values[:] = [names.get(name, name) for name in values]
        pasts = [f"{kind}_cache.0" for kind in ("key", "value")]
        facts = GraphFacts(
            caches={names[past]: names[f"updated_{past}"] for past in pasts},
            sequence_axis={names[past]: 1 for past in pasts},
            update_lengths=update_lengths,
            **{k: frozenset(names.get(n, n) for n in values) for k, values in self.facts.items()},
        )
        found = find_roles(model, facts, config)
        assert [t.name for t in found if t.io == "input"] == [info.name for info in model.graph.input]
        return {original[t.name]: t for t in found}


def mobius() -> Decoder:
    decoder = Decoder()
    return decoder.finish(decoder.embed(decoder.ids()))


MOBIUS_ROLES = {
    "input_ids": (Role.TOKENS, ("batch", "sequence")),
    "position_ids": (Role.POSITIONS, ("batch", "sequence")),
    "write_indices": (Role.WRITE_INDICES, ("batch",)),
    "nonpad_kv_seqlen": (Role.VALID_LENGTHS, ("batch",)),
    "key_cache.0": (Role.CACHE, ("batch", "", "")),
    "value_cache.0": (Role.CACHE, ("batch", "", "")),
    "logits": (Role.LOGITS, ("batch", "sequence", "")),
    "updated_key_cache.0": (Role.CACHE, ("batch", "", "")),
    "updated_value_cache.0": (Role.CACHE, ("batch", "", "")),
}


def summary(roles: dict[str, TensorRole]) -> dict[str, tuple[Role, tuple[str, ...]]]:
    return {name: (role.role, role.axes) for name, role in roles.items()}


@given(
    st.permutations(range(6)),
    st.lists(st.text(string.ascii_letters, min_size=12, max_size=14), min_size=9, max_size=9, unique=True),
)
@settings(max_examples=40, deadline=None)
def test_neither_names_nor_order_matter(order: list[int], names: list[str]) -> None:
    renamed = dict(zip(MOBIUS_ROLES, names, strict=True))
    assert summary(mobius().roles(rename=renamed.__getitem__, order=order)) == MOBIUS_ROLES


def test_found_by_says_what_showed_it() -> None:
    roles = mobius().roles()
    assert roles["input_ids"].found_by == f"graph: index into the embedding table [{VOCAB}, {HIDDEN}]"
    assert roles["write_indices"].found_by == "graph: write_indices of TensorScatter"
    assert roles["logits"].found_by == f"graph: made by a product that widens {HIDDEN} to {VOCAB}"
    assert roles["key_cache.0"].dtype == "float"
    assert roles["key_cache.0"].shape == (B, CAPACITY, HEADS * SIZE)


def test_misleading_names_do_not_mislead() -> None:
    swapped = {"input_ids": "position_ids", "position_ids": "input_ids"}
    assert summary(mobius().roles(rename=lambda name: swapped.get(name, name))) == MOBIUS_ROLES


def test_anonymous_and_fixed_sizes() -> None:
    decoder = Decoder(batch="", sequence=1)
    for info in (roles := decoder.finish(decoder.embed(decoder.ids())).roles()):
        assert roles[info].axes[0] == "batch"
        assert set(roles[info].axes[1:]) <= {""}


def test_indices_and_lengths_through_simple_operators() -> None:
    decoder = Decoder()
    hidden = decoder.embed(decoder.ids())
    start = decoder.input("start", INT32, [B, 1])
    flat = decoder.node("Squeeze", [decoder.node("Cast", [start], to=INT64), decoder.constant([1])])
    indices = decoder.node("Mod", [flat, decoder.constant(CAPACITY)])
    length = decoder.input("length", INT64, [1])
    lengths = decoder.node("Expand", [length, decoder.node("Shape", [indices])])
    roles = decoder.finish(hidden, indices=indices, lengths=lengths).roles()
    assert roles["start"].role is Role.WRITE_INDICES
    assert roles["start"].axes == ("batch", "")
    assert roles["length"].role is Role.VALID_LENGTHS


def test_lengths_and_positions_computed_from_the_write_index() -> None:
    decoder = Decoder()
    ids = decoder.ids()
    indices = decoder.input("past_length", INT64, [B])
    size = decoder.node("Gather", [decoder.node("Shape", [ids]), decoder.constant(1)])
    lengths = decoder.node("Add", [indices, size])
    steps = decoder.node("Range", [decoder.constant(0), size, decoder.constant(1)])
    positions = decoder.node("Add", [decoder.node("Unsqueeze", [indices, decoder.constant([1])]), steps])
    roles = decoder.finish(decoder.embed(ids), positions, indices, lengths).roles()
    assert roles["past_length"].role is Role.WRITE_INDICES


def test_write_index_computed_from_the_length() -> None:
    decoder = Decoder()
    lengths = decoder.input("total", INT64, [B])
    indices = decoder.node("Sub", [lengths, decoder.constant(1)])
    roles = decoder.finish(decoder.embed(decoder.ids()), indices=indices, lengths=lengths).roles()
    assert roles["total"].role is Role.VALID_LENGTHS


def test_write_index_taken_from_the_positions() -> None:
    decoder = Decoder()
    positions = decoder.ids("where")
    indices = decoder.node("Gather", [positions, decoder.constant(0)], axis=1)
    roles = decoder.finish(decoder.embed(decoder.ids()), positions, indices).roles()
    assert roles["where"].role is Role.POSITIONS


def test_one_input_as_write_index_and_position_is_a_write_index() -> None:
    decoder = Decoder(sequence=1)
    index = decoder.input("at", INT64, [B])
    positions = decoder.node("Unsqueeze", [index, decoder.constant([1])])
    assert decoder.finish(decoder.embed(decoder.ids()), positions, index).roles()["at"].role is Role.WRITE_INDICES


def test_an_input_with_an_offset_gets_no_role() -> None:
    """One more than the write index is not a write index; feeding it as one would be wrong by one row."""
    decoder = Decoder()
    indices = decoder.node("Sub", [decoder.input("x", INT64, [B]), decoder.constant(1)])
    role = decoder.finish(decoder.embed(decoder.ids()), indices=indices).roles()["x"]
    assert role.role is Role.OTHER
    assert role.found_by == "graph: takes part in: write_indices of TensorScatter"
    assert role.axes == ("batch",)


def test_rotary_angles_computed_in_the_graph() -> None:
    decoder = Decoder()
    ids = decoder.ids()
    where = decoder.input("where", INT64, [B, S])
    column = decoder.node("Unsqueeze", [decoder.node("Cast", [where], to=FLOAT), decoder.constant([2])])
    angles = decoder.node("MatMul", [column, decoder.weight(1, SIZE // 2)])
    hidden = decoder.embed(ids)
    query = decoder.node("MatMul", [hidden, decoder.weight(HIDDEN, HEADS * SIZE)])
    cos, sin = decoder.node("Cos", [angles]), decoder.node("Sin", [angles])
    turned = decoder.node("RotaryEmbedding", [query, cos, sin], num_heads=HEADS)
    extra = decoder.node("MatMul", [turned, decoder.weight(HEADS * SIZE, HIDDEN)])
    roles = decoder.finish(decoder.node("Add", [hidden, extra]), positions="").roles()
    assert roles["where"].role is Role.POSITIONS
    assert roles["input_ids"].role is Role.TOKENS


def test_position_input_of_rotary_embedding() -> None:
    decoder = Decoder()
    where = decoder.input("where", INT64, [B, S])
    hidden = decoder.embed(decoder.ids())
    query = decoder.node("MatMul", [hidden, decoder.weight(HIDDEN, HEADS * SIZE)])
    tables = [decoder.weight(POSITIONS, SIZE // 2) for _ in range(2)]
    turned = decoder.node("RotaryEmbedding", [query, *tables, where], num_heads=HEADS)
    extra = decoder.node("MatMul", [turned, decoder.weight(HEADS * SIZE, HIDDEN)])
    roles = decoder.finish(decoder.node("Add", [hidden, extra]), positions="").roles()
    assert roles["where"].role is Role.POSITIONS


def test_learned_positions_as_wide_as_the_tokens() -> None:
    decoder = Decoder()
    where = decoder.input("a", INT64, [S])
    hidden = decoder.node("Add", [decoder.embed(decoder.ids("b")), decoder.embed(where, rows=POSITIONS)])
    roles = decoder.finish(hidden, positions="").roles()
    assert roles["a"].role is Role.POSITIONS
    assert roles["a"].axes == ("sequence",)
    assert roles["b"].role is Role.TOKENS


def test_learned_positions_with_a_constant_offset() -> None:
    decoder = Decoder()
    shifted = decoder.node("Add", [decoder.input("a", INT64, [B, S]), decoder.constant(2)])
    hidden = decoder.node("Add", [decoder.embed(decoder.ids("b")), decoder.embed(shifted, rows=POSITIONS)])
    assert decoder.finish(hidden, positions="").roles()["a"].role is Role.POSITIONS


@pytest.mark.parametrize("rotary", [True, False])
def test_a_start_that_steps_are_added_to_is_no_position(rotary: bool) -> None:
    decoder = Decoder()
    ids = decoder.ids()
    size = decoder.node("Gather", [decoder.node("Shape", [ids]), decoder.constant(1)])
    steps = decoder.node("Range", [decoder.constant(0), size, decoder.constant(1)])
    column = decoder.node("Unsqueeze", [decoder.input("start", INT64, [B]), decoder.constant([1])])
    positions = decoder.node("Add", [column, steps])
    hidden = decoder.embed(ids)
    if not rotary:
        hidden = decoder.node("Add", [hidden, decoder.embed(positions, rows=POSITIONS)])
    role = decoder.finish(hidden, positions if rotary else "").roles()["start"]
    assert role.role is Role.OTHER
    assert "positions" in role.found_by


def test_a_small_table_is_no_table_of_positions() -> None:
    decoder = Decoder()
    kinds = decoder.input("kinds", INT64, [B, S])
    hidden = decoder.node("Add", [decoder.embed(decoder.ids()), decoder.embed(kinds, rows=2)])
    assert decoder.finish(hidden).roles()["kinds"].role is Role.OTHER


def test_per_layer_embeddings_leave_the_tokens_alone() -> None:
    decoder = Decoder()
    ids = decoder.ids()
    wide = decoder.node("MatMul", [decoder.embed(ids, columns=4 * HIDDEN), decoder.weight(4 * HIDDEN, HIDDEN)])
    roles = decoder.finish(decoder.node("Add", [decoder.embed(ids), wide])).roles()
    assert roles["input_ids"].role is Role.TOKENS


def test_embeddings_instead_of_tokens() -> None:
    decoder = Decoder()
    roles = decoder.finish(decoder.input("x", FLOAT, [B, S, HIDDEN])).roles()
    assert roles["x"].role is Role.TOKENS
    assert roles["x"].axes == ("batch", "sequence", "")


def test_a_block_without_logits_has_no_logits() -> None:
    decoder = Decoder()
    decoder.finish(decoder.input("x", FLOAT, [B, S, HIDDEN]), decoder.ids("p"), logits=False)
    decoder.node("MatMul", ["hidden_out", decoder.weight(HIDDEN, HIDDEN)], "projected")
    decoder.output("projected", FLOAT, [B, S, HIDDEN])
    roles = decoder.roles()
    assert roles["p"].role is Role.POSITIONS
    assert roles["projected"].role is Role.OTHER
    assert roles["hidden_out"].role is Role.OTHER
    assert roles["hidden_out"].axes == ("batch", "sequence", "")
    assert roles["x"].role is Role.OTHER


def test_capped_and_cast_logits_beside_hidden_states() -> None:
    decoder = Decoder()
    decoder.finish(decoder.embed(decoder.ids()))
    capped = decoder.node("Tanh", [decoder.node("Div", ["logits", decoder.constant(30.0, np.float32)])])
    decoder.node("Cast", [decoder.node("Mul", [capped, decoder.constant(30.0, np.float32)])], "scores", to=FLOAT)
    decoder.outputs = [o for o in decoder.outputs if o.name != "logits"]
    decoder.output("scores", FLOAT, [B, S, VOCAB])
    decoder.node("Identity", [decoder.nodes[-5].input[0]], "states")
    decoder.output("states", FLOAT, [B, S, HIDDEN])
    roles = decoder.roles()
    assert roles["scores"].role is Role.LOGITS
    assert roles["states"].role is Role.OTHER


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((B, 1, S, CAPACITY), ("batch", "", "sequence", "")),
        ((B, 1, S, "k"), ("batch", "", "sequence", "keys")),
        (("", 1, "", ""), ("batch", "", "sequence", "keys")),
        ((S, "past + new"), ("sequence", "keys")),
        (("", ""), ("sequence", "keys")),
    ],
)
def test_mask_straight_into_attention(shape: tuple[Dim, ...], axes: tuple[str, ...]) -> None:
    decoder = Decoder()
    hidden = decoder.embed(decoder.ids())
    role = decoder.finish(hidden, mask=decoder.input("m", BOOL, shape)).roles()["m"]
    assert (role.role, role.axes) == (Role.MASK, axes)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((B, 1, B, CAPACITY), "batch, fixed, batch, fixed"),
        ((B, 1, S, B), "batch, fixed, sequence, batch"),
        ((S, 1, S, CAPACITY), "sequence, fixed, sequence, fixed"),
        ((S, 1, B, CAPACITY), "sequence, fixed, batch, fixed"),
        ((S, 1, 3, CAPACITY), "sequence, fixed, fixed, fixed"),
        ((S, S, CAPACITY), "sequence, sequence, fixed"),
        ((1, 1, B, CAPACITY), "fixed, fixed, batch, fixed"),
        ((S, B), "sequence, batch"),
    ],
)
def test_a_mask_whose_axes_are_in_no_known_order_is_named(shape: tuple[Dim, ...], found: str) -> None:
    """Such as one whose axis of queries is called as the batch: steps of other sizes would have no such mask."""
    decoder = Decoder()
    hidden = decoder.embed(decoder.ids())
    made = decoder.finish(hidden, mask=decoder.input("m", BOOL, shape))
    with pytest.raises(UnsupportedModelError, match=rf"the mask 'm' \[.*\] has axes {found}; supported are \[batch,"):
        made.roles()


@pytest.mark.parametrize("batch", [B, ""])
def test_padding_mask_that_is_turned_into_a_bias(batch: str) -> None:
    decoder = Decoder()
    ids = decoder.ids()
    padding = decoder.node("Cast", [decoder.input("m", INT64, [batch, "k"])], to=FLOAT)
    inverse = decoder.node("Sub", [decoder.constant(1.0, np.float32), padding])
    bias = decoder.node("Mul", [inverse, decoder.constant(-1e9, np.float32)])
    mask = decoder.node("Unsqueeze", [bias, decoder.constant([1, 2])])
    role = decoder.finish(decoder.embed(ids), mask=mask).roles()["m"]
    assert (role.role, role.axes) == (Role.MASK, ("batch", "keys"))


@pytest.mark.parametrize(("rotary", "role"), [(True, Role.POSITIONS), (False, Role.OTHER)])
def test_positions_compared_with_keys_are_no_mask(rotary: bool, role: Role) -> None:
    decoder = Decoder()
    where = decoder.ids("where")
    column = decoder.node("Unsqueeze", [where, decoder.constant([1, 3])])
    keys = decoder.constant(np.arange(CAPACITY))
    mask = decoder.node("GreaterOrEqual", [column, keys])
    roles = decoder.finish(decoder.embed(decoder.ids()), where if rotary else "", mask=mask).roles()
    assert roles["where"].role is role


def test_lengths_counted_from_a_padding_mask() -> None:
    decoder = Decoder()
    padding = decoder.input("m", INT64, [B, "k"])
    lengths = decoder.node("ReduceSum", [padding, decoder.constant([1])], keepdims=0)
    role = decoder.finish(decoder.embed(decoder.ids()), lengths=lengths).roles()["m"]
    assert (role.role, role.axes) == (Role.MASK, ("batch", "keys"))


def test_packed_tokens() -> None:
    decoder = Decoder(sequence="T")
    decoder.input("cumulative", INT32, ["rows + 1"])
    hidden = decoder.embed(decoder.input("ids", INT64, ["T"]))
    column = decoder.node("Unsqueeze", [hidden, decoder.constant([0])])
    roles = decoder.finish(column).roles(update_lengths=frozenset({"cumulative"}))
    assert roles["cumulative"].role is Role.UPDATE_LENGTHS
    assert roles["cumulative"].axes == ("batch+1",)
    assert roles["ids"].axes == ("tokens",)


# --- ambiguity


def test_write_index_that_is_also_the_length_is_ambiguous() -> None:
    decoder = Decoder()
    both = decoder.input("x", INT64, [B])
    decoder.finish(decoder.embed(decoder.ids()), indices=both, lengths=both)
    with pytest.raises(AmbiguousRoleError) as caught:
        decoder.roles()
    assert str(caught.value) == (
        "input 'x' could be write_indices (write_indices of TensorScatter) or valid_lengths (nonpad_kv_seqlen of "
        "Attention); say which with --config, a YAML file such as: roles: {write_indices: x}"
    )


def test_a_shipped_name_decides_between_equals(tmp_path: Path) -> None:
    decoder = Decoder()
    both = decoder.input("nonpad_kv_seqlen", INT64, [B])
    roles = decoder.finish(decoder.embed(decoder.ids()), indices=both, lengths=both).roles()
    assert roles["nonpad_kv_seqlen"].role is Role.VALID_LENGTHS
    assert roles["nonpad_kv_seqlen"].found_by == "config: mobius.yaml"


def two_token_inputs(first: str, second: str) -> Decoder:
    decoder = Decoder()
    table = decoder.weight(VOCAB, HIDDEN)
    parts = [decoder.node("Gather", [table, decoder.ids(name)]) for name in (first, second)]
    return decoder.finish(decoder.node("Add", parts))


def test_two_token_inputs_are_ambiguous(tmp_path: Path) -> None:
    decoder = two_token_inputs("a", "b")
    with pytest.raises(
        AmbiguousRoleError, match=r"'tokens' is claimed by 'a' \(graph: .*\) or 'b' \(graph: .*--config"
    ):
        decoder.roles()
    config = tmp_path / "own.yaml"
    config.write_text("roles: {tokens: b}")
    roles = decoder.roles(str(config))
    assert (roles["a"].role, roles["b"].role) == (Role.OTHER, Role.TOKENS)
    assert roles["b"].found_by == "config: own.yaml"


def test_a_shipped_name_decides_between_two_token_inputs() -> None:
    roles = two_token_inputs("a", "input_ids").roles()
    assert (roles["a"].role, roles["input_ids"].role) == (Role.OTHER, Role.TOKENS)


@pytest.mark.parametrize("prefix", ["", "dec/", "model.decoder_"])
@pytest.mark.parametrize("other", [True, False])
def test_a_prefix_of_all_names_is_none_of_them(prefix: str, other: bool) -> None:
    """`onnx.compose.add_prefix`; the importer's own inputs come without it."""
    decoder = two_token_inputs("a", "input_ids")
    decoder.input("attention_mask", INT64, [B, "past + new"])
    own = ("write_indices", "nonpad_kv_seqlen") if other else ()
    roles = decoder.roles(rename=lambda name: name if name in own else prefix + name)
    assert roles["input_ids"].role is Role.TOKENS
    assert roles["attention_mask"].role is Role.MASK


def test_two_embedding_inputs_are_ambiguous() -> None:
    decoder = Decoder()
    x, y = (decoder.input(name, FLOAT, [B, S, HIDDEN]) for name in "xy")
    decoder.finish(decoder.node("Add", [x, y]))
    with pytest.raises(AmbiguousRoleError, match="'tokens' is claimed by 'x'"):
        decoder.roles()


# --- names


def test_names_decide_where_the_graph_says_nothing() -> None:
    decoder = Decoder()
    decoder.input("attention_mask", INT64, [B, "past + new"])
    decoder.input("whatever", INT64, ["n"])
    roles = decoder.finish(decoder.embed(decoder.ids())).roles()
    assert roles["attention_mask"].role is Role.MASK
    assert roles["attention_mask"].found_by.startswith("config: ")
    assert roles["attention_mask"].axes == ("batch", "keys")
    assert (roles["whatever"].role, roles["whatever"].axes) == (Role.OTHER, ("?",))


def test_the_user_is_not_argued_with(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("roles:\n  valid_lengths: ['write_.*']\n  other: nonpad_kv_seqlen\n")
    roles = mobius().roles(str(config))
    assert roles["write_indices"].role is Role.VALID_LENGTHS
    assert roles["nonpad_kv_seqlen"].role is Role.OTHER


def test_patterns_match_whole_names_and_the_right_side(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("roles: {mask: 'input', logits: '.*'}")
    with pytest.raises(OptionError, match=r"gives the role 'logits' to 'updated_key_cache\.0', which is a cache"):
        mobius().roles(str(config))
    config.write_text("roles: {mask: 'input', tokens: logits}")
    assert summary(mobius().roles(str(config))) == MOBIUS_ROLES


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("roles: [", "is not YAML: "),
        ("roles: {tokens: \x07}", "is not YAML: "),
        ("roles: {tokens: 2001-99-99}", "is not YAML: month must be in 1..12"),
        ("[" * 10_000, "is not YAML: "),
        ("", "is one mapping under the key 'roles'"),
        ("tokens: input_ids", "is one mapping under the key 'roles'"),
        ("roles: [tokens]", "is one mapping under the key 'roles'"),
        ("roles: {}\npreset: x", "is one mapping under the key 'roles'"),
        ("roles: {token: x}", "role 'token': there is no such role; known are tokens, positions, "),
        ("roles: {cache: x}", "role 'cache': caches are found in the graph, not by name; known are"),
        ("roles: {1: x}", "role '1': there is no such role"),
        ("roles: {tokens: 3}", "role 'tokens' has the pattern 3; give a name or a list of names, as text"),
        ("roles: {tokens: [a, null]}", "role 'tokens' has the pattern None"),
        ("roles: {tokens: ''}", "role 'tokens' has the pattern ''"),
        ("roles: {tokens: '(x'}", "role 'tokens' has '(x', which is no regular expression: "),
        (
            "roles: {tokens: 'input.*', positions: '.*_ids'}",
            "'input_ids' matches 'input.*' of role 'tokens' and '.*_ids'",
        ),
        ("roles: {tokens: 'key_.*'}", "gives the role 'tokens' to 'key_cache.0', which is a cache; narrow the pattern"),
    ],
)
def test_bad_config(tmp_path: Path, content: str, said: str) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(content)
    with pytest.raises(OptionError, match=re.escape(said)) as caught:
        mobius().roles(str(config))
    assert "own.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no\.yaml: the role config cannot be read \(No such file or directory\)"):
        mobius().roles(str(tmp_path / "no.yaml"))
    with pytest.raises(OptionError, match="cannot be read"):
        mobius().roles(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("input_ids", Role.TOKENS),
        ("inputs_embeds", Role.TOKENS),
        ("position_ids", Role.POSITIONS),
        ("cache_position", Role.POSITIONS),
        ("write_indices", Role.WRITE_INDICES),
        ("nonpad_kv_seqlen", Role.VALID_LENGTHS),
        ("attention_mask", Role.MASK),
        ("input.past_key_values.layers.11.cumulative_length", Role.OTHER),
        ("xinput_ids", None),
    ],
)
def test_shipped_patterns(name: str, role: Role | None) -> None:
    found = {pattern.role for pattern in shipped_patterns() if pattern.matches(name, "input")}
    assert found == ({role} if role else set())


def test_shipped_patterns_agree_with_each_other() -> None:
    """A plain name in one file must not have another role in another file."""
    for pattern in shipped_patterns():
        for io in ("input", "output"):
            agreeing = {other.role for other in shipped_patterns() if other.matches(pattern.regex.pattern, io)}
            assert len(agreeing) <= 1


@pytest.mark.parametrize("name", ["input_ids", "key_cache.0", "model/ids:0", "it's [0], {1}", "a b", "yes"])
def test_example_in_messages_is_a_legal_config(tmp_path: Path, name: str) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(example(Role.TOKENS, name))
    (pattern,) = load_patterns(config)
    assert pattern.matches(name, "input")
