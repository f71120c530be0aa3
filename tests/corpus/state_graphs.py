"""State that is no attention cache: what is found, what is refused, and what must not be taken for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import onnx
from hybrids import hybrid_model
from onnx import parser

from corpus import Entry, built

PAIRS = {
    "by name": (("past_conv.0", "present_conv.0"), ("past_conv.1", "present_conv.1")),
    "optimum": (("past_key_values.0.conv_state", "present.0.conv_state"), ("past_key_values.1.x", "present.1.x")),
    "cache_params": (
        ("cache_params.conv.0", "cache_params_out.conv.0"), ("cache_params.ssm.0", "cache_params_out.ssm.0"),
    ),
    "names before order": (("past_s.0", "present_s.0"), ("past_s.1", "present_s.1")),
}  # fmt: skip
Text = tuple[str, str, str]
"""Inputs, outputs, nodes."""


def beside_a_cache(inputs: str, outputs: str, nodes: str, constants: str = "") -> onnx.ModelProto:
    """A cache that a step writes, so that there is something to plan, beside a graph in ONNX text."""
    return parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 24]>
        graph ({inputs}, float[B,2,8,4] cache, float[B,2,S,4] row, int64[B] write_indices)
            => ({outputs}, float[B,2,8,4] cache_out) <{constants}> {{
            {nodes}
            cache_out = TensorScatter <axis = 2> (cache, row, write_indices)
        }}""")


def chain(pairs: Sequence[tuple[str, str]], *, turned: bool) -> Text:
    """Layers of one state each: ``x += past``, ``present = past * x``."""
    outputs = [f'float[B,4] "{present}"' for _, present in pairs]
    nodes = [
        f'x{i + 1} = Add (x{i}, "{past}")  "{present}" = Mul ("{past}", x{i + 1})'
        for i, (past, present) in enumerate(pairs)
    ]
    inputs = ["float[B,4] x0", *(f'float[B,4] "{past}"' for past, _ in pairs)]
    return ", ".join(inputs), ", ".join(outputs[::-1] if turned else outputs), "\n".join(nodes)


def replaced(name: str, read: str = "") -> Text:
    """The last token, as RWKV keeps it: the next value does not depend on the one before."""
    nodes = f"y = Add (x, {read or name})  new_shift = Neg (x)"
    return f"float[B,4] x, float[B,4] {name}", "float[B,4] y, float[B,4] new_shift", nodes


def written(nodes: str, inputs: str = "") -> Text:
    rows = "float[B,2,8,4] past, float[B,2,1,4] new, float[B,2,1,4] q"
    return rows + inputs, "float[B,2,8,4] present", nodes


def other(past: str, present: str, shape: str) -> Text:
    return f"{shape} {past}", f"{shape} {present}", f"{present} = Add ({past}, {past})"


TWO = "float[B,4] state_a, float[B,4] state_b"  # of which each makes all outputs, and names that say nothing
TURNED = "turned = Transpose <perm = [0, 1, 3, 2]> (present)"
FORMS: dict[str, Text] = {
    **{name: chain(pairs, turned=name == "names before order") for name, pairs in PAIRS.items()},
    "replaced": replaced("shift"),
    "replaced, named otherwise": replaced("past_tokens"),
    "replaced, unread": replaced("shift", "x"),
    "two that are alike": (
        TWO, "float[B,4] u, float[B,4] w", "both = Add (state_a, state_b)  u = Tanh (both)  w = Sin (both)"
    ),
    "two inputs, one output": (TWO, "float[B,4] u", "both = Add (state_a, state_b)  u = Tanh (both)"),
    # The same as a cache written by one-hot vectors, but for the Softmax: linear attention.
    "a product without softmax": (
        "float[B,2,4,4] past_kv, float[B,2,4,4] new, float[B,2,1,4] q", "float[B,2,4,4] present_kv",
        "half = Constant <value_float = 0.5> ()  old = Mul (past_kv, half)  present_kv = Add (old, new)"
        "  y = MatMul (q, present_kv)",
    ),
    "other names": other("inputs_embeds", "hidden_out", "float[B,1,4]"),
    "a count": other("past_x", "present_x", "int64[B,4]"),
    "grows": other("past_x", "present_x", "float[B,P]"),
    "one axis": other("past_x", "present_x", "float[B]"),
    "a cache, _scatter": written(
        "present = ScatterElements <axis = 2> (past, rows, new)", ", int64[B,2,1,4] rows"
    ),
    "a cache, _rolling": written(f"""
        rows = Concat <axis = 2> (past, new)  first = Constant <value_ints = [-8]> ()
        end = Constant <value_ints = [99]> ()  axes = Constant <value_ints = [2]> ()
        [node_present] present = Slice (rows, first, end, axes)  {TURNED}  y = MatMul (q, turned)"""),
    "a cache, _one_hot": written(f"""
        old = Mul (past, keep)  [node_present] present = Add (old, new)  {TURNED}  scores = MatMul (q, turned)
        half = Constant <value_float = 0.5> ()  scaled = Mul (scores, half)  y = Softmax (scaled)""",
        ", float[B,1,8,1] keep"),
    "a cache, _attention": written("y = Attention (q, past, past)  [node_present] present = Add (past, new)"),
    "a cache, _unchanged": written("present = Identity (past)"),
    "a cache, _unread": written(
        "shape = Constant <value_ints = [1, 2, 8, 4]> ()  present = Expand (new, shape)"
    ),
}  # fmt: skip


def entries() -> Iterator[Entry]:
    yield from built("state", {name: partial(beside_a_cache, *text) for name, text in FORMS.items()})
    yield from built("state", {"hybrid, one sequence": lambda: hybrid_model(batch=1)})
