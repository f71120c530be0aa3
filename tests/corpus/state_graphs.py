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
        x = graph.Add(x, past)
        graph.Mul(past, x, out=present)
        graph.output(present, FLOAT, shape)
    if swapped:
        graph.outputs.reverse()
    return graph


def replaced(name: str, *, read: bool = True) -> Graph:
    """The last token, as RWKV keeps it: the next value does not depend on the one before."""
    graph = Graph()
    graph.input("x", FLOAT, ["B", 4])
    graph.input(name, FLOAT, ["B", 4])
    graph.Add("x", name if read else "x", out="y")
    graph.Neg("x", out="new_shift")
    for output in ("y", "new_shift"):
        graph.output(output, FLOAT, ["B", 4])
    return graph


def shared(*outputs: str) -> Graph:
    """Two states of which each makes all outputs, and names that say nothing."""
    graph = Graph()
    for name in ("state_a", "state_b"):
        graph.input(name, FLOAT, ["B", 4])
    both = graph.Add("state_a", "state_b")
    for name in outputs:
        graph.node("Tanh" if name == "u" else "Sin", [both], name)
        graph.output(name, FLOAT, ["B", 4])
    return graph


def _scatter(g: Graph) -> None:
    g.input("rows", TensorProto.INT64, ["B", 2, 1, 4])
    g.ScatterElements("past", "rows", "new", out="present", axis=2)


def _rolling(g: Graph) -> None:
    rows = g.Concat("past", "new", axis=2)
    g.Slice(rows, [-8], [99], [2], out="present")
    g.MatMul("q", g.Transpose("present", perm=[0, 1, 3, 2]), out="y")


def _one_hot(g: Graph) -> None:
    g.input("keep", FLOAT, ["B", 1, 8, 1])
    g.Add(g.Mul("past", "keep"), "new", out="present")
    scores = g.MatMul("q", g.Transpose("present", perm=[0, 1, 3, 2]))
    g.Softmax(g.Mul(scores, g.constant(0.5, np.float32)), out="y")


def _attention(g: Graph) -> None:
    g.Attention("q", "past", "past", out="y")
    g.Add("past", "new", out="present")


def _unchanged(g: Graph) -> None:
    g.Identity("past", out="present")


def _unread(g: Graph) -> None:
    g.Expand("new", [1, 2, 8, 4], out="present")


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
    graph.Add(graph.Mul("past_kv", graph.constant(0.5, np.float32)), "new", out="present_kv")
    graph.MatMul("q", "present_kv", out="y")
    graph.output("present_kv", FLOAT, ["B", 2, 4, 4])
    return graph


def other(past: str, present: str, dtype: int, shape: Sequence[Dim], out: Sequence[Dim] = ()) -> Graph:
    graph = Graph()
    graph.input(past, dtype, shape)
    graph.Add(past, past, out=present)
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
