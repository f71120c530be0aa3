"""The check of rewritten models, on faults that are planted in them, and on models that do not end."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from attention_forms import WIDE
from concat_graphs import Build, Decoder, _attend, make_decoder
from decoders import DecoderConfig
from decoders import make_decoder as make_static
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper
from verify import mistakes as m

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel, import_model, pipeline, plan_model
from trt_kvcache.importer.cache_plan import CachePlan, InterfaceChange, PlanOptions
from trt_kvcache.importer.check import check_rewrite
from trt_kvcache.importer.check.hashed_graph import Graph as CheckedGraph

CAPACITY = 24
PLAN = PlanOptions(capacity=CAPACITY)
MODELS = Path(__file__).parents[2] / "models"
SOURCES = {
    "concat": (lambda: make_decoder(Decoder(layers=2)), PLAN),
    "window": (lambda: make_decoder(Decoder(window=5)), PLAN),
    "half": (lambda: make_decoder(Decoder(dtype=np.float16)), PLAN),
    "static": (lambda: make_static(DecoderConfig(form="mobius")), PlanOptions()),
    "circular": (lambda: make_static(DecoderConfig(form="heads-major", mode="circular", capacity=16)), PlanOptions()),
}


def check(model: onnx.ModelProto, folder: Path, options: PlanOptions, edit: m.Mistake = m.nothing) -> CachePlan:
    """Import a model, and check it again with a fault in what was made of it."""
    onnx.save(model, folder / "model.onnx")
    imported: ImportedModel = import_model(folder / "model.onnx", options)
    wrong = deepcopy(imported.model)
    edit(wrong)
    flat = pipeline.prepare(imported.source.proto, options)
    check_rewrite(flat.reference, wrong, imported.plan, flat.weights, folder)
    return imported.plan


def unchanged_cache(model: onnx.ModelProto) -> None:
    """A cache comes out as it went in."""
    found = m.nodes(model, "TensorScatter")[0]
    found.op_type = "Identity"
    del found.input[1:], found.attribute[:]


def other_present(model: onnx.ModelProto) -> None:
    """The caller gets another cache than attention reads."""
    name = m.nodes(model, "TensorScatter")[0].output[0]
    for found in model.graph.node:
        for field in (found.input, found.output):
            field[:] = [f"{name}/read" if n == name else n for n in field]
    model.graph.node.append(helper.make_node("Add", [f"{name}/read"] * 2, [name], "doubled"))


def wrong_scale(model: onnx.ModelProto) -> None:
    """Scores of the first attention are a tenth larger."""
    found = next(n for n in model.graph.node if n.op_type in ("Attention", "Softmax"))
    half = any(t.data_type == TensorProto.FLOAT16 for t in model.graph.initializer)
    m.insert(model, found, 0, "Mul", m.constant(model, 1.1, np.float16 if half else np.float32))


MASKS = (m.own_key_hidden, m.next_key_visible)
FAULTS = (*MASKS, m.write_one_early, m.swap_keys_and_values, wrong_scale, unchanged_cache, other_present)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("source", "fault"),
    [(s, f) for s in SOURCES for f in FAULTS if s != "circular" or f not in MASKS],  # it has no causal mask
)
def test_planted_faults_are_refused(source: str, fault: m.Mistake, tmp_path: Path) -> None:
    make, options = SOURCES[source]
    with pytest.raises(
        UnsupportedModelError,
        match=r"does not compute the same|could not be compared|the output '\w+' differently|does not match its plan",
    ):
        check(make(), tmp_path, options, fault)


def test_float32_differs_by_less_than_a_thousandth(tmp_path: Path) -> None:
    def larger(model: onnx.ModelProto) -> None:
        m.insert(model, m.nodes(model, "Attention")[0], 2, "Mul", m.constant(model, 1.0003, np.float32))

    with pytest.raises(UnsupportedModelError, match="does not compute the same"):
        check(make_decoder(Decoder()), tmp_path, PLAN, larger)


def kind_of(model: onnx.ModelProto) -> int:
    """The element type of the first cache."""
    return next(v.type.tensor_type.elem_type for v in model.graph.input if "past" in v.name)


def scaled(model: onnx.ModelProto, factor: float, *, beside: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Queries, or scores, become larger by a factor, and a zero that goes through operators is added to them."""
    found = next(n for n in model.graph.node if n.op_type in ("Attention", "Softmax"))
    dtype = helper.tensor_dtype_to_np_dtype(kind_of(model))
    zero = m.constant(model, 0, dtype)
    for number, (op, attributes) in enumerate(beside):
        model.graph.node.insert(number, helper.make_node(op, [zero], [f"zero/{number}"], **attributes))
        zero = f"zero/{number}"
    m.insert(model, found, 0, "Mul", m.constant(model, factor, dtype))
    m.insert(model, found, 0, "Add", zero)


