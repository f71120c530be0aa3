"""Small decoders with TensorScatter caches and ONNX Attention, drawn at random: one seed, one model.

ids or hidden or q, k, v -- MatMul --> q, new k, new v; TensorScatter(past, new, write_indices) -- views --> K, V
Attention(q, K, V, mask, lengths) -- guard, MatMul --> logits or y

Most of a model is ordinary. One or two things in it are not: see `ODD`.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from graphs import Dim, Graph, renamed
from onnx import TensorProto, helper, numpy_helper

from corpus import Entry, built
from trt_kvcache.importer.cache_plan import CacheLayout, Fallback, LogitPositions, PlanOptions, Sliding, Target
from trt_kvcache.importer.protos import replace_field

FLOAT, HALF, BFLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE
INT8, UINT8, INT32, INT64 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64
BOOL = TensorProto.BOOL
HIDDEN, VOCABULARY = 12, 40
ODD = (
    "scores", "short mask", "flat mask", "integer mask", "mask of another type", "open mask", "constant mask",
    "overflowing mask", "ring", "stated capacity", "default past", "past is output", "view of past", "view of present",
    "circular", "fixed circular", "one write index", "int8", "zero point", "guard", "names", "domain", "chained",
    "unread cache", "shared cache", "value size", "precision", "window", "computed lengths", "int32 indices",
    "no indices", "sliced", "mixed layouts", "open capacity", "another batch symbol", "scaled", "softcap",
)  # fmt: skip
"""Odd things that few models have."""
_LAYOUTS = ("bnsh", "bnsh", "bsnh", "bsd", "bsd", "bnhs", "b1nsh", "bnsxy")


@dataclass(frozen=True)
class Mask:
    """A mask that the caller gives: its type and shape."""

    dtype: int
    shape: tuple[Dim, ...]


@dataclass
class Plain:
    """A model, and what a caller has to know to run it.

    Attributes:
        parts: of inputs by name: ``"ids"``, ``"values"``, ``"start"``, ``"valid"``, ``"mask"`` or ``"past"``.
        sizes: of the symbols that a step does not set: capacity.
        axes: the sequence axis of each past.
        rows: of each past, as the model has it.
        presents: present by past.
        same: all rows start at one place.
        short: rows may have fewer valid tokens than a step brings.
        faint: rows that hold no token are hidden by a number, or not in all outputs: large garbage would count.
        room: the most tokens that a sequence may have; of circular caches, what is valid at most.
        circular: sequences may go on after the end.
    """

    seed: int
    odd: tuple[str, ...]
    model: onnx.ModelProto
    options: PlanOptions
    parts: dict[str, str]
    masks: dict[str, Mask]
    axes: dict[str, int]
    presents: dict[str, str]
    capacity: int
    batch: int | None
    length: int | None
    indexed: bool
    same: bool
    short: bool
    room: int
    circular: bool
    faint: bool


def plain_model(seed: int, odd: Sequence[str] | None = None) -> Plain:
    """The model of a seed; `odd`: what of `ODD` it has, instead of what the seed draws."""
    return _Maker(seed, odd).make()


class _Maker(Graph):
    def __init__(self, seed: int, odd: Sequence[str] | None) -> None:
        super().__init__()
        self.rng = rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.seed = seed
        drawn = rng.sample(ODD, rng.choice((0, 1, 1, 1, 2, 2, 3)))
        self.odd = tuple(drawn if odd is None else odd)
        self.dtype = rng.choice((FLOAT, FLOAT, FLOAT, FLOAT, HALF, HALF, BFLOAT))
        self.batch: Dim = rng.choice(("B", "B", "B", 2, 1))
        self.length: Dim = rng.choice(("S", "S", "S", 1, 2, 3))
        self.capacity = rng.choice((6, 8, 9, 12))
        self.opset = rng.choice((24, 24, 25))
        self.front = rng.choice(("ids", "ids", "hidden", "direct"))
        self.layout = rng.choice(_LAYOUTS)
        self.kv_heads, self.size = rng.choice((1, 2, 2)), rng.choice((4, 8, 8, 16))
        self.heads = self.kv_heads * rng.choice((1, 2, 2, 3))
        self.value_size = self.size
        self.mode = "linear"
        self.cache_dtype = self.dtype
        self.zero_point = 0
        self.indices, self.lengths = "input", rng.choice(("input", "input", "input", "none"))
        self.mask = "none" if self.lengths == "input" and rng.random() < 0.75 else rng.choice(("bool", "float", "made"))
        self.causal = rng.random() < 0.6
        self.view = "plain"
        self.target = rng.choice((Target.TENSORRT_RTX, Target.TENSORRT_RTX, Target.TENSORRT))
        self.window = -1
        self.right = -1
        self.attributes: dict[str, Any] = {}
        self.mode_of_scores = -1
        self.sliding, self.chunk = Sliding.LINEAR, 3
        self.open_capacity = False
        self.short_mask = 0
        self.parts: dict[str, str] = {}
        self.masks: dict[str, Mask] = {}
        self.axes: dict[str, int] = {}
        self.presents: dict[str, str] = {}
        self.layers = rng.choice((1, 1, 2))
        self.faint = False
        for name in self.odd:
            self._make_odd(name)
        if self.window >= 0 or self.right >= 0:
            self.opset = 25

    def _make_odd(self, name: str) -> None:
        rng = self.rng
        if name == "scores":
            self.mode_of_scores = rng.randrange(4)
        elif name == "short mask":
            self.mask, self.short_mask = rng.choice(("bool", "float", "made")), rng.choice((1, 2))
        elif name == "flat mask":
            self.mask = rng.choice(("flat", "flat", "constant flat"))
        elif name == "integer mask":
            self.mask = rng.choice(("int64", "int32", "made int64"))
        elif name == "mask of another type":
            self.mask = rng.choice(("other", "made other"))
        elif name == "open mask":
            self.mask = rng.choice(("open bool", "open float"))
        elif name == "constant mask":
            self.mask = "constant"
        elif name == "overflowing mask":
            self.mask = rng.choice(("made overflow", "made lowest", "made infinite", "made double"))
        elif name == "ring":
            self.sliding, self.window, self.causal = Sliding.CIRCULAR, rng.choice((0, 1, 2, 3)), True
            self.chunk, self.mask, self.lengths, self.capacity = rng.choice((1, 2, 3)), "none", "input", 12
            self.length = self.length if isinstance(self.length, str) else min(self.length, self.chunk)
        elif name == "stated capacity":
            self.view = rng.choice(("stated", "stated whole"))
        elif name == "circular":
            self.mode, self.causal = "circular", self.causal and self.rng.random() < 0.3
        elif name == "fixed circular":
            self.mode, self.length, self.causal = "circular", rng.choice((2, 3, 4)), False
        elif name == "one write index":
            self.indices = rng.choice(("one", "one", "expanded"))
        elif name == "int8":
            self.cache_dtype, self.zero_point = INT8, 0
        elif name == "zero point":
            self.cache_dtype, self.zero_point = rng.choice(((INT8, 3), (INT8, -7), (UINT8, 128)))
        elif name == "guard":
            self.mask = "made"
        elif name == "value size":
            self.value_size = rng.choice((4, 8, 16, 12))
        elif name == "precision":
            self.attributes["softmax_precision"] = rng.choice((FLOAT, FLOAT, HALF, DOUBLE))
        elif name == "window":
            self.window, self.right = rng.choice(((2, -1), (0, -1), (3, 0), (1, 1), (-1, 0)))
        elif name == "computed lengths":
            self.lengths = rng.choice(("computed", "int32", "bounded"))
        elif name == "int32 indices":
            self.indices = "int32"
        elif name == "no indices":
            self.indices = "none"
        elif name == "sliced":
            self.view = rng.choice(("sliced", "cut"))
        elif name == "open capacity":
            self.open_capacity = True
        elif name == "another batch symbol":
            self.indices = "symbol"
        elif name == "scaled":
            self.attributes["scale"] = rng.choice((0.3, 1.0, 0.05))
        elif name == "softcap":
            self.attributes["softcap"] = rng.choice((2.0, 30.0))

    # inputs

    def weight(self, *shape: int) -> str:
        values = self.numbers.standard_normal(shape) / np.sqrt(shape[0])
        return self.constant(values, helper.tensor_dtype_to_np_dtype(self.dtype))

    def rows_of_batch(self) -> str:
        """The batch, int64 ``[1]``."""
        return self.Shape(self.given, start=0, end=1)

    def new_tokens(self) -> str:
        """S, int64 ``[1]``."""
        axis = 2 if self.front == "direct" and self.layout != "bsd" else 1
        return self.Shape(self.given, start=axis, end=axis + 1)

    def take(self, name: str, part: str, dtype: int, shape: Sequence[Dim]) -> str:
        self.parts[name] = part
        return self.input(name, dtype, shape)

    def take_start(self) -> None:
        self.write = ""
        batch = self.batch
        if self.indices == "input":
            self.write = self.take("write_indices", "start", INT64, [batch])
        elif self.indices == "symbol":
            self.write = self.take("write_indices", "start", INT64, ["W"])
        elif self.indices == "int32":
            self.write = self.Cast(self.take("write_indices", "start", INT32, [batch]), to=INT64)
        elif self.indices == "one":
            self.write = self.take("write_indices", "start", INT64, [1])
        elif self.indices == "expanded":
            one = self.take("write_indices", "start", INT64, [1])
            self.write = self.Expand(one, self.rows_of_batch())

    def take_valid(self) -> None:
        self.valid = ""
        if self.lengths in ("input", "bounded"):
            self.valid = self.take("nonpad_kv_seqlen", "valid", INT64, [self.batch])
        elif self.lengths == "int32":
            self.valid = self.Cast(self.take("nonpad_kv_seqlen", "valid", INT32, [self.batch]), to=INT64)
        if self.lengths == "bounded":
            self.valid = self.Min(self.valid, self.capacity)
        if self.lengths == "computed":
            ends = self.new_tokens()
            if self.write:
                ends = self.Add(self.write, ends)
            ends = self.Min(ends, [self.capacity])
            self.valid = self.Expand(ends, self.rows_of_batch())

    def positions(self) -> str:
        """Positions of the new tokens, int64 ``[B, 1, S, 1]``."""
        count = self.Squeeze(self.new_tokens())
        steps = self.Range(0, count, 1)
        steps = self.Unsqueeze(steps, [0, 1, 3])
        if not self.write:
            return steps
        return self.Add(self.Unsqueeze(self.write, [1, 2, 3]), steps)

    def take_mask(self) -> str:
        """The mask of one attention; all share what the caller gives."""
        rng, kind, keys = self.rng, self.mask, self.capacity - self.short_mask
        if kind == "none":
            return ""
        if not kind.startswith(("made", "constant")):
            if "attn_mask" in self.parts:
                return "attn_mask"
            last: Dim = "T" if kind.startswith("open") else keys
            last = "L" if self.open_capacity and last == self.capacity else last
            shape: list[Dim] = [rng.choice((1, self.batch)), rng.choice((1, 1, self.heads)), self.length, last]
            if rng.random() < 0.3:
                shape[2] = 1
            shape = [last] if kind == "flat" else shape[rng.choice((0, 0, 0, 2)) :] if rng.random() < 0.8 else shape[1:]
            other = {FLOAT: rng.choice((HALF, DOUBLE)), HALF: FLOAT, BFLOAT: FLOAT}[self.dtype]
            dtype = {"bool": BOOL, "open bool": BOOL, "int64": INT64, "int32": INT32, "other": other}.get(
                kind, rng.choice((BOOL, self.dtype)) if kind == "flat" else self.dtype
            )
            self.masks["attn_mask"], self.faint = Mask(dtype, tuple(shape)), dtype != BOOL
            return self.take("attn_mask", "mask", dtype, shape)
        if kind.startswith("constant"):
            shape = [1, 1, 1, keys] if rng.random() < 0.5 else [1, keys]
            values = self.numbers.random([keys] if kind == "constant flat" else shape) < 0.7
            values[..., 0] = True
            if rng.random() < 0.5:
                return self.constant(values, bool)
            return self.constant(np.where(values, 0, -np.inf), helper.tensor_dtype_to_np_dtype(self.dtype))
        places = self.constant(np.arange(keys).reshape(1, 1, 1, keys))
        visible = self.LessOrEqual(places, self.positions())
        if rng.random() < 0.3 and self.mode == "linear" and (self.valid or not self.causal):  # it leaves a key to see
            oldest = self.Sub(self.positions(), 3)
            visible = self.And(visible, self.Greater(places, oldest))
        self.visible = visible
        if kind == "made" and rng.random() < 0.5:
            return visible
        dtype, hidden, self.faint = self.dtype, -1e4, True
        if kind == "made int64":
            return self.Where(visible, 0, -20)
        if kind == "made other":
            dtype = {FLOAT: rng.choice((HALF, DOUBLE)), HALF: FLOAT, BFLOAT: FLOAT}[self.dtype]
        if kind == "made overflow":
            wide = DOUBLE if self.dtype != HALF else FLOAT
            chosen = self.Where(visible, self._number(0, wide), self._number(-1e39 if wide == DOUBLE else -1e9, wide))
            return self.Cast(chosen, to=dtype)
        if kind == "made double":
            lowest = self._number(-6e4 if dtype == HALF else -3e38, dtype)
            chosen = self.Where(visible, self._number(0, dtype), lowest)
            return self.Add(chosen, chosen)
        if kind == "made lowest":
            hidden = -65504.0 if dtype == HALF else -3.3e38
        if kind == "made infinite":
            hidden = -np.inf
        return self.Where(visible, self._number(0, dtype), self._number(hidden, dtype))

    def _number(self, value: float, dtype: int) -> str:
        with np.errstate(over="ignore"):
            return self.constant(value, helper.tensor_dtype_to_np_dtype(dtype))

    # caches

    def shape_of(self, layout: str, heads: int, size: int, tokens: Dim) -> tuple[list[Dim], int]:
        batch = self.batch
        return {
            "bnsh": ([batch, heads, tokens, size], 2),
            "bsnh": ([batch, tokens, heads, size], 1),
            "bsd": ([batch, tokens, heads * size], 1),
            "bnhs": ([batch, heads, size, tokens], 3),
            "b1nsh": ([batch, 1, heads, tokens, size], 3),
            "bnsxy": ([batch, heads, tokens, size // 2, 2], 2),
        }[layout]

    def project(self, x: str, heads: int, size: int) -> str:
        """``[B, S, heads * size]``"""
        return self.MatMul(x, self.weight(HIDDEN, heads * size))

    def laid(self, rows: str, layout: str, heads: int, size: int) -> str:
        """``[B, S, heads * size]`` as an update of a cache."""
        if layout == "bsd":
            return rows
        split = self.Reshape(rows, [0, 0, heads, size])
        perm = {"bnsh": [0, 2, 1, 3], "bnhs": [0, 2, 3, 1]}.get(layout, [0, 2, 1, 3])
        if layout == "bsnh":
            return split
        turned = self.Transpose(split, perm=perm)
        if layout == "b1nsh":
            return self.Unsqueeze(turned, [1])
        if layout == "bnsxy":
            return self.Reshape(turned, [0, 0, -1, size // 2, 2])
        return turned

    def cache(self, name: str, layout: str, x: str, heads: int, size: int) -> str:
        """Past, update and present; returns K or V ``[B, N, L, H]``, or ``[B, L, N * H]`` of the layout bsd."""
        rows: Dim = "L" if self.open_capacity else self.capacity
        shape, axis = self.shape_of(layout, heads, size, rows)
        past = self.take(f"past_{name}", "past", self.cache_dtype, shape)
        if x:
            new = self.laid(self.project(x, heads, size), layout, heads, size)
        else:
            update, _ = self.shape_of(layout, heads, size, self.length)
            new = self.take(f"new_{name}", "values", self.dtype, update)
            self.given = new if not self.given else self.given
        if self.cache_dtype != self.dtype:
            scale = self.constant(0.05, helper.tensor_dtype_to_np_dtype(self.dtype))
            zero = self.constant(self.zero_point, helper.tensor_dtype_to_np_dtype(self.cache_dtype))
            new = self.QuantizeLinear(new, scale, zero)
        attributes: dict[str, Any] = {} if self.mode == "linear" else {"mode": self.mode}
        place = axis if self.rng.random() < 0.5 else axis - len(shape)
        attributes |= {} if place == -2 and self.rng.random() < 0.5 else {"axis": place}
        present = f"present_{name}"
        inputs = [past, new] + ([self.write] if self.write else [])
        if "chained" in self.odd:
            first = self.node("TensorScatter", inputs, f"middle_{name}", **attributes)
            inputs = [first, new] + ([self.write] if self.write else [])
        self.node("TensorScatter", inputs, present, **attributes)
        self.output(present, self.cache_dtype, shape)
        self.axes[past], self.presents[past] = axis, present
        if name == "k0":
            self._outputs_beside(past, present, shape)
        read = present
        if self.cache_dtype != self.dtype:
            read = self.DequantizeLinear(read, scale, zero)
        return read

    def _outputs_beside(self, past: str, present: str, shape: list[Dim]) -> None:
        rank, rng = len(shape), self.rng
        if "past is output" in self.odd:
            if rng.random() < 0.5:
                self.outputs.append(helper.make_tensor_value_info(past, self.cache_dtype, shape))
            else:
                self.Identity(past, out="past_copy")
                self.output("past_copy", self.cache_dtype, shape)
        for what, tensor in (("view of past", past), ("view of present", present)):
            if what not in self.odd:
                continue
            name = what.replace(" ", "_")
            kind = rng.choice(("same", "turned", "flat", "rows"))
            if kind == "same":
                self.Identity(tensor, out=name)
                self.output(name, self.cache_dtype, shape)
            elif kind == "turned":
                perm = [0, *range(rank - 1, 0, -1)]
                self.Transpose(tensor, out=name, perm=perm)
                self.output(name, self.cache_dtype, [shape[i] for i in perm])
            elif kind == "flat":
                self.Reshape(tensor, [0, -1], out=name)
                self.output(name, self.cache_dtype, [shape[0], "F"])
            else:
                ends = [self.constant([n]) for n in (0, 2, self.axes[past])]
                self.Slice(tensor, *ends, out=name)
                self.output(name, self.cache_dtype, [2 if i == self.axes[past] else d for i, d in enumerate(shape)])

    def read(self, tensor: str, layout: str, heads: int, size: int, flat: bool) -> str:
        """K or V of a cache, through views."""
        rng, stated = self.rng, self.view.startswith("stated")
        rows = self.capacity if stated else rng.choice((-1, 0)) if not self.open_capacity else -1
        if layout == "bsd" and not flat:
            split = self.Reshape(tensor, [0, rows, heads, size])
            tensor = self.Transpose(split, perm=[0, 2, 1, 3])
        elif layout == "bsd" and stated:
            tensor = self.Reshape(tensor, [0, rows, heads * size])
        elif layout == "bsnh":
            tensor = self.Transpose(tensor, perm=[0, 2, 1, 3])
        elif layout == "bnhs":
            tensor = self.Transpose(tensor, perm=[0, 1, 3, 2])
        elif layout == "b1nsh" and not stated:
            tensor = self.Squeeze(tensor, [1])
        elif layout == "b1nsh":
            tensor = self.Reshape(tensor, [-1, heads, self.capacity, size])
        elif layout == "bnsxy":
            tensor = self.Reshape(tensor, [0, 0, rows if rows else -1, size])
        if self.view == "stated whole" and not flat:
            first = self.batch if isinstance(self.batch, int) else -1
            tensor = self.Reshape(tensor, [first, heads, self.capacity, size])
        if self.view in ("sliced", "cut"):
            end = self.capacity if self.view == "sliced" else self.keys
            tensor = self.Slice(tensor, *(self.constant([n]) for n in (0, end, 1 if flat else 2)))
        return tensor

    # attention

    def attend(self, layer: int, query: str, key: str, value: str, flat: bool, number: int) -> str:
        attributes = dict(self.attributes)
        if self.causal:
            attributes["is_causal"] = 1
        if self.window >= 0:
            attributes["left_window_size"] = self.window
        if self.right >= 0:
            attributes["right_window_size"] = self.right
        if flat:
            attributes |= {"q_num_heads": self.heads, "kv_num_heads": self.kv_heads}
        mask = self.take_mask()
        inputs = [query, key, value, mask, "", "", self.valid]
        while not inputs[-1]:
            inputs.pop()
        out, outputs = f"y_{layer}_{number}", [f"y_{layer}_{number}"]
        if self.mode_of_scores >= 0 and number == 0:
            scores = f"scores_{layer}"
            attributes["qk_matmul_output_mode"] = self.mode_of_scores
            outputs += ["", "", scores]
            self.output(scores, self.dtype, [self.batch, self.heads, self.length, self.keys_symbol()])
        self.node("Attention", inputs, outputs, **attributes)
        if "guard" in self.odd and not flat and self.mask.startswith("made"):
            counted = self.ReduceSum(self.Cast(self.visible, to=FLOAT), [-1])
            compare, limit = self.rng.choice((("LessOrEqual", 1.0), ("Less", 1.0)))
            blind = self.node(compare, [counted, self.constant(limit, np.float32)])
            return self.Where(blind, self._number(0, self.dtype), out)
        return out

    def keys_symbol(self) -> Dim:
        return "L" if self.open_capacity and self.view != "cut" else self.keys

    @property
    def keys(self) -> int:
        return self.capacity - 2 if self.view == "cut" else self.capacity

    def make(self) -> Plain:
        rng = self.rng
        if self.mode == "circular" and self.mask not in ("none",):
            self.mask = "none" if rng.random() < 0.6 else self.mask
        if self.view == "cut" and self.mask != "none":
            self.mask = "none"
        self.given = ""
        if self.front == "ids":
            ids = self.take("input_ids", "ids", INT64, [self.batch, self.length])
            table = self.numbers.standard_normal((VOCABULARY, HIDDEN))
            self.given = ids
            x = self.Gather(self.constant(table, helper.tensor_dtype_to_np_dtype(self.dtype)), ids)
        elif self.front == "hidden":
            x = self.given = self.take("inputs_embeds", "values", self.dtype, [self.batch, self.length, HIDDEN])
        else:
            x = ""
            shape: list[Dim] = [self.batch, self.length, self.heads * self.size]
            flat = self.layout == "bsd"
            if not flat:
                shape = [self.batch, self.heads, self.length, self.size]
            self.given = self.take("query", "values", self.dtype, shape)
            self.layers = 1
        self.take_start()
        self.take_valid()
        for layer in range(self.layers):
            x = self.layer(layer, x)
        if self.front != "direct":
            self.MatMul(x, self.weight(HIDDEN, VOCABULARY), out="logits")
            self.output("logits", self.dtype, [self.batch, self.length, VOCABULARY])
        return self.finish()

    def layer(self, layer: int, x: str) -> str:
        rng, layout = self.rng, self.layout
        other = rng.choice(_LAYOUTS) if "mixed layouts" in self.odd else layout
        if self.front == "direct" and layout == "bsd":
            other = layout
        flat = layout == other == "bsd" and (self.front == "direct" or rng.random() < 0.6)
        key = self.cache(f"k{layer}", layout, x, self.kv_heads, self.size)
        value = self.cache(f"v{layer}", other, x, self.kv_heads, self.value_size)
        if "unread cache" in self.odd:
            self.cache(f"z{layer}", rng.choice(_LAYOUTS), x, 2, 4)
        key = self.read(key, layout, self.kv_heads, self.size, flat)
        value = self.read(value, other, self.kv_heads, self.value_size, flat)
        made = []
        for number in range(2 if "shared cache" in self.odd else 1):
            if self.front == "direct":
                query = self.given if number == 0 or rng.random() < 0.5 else self.take(
                    f"query_{number}", "values", self.dtype, self._query_shape(flat))  # fmt: skip
            else:
                query = self.project(x, self.heads, self.size)
                if not flat:
                    split = self.Reshape(query, [0, 0, self.heads, self.size])
                    query = self.Transpose(split, perm=[0, 2, 1, 3])
            made.append(self.attend(layer, query, key, value, flat, number))
        if self.front == "direct":
            for name in made:
                self.output(name, self.dtype, self._result_shape(flat))
            return ""
        for y in made:
            if not flat:
                turned = self.Transpose(y, perm=[0, 2, 1, 3])
                y = self.Reshape(turned, [0, 0, self.heads * self.value_size])
            out = self.MatMul(y, self.weight(self.heads * self.value_size, HIDDEN))
            x = self.Add(x, out)
        return x

    def _query_shape(self, flat: bool) -> list[Dim]:
        return [self.batch, self.length, self.heads * self.size] if flat else [
            self.batch, self.heads, self.length, self.size]  # fmt: skip

    def _result_shape(self, flat: bool) -> list[Dim]:
        return [self.batch, self.length, self.heads * self.value_size] if flat else [
            self.batch, self.heads, self.length, self.value_size]  # fmt: skip

    def finish(self) -> Plain:
        rng = self.rng
        if "default past" in self.odd:
            value = next(v for v in self.inputs if v.name == "past_k0")
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            if all(shape):
                values = np.zeros(shape, helper.tensor_dtype_to_np_dtype(self.cache_dtype))
                self.initializers.append(numpy_helper.from_array(values, "past_k0"))
        model = self.model(self.opset)
        if "names" in self.odd:
            self._rename(model)
        if "domain" in self.odd:
            for opset in model.opset_import:
                opset.domain = "ai.onnx"
            for node in model.graph.node:
                node.domain = rng.choice(("", "ai.onnx"))
        options = PlanOptions(
            target=self.target,
            capacity=self.capacity if self.open_capacity else None,
            cache_layout=rng.choice((CacheLayout.AUTO, CacheLayout.AUTO, CacheLayout.PRESERVE)),
            attention_span=rng.random() < 0.75,
            fallback=rng.choice((Fallback.AUTO, Fallback.AUTO, Fallback.FUNCTIONAL, Fallback.CONTRACT)),
            sliding=self.sliding,
            window_chunk=self.chunk,
            logits=rng.choice((LogitPositions.LAST, LogitPositions.ALL)),
        )
        room = (
            min(self.keys, self.capacity - self.short_mask)
            if self.lengths != "none" or self.mask != "none"
            else self.capacity
        )
        return Plain(
            seed=self.seed, odd=self.odd, model=model, options=options, parts=self.parts, masks=self.masks,
            axes=self.axes, presents=self.presents, capacity=self.capacity,
            batch=self.batch if isinstance(self.batch, int) else None,
            length=self.length if isinstance(self.length, int) else None,
            indexed=bool(self.write), same=self.indices in ("one", "expanded", "none"),
            short=self.lengths in ("input", "int32", "bounded") and not self.faint,
            room=room, circular=self.mode == "circular", faint=self.faint or self.mode_of_scores in (0, 1),
        )  # fmt: skip

    def _rename(self, model: onnx.ModelProto) -> None:
        """Line breaks, control characters and other signs in the names of inputs, outputs and nodes."""
        sign = self.rng.choice(("\n", "\x07", "\r", "\x1b[2J", "\x00", "\u2028", "é"))
        whole = {v.name: f"{v.name}{sign}x" for v in (*model.graph.input, *model.graph.output)}
        some = {name: new for name, new in whole.items() if self.rng.random() < 0.4}
        some = some or dict([next(iter(whole.items()))])
        for node in renamed(model, some).graph.node:
            node.name = f"{node.name}{sign}" if self.rng.random() < 0.3 else node.name
        for table in (self.parts, self.masks, self.axes, self.presents):
            for name in [n for n in table if n in some]:
                table[some[name]] = table.pop(name)  # type: ignore[attr-defined]
        self.presents = {past: some.get(present, present) for past, present in self.presents.items()}


def drawn(name: str, seed: int, odd: Sequence[str] | None = None, **options: Any) -> Iterator[Entry]:
    """The model of a seed, and its options."""
    plain = plain_model(seed, odd)
    yield from built("plain", {name: lambda: plain.model}, **(vars(plain.options) | options))


def entries() -> Iterator[Entry]:
    """Each odd thing by itself, some of each seed's own, and what was refused once and should not be, or not at all."""
    for name in ODD:
        yield from drawn(name, 5000, (name,))
    for seed in (*range(24), 44566, 44650):
        yield from drawn(str(seed), seed)
    for target in Target:
        yield from drawn(f"int8 caches of two attentions, {target}", 50004, ("shared cache", "int8"), target=target)
    for seed in range(2):
        yield from drawn(f"ring {seed}", seed, ("ring",))
    spelled = ((157, "stated capacity"), (218, "open capacity", "stated capacity"), (123, "view of past"),
               (176, "computed lengths", "past is output"))  # fmt: skip
    for seed, *odd in spelled:
        yield from drawn(f"as a ring: {', '.join(odd)}", seed, ("window", *odd), sliding="circular", window_chunk=3)
    for op in ("Min", "Sub"):
        bounded = {f"as a ring: rows from {op}": partial(rows_from, op)}
        yield from built("plain", bounded, sliding="circular", window_chunk=3, capacity=9)


def rows_from(op: str) -> onnx.ModelProto:
    """Write indices that are computed: the lengths before a step, or bounded ones."""
    model = plain_model(133, ("window",)).model
    graph = model.graph
    if op == "Min":
        graph.initializer.append(numpy_helper.from_array(np.array([7]), "bound"))
        nodes = [helper.make_node("Min", ["write_indices", "bound"], ["rows"], "bounded")]
    else:
        graph.input.remove(next(v for v in graph.input if v.name == "write_indices"))
        nodes = [
            helper.make_node("Shape", ["input_ids"], ["new"], start=1, end=2),
            helper.make_node("Sub", ["nonpad_kv_seqlen", "new"], ["rows"]),
        ]
    for node in graph.node:
        if node.op_type == "TensorScatter":
            node.input[2] = "rows"
    replace_field(graph.node, [*nodes, *graph.node])
    return model
