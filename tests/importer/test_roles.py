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
from trt_kvcache.importer.interface import Known, find_roles, open_axes
from trt_kvcache.importer.interface.config import example, load_patterns, shipped_patterns
from trt_kvcache.importer.plan import Role, TensorRole

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
        self.indices = ""

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
        self.indices = indices
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
        updates = [n.input[1] for n in model.graph.node if n.op_type == "TensorScatter"]
        known = Known(
            caches={names[past]: names[f"updated_{past}"] for past in pasts},
            sequence_axis={names[past]: 1 for past in pasts},
            write_indices=frozenset([names.get(self.indices, self.indices)]),
            update_lengths=update_lengths,
            updates=dict.fromkeys(updates, ("batch", "sequence", "?")),
        )
        found = [open_axes(role) for role in find_roles(model, known, config)]
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


def _squeezed(d: Decoder) -> Decoder:
    flat = d.node("Squeeze", [d.node("Cast", [d.input("start", INT32, [B, 1])], to=INT64), d.constant([1])])
    indices = d.node("Mod", [flat, d.constant(CAPACITY)])
    lengths = d.node("Expand", [d.input("length", INT64, [1]), d.node("Shape", [indices])])
    return d.finish(d.embed(d.ids()), indices=indices, lengths=lengths)


def _steps(d: Decoder, ids: str, start: str) -> str:
    """Positions of the tokens of a step that begins at `start`."""
    size = d.node("Gather", [d.node("Shape", [ids]), d.constant(1)])
    steps = d.node("Range", [d.constant(0), size, d.constant(1)])
    return d.node("Add", [d.node("Unsqueeze", [start, d.constant([1])]), steps])


def _from_write_index(d: Decoder) -> Decoder:
    ids, indices = d.ids(), d.input("past_length", INT64, [B])
    size = d.node("Gather", [d.node("Shape", [ids]), d.constant(1)])
    return d.finish(d.embed(ids), _steps(d, ids, indices), indices, d.node("Add", [indices, size]))


def _one_index(d: Decoder) -> Decoder:
    index = d.input("at", INT64, [B])
    return d.finish(d.embed(d.ids()), d.node("Unsqueeze", [index, d.constant([1])]), index)


def _offset_index(d: Decoder) -> Decoder:
    """One more than the write index is not a write index; feeding it as one would be wrong by one row."""
    return d.finish(d.embed(d.ids()), indices=d.node("Sub", [d.input("x", INT64, [B]), d.constant(1)]))


def _turned(d: Decoder, ids: str, *angles: str) -> Decoder:
    hidden = d.embed(ids)
    query = d.node("MatMul", [hidden, d.weight(HIDDEN, HEADS * SIZE)])
    turned = d.node("RotaryEmbedding", [query, *angles], num_heads=HEADS)
    extra = d.node("MatMul", [turned, d.weight(HEADS * SIZE, HIDDEN)])
    return d.finish(d.node("Add", [hidden, extra]), positions="")