def nothing_to_bfloat16(model: onnx.ModelProto) -> None:
    scaled(model, 1.01, beside=[("Cast", {"to": TensorProto.BFLOAT16}), ("Cast", {"to": kind_of(model)})])


def nothing_rounded(model: onnx.ModelProto) -> None:
    scaled(model, 1.03, beside=[("Round", {})])


def keys_in_bfloat16(model: onnx.ModelProto) -> None:
    keys = m.nodes(model, "TensorScatter")[0].output[0]
    found = next(n for n in model.graph.node if keys in n.input and n.op_type != "Shape")
    place = list(found.input).index(keys)
    m.insert(model, found, place, "Cast", to=TensorProto.BFLOAT16)
    m.insert(model, found, place, "CastLike", keys)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("fault", [nothing_to_bfloat16, nothing_rounded, keys_in_bfloat16])
def test_what_the_rewritten_side_rounds_widens_no_tolerance(fault: m.Mistake, dtype: type, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="does not compute the same.*: (.* in the rewritten|the rewritten)"):
        check(make_decoder(Decoder(dtype=dtype)), tmp_path, PLAN, fault)


def in_float16(g: Build, x: str) -> str:
    return g.Cast(g.Cast(x, to=TensorProto.FLOAT16), to=TensorProto.FLOAT)


def operand_in_float16(model: onnx.ModelProto, place: int) -> None:
    """Queries, keys or values of the first attention are rounded."""
    found = m.nodes(model, "Attention")[0]
    m.insert(model, found, place, "Cast", to=TensorProto.FLOAT16)
    m.insert(model, found, place, "CastLike", m.constant(model, 0, np.float32))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_float32_passes_unrounded_beside_float16_stays_so(part: str, place: int, tmp_path: Path) -> None:
    """The original rounds keys or values, and the rewritten model rounds one operand, the same or another."""
    model = make_decoder(Decoder(**{part: in_float16}))
    own = place == ["", "keys", "values"].index(part)
    refused = pytest.raises(UnsupportedModelError, match=r"the rewritten model rounds '[\w.]+' to a narrower type")
    with nullcontext() if own else refused:
        check(model, tmp_path, PLAN, lambda wrong: operand_in_float16(wrong, place))


def test_the_epsilon_of_a_norm_of_queries_is_compared(tmp_path: Path) -> None:
    """It shows among small numbers alone, and a cache beside them holds others."""

    def larger(model: onnx.ModelProto) -> None:
        norm = m.nodes(model, "RMSNormalization")[0]  # of queries; keys go to a cache as they are
        m.set_attribute(norm, "epsilon", 10 * next(a.f for a in norm.attribute if a.name == "epsilon"))

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        return _attend(g, g.RMSNormalization(query, g.weight(g.decoder.size), epsilon=1e-6), keys, values)

    model = make_decoder(Decoder(attend=attend, opset=24))
    check(model, tmp_path, PLAN)
    with pytest.raises(UnsupportedModelError, match=r"in a step of .* after"):
        check(model, tmp_path, PLAN, larger)


def roll(g: Build, x: str) -> str:
    return g.Concat(g.Slice(x, [1], [1 << 40], [0]), g.Slice(x, [0], [1], [0]), axis=0)


def a_hundredth(g: Build, x: str) -> str:
    return g.Add(x, g.Mul(roll(g, x), g.number(0.01)))


def behind_large_products(g: Build, x: str) -> str:
    """Random weights stand in for them."""
    wide = g.MatMul(x, g.weight(16, 1 << 15))
    return roll(g, g.MatMul(wide, g.weight(1 << 15, 16)))


