"""Decoders that give back the new rows of their caches only: what models that grow by Concat become if edited so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from concat_graphs import Build, Decoder, decoders, make_decoder
from foreign_tools import foreign
from graphs import Dim
from onnx import TensorProto, helper
from stored import edited

from corpus import Entry, built

Nodes = list[onnx.NodeProto]
Form = Callable[[str, str], Nodes]


def as_joined(rows: str, output: str) -> Nodes:
    return [helper.make_node("Identity", [rows], [output], name=f"{output}/given")]


def transposed(*perm: int) -> Form:
    return lambda rows, output: [helper.make_node("Transpose", [rows], [output], name=f"{output}/given", perm=perm)]


def flat(rows: str, output: str) -> Nodes:
    """``[B, S, N * D]`` of ``[B, N, S, D]``."""
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [0, 0, -1])
    return [
        helper.make_node("Transpose", [rows], [f"{output}/rows"], name=f"{output}/moved", perm=(0, 2, 1, 3)),
        helper.make_node("Constant", [], [f"{output}/shape"], name=f"{output}/sizes", value=shape),
        helper.make_node("Reshape", [f"{output}/rows", f"{output}/shape"], [output], name=f"{output}/given"),
    ]


def changed(op: str) -> Form:
    """Something else than what is joined."""
    return lambda rows, output: [helper.make_node(op, [rows], [output], name=f"{output}/given")]


def give_new_rows(model: onnx.ModelProto, *forms: Form) -> onnx.ModelProto:
    """The same decoder, whose outputs are what its Concats join with the past.

    Args:
        model: each of its caches is the output of a Concat. Not changed.
        forms: how the outputs are made of the new rows, taken in turn.
    """
    made = deepcopy(model)
    makers = {name: node for node in made.graph.node for name in node.output}
    inputs = {value.name for value in made.graph.input}
    turn = 0
    for value in made.graph.output:
        node = makers[value.name]
        if node.op_type != "Concat" or not inputs & set(node.input):
            continue
        whole = f"{value.name}/whole"
        for reader in made.graph.node:
            reader.input[:] = [whole if name == value.name else name for name in reader.input]
        node.output[0] = whole
        made.graph.node.extend(forms[turn % len(forms)](node.input[1], value.name))
        value.type.tensor_type.ClearField("shape")
        turn += 1
    return onnx.shape_inference.infer_shapes(made, data_prop=True)


def fixed(model: onnx.ModelProto, room: int, length: Dim = "sequence") -> onnx.ModelProto:
    """The same decoder with a past that always has so many rows."""
    made = deepcopy(model)
    for value in made.graph.input:
        dims = value.type.tensor_type.shape.dim
        if "past_key" in value.name:
            axis = next(i for i, d in enumerate(dims) if d.dim_param == "past")
            dims[axis].dim_value = room
        elif "mask" in value.name and isinstance(length, int):
            dims[-1].dim_value = room + length
    return made


DECODERS: dict[str, dict[str, Any]] = {
    "bsnd": {"layout": "bsnd"},
    "flat caches": {"layout": "flat"},
    "padding": {"mask": "padding", "positions": "padding"},
    "window": {"window": 3},
    "own mask": {"mask": "own", "apply": "where"},
    "lengths of the whole": {"positions": "present"},
    "float16": {"dtype": np.float16},
}
ROOM = 20
FULL: dict[str, dict[str, Any]] = {
    "padding": {"mask": "padding", "positions": "padding"},
    "padding and given positions": {"mask": "padding"},
    "own mask": {"mask": "own", "apply": "where"},
    "own mask, added": {"mask": "own", "own_type": np.float32},
    "one token at a time": {"mask": "own", "own_type": np.float32, "sequence": 1},
    "four tokens at a time": {"mask": "padding", "sequence": 4},
    "no mask": {"mask": "none"},
    "causal by place": {"mask": "past"},
    "window by place": {"mask": "padding", "window": 3},
}
"""A past that always has as many rows: a mask has to hide those that hold nothing."""


def prefixed(g: Build, x: str) -> str:
    """Another input that is joined is no cache, such as embeddings of a prefix."""
    prefix = g.input("prefix", TensorProto.FLOAT, ["batch", "rows", 16])
    more = g.Concat(prefix, x, axis=1)
    return g.Add(x, g.ReduceMean(more, [1]))


def by_batch(g: Build, x: str) -> str:
    """Hidden states, spread over as many sequences as the past has."""
    batch = g.Slice(g.Shape(g.pasts[0]), [0], [1])
    return g.Expand(x, g.Concat(batch, [1, 1], axis=0))


def given_twice() -> onnx.ModelProto:
    """Values that are not given back are not taken for the keys, although another output has their shape."""
    model = give_new_rows(make_decoder(Decoder()), as_joined)
    rows = [node for node in model.graph.node if node.name.endswith("/given")]
    rows[1].input[0] = rows[0].input[0]
    return model


def of_several_lengths() -> onnx.ModelProto:
    model = fixed(give_new_rows(make_decoder(Decoder(mask="padding")), as_joined), ROOM)
    values = next(v for v in model.graph.input if v.name.endswith("value"))
    values.type.tensor_type.shape.dim[2].dim_value = ROOM + 1
    return model


def read_before(perm: tuple[int, ...], folder: Path) -> Path:
    """onnxsim joins the Transpose before an output with the one that reads the output."""

    def fuse(model: onnx.ModelProto) -> None:
        written = next(node.output[0] for node in model.graph.node if node.op_type == "ScatterND")
        reader = next(node for node in model.graph.node if list(node.input) == ["k_cache_out"])
        reader.input[0], reader.attribute[0].ints[:] = written, perm

    return edited("plain-torch/bshd_index_put_dynamo_op18", folder, fuse)


KEYS = ("bnds", "bnsd")
LAID: dict[str, dict[str, Any]] = {
    "keys transposed": {"layers": 2, "layout": KEYS},
    "both transposed": {"mask": "padding", "positions": "padding", "layout": "bnds"},
    "lengths of the whole": {"positions": "present", "layout": KEYS},
    "own mask": {"mask": "own", "apply": "where", "layout": KEYS},
    "heads before one sequence": {"layers": 2, "batch": 1, "layout": ("nbds", "nbsd")},
    "sizes read off a past": {"after": by_batch, "layout": KEYS},
}


def entries() -> Iterator[Entry]:
    models = {
        "joined": lambda: give_new_rows(foreign("concat"), as_joined),
        "flat": lambda: give_new_rows(foreign("concat"), flat),
    }
    yield from built("new rows", models, capacity=32)
    new = {n: (lambda how=how: give_new_rows(make_decoder(Decoder(**how)), as_joined)) for n, how in DECODERS.items()}
    forms: dict[str, tuple[Form, ...]] = {
        "keys transposed": (transposed(0, 1, 3, 2), as_joined),
        "tokens first": (transposed(2, 0, 1, 3), transposed(2, 1, 0, 3)),
        "flat and transposed": (flat, transposed(0, 3, 1, 2)),
        "negated keys": (changed("Neg"), as_joined),
    }
    new |= {n: (lambda form=form: give_new_rows(make_decoder(Decoder(layers=2)), *form)) for n, form in forms.items()}
    new |= {"prefixed": lambda: give_new_rows(make_decoder(Decoder(after=prefixed)), as_joined)}
    yield from built("new rows", new | {"given twice": given_twice}, capacity=24)
    yield from built("new rows, circular", {"window": new["window"]}, capacity=24, sliding="circular", window_chunk=3)
    full = {
        n: (lambda how=how: fixed(
            give_new_rows(make_decoder(Decoder(**how)), as_joined), ROOM, how.get("sequence", "sequence")))
        for n, how in FULL.items()
    }  # fmt: skip
    yield from built("full past", full | {"several lengths": of_several_lengths})
    yield from built("full past, capacity 64", {"padding": full["padding"]}, capacity=64)
    yield from decoders("laid", LAID)
    laid = {n: (lambda how=how: give_new_rows(make_decoder(Decoder(**how)), as_joined)) for n, how in LAID.items()}
    yield from built("laid, new rows", laid, capacity=24)
    yield from decoders("turned", {"one head, three sequences": {"kv_heads": 1, "batch": 3}})
    for perm in ((1, 2, 0, 3), (1, 2, 3, 0)):
        yield f"turned/read before {perm}", partial(read_before, perm), {}
