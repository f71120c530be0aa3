"""One attention for each head of a cache: together they become one, and what only looks so is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from concat_decode import check_decode, rewritten, run
from concat_graphs import MASKS, Build, Decoder, make_decoder
from graphs import Graph
from onnx import TensorProto

from trt_kvcache import UnsupportedModelError, verify_model
from trt_kvcache.importer.graph import replace_uses
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.stacks import write_heads_together

Change = Callable[[Build, int, str], str]


def _same(g: Build, head: int, tensor: str) -> str:
    return tensor


@dataclass(frozen=True)
class Apart:
    """How attention to single heads is written: the `attend` of a `Decoder`.

    Attributes:
        cut: how a head is cut out: "slice", "gather" or "split".
        order: the heads of keys that query heads attend to, in the order of these.
        values: the same for values; None: those of keys.
        together: queries of all heads of a group in one attention.
        query, scores, weights: change a tensor on its way, by head.
        previous: queries get something of what the attention before gave.
    """

    cut: str = "slice"
    order: tuple[int, ...] = (0, 0, 1, 1)
    values: tuple[int, ...] | None = None
    together: bool = False
    query: Change = _same
    scores: Change = _same
    weights: Change = _same
    previous: bool = False

    def __call__(self, g: Build, query: str, keys: str, values: str) -> str:
        decoder = g.decoder
        group = decoder.heads // decoder.kv_heads if self.together else 1
        visible = g.once("mask", lambda: MASKS[str(decoder.mask)](g))
        found: list[str] = []
        for head, (key, value) in enumerate(zip(self.order, self.values or self.order, strict=True)):
            some = g.node("Slice", [query, *(g.constant([n]) for n in (head * group, (head + 1) * group, 1))])
            if self.previous and found:
                some = g.node("Add", [some, found[-1]])
            some = self.query(g, head, g.node("Mul", [some, g.number(decoder.size**-0.5)]))
            turned = g.node("Transpose", [self._cut(g, keys, key)], perm=[0, 1, 3, 2])
            scores = self.scores(g, head, g.node("MatMul", [some, turned]))
            weights = g.node("Softmax", [g.node("Where", [visible, scores, g.number(decoder.lowest)])], axis=-1)
            found.append(g.node("MatMul", [self.weights(g, head, weights), self._cut(g, values, value)]))
        return g.node("Concat", found, axis=1)

    def _cut(self, g: Build, tensor: str, head: int) -> str:
        if self.cut == "slice":
            return g.node("Slice", [tensor, *(g.constant([n]) for n in (head, head + 1, 1))])
        if self.cut == "gather":
            return g.node("Unsqueeze", [g.node("Gather", [tensor, g.constant(head)], axis=1), g.constant([1])])
        count = g.decoder.kv_heads
        names = g.once(f"split {tensor}", lambda: _split(g, tensor, count)).split()
        return names[head]


def _split(g: Build, tensor: str, count: int) -> str:
    names = [f"{tensor}_head{head}" for head in range(count)]
    g.nodes.append(onnx.helper.make_node("Split", [tensor], names, f"split_{tensor}", axis=1, num_outputs=count))
    return " ".join(names)


def apart(decoder: dict[str, Any] | None = None, **settings: Any) -> Decoder:
    return Decoder(**{"repeat": "none", "scale": "none", **(decoder or {})}, attend=Apart(**settings))


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "slices": ({}, {}),
    "Gather": ({"mask": "padding", "layers": 2}, {"cut": "gather"}),
    "a window": ({"window": 5}, {}),
    "groups together": ({"heads": 6}, {"order": (0, 1), "together": True}),
    "in turns": ({}, {"order": (0, 1, 0, 1)}),
    "in any order": ({"heads": 6, "kv_heads": 3}, {"order": (2, 0, 1, 0, 2, 1)}),
    "as many heads": ({"kv_heads": 4}, {"order": (0, 1, 2, 3)}),
    "[B, S, N, D], float16": ({"layout": "bsnd", "dtype": np.float16}, {}),
    "[B, S, N * D], a fixed batch": ({"layout": "flat", "batch": 2, "positions": "past"}, {}),
    "capped": ({}, {"scores": lambda g, head, t: g.node("Tanh", [t])}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_they_become_one(tmp_path: Path, name: str) -> None:
    decoder = apart(*VARIANTS[name][:1], **VARIANTS[name][1])
    result = check_decode(make_decoder(decoder), tmp_path, 1e-4 if decoder.dtype is np.float32 else 2e-2)
    assert {(a.query_heads, a.kv_heads) for a in result.plan.attention} == {(decoder.heads, decoder.kv_heads)}
    count = sum(node.op_type == "TensorScatter" for node in result.model.graph.node)
    assert count == 2 * decoder.layers
    onnx.checker.check_model(result.model, full_check=True)


def test_parts_of_a_split_stay_apart(tmp_path: Path) -> None:
    """What Split gives may be anything: each part is read as it is, in the rows in use."""
    result = check_decode(make_decoder(apart(cut="split")), tmp_path)
    assert [(a.query_heads, a.kv_heads) for a in result.plan.attention] == [(1, 1)] * 4


def _of(head: int, change: Callable[[Build, str], str]) -> Change:
    return lambda g, found, tensor: change(g, tensor) if found == head else tensor


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a head that nothing attends to": ({"order": (0, 0, 0, 0)}, "of all query heads that do, 4 to head 0, 0 to head 1"),
    "more to one": ({"order": (0, 1, 0, 0)}, "attends to one head of .* 3 to head 0, 1 to head 1"),
    "values of another head": ({"values": (0, 1, 1, 1)}, "share heads of keys and of values in another order"),
    "another scale": ({"scores": _of(1, lambda g, t: g.node("Mul", [t, g.number(0.5)]))}, "with other scales"),
    "a cap": ({"scores": _of(2, lambda g, t: g.node("Tanh", [t]))}, "with other scales"),
    "slopes": (
        {"scores": lambda g, h, t: g.node("Add", [t, g.node("Mul", [_distances(g), g.number(0.25 * (h + 1))])])},
        "with sinks or a position bias",
    ),
    "one behind the other": ({"previous": True}, "attends to one head of .* 1 to head 0, 0 to head 1"),
    "weights changed": ({"weights": _of(1, lambda g, t: g.node("Relu", [t]))}, "do not go to one MatMul"),
}


def _distances(g: Build) -> str:
    return g.once("far", lambda: g.node("Cast", [g.to_scores(g.node("Sub", [g.key_rows, g.query_rows]))], to=1))


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_refused(tmp_path: Path, name: str) -> None:
    settings, why = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=why):
        rewritten(make_decoder(apart(**settings)), tmp_path)


def test_a_mask_of_its_own_is_refused(tmp_path: Path) -> None:
    def near(g: Build, head: int, scores: str) -> str:
        first = g.node("Sub", [g.query_rows, g.constant(5)])
        return g.node("Where", [g.to_scores(g.node("Greater", [g.key_rows, first])), scores, g.number(-65504.0)])

    one = apart(scores=lambda g, head, t: near(g, head, t) if head == 3 else t)
    with pytest.raises(UnsupportedModelError, match="attend to one head of the cache .* with other masks"):
        rewritten(make_decoder(one), tmp_path)


def written_apart(model: onnx.ModelProto, heads: Sequence[int] = (0, 1), new_only: bool = False) -> onnx.ModelProto:
    """Each head of a cache ``[B, N, P, H]`` written by a Concat of its own, as AI Hub's exports have it."""
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    for present in graph.outputs[1:]:
        whole = present.inputs[0]
        readers, (past, new) = list(present.outputs), whole.inputs
        cuts = [[_head(graph, t, head) for head in heads] for t in (past, new)]
        written = [gs.Variable(f"{present.name}_{n}", present.dtype) for n in range(len(heads))]
        for old, more, made in zip(*cuts, written, strict=True):
            graph.nodes.append(gs.Node("Concat", f"write_{made.name}", {"axis": 2}, [old, more], [made]))
        whole.attrs, whole.inputs = {"axis": 1}, cuts[1] if new_only else written
        present.shape = [d if axis != 2 or not new_only else "sequence" for axis, d in enumerate(present.shape)]
        for reader in readers:
            if reader.op == "Slice":
                replace_uses(reader.outputs[0], written[int(reader.inputs[1].values[0])])
    graph.cleanup().toposort()
    return gs.export_onnx(graph)