@pytest.mark.parametrize("after", [a_hundredth, behind_large_products])
def test_what_another_sequence_adds_is_found(after: Callable[[Build, str], str], tmp_path: Path) -> None:
    onnx.save(make_decoder(Decoder(after=after)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="'logits' of one sequence of a batch depends on the other"):
        plan_model(tmp_path / "model.onnx", PLAN)


def test_equal_layers_share_no_verdict_if_their_caches_are_exchanged(tmp_path: Path) -> None:
    """In the second layer new keys go into the cache of the values, and new values into that of the keys."""
    from trt_kvcache.importer.check import checker

    onnx.save(make_decoder(Decoder(layers=2)), tmp_path / "model.onnx")
    imported = import_model(tmp_path / "model.onnx", PLAN)
    wrong = deepcopy(imported.model)
    last = [n for n in wrong.graph.node if n.op_type == "TensorScatter"][-2:]
    last[0].input[0], last[1].input[0] = last[1].input[0], last[0].input[0]
    flat = pipeline.prepare(imported.source.proto, PLAN)
    for model, answers in ((imported.model, {"equal"}), (wrong, {"equal", "different"})):
        verdicts = checker.check_models(flat.reference, model, imported.plan, flat.weights, tmp_path)
        assert {v.answer for v in verdicts} == answers


def test_operands_that_may_not_change_places_keep_them() -> None:
    def differences(*operands: str) -> str:
        nodes = [helper.make_node("Sub", operands, ["d"]), helper.make_node("Add", ["d", "a"], ["y"])]
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes, "g", [value(n, TensorProto.FLOAT, [1]) for n in "ab"], [value("y", TensorProto.FLOAT, [1])]
        )
        seen, _ = CheckedGraph(helper.make_model(graph)).digests({"a": "a", "b": "b"})
        return seen["y"]

    assert differences("a", "b") != differences("b", "a")


@pytest.mark.parametrize("form", ["products", "scores", "an operator", "double products"])
def test_products_in_a_narrower_type_are_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides compute in float32 where they are compared, so only large numbers show a cast to float16."""
    from trt_kvcache.importer.recognize.attention_reader import Reader

    honest = Reader.read

    def lie(reader: Reader) -> Any:
        return replace(honest(reader), wide=False)

    how = {"dtype": np.float16, "upcast": True, "size": 8} | WIDE[form]
    onnx.save(make_decoder(Decoder(**how)), tmp_path / "model.onnx")
    assert plan_model(tmp_path / "model.onnx", PLAN).attention[0].dtype == "float"
    monkeypatch.setattr(Reader, "read", lie)
    with pytest.raises(
        UnsupportedModelError, match="overflows only in the rewritten model, if|the rewritten model rounds"
    ):
        plan_model(tmp_path / "model.onnx", PLAN)


def test_a_recognizer_that_lies_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is taken for the whole past."""
    from trt_kvcache.importer.recognize.attention_reader import Reader

    honest = Reader.read

    def lying(reader: Reader) -> Any:
        seen = honest(reader)
        return replace(seen, mask=replace(seen.mask, window=None))

    onnx.save(make_decoder(Decoder(window=5)), tmp_path / "model.onnx")
    plan_model(tmp_path / "model.onnx", PLAN)
    monkeypatch.setattr(Reader, "read", lying)
    with pytest.raises(UnsupportedModelError, match="does not compute the same"):
        plan_model(tmp_path / "model.onnx", PLAN)


def over_caches(
    attend: Callable[..., Sequence[str] | str], caches: Sequence[str] = ("",), heads: int = 2, rows: int = 64
) -> onnx.ModelProto:
    """Caches, and what `attend` makes of a query, of each of them after its update, and of their valid lengths."""
    graph = Graph()
    past, new, query = (
        [graph.input(f"{kind}{c}", TensorProto.FLOAT, ["B", heads, length, 8]) for c in names]
        for kind, names, length in (("past", caches, rows), ("new", caches, "S"), ("query", [""], "S"))
    )
    where, lengths = (graph.input(name, TensorProto.INT64, ["B"]) for name in ("write_indices", "nonpad_kv_seqlen"))
    presents = []
    for name, p, n in zip(caches, past, new, strict=True):
        presents.append(graph.TensorScatter(p, n, where, out=f"present{name}", axis=2))
        graph.output(presents[-1], TensorProto.FLOAT, ["B", heads, rows, 8])
    made = attend(graph, *query, *presents, lengths)
    for result, name in zip([made] if isinstance(made, str) else made, ("seen", "seen_1"), strict=False):
        graph.Identity(result, out=name)
        graph.output(name, TensorProto.FLOAT, ["B", heads, "S", 8])
    return graph.model(opset=24)


def hostile(body: Callable[[Graph, str], str]) -> onnx.ModelProto:
    """A cache whose attention has a mask that `body` makes of the number of tokens."""
    return over_caches(lambda g, q, present, n: g.Attention(q, present, present, body(g, q), "", "", n, is_causal=1))


