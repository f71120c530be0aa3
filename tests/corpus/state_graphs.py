"""State that is no attention cache: what is found, what is refused, and what must not be taken for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import onnx
from graphs import Dim, Graph
from hybrids import hybrid_model
from onnx import TensorProto

from corpus import Entry, built

FLOAT = TensorProto.FLOAT
PAIRS = {
    "by name": (("past_conv.0", "present_conv.0"), ("past_conv.1", "present_conv.1")),
    "optimum": (("past_key_values.0.conv_state", "present.0.conv_state"), ("past_key_values.1.x", "present.1.x")),
    "cache_params": (
        ("cache_params.conv.0", "cache_params_out.conv.0"), ("cache_params.ssm.0", "cache_params_out.ssm.0"),
    ),
}  # fmt: skip


def beside_a_cache(graph: Graph) -> onnx.ModelProto:
    """A cache that a step writes, so that there is something to plan."""
    shape: list[Dim] = ["B", 2, 8, 4]
    inputs = [graph.input("cache", FLOAT, shape), graph.input("row", FLOAT, ["B", 2, "S", 4])]
    inputs.append(graph.input("write_indices", TensorProto.INT64, ["B"]))
    graph.node("TensorScatter", inputs, "cache_out", axis=2)
    graph.output("cache_out", FLOAT, shape)
    return graph.model()


def chain(names: Sequence[tuple[str, str]], shape: Sequence[Dim] = ("B", 4), *, swapped: bool = False) -> Graph:
    """Layers of one state each: ``x += past``, ``present = past * x``."""
    graph = Graph()
    x = graph.input("x", FLOAT, shape)
    for past, present in names:
        graph.input(past, FLOAT, shape)
        x = graph.node("Add", [x, past])
        graph.node("Mul", [past, x], present)
        graph.output(present, FLOAT, shape)
    if swapped:
        graph.outputs.reverse()
    return graph


def replaced(name: str, *, read: bool = True) -> Graph:
    """The last token, as RWKV keeps it: the next value does not depend on the one before."""
    graph = Graph()
    graph.input("x", FLOAT, ["B", 4])
    graph.input(name, FLOAT, ["B", 4])
    graph.node("Add", ["x", name if read else "x"], "y")
    graph.node("Neg", ["x"], "new_shift")
    for output in ("y", "new_shift"):
        graph.output(output, FLOAT, ["B", 4])
    return graph


def shared(*outputs: str) -> Graph:
    """Two states of which each makes all outputs, and names that say nothing."""
    graph = Graph()
    for name in ("state_a", "state_b"):
        graph.input(name, FLOAT, ["B", 4])
    both = graph.node("Add", ["state_a", "state_b"])
    for name in outputs:
        graph.node("Tanh" if name == "u" else "Sin", [both], name)
        graph.output(name, FLOAT, ["B", 4])
    return graph


def _scatter(g: Graph) -> None:
    g.input("rows", TensorProto.INT64, ["B", 2, 1, 4])
    g.node("ScatterElements", ["past", "rows", "new"], "present", axis=2)


def _rolling(g: Graph) -> None:
    rows = g.node("Concat", ["past", "new"], axis=2)
    g.node("Slice", [rows, g.constant([-8]), g.constant([99]), g.constant([2])], "present")
    g.node("MatMul", ["q", g.node("Transpose", ["present"], perm=[0, 1, 3, 2])], "y")


def _one_hot(g: Graph) -> None:
    g.input("keep", FLOAT, ["B", 1, 8, 1])
    g.node("Add", [g.node("Mul", ["past", "keep"]), "new"], "present")
    scores = g.node("MatMul", ["q", g.node("Transpose", ["present"], perm=[0, 1, 3, 2])])
    g.node("Softmax", [g.node("Mul", [scores, g.constant(0.5, np.float32)])], "y")


def _attention(g: Graph) -> None:
    g.node("Attention", ["q", "past", "past"], "y")
    g.node("Add", ["past", "new"], "present")


def _unchanged(g: Graph) -> None:
    g.node("Identity", ["past"], "present")


def _unread(g: Graph) -> None:
    g.node("Expand", ["new", g.constant([1, 2, 8, 4])], "present")


def written(write: Callable[[Graph], None]) -> Graph:
    graph, shape = Graph(), ["B", 2, 8, 4]
    graph.input("past", FLOAT, shape)
    for name in ("new", "q"):
        graph.input(name, FLOAT, ["B", 2, 1, 4])
    write(graph)
    graph.output("present", FLOAT, shape)
    return graph


def product_without_softmax() -> Graph:
    """The same as a cache written by one-hot vectors, but for the Softmax: linear attention."""
    graph = Graph()
    graph.input("past_kv", FLOAT, ["B", 2, 4, 4])
    graph.input("new", FLOAT, ["B", 2, 4, 4])
    graph.input("q", FLOAT, ["B", 2, 1, 4])
    graph.node("Add", [graph.node("Mul", ["past_kv", graph.constant(0.5, np.float32)]), "new"], "present_kv")
    graph.node("MatMul", ["q", "present_kv"], "y")
    graph.output("present_kv", FLOAT, ["B", 2, 4, 4])
    return graph


def other(past: str, present: str, dtype: int, shape: Sequence[Dim], out: Sequence[Dim] = ()) -> Graph:
    graph = Graph()
    graph.input(past, dtype, shape)
    graph.node("Add", [past, past], present)
    graph.output(present, dtype, out or shape)
    return graph


FORMS: dict[str, Callable[[], Graph]] = {
    **{name: partial(chain, pairs) for name, pairs in PAIRS.items()},
    "names before order": partial(chain, (("past_s.0", "present_s.0"), ("past_s.1", "present_s.1")), swapped=True),
    "replaced": partial(replaced, "shift"),
    "replaced, named otherwise": partial(replaced, "past_tokens"),
    "replaced, unread": partial(replaced, "shift", read=False),
    "two that are alike": partial(shared, "u", "w"),
    "two inputs, one output": partial(shared, "u"),
    "a product without softmax": product_without_softmax,
    "other names": partial(other, "inputs_embeds", "hidden_out", FLOAT, ["B", 1, 4]),
    "a count": partial(other, "past_x", "present_x", TensorProto.INT64, ["B", 4]),
    "grows": partial(other, "past_x", "present_x", FLOAT, ["B", "P"]),
    "one axis": partial(other, "past_x", "present_x", FLOAT, ["B"]),
    **{f"a cache, {f.__name__}": partial(written, f)
       for f in (_scatter, _rolling, _one_hot, _attention, _unchanged, _unread)},
}  # fmt: skip


def entries() -> Iterator[Entry]:
    yield from built("state", {name: (lambda make=make: beside_a_cache(make())) for name, make in FORMS.items()})
    yield from built("state", {"hybrid, one sequence": lambda: hybrid_model(batch=1)})