def _computed_angles(d: Decoder) -> Decoder:
    ids, where = d.ids(), d.input("where", INT64, [B, S])
    column = d.node("Unsqueeze", [d.node("Cast", [where], to=FLOAT), d.constant([2])])
    angles = d.node("MatMul", [column, d.weight(1, SIZE // 2)])
    return _turned(d, ids, d.node("Cos", [angles]), d.node("Sin", [angles]))


def _learned(d: Decoder, where: str, *, rows: int = POSITIONS) -> Decoder:
    hidden = d.node("Add", [d.embed(d.ids("b")), d.embed(where, rows=rows)])
    return d.finish(hidden, positions="")


def _learned_start(d: Decoder) -> Decoder:
    ids = d.ids()
    positions = _steps(d, ids, d.input("start", INT64, [B]))
    return d.finish(d.node("Add", [d.embed(ids), d.embed(positions, rows=POSITIONS)]), "")


def _rotary_start(d: Decoder) -> Decoder:
    ids = d.ids()
    positions = _steps(d, ids, d.input("start", INT64, [B]))
    return d.finish(d.embed(ids), positions)


def _block(d: Decoder) -> Decoder:
    d.finish(d.input("x", FLOAT, [B, S, HIDDEN]), d.ids("p"), logits=False)
    d.node("MatMul", ["hidden_out", d.weight(HIDDEN, HIDDEN)], "projected")
    d.output("projected", FLOAT, [B, S, HIDDEN])
    return d


def _capped(d: Decoder) -> Decoder:
    d.finish(d.embed(d.ids()))
    capped = d.node("Tanh", [d.node("Div", ["logits", d.constant(30.0, np.float32)])])
    d.node("Cast", [d.node("Mul", [capped, d.constant(30.0, np.float32)])], "scores", to=FLOAT)
    d.outputs = [o for o in d.outputs if o.name != "logits"]
    d.output("scores", FLOAT, [B, S, VOCAB])
    d.node("Identity", [d.nodes[-5].input[0]], "states")
    d.output("states", FLOAT, [B, S, HIDDEN])
    return d


def _padding(d: Decoder, batch: Dim = B) -> Decoder:
    padding = d.node("Cast", [d.input("m", INT64, [batch, "k"])], to=FLOAT)
    inverse = d.node("Sub", [d.constant(1.0, np.float32), padding])
    bias = d.node("Mul", [inverse, d.constant(-1e9, np.float32)])
    return d.finish(d.embed(d.ids()), mask=d.node("Unsqueeze", [bias, d.constant([1, 2])]))


def _compared(d: Decoder, *, rotary: bool) -> Decoder:
    """Positions that are compared with keys are no mask."""
    where = d.ids("where")
    mask = d.node("GreaterOrEqual", [d.node("Unsqueeze", [where, d.constant([1, 3])]), d.constant(np.arange(CAPACITY))])
    return d.finish(d.embed(d.ids()), where if rotary else "", mask=mask)


def _counted(d: Decoder) -> Decoder:
    lengths = d.node("ReduceSum", [d.input("m", INT64, [B, "k"]), d.constant([1])], keepdims=0)
    return d.finish(d.embed(d.ids()), lengths=lengths)


def _names_alone(d: Decoder) -> Decoder:
    d.input("attention_mask", INT64, [B, "past + new"])
    d.input("whatever", INT64, ["n"])
    return d.finish(d.embed(d.ids()))


Found = tuple[Role, tuple[str, ...]]
PLACES = (Role.POSITIONS, ("batch", "sequence"))
TOKENS = (Role.TOKENS, ("batch", "sequence"))
GRAPHS: dict[str, tuple[Callable[[Decoder], Decoder], dict[str, Found]]] = {
    "indices and lengths through simple operators": (
        _squeezed, {"start": (Role.WRITE_INDICES, ("batch", "")), "length": (Role.VALID_LENGTHS, ("",))}),
    "lengths and positions from the write index": (
        _from_write_index, {"past_length": (Role.WRITE_INDICES, ("batch",))}),
    "one input as write index and position": (_one_index, {"at": (Role.WRITE_INDICES, ("batch",))}),
    "an index with an offset": (_offset_index, {"x": (Role.OTHER, ("batch",))}),
    "rotary angles in the graph": (_computed_angles, {"where": PLACES, "input_ids": TOKENS}),
    "learned positions as wide as the tokens": (
        lambda d: _learned(d, d.input("a", INT64, [S])), {"a": (Role.POSITIONS, ("sequence",)), "b": TOKENS}),
    "learned positions with an offset": (
        lambda d: _learned(d, d.node("Add", [d.input("a", INT64, [B, S]), d.constant(2)])), {"a": PLACES, "b": TOKENS}),
    "a start of learned positions": (_learned_start, {"start": (Role.OTHER, ("batch",))}),
    "a start of rotary positions": (_rotary_start, {"start": (Role.OTHER, ("batch",))}),
    "a small table is none of positions": (
        lambda d: _learned(d, d.input("kinds", INT64, [B, S]), rows=2), {"kinds": (Role.OTHER, ("batch", "sequence"))}),
    "embeddings instead of tokens": (
        lambda d: d.finish(d.input("x", FLOAT, [B, S, HIDDEN])), {"x": (Role.TOKENS, ("batch", "sequence", ""))}),
    "a block without logits": (
        _block, {"p": PLACES, "x": (Role.OTHER, ("batch", "sequence", "")),
                 "projected": (Role.OTHER, ("batch", "sequence", "")),
                 "hidden_out": (Role.OTHER, ("batch", "sequence", ""))}),
    "capped logits beside hidden states": (
        _capped, {"scores": (Role.LOGITS, ("batch", "sequence", "")),
                  "states": (Role.OTHER, ("batch", "sequence", ""))}),
    "a padding mask that becomes a bias": (_padding, {"m": (Role.MASK, ("batch", "keys"))}),
    "a padding mask of a nameless batch": (lambda d: _padding(d, ""), {"m": (Role.MASK, ("batch", "keys"))}),
    "positions compared with keys": (lambda d: _compared(d, rotary=True), {"where": PLACES}),
    "what is only compared with keys": (
        lambda d: _compared(d, rotary=False), {"where": (Role.OTHER, ("batch", "sequence"))}),
    "lengths counted from a padding mask": (_counted, {"m": (Role.MASK, ("batch", "keys"))}),
    "names, where the graph says nothing": (
        _names_alone, {"attention_mask": (Role.MASK, ("batch", "keys")), "whatever": (Role.OTHER, ("?",))}),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_says_roles_and_axes(name: str) -> None:
    build, wanted = GRAPHS[name]
    found = summary(build(Decoder()).roles())
    assert {tensor: found[tensor] for tensor in wanted} == wanted


def test_anonymous_and_fixed_sizes() -> None:
    decoder = Decoder(batch="", sequence=1)
    for info in (roles := decoder.finish(decoder.embed(decoder.ids())).roles()):
        assert roles[info].axes[0] == "batch"
        assert set(roles[info].axes[1:]) <= {""}


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


# --- names


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
        ("roles: {tokens: '(x'}", "role 'tokens' has '(x', which is no regular expression of RE2: "),
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