def test_a_question_without_an_answer_is_no_proof(tmp_path: Path) -> None:
    """Whatever the mask, attention over values of zero gives zero."""

    def zero(g: Graph, query: str, present: str, lengths: str) -> str:
        nothing = g.Mul(present, g.constant(0.0, np.float32))
        return g.Attention(query, present, nothing, "", "", "", lengths, is_causal=1)

    onnx.save(over_caches(zero), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="the same number for all queries, keys and values"):
        plan_model(tmp_path / "model.onnx", PlanOptions())


def test_attentions_over_one_cache_are_never_taken_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is compared with the first of them; the second one reads it, too."""
    from trt_kvcache.importer.check import checker

    def both(g: Graph, query: str, present: str, lengths: str) -> list[str]:
        other = g.input("query_1", TensorProto.FLOAT, ["B", 2, "S", 8])
        return [g.Attention(q, present, present, "", "", "", lengths, is_causal=1) for q in (query, other)]

    imported = planned(over_caches(both), tmp_path)
    monkeypatch.setattr(checker, "_WEIGHTS", -1)
    verdicts = checker.check_models(imported.source.proto, imported.model, imported.plan, {}, tmp_path)
    assert {v.answer for v in verdicts} == {"undecided"}
    assert len(verdicts) > 1


def beside(last: int = 8) -> onnx.ModelProto:
    """A cache, attention over it, and one more output: twice the result."""
    model = hostile(lambda graph, query: graph.constant([[0.0]], np.float32))
    model.graph.initializer.append(numpy_helper.from_array(np.array(2, np.float32), "two"))
    model.graph.node.append(helper.make_node("Mul", ["seen", "two"], ["twice"], "node_twice"))
    model.graph.output.append(helper.make_tensor_value_info("twice", TensorProto.FLOAT, ["B", 2, "S", last]))
    return model


def planned(model: onnx.ModelProto, folder: Path) -> ImportedModel:
    onnx.save(model, folder / "model.onnx")
    return import_model(folder / "model.onnx", PlanOptions())


def without_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    made = deepcopy(model)
    kept = [v for v in made.graph.output if v.name != name]
    del made.graph.output[:]
    made.graph.output.extend(kept)
    return made


def test_an_output_that_is_lost_is_refused(tmp_path: Path) -> None:
    """Neither the rewritten model nor the plan has it."""
    imported = planned(beside(), tmp_path)
    plan = replace(imported.plan, tensors=tuple(t for t in imported.plan.tensors if t.name != "twice"))
    with pytest.raises(UnsupportedModelError, match="has no output 'twice', but the plan does not list it as removed$"):
        check_rewrite(imported.source.proto, without_output(imported.model, "twice"), plan, {}, tmp_path)
    with pytest.raises(UnsupportedModelError, match="output 'twice' is missing"):
        check_rewrite(imported.source.proto, without_output(imported.model, "twice"), imported.plan, {}, tmp_path)


def test_only_counters_and_copies_may_be_gone(tmp_path: Path) -> None:
    """The plan says that the output is gone, and so do both interfaces."""
    imported = planned(beside(), tmp_path)
    plan = replace(
        imported.plan,
        tensors=tuple(t for t in imported.plan.tensors if t.name != "twice"),
        changes=(InterfaceChange("output", "twice [B, 2, S, 8]", "", "nothing reads it"),),
    )
    with pytest.raises(UnsupportedModelError, match="has no output 'twice', which depends on the tokens"):
        check_rewrite(imported.source.proto, without_output(imported.model, "twice"), plan, {}, tmp_path)


@pytest.mark.parametrize("name", ["twice", "present"])
def test_an_output_of_the_rewritten_model_alone_is_refused(name: str, tmp_path: Path) -> None:
    imported = planned(beside(), tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"has an output '{name}', but the original does not"):
        check_rewrite(without_output(imported.source.proto, name), imported.model, imported.plan, {}, tmp_path)


@pytest.mark.parametrize(("dtype", "last"), [("float", 9), ("float16", 8)])
def test_outputs_keep_the_shape_and_type_of_the_plan(dtype: str, last: int, tmp_path: Path) -> None:
    """Plan and declaration agree; neither says what the graph computes."""
    imported = planned(beside(), tmp_path)
    shape = ("B", 2, "S", last)
    wrong = without_output(imported.model, "twice")
    kind = TensorProto.DataType.Value(dtype.upper())
    wrong.graph.output.append(helper.make_tensor_value_info("twice", kind, shape))
    tensors = (replace(t, dtype=dtype, shape=shape) if t.name == "twice" else t for t in imported.plan.tensors)
    with pytest.raises(UnsupportedModelError, match=r"'twice' is float \[B, 2, S, 8\], but the plan says"):
        check_rewrite(imported.source.proto, wrong, replace(imported.plan, tensors=tuple(tensors)), {}, tmp_path)


def test_an_input_that_is_open_in_the_plan_alone_is_refused(tmp_path: Path) -> None:
    """An engine would take the one size only."""
    imported = planned(beside(), tmp_path)
    wrong = deepcopy(imported.model)
    where = next(v for v in wrong.graph.input if v.name == "write_indices")
    where.type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(
        UnsupportedModelError, match=r"input 'write_indices' is int64 \[2\], but the plan says int64 \['B'\]"
    ):
        check_rewrite(imported.source.proto, wrong, imported.plan, {}, tmp_path)


def _deaf(model: onnx.ModelProto) -> None:
    """The logits of all positions, whatever the span."""
    first = next(n for n in m.nodes(model, "Max") if n.output[0].startswith("trt_kvcache/first"))
    first.op_type, first.input[:] = "Identity", first.input[1:]


def _untyped(model: onnx.ModelProto) -> None:
    """Positions as numbers of another type, which NumPy multiplies all the same."""
    m.nodes(model, "Cast")[0].attribute[0].i = TensorProto.UINT16


def _shapeless(model: onnx.ModelProto) -> None:
    """A size that ONNX does not know, and NumPy takes for -1."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT64 and list(tensor.dims) == [4]:
            values = np.array(numpy_helper.to_array(tensor))
            if values[2] == 2:
                values[2] = -2
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