def _head(graph: gs.Graph, tensor: gs.Tensor, head: int) -> gs.Variable:
    made = gs.Variable(f"{tensor.name}_head{head}", tensor.dtype)
    bounds = [gs.Constant(f"{made.name}_{i}", np.array([n])) for i, n in enumerate((head, head + 1, 1))]
    graph.nodes.append(gs.Node("Slice", f"cut_{made.name}", {}, [tensor, *bounds], [made]))
    return made


@pytest.mark.parametrize("new_only", [False, True])
def test_heads_that_are_written_one_by_one(tmp_path: Path, new_only: bool) -> None:
    model = written_apart(make_decoder(apart({"layers": 2})), new_only=new_only)
    result = rewritten(model, tmp_path) if new_only else check_decode(model, tmp_path)
    assert [(a.query_heads, a.kv_heads) for a in result.plan.attention] == [(4, 2)] * 2
    if new_only:
        assert verify_model(tmp_path / "model.onnx", PlanOptions(capacity=24)).passed


def test_heads_that_are_written_in_another_order_are_refused(tmp_path: Path) -> None:
    """The outputs have the heads in the other order, so that each step would read those of another."""
    model = written_apart(make_decoder(apart()))
    for node in model.graph.node:
        if node.op_type == "Concat" and node.output[0].startswith("present"):
            swapped = list(node.input)[::-1] if len(node.input) == 2 else list(node.input)
            if node.output[0] in {o.name for o in model.graph.output}:
                node.input[:] = swapped
    with pytest.raises(UnsupportedModelError, match="cannot be done in place: Slice .* moves its rows"):
        rewritten(model, tmp_path)