@pytest.mark.few(2)
@pytest.mark.parametrize("edit", [_deaf, _untyped, _shapeless])
def test_faults_that_cut_mutants_found_are_refused(edit: m.Mistake, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="does not (match|depend on the logits span|compute the same)|could not be compared"
    ):
        check(make_decoder(Decoder(layers=2)), tmp_path, PLAN, edit)


def test_a_model_that_runs_in_steps_of_one_token_only_is_run_in_them(tmp_path: Path) -> None:
    """Its last norm divides every sequence by the size of every other: ``[B, 1, D] / [B, 1]`` is ``[B, B, D]``."""
    model = onnx.load(MODELS / "optimum/llama/model.onnx")
    norm = next(n for n in model.graph.node if n.name == "/model/norm/ReduceMean")
    next(a for a in norm.attribute if a.name == "keepdims").i = 0
    with pytest.raises(UnsupportedModelError, match="'logits' of one sequence of a batch depends on the other"):
        check(model, tmp_path, PlanOptions(capacity=40))


PAIR = (("_k", "_v"), 1, 16)
"""Keys and values apart: caches of one head and 16 rows."""


def held(g: Graph, lengths: str, *shape: int) -> str:
    """Rows that hold a token."""
    return g.Less(np.arange(16).reshape(shape), g.Unsqueeze(lengths, [1, 2, 3]))


def test_garbage_of_its_own_is_refused(tmp_path: Path) -> None:
    """The original reads keys of rows without a token, and hides their values; the rewritten model reads both."""

    def made(hides: bool) -> onnx.ModelProto:
        def attend(g: Graph, query: str, keys: str, values: str, lengths: str) -> str:
            hidden = g.Where(held(g, lengths, 1, 1, 16, 1), values, g.constant(0, np.float32))
            return g.Attention(query, keys, hidden if hides else values)

        return over_caches(attend, *PAIR)

    imported = planned(made(hides=False), tmp_path)
    with pytest.raises(UnsupportedModelError, match="does not compute the same"):
        check_rewrite(made(hides=True), imported.model, imported.plan, {}, tmp_path)


def masked(
    keys_of: Callable[[Graph, str, str], str] = lambda graph, keys, seen: keys, lowest: float = -np.inf
) -> onnx.ModelProto:
    """Attention over fixed caches in plain operators; `lowest` stands for the scores of hidden keys, or is added."""

    def attend(g: Graph, query: str, keys: str, values: str, lengths: str) -> str:
        seen, low = held(g, lengths, 1, 1, 1, 16), g.constant(lowest, np.float32)
        scores = g.MatMul(query, g.Transpose(keys_of(g, keys, seen), perm=[0, 1, 3, 2]))
        if lowest == -np.inf:
            scores = g.Where(seen, scores, low)
        else:
            scores = g.Add(scores, g.Where(seen, g.constant(0, np.float32), low))
        return g.MatMul(g.Softmax(scores, axis=-1), values)

    return over_caches(attend, *PAIR)


def test_keys_that_are_no_numbers_are_refused_though_a_mask_hides_them(tmp_path: Path) -> None:
    """Where hides NaN; a kernel that adds the mask does not. The original divides by the norm of tokens alone."""

    def divided(graph: Graph, keys: str, held: str) -> str:
        return graph.Div(keys, graph.ReduceL2(keys, [-1]))

    def safe(graph: Graph, keys: str, held: str) -> str:
        rows = graph.Transpose(held, perm=[0, 1, 3, 2])
        return graph.Where(rows, divided(graph, keys, held), graph.constant(0, np.float32))

    imported = planned(masked(), tmp_path)
    check_rewrite(masked(), masked(), imported.plan, {}, tmp_path)
    with pytest.raises(UnsupportedModelError, match="which has NaN or infinite numbers in cache rows without a token"):
        check_rewrite(masked(safe), masked(divided), imported.plan, {}, tmp_path)


def test_garbage_is_as_large_as_the_original_hides(tmp_path: Path) -> None:
    """A mask of -60 hides numbers of 10, and one of -15 does not; both hide numbers of 1."""
    imported = planned(masked(), tmp_path)
    with pytest.raises(UnsupportedModelError, match="does not compute the same"):
        check_rewrite(masked(lowest=-60.0), masked(lowest=-15.0), imported.plan, {}, tmp_path)


def doubled(graph: Graph, query: str) -> str:
    """Concat of itself, forty times: a terabyte."""
    tensor = graph.Shape(query)
    for _ in range(40):
        tensor = graph.Concat(tensor, tensor, axis=0)
    zero = graph.Cast(graph.ReduceMin(tensor, keepdims=0), to=TensorProto.FLOAT)
    return graph.Mul(zero, graph.constant([[0.0]], np.float32))


@pytest.mark.slow
def test_a_mask_that_takes_all_memory_is_refused(tmp_path: Path) -> None:
    flat = hostile(lambda graph, query: graph.constant([[0.0]], np.float32))
    onnx.save(flat, tmp_path / "model.onnx")
    imported = import_model(tmp_path / "model.onnx", PlanOptions(check_memory=2))
    started = time.monotonic()
    with pytest.raises(UnsupportedModelError) as refused:
        check_rewrite(hostile(doubled), imported.model, imported.plan, {}, tmp_path)
    assert "\n" not in str(refused.value)
    assert time.monotonic() - started < 60


def endless(graph: Graph, query: str) -> str:
    count = graph.constant(10**15)
    go = graph.constant(True, np.bool_)
    start = graph.Cast(graph.ReduceMin(graph.Shape(query), keepdims=0), to=TensorProto.FLOAT)
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["goes"]), helper.make_node("Add", ["x", "x"], ["y"])], "body",
        [value("i", TensorProto.INT64, []), value("on", TensorProto.BOOL, []), value("x", TensorProto.FLOAT, [])],
        [value("goes", TensorProto.BOOL, []), value("y", TensorProto.FLOAT, [])],
    )  # fmt: skip
    last = graph.Loop(count, go, start, body=body)
    return graph.Mul(graph.Mul(last, graph.constant([[0.0]], np.float32)), start)


def test_the_process_may_die(tmp_path: Path) -> None:
    from trt_kvcache.importer import check as check_process

    onnx.save(make_decoder(Decoder()), tmp_path / "model.onnx")
    before = plan_model(tmp_path / "model.onnx", PLAN)
    (child,) = check_process._current.values()
    child._process.kill()
    child._process.wait()
    assert plan_model(tmp_path / "model.onnx", PLAN) == before


def test_a_caller_with_another_limit_ends_no_check(tmp_path: Path) -> None:
    """It starts a process of its own beside the one that answers."""
    from trt_kvcache.importer import check as check_process

    onnx.save(hostile(endless), tmp_path / "endless.onnx")
    onnx.save(make_decoder(Decoder()), tmp_path / "model.onnx")

    def first() -> str:
        with pytest.raises(UnsupportedModelError) as refused:
            plan_model(tmp_path / "endless.onnx", PlanOptions(check_seconds=3, check_memory=5))
        return str(refused.value)

    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(first)
        while not check_process._asking.locked():
            time.sleep(0.01)
        assert plan_model(tmp_path / "model.onnx", replace(PLAN, check_memory=6)).caches
    assert "took more than 3 s" in refusal.result()
    assert "\n" not in refusal.result()