@pytest.mark.parametrize("start", [[0, 0], [0], [-2]])
def test_a_cut_along_several_axes_is_no_head(start: list[int]) -> None:
    model = written_apart(make_decoder(apart()))
    name = "past_key_values.0.key_head0_0"
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(start), name))
    made = write_heads_together(model).graph.node
    assert sum(n.op_type == "Slice" and n.input[0] == "present.0.key" for n in made) == (0 if len(start) > 1 else 2)


@pytest.mark.parametrize("layers", [True, False])
def test_parts_that_are_layers_stay_apart(layers: bool) -> None:
    """What the second one writes is made of what the first one holds."""
    g = Graph()
    past = g.input("past", TensorProto.FLOAT, [2, "batch", "past", 4])
    new = g.input("new", TensorProto.FLOAT, [1, "batch", "sequence", 4])
    cuts = [g.node("Slice", [past, *(g.constant([n]) for n in (part, part + 1, 0))]) for part in (0, 1)]
    first = g.node("Concat", [cuts[0], new], axis=2)
    more = g.node("Add", [new, g.node("ReduceMean", [first if layers else new, g.constant([2])])])
    g.node("Concat", [first, g.node("Concat", [cuts[1], more], axis=2)], "present", axis=0)
    g.output("present", TensorProto.FLOAT, [2, "batch", "total", 4])
    model = g.model(18)
    made = write_heads_together(model)
    assert (made is model) is layers
    feeds = {name: np.random.default_rng(0).random((n, 3, 5, 4), np.float32) for name, n in (("past", 2), ("new", 1))}
    np.testing.assert_array_equal(run(made, feeds)["present"], run(model, feeds)["present"])
