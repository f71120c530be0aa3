"""Small decoders that compute one causal attention over growing or fixed caches, in many legal spellings.

`SPELLINGS` lists, for each part of a decoder, the usual spelling first and then the others. `spelled` draws a model:
with one part spelled in a given way, or with every part drawn. `twin` is the same decoder in usual spellings, with the
same weights: both give the same logits, which `tests/spelling_judge.py` asks ONNX Runtime.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
from graphs import Dim, Graph
from onnx import TensorProto, helper

VOCABULARY = 16
CAPACITY = 20  # unlike all sizes of heads and widths, as in trained models
_FAR = 1e4
_OPSET = 23
_FLOAT, _INT64, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL

SPELLINGS = {
    "layout": ("bnpd", "bpnd", "flat"),
    "append": (
        "concat", "three parts", "pad", "one-hot", "where", "gather", "slice", "reverse", "first row", "scatter",
    ),
    "repeat": ("expand", "tile", "gather", "concat", "5-D", "5-D einsum", "split", "folded", "matrix"),
    "scores": ("matmul", "einsum", "mul and sum", "keys left", "flat heads", "gemm", "unsqueezed"),
    "values": ("matmul", "einsum", "mul and sum", "values left", "flat heads", "gemm"),
    "mask": (
        "range", "trilu", "cumulative", "int", "float", "buffer", "positions", "padding", "one-hot", "greater",
        "scatter", "equal",
    ),
    "apply": ("where", "hide", "add", "mul", "sub", "min", "infinity", "expanded"),
    "softmax": (
        "op", "other axis", "exp and sum", "exp, max and sum", "log-sum-exp", "log of sum", "log-softmax", "2-D rows",
        "late", "masked after exp", "pow", "1-D rows",
    ),
    "rotary": ("slice", "split", "gather", "matrix", "pairs", "op", "sum"),
    "angles": ("computed", "table", "sliced table", "einsum"),
    "positions": ("input", "past", "padding", "present", "cumulative"),
    "scale": ("scores", "q", "k", "both", "weights", "sqrt of size"),
    "wrap": ("none", "function", "if around mask", "if around attention", "identities", "function of mask", "casts"),
    "names": ("usual", "nothing", "numbers"),
    "project": ("apart", "packed", "gemm", "einsum", "heads"),
    "merge": ("reshape", "einsum", "concat", "sum of heads"),
}  # fmt: skip
# Of caches with `CAPACITY` rows, into which each step writes its rows at `cache_position`.
FIXED_SPELLINGS = SPELLINGS | {
    "append": (
        "scatter nd", "scatter elements", "concat", "where", "one-hot", "grid", "pad",
    ),
    "mask": tuple(how for how in SPELLINGS["mask"] if how != "padding"),
    "positions": tuple(how for how in SPELLINGS["positions"] if how != "padding"),
}  # fmt: skip


@dataclass(frozen=True)
class Spelling:
    """A decoder: its sizes, which change its numbers, and its spelling, which does not.

    Attributes:
        window: keys that a query sees, its own included; 0: all.
        softcap: of scores; 0: none.
        fixed: caches have `CAPACITY` rows from the start; the caller says where new rows go.
        bias: projections add a bias.
        interleaved: rotary turns neighbours, not halves.
        rotates: it has rotary positions.
        spelled: of each part.
    """

    seed: int
    spelled: dict[str, str]
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    size: int = 4
    window: int = 0
    bias: bool = False
    interleaved: bool = False
    rotates: bool = True
    softcap: float = 0.0
    fixed: bool = False

    @property
    def unusual(self) -> dict[str, str]:
        """The parts that are not spelled as usual."""
        return {part: how for part, how in self.spelled.items() if how != self.spellings[part][0]}

    @property
    def spellings(self) -> dict[str, tuple[str, ...]]:
        return FIXED_SPELLINGS if self.fixed else SPELLINGS


def spelled(seed: int, part: str = "", how: str = "", *, kept: float = 0.0, fixed: bool = False) -> Spelling:
    """A decoder of usual spellings but for one part; without a part, each is drawn, or kept with a probability."""
    rng = np.random.default_rng(seed)
    spellings = FIXED_SPELLINGS if fixed else SPELLINGS
    usual = {name: hows[0] for name, hows in spellings.items()}
    drawn = {name: hows[int(rng.integers(len(hows)))] for name, hows in spellings.items()}
    drawn |= {name: hows[0] for name, hows in spellings.items() if rng.random() < kept}
    heads, kv_heads = ((4, 2), (4, 4), (4, 1), (2, 1), (6, 3))[int(rng.integers(5))]
    made = Spelling(
        seed, {**usual, part: how} if part else drawn, int(rng.integers(1, 3)), heads, kv_heads,
        int(rng.choice([4, 8])), int(rng.choice([0, 0, 3, 5])), bool(rng.integers(2)), bool(rng.integers(2)),
        bool(rng.integers(3)), float(rng.choice([0.0, 0.0, 0.0, 2.0])), fixed,
    )  # fmt: skip
    if part == "repeat" and heads == kv_heads:
        made = replace(made, kv_heads=2)
    if part in ("rotary", "angles", "positions"):
        made = replace(made, rotates=True)
    return made


def all_single(spellings: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Every part in every other spelling than the usual one."""
    return [(part, how) for part, hows in spellings.items() for how in hows[1:]]


def twin(spelling: Spelling) -> Spelling:
    """The same decoder in usual spellings."""
    return replace(spelling, spelled={name: hows[0] for name, hows in spelling.spellings.items()})


class _Build(Graph):
    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.s = spelling
        self.rng = np.random.default_rng(spelling.seed)
        self.functions: list[onnx.FunctionProto] = []
        self.known: dict[str, str] = {}
        self.tokens, self.positions, self.pasts, self.presents = "", "", list[str](), list[str]()
        self.batch_dim: Dim = "batch"

    def how(self, part: str) -> str:
        return self.s.spelled[part]

    def name(self, usual: str) -> str:
        """The name of one more input or output."""
        number = len(self.inputs) + len(self.outputs)
        return {"usual": usual, "nothing": f"t{number}", "numbers": str(17 * number + 3)}[self.how("names")]

    def f(self, value: object) -> str:
        return self.constant(value, np.float32)

    def weight(self, *shape: int) -> str:
        return self.f(self.rng.standard_normal(shape) / np.sqrt(shape[0]))

    def dim(self, tensor: str, axis: int) -> str:
        """One size as ``[1]``."""
        return self.Shape(tensor, start=axis, end=axis + 1)

    def sizes(self, *dims: object) -> str:
        return self.Concat(*(d if isinstance(d, str) else self.constant([d]) for d in dims), axis=0)

    def scalar(self, size: str) -> str:
        return self.Squeeze(size, [0])

    def once(self, what: str, make: Callable[[], str]) -> str:
        if what not in self.known:
            self.known[what] = make()
        return self.known[what]

    def part(self, first: int, out: str, kind: str) -> str:
        """The nodes from `first` on as a function, or as both branches of an If; returns what gives `out`."""
        nodes = self.nodes[first:]
        made = {n for node in nodes for n in node.output}
        result = f"{out}_{kind}"
        if kind == "function":
            read = dict.fromkeys(n for node in nodes for n in node.input if n and n not in made)
            name = f"Part{len(self.functions)}"
            opsets = [helper.make_opsetid("", _OPSET)]
            self.functions.append(helper.make_function("local", name, list(read), [out], nodes, opsets))
            self.nodes[first:] = [helper.make_node(name, list(read), [result], f"node_{result}", domain="local")]
            return result
        branches = []
        for side in ("then", "else"):
            copies = []
            for node in nodes:
                copy = onnx.NodeProto()
                copy.CopyFrom(node)
                copy.input[:] = [f"{n}_{side}" if n in made else n for n in node.input]
                copy.output[:] = [f"{n}_{side}" for n in node.output]
                copy.name = f"{node.name}_{side}"
                copies.append(copy)
            value = helper.make_tensor_value_info(f"{out}_{side}", _FLOAT if kind == "if" else _BOOL, None)
            branches.append(helper.make_graph(copies, side, [], [value]))
        del self.nodes[first:]
        condition = self.Greater(self.scalar(self.total), -1)
        self.nodes.append(
            helper.make_node("If", [condition], [result], f"node_{result}", then_branch=branches[0],
                             else_branch=branches[1])
        )  # fmt: skip
        return result

    @property
    def batch(self) -> str:
        return self.once("batch", lambda: self.dim(self.tokens, 0))

    @property
    def new(self) -> str:
        return self.once("new", lambda: self.dim(self.tokens, 1))

    @property
    def past(self) -> str:
        if self.s.fixed:
            return self.once("past", lambda: self.Slice(self.positions, [0], [1], [0]))
        return self.once("past", lambda: self.dim(self.pasts[0], self.row_axis))

    @property
    def total(self) -> str:
        return self.once("total", lambda: self.Add(self.past, self.new))

    @property
    def keys(self) -> str:
        """How many keys scores have, as ``[1]``."""
        return self.constant([CAPACITY]) if self.s.fixed else self.total

    @property
    def row_axis(self) -> int:
        """The axis of a past along which its rows lie."""
        return _layout(self.s)[1]


def _layout(s: Spelling) -> tuple[list[Dim], int]:
    """Shape and row axis of a past."""
    n, d = s.kv_heads, s.size
    return {
        "bnpd": (["batch", n, "past", d], 2),
        "bpnd": (["batch", "past", n, d], 1),
        "flat": (["batch", "past", n * d], 1),
    }[s.spelled["layout"]]


def make(s: Spelling) -> onnx.ModelProto:
    g = _Build(s)
    width = s.heads * s.size
    batch: Dim = 1 if "gemm" in (s.spelled["scores"], s.spelled["values"]) else "batch"
    rename = g.name

    def shape(dims: list[Dim], rows: str) -> list[Dim]:
        named: dict[str, Dim] = {"past": CAPACITY if s.fixed else rows, "batch": batch}
        return [named.get(d, d) if isinstance(d, str) else d for d in dims]

    g.batch_dim = batch
    g.tokens = g.input(rename("input_ids"), _INT64, [batch, "sequence"])
    if s.fixed:
        g.positions = g.input(rename("cache_position"), _INT64, ["sequence"])
    x = g.Gather(g.weight(VOCABULARY, width), g.tokens, axis=0)
    kinds = ("key", "value")
    for layer in range(s.layers):
        for kind in kinds:
            past = g.input(rename(f"past_key_values.{layer}.{kind}"), _FLOAT, shape(_layout(s)[0], "past"))
            g.pasts.append(past)
    names = [rename("logits")]
    g.output(names[0], _FLOAT, [batch, "sequence", VOCABULARY])
    for layer in range(s.layers):
        for kind in kinds:
            present = rename(f"present.{layer}.{kind}")
            g.output(present, _FLOAT, shape(_layout(s)[0], "total"))
            g.presents.append(present)
    for layer in range(s.layers):
        x = g.Add(x, _layer(g, x, layer))
    g.MatMul(x, g.weight(width, VOCABULARY), out=names[0])
    domains = ["local"] if g.functions else []
    graph = helper.make_graph(g.nodes, "graph", g.inputs, g.outputs, g.initializers)
    imports = [helper.make_opsetid("", _OPSET)] + [helper.make_opsetid(d, 1) for d in domains]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=g.functions)
    onnx.checker.check_model(model, full_check=True)
    return model


def _layer(g: _Build, x: str, layer: int) -> str:
    s = g.s
    query, key, value = _projected(g, x)
    if s.rotates:
        query, key = _rotated(g, query), _rotated(g, key)
    if g.how("wrap") == "identities":
        query, key = (g.Identity(g.Identity(t)) for t in (query, key))
    if g.how("wrap") == "casts":
        key, value = (g.Cast(g.Cast(t, to=TensorProto.DOUBLE), to=_FLOAT) for t in (key, value))
    key, value = _cached(g, key, value, layer)
    if g.how("wrap") == "identities":
        key, value = (g.Identity(t) for t in (key, value))
    mask = g.once("mask", lambda: _mask(g))
    for name in ("new", "past", "total", "keys", "batch"):  # made once, and outside of what is wrapped
        getattr(g, name)
    first = len(g.nodes)
    result = _attention(g, query, key, value, mask)
    if g.how("wrap") == "if around attention":
        result = g.part(first, result, "if")
    if g.how("wrap") == "function":
        result = g.part(first, result, "function")
    return _merged(g, result)


def _projected(g: _Build, x: str) -> list[str]:
    """Queries, keys and values ``[B, heads, S, D]``."""
    s, how = g.s, g.how("project")
    counts = (s.heads, s.kv_heads, s.kv_heads)
    width = s.heads * s.size
    factor = s.size**-0.25 if g.how("scale") == "weights" else 1.0
    weights = [g.rng.standard_normal((width, n * s.size)) / np.sqrt(width) for n in counts]
    biases = [g.rng.standard_normal(n * s.size) * s.bias for n in counts]
    for i in (0, 1):
        weights[i], biases[i] = weights[i] * factor, biases[i] * factor
    if how == "packed":
        both = g.Add(g.MatMul(x, g.f(np.concatenate(weights, 1))), g.f(np.concatenate(biases)))
        outs = [f"packed_{len(g.nodes)}_{i}" for i in range(3)]
        g.Split(both, [n * s.size for n in counts], out=outs, axis=-1)
        flat = outs
    elif how == "gemm":
        rows = g.Reshape(x, [-1, width])
        flat = [g.Gemm(rows, g.f(w.T), g.f(b), transB=1) for w, b in zip(weights, biases, strict=True)]
        flat = [g.Reshape(t, g.sizes(g.batch, g.new, -1)) for t in flat]
    elif how == "einsum":
        made = []
        for n, w, b in zip(counts, weights, biases, strict=True):
            heads = g.Einsum(x, g.f(w.reshape(width, n, s.size)), equation="bse,end->bnsd")
            made.append(g.Add(heads, g.f(b.reshape(1, n, 1, s.size))))
        return made
    elif how == "heads":  # [B, 1, S, E] @ [N, E, D]
        made = []
        for n, w, b in zip(counts, weights, biases, strict=True):
            heads = g.MatMul(g.Unsqueeze(x, [1]), g.f(w.reshape(width, n, s.size).transpose(1, 0, 2)))
            made.append(g.Add(heads, g.f(b.reshape(n, 1, s.size))))
        return made
    else:
        flat = [g.MatMul(x, g.f(w)) for w in weights]
        flat = [g.Add(t, g.f(b)) if s.bias else t for t, b in zip(flat, biases, strict=True)]
    rows = [g.Reshape(t, [0, 0, n, s.size]) for t, n in zip(flat, counts, strict=True)]
    return [g.Transpose(t, perm=[0, 2, 1, 3]) for t in rows]


def _positions(g: _Build) -> str:
    """int64 ``[B or 1, S]``."""
    how = g.how("positions")
    if how == "input":
        return g.once("position_ids", lambda: g.input(g.name("position_ids"), _INT64, [g.batch_dim, "sequence"]))
    if how == "padding":
        counted = g.Sub(g.CumSum(_padding(g), g.constant(1)), 1)
        return g.Slice(counted, g.Neg(g.new), [2**31], [1])
    if how == "present":
        return g.Unsqueeze(g.Slice(g.Range(0, g.scalar(g.total), 1), g.past, g.total, [0]), [0])
    if how == "cumulative":
        ones = g.ConstantOfShape(g.new, value=helper.make_tensor("one", _INT64, [1], [1]))
        return g.Unsqueeze(g.Add(g.CumSum(ones, g.constant(0)), g.Sub(g.past, 1)), [0])
    return g.Unsqueeze(g.Range(g.scalar(g.past), g.scalar(g.total), 1), [0])


def _padding(g: _Build) -> str:
    return g.once("padding", lambda: g.input(g.name("attention_mask"), _INT64, [g.batch_dim, "total"]))


def _angles(g: _Build) -> tuple[str, str]:
    """Cosines and sines ``[B or 1, 1, S, D / 2]``."""
    s, how = g.s, g.how("angles")
    speeds = (100.0 ** (-np.arange(s.size // 2) / (s.size // 2))).astype(np.float32)
    if how == "computed":
        places = g.Unsqueeze(g.Cast(_positions(g), to=_FLOAT), [1, 3])
        angles = g.Mul(places, g.f(speeds))
        return g.Cos(angles), g.Sin(angles)
    if how == "einsum":
        places = g.Cast(_positions(g), to=_FLOAT)
        angles = g.Unsqueeze(g.Einsum(places, g.f(speeds), equation="bs,d->bsd"), [1])
        return g.Cos(angles), g.Sin(angles)
    table = np.arange(CAPACITY)[:, None].astype(np.float32) * speeds
    if how == "table":
        places = _positions(g)
        cos, sin = (g.Unsqueeze(g.Gather(g.f(fn(table)), places, axis=0), [1]) for fn in (np.cos, np.sin))
    else:
        cos, sin = (g.Unsqueeze(g.Slice(g.f(fn(table)), g.past, g.total, [0]), [0, 1]) for fn in (np.cos, np.sin))
    return cos, sin


def _rotated(g: _Build, x: str) -> str:
    """``[B, H, S, D]`` -> the same."""
    s, how, half = g.s, g.how("rotary"), g.s.size // 2
    cos = g.once("cos", lambda: _angles(g)[0])
    sin = g.once("sin", lambda: _angles(g)[1])
    order = np.arange(s.size).reshape(half, 2).T.reshape(-1) if s.interleaved else np.arange(s.size)
    if how == "op":
        tables = [g.Squeeze(t, [1]) for t in (cos, sin)]
        tables = [g.Expand(t, g.sizes(g.batch, 1, 1)) for t in tables]
        return g.RotaryEmbedding(x, *tables, interleaved=int(s.interleaved))

    def wide(t: str) -> str:
        if s.interleaved:
            return g.Reshape(g.Concat(*[g.Unsqueeze(t, [-1])] * 2, axis=-1), [0, 0, 0, s.size])
        return g.Concat(t, t, axis=-1)

    if how in ("gather", "matrix", "sum"):
        turned = np.zeros((s.size, s.size))
        for i in range(half):
            a, b = order[i], order[i + half]
            turned[b, a], turned[a, b] = -1, 1
        if how == "gather":
            index = np.argmax(np.abs(turned), axis=0)
            other = g.Mul(g.Gather(x, index, axis=-1), g.f(turned.sum(0)))
        else:
            other = g.MatMul(x, g.f(turned))
        first, second = g.Mul(x, wide(cos)), g.Mul(other, wide(sin))
        return g.Sum(first, second) if how == "sum" else g.Add(first, second)
    if how == "pairs":
        shape = [0, 0, 0, half, 2] if s.interleaved else [0, 0, 0, 2, half]
        axis = 4 if s.interleaved else 3
        pairs = g.Reshape(x, shape)
        a, b = (g.Gather(pairs, i, axis=axis) for i in (0, 1))
    elif how == "split" and not s.interleaved:
        a, b = outs = [f"half_{len(g.nodes)}_{i}" for i in (0, 1)]
        g.Split(x, out=outs, axis=-1, num_outputs=2)
    elif s.interleaved:
        a, b = (g.Slice(x, [i], [s.size], [-1], [2]) for i in (0, 1))
    else:
        a, b = g.Slice(x, [0], [half], [-1]), g.Slice(x, [half], [2**31], [-1])
    one, two = g.Sub(g.Mul(a, cos), g.Mul(b, sin)), g.Add(g.Mul(b, cos), g.Mul(a, sin))
    if s.interleaved:
        return g.Reshape(g.Concat(g.Unsqueeze(one, [-1]), g.Unsqueeze(two, [-1]), axis=-1), [0, 0, 0, s.size])
    return g.Concat(one, two, axis=-1)


def _cached(g: _Build, key: str, value: str, layer: int) -> tuple[str, str]:
    """Keys and values ``[B, N, T, D]`` after their update."""
    s, how, made = g.s, g.how("layout"), []
    dims, axis = _layout(s)
    perm = None if how == "bnpd" else [0, 2, 1, 3]
    for index, tensor in enumerate((key, value)):
        rows = tensor if perm is None else g.Transpose(tensor, perm=perm)
        if how == "flat":
            rows = g.Reshape(rows, [0, 0, s.kv_heads * s.size])
        place = 2 * layer + index
        write = _written if s.fixed else _appended
        whole = write(g, g.pasts[place], rows, axis, len(dims), g.presents[place])
        if how == "flat":
            whole = g.Reshape(whole, [0, 0, s.kv_heads, s.size])
        made.append(whole if perm is None else g.Transpose(whole, perm=perm))
    return made[0], made[1]


def _appended(g: _Build, past: str, rows: str, axis: int, rank: int, present: str) -> str:
    how = g.how("append")

    def padded(tensor: str, before: str, after: str) -> str:
        zeros = [[0] * n for n in (axis, rank - 1, rank - 1 - axis)]
        parts = [g.constant(zeros[0]), before, g.constant(zeros[1]), after, g.constant(zeros[2])]
        return g.Pad(tensor, g.Concat(*parts, axis=0))

    none = g.constant([0])
    if how == "three parts":
        both = g.Concat(past, g.Slice(rows, [0], [1], [axis]), g.Slice(rows, [1], [2**31], [axis]), axis=axis)
        return g.Identity(both, out=present)
    if how == "first row":
        return g.Concat(g.Slice(past, [0], [2**31], [axis]), g.Slice(rows, [0], g.new, [axis]), out=present, axis=axis)
    if how in ("pad", "where"):
        one, two = padded(past, none, g.new), padded(rows, g.past, none)
        if how == "pad":
            return g.Add(one, two, out=present)
        kept = g.Less(g.Range(0, g.scalar(g.total), 1), g.past)
        kept = g.Reshape(kept, [-1] + [1] * (rank - 1 - axis))
        return g.Where(kept, one, two, out=present)
    if how == "one-hot" and axis == rank - 2:
        places = g.Unsqueeze(g.Range(0, g.scalar(g.total), 1), [1])
        chosen = g.Equal(places, g.Range(g.scalar(g.past), g.scalar(g.total), 1))
        return g.Add(padded(past, none, g.new), g.MatMul(g.Cast(chosen, to=_FLOAT), rows), out=present)
    if how == "gather":
        both = g.Concat(past, rows, axis=axis)
        return g.Gather(both, g.Range(0, g.scalar(g.total), 1), out=present, axis=axis)
    if how == "slice":
        return g.Slice(g.Concat(past, rows, axis=axis), [0], g.total, [axis], out=present)
    if how == "reverse":
        ends = ([-1], [-(2**31)], [axis], [-1])
        both = g.Concat(g.Slice(rows, *ends), g.Slice(past, *ends), axis=axis)
        return g.Slice(both, *ends, out=present)
    if how == "scatter":
        index = g.Range(g.scalar(g.past), g.scalar(g.total), 1)
        shape = g.Shape(rows)
        index = g.Expand(g.Reshape(index, [-1] + [1] * (rank - 1 - axis)), shape)
        return g.ScatterElements(padded(past, none, g.new), index, rows, out=present, axis=axis)
    return g.Concat(past, rows, out=present, axis=axis)


def _written(g: _Build, past: str, rows: str, axis: int, rank: int, present: str) -> str:
    """Rows written into a cache of `CAPACITY` rows."""
    how = g.how("append")
    if how == "scatter elements":
        index = g.Expand(g.Reshape(g.positions, [-1] + [1] * (rank - 1 - axis)), g.Shape(rows))
        return g.ScatterElements(past, index, rows, out=present, axis=axis)
    if how == "concat":
        after = g.Slice(past, g.total, [CAPACITY], [axis])
        return g.Concat(g.Slice(past, [0], g.past, [axis]), rows, after, out=present, axis=axis)
    if how in ("where", "pad"):
        sizes: list[object] = [0] * rank
        before, behind = list(sizes), list(sizes)
        before[axis], behind[axis] = g.past, g.Sub(CAPACITY, g.total)
        wide = g.Pad(rows, g.Concat(g.sizes(*before), g.sizes(*behind), axis=0))
        places = g.Range(0, CAPACITY, 1)
        new = g.And(g.GreaterOrEqual(places, g.past), g.Less(places, g.total))
        new = g.Reshape(new, [-1] + [1] * (rank - 1 - axis))
        if how == "where":
            return g.Where(new, wide, past, out=present)
        return g.Add(g.Where(new, g.f(0.0), past), wide, out=present)
    if how == "one-hot" and axis == rank - 2:
        hot = g.Cast(g.Equal(g.Unsqueeze(g.Range(0, CAPACITY, 1), [1]), g.positions), to=_FLOAT)
        new = g.Greater(g.ReduceSum(hot, [1], keepdims=1), g.f(0.0))
        return g.Where(new, g.MatMul(hot, rows), past, out=present)
    if how == "grid" and rank == 4:  # torch's index_put with an index for each axis in front
        sizes = [g.dim(past, i) for i in range(axis)]
        grids = [g.Reshape(g.Range(0, g.scalar(n), 1), [-1] + [1] * (axis - i)) for i, n in enumerate(sizes)]
        shape = g.Concat(*sizes, g.new, axis=0)
        index = g.Concat(*(g.Unsqueeze(g.Expand(t, shape), [-1]) for t in (*grids, g.positions)), axis=-1)
        return g.ScatterND(past, index, rows, out=present)
    perm = [axis, *(i for i in range(rank) if i != axis)]
    back = [perm.index(i) for i in range(rank)]
    index = g.Unsqueeze(g.positions, [1])
    made = g.ScatterND(g.Transpose(past, perm=perm), index, g.Transpose(rows, perm=perm))
    return g.Transpose(made, perm=back, out=present)


def _mask(g: _Build) -> str:
    """Bool ``[B or 1, 1, S, T]``."""
    for name in ("total", "past", "new", "batch"):
        getattr(g, name)
    if g.how("mask") == "positions":
        _positions(g)
    if g.how("mask") == "padding":
        _padding(g)
    first = len(g.nodes)
    mask = g.Identity(_visible(g))
    if g.how("wrap") == "if around mask":
        return g.part(first, mask, "if_mask")
    if g.how("wrap") == "function of mask":
        return g.part(first, mask, "function")
    return mask


def _visible(g: _Build) -> str:
    how, window = g.how("mask"), g.s.window
    total, past = g.scalar(g.total), g.scalar(g.past)
    if how == "trilu":
        ones = g.ConstantOfShape(g.sizes(g.new, g.keys), value=helper.make_tensor("one", _FLOAT, [1], [1.0]))
        seen = g.Trilu(ones, past, upper=0)
        if window:
            seen = g.Sub(seen, g.Trilu(ones, g.Sub(past, window), upper=0))
        return g.Unsqueeze(g.Cast(seen, to=_BOOL), [0, 1])
    if how == "buffer":
        square = np.tril(np.ones((CAPACITY, CAPACITY))) - np.tril(np.ones((CAPACITY, CAPACITY)), -(window or CAPACITY))
        rows = g.Slice(g.constant(square[None, None], np.bool_), g.past, g.total, [2])
        return g.Slice(rows, [0], g.keys, [3])
    keys, queries = g.Range(0, g.scalar(g.keys), 1), g.Unsqueeze(g.Range(past, total, 1), [1])
    if how == "cumulative":
        ones = [g.ConstantOfShape(n, value=helper.make_tensor("one", _INT64, [1], [1])) for n in (g.keys, g.new)]
        keys = g.CumSum(ones[0], g.constant(0))
        queries = g.Unsqueeze(g.Add(g.CumSum(ones[1], g.constant(0)), past), [1])
    if how == "positions":
        queries = g.Unsqueeze(_positions(g), [1, 3])
    distance = g.Sub(queries, keys)
    if how == "int":
        seen = g.Cast(g.Clip(g.Add(g.Sign(distance), 1), 0, 1), to=_BOOL)
        if window:
            seen = g.And(seen, g.Cast(g.Clip(g.Sub(window, distance), 0, 1), to=_BOOL))
    elif how == "float":
        apart = g.Cast(distance, to=_FLOAT)
        seen = g.Not(g.Less(apart, g.f(-0.5)))
        if window:
            seen = g.And(seen, g.Less(apart, g.f(window - 0.5)))
    elif how == "greater":
        seen = g.Not(g.Greater(keys, queries))
        if window:
            seen = g.And(seen, g.Not(g.GreaterOrEqual(distance, g.constant(window))))
    elif how == "equal":
        seen = g.Equal(g.Max(distance, 0), distance)
        if window:
            seen = g.And(seen, g.Equal(g.Min(distance, window - 1), distance))
    elif how == "one-hot":  # key j is seen by the queries after the one that it belongs to
        hot = g.OneHot(g.Range(past, total, 1), g.scalar(g.keys), g.f([0, 1]), axis=-1)
        seen = g.CumSum(hot, g.constant(-1), reverse=1)
        if window:
            seen = g.Mul(seen, g.Cast(g.Less(distance, window), to=_FLOAT))
        seen = g.Cast(seen, to=_BOOL)
    elif how == "scatter":
        zeros = g.ConstantOfShape(g.sizes(g.new, g.keys), value=helper.make_tensor("zero", _FLOAT, [1], [0.0]))
        kept = g.Cast(g.GreaterOrEqual(distance, g.constant(0)), to=_FLOAT)
        index = g.Expand(g.Unsqueeze(keys, [0]), g.sizes(g.new, g.keys))
        seen = g.Cast(g.ScatterElements(zeros, index, kept, axis=1), to=_BOOL)
        if window:
            seen = g.And(seen, g.Less(distance, window))
    else:
        seen = g.LessOrEqual(keys, queries)
        if window:
            seen = g.And(seen, g.Greater(keys, g.Sub(queries, window)))
    if how == "padding":
        return g.And(g.Unsqueeze(seen, [0, 1]), g.Unsqueeze(g.Cast(_padding(g), to=_BOOL), [1, 2]))
    return seen if how == "positions" else g.Unsqueeze(seen, [0, 1])


def _attention(g: _Build, query: str, key: str, value: str, mask: str) -> str:
    """``[B, H, S, D]``."""
    s, how = g.s, g.how("repeat")
    groups = s.heads // s.kv_heads
    factor, where = s.size**-0.5, g.how("scale")
    if where in ("q", "both"):
        query = g.Mul(query, g.f(factor if where == "q" else factor**0.5))
    if where in ("k", "both"):
        key = g.Mul(key, g.f(factor if where == "k" else factor**0.5))
    one_by_one = how == "split" or "gemm" in (g.how("scores"), g.how("values"))
    if one_by_one:
        queries, keys, values = (_apart(g, t, n) for t, n in ((query, s.heads), (key, s.kv_heads), (value, s.kv_heads)))
        parts = [_attend(g, queries[h], keys[h // groups], values[h // groups], mask) for h in range(s.heads)]
        return g.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
    if groups > 1 and how in ("5-D", "5-D einsum", "folded"):
        return _grouped(g, query, key, value, mask, how)
    return _attend(g, query, *(_repeated(g, t, how) for t in (key, value)), mask)


def _apart(g: _Build, tensor: str, count: int) -> list[str]:
    """Heads ``[B, 1, ., D]``."""
    if count == 1:
        return [tensor]
    outs = [f"head_{len(g.nodes)}_{i}" for i in range(count)]
    g.Split(tensor, out=outs, axis=1, num_outputs=count)
    return outs


def _repeated(g: _Build, tensor: str, how: str) -> str:
    s = g.s
    groups = s.heads // s.kv_heads
    if groups == 1:
        return tensor
    if how == "gather":
        return g.Gather(tensor, np.arange(s.heads) // groups, axis=1)
    if how == "concat":
        heads = _apart(g, tensor, s.kv_heads)
        return g.Concat(*(heads[h // groups] for h in range(s.heads)), axis=1)
    if how == "matrix":
        spread = np.repeat(np.eye(s.kv_heads), groups, 0)
        return g.Einsum(g.f(spread), tensor, equation="hn,bntd->bhtd")
    wide = g.Unsqueeze(tensor, [2])
    wide = (g.Tile if how == "tile" else g.Expand)(wide, [1, 1, groups, 1, 1])
    return g.Reshape(wide, [0, s.heads, -1, s.size])


def _grouped(g: _Build, query: str, key: str, value: str, mask: str, how: str) -> str:
    """Queries of one key head side by side, so that no head is repeated."""
    s = g.s
    if how == "folded":  # [B, N, G * S, D]
        folded = g.Reshape(query, [0, s.kv_heads, -1, s.size])
        scores = g.MatMul(folded, g.Transpose(key, perm=[0, 1, 3, 2]))
        scores = g.Reshape(scores, g.sizes(g.batch, s.heads, g.new, -1))
        weights, below = _softmax(g, scores, mask)
        weights = g.Reshape(weights, g.sizes(g.batch, s.kv_heads, -1, g.keys))
        made = g.Reshape(g.MatMul(weights, value), g.sizes(g.batch, s.heads, g.new, -1))
        return made if below is None else g.Div(made, below)
    five = g.Reshape(query, g.sizes(g.batch, s.kv_heads, -1, g.new, s.size))
    mask = g.Unsqueeze(mask, [1])
    if how == "5-D einsum":
        weights, below = _softmax(g, g.Einsum(five, key, equation="bngsd,bntd->bngst"), mask)
        made = g.Einsum(weights, value, equation="bngst,bntd->bngsd")
    else:
        keys = g.Unsqueeze(g.Transpose(key, perm=[0, 1, 3, 2]), [2])
        weights, below = _softmax(g, g.MatMul(five, keys), mask)
        made = g.MatMul(weights, g.Unsqueeze(value, [2]))
    made = made if below is None else g.Div(made, below)
    return g.Reshape(made, g.sizes(g.batch, s.heads, g.new, s.size))


def _attend(g: _Build, query: str, key: str, value: str, mask: str) -> str:
    """``[B, H, S, D]`` of as many heads of each; H is 1 where heads are apart."""
    weights, below = _softmax(g, _scores(g, query, key), mask)
    how = g.how("values")
    if how == "einsum":
        made = g.Einsum(weights, value, equation="bhst,bhtd->bhsd")
    elif how == "mul and sum":
        made = g.ReduceSum(g.Mul(g.Unsqueeze(weights, [4]), g.Unsqueeze(value, [2])), [3], keepdims=0)
    elif how == "values left":
        turned = g.MatMul(g.Transpose(value, perm=[0, 1, 3, 2]), g.Transpose(weights, perm=[0, 1, 3, 2]))
        made = g.Transpose(turned, perm=[0, 1, 3, 2])
    elif how == "flat heads":
        rows = g.MatMul(_flat(g, weights), _flat(g, value))
        made = g.Reshape(rows, _same(g, query))
    elif how == "gemm":
        two = [g.Squeeze(t, [0, 1]) for t in (weights, value)]
        made = g.Unsqueeze(g.Gemm(*two), [0, 1])
    else:
        made = g.MatMul(weights, value)
    return made if below is None else g.Div(made, below)


def _flat(g: _Build, tensor: str) -> str:
    """``[B, H, a, b]`` -> ``[B * H, a, b]``."""
    return g.Reshape(tensor, g.sizes(-1, g.dim(tensor, 2), g.dim(tensor, 3)))


def _same(g: _Build, query: str) -> str:
    return g.Shape(query)


def _scores(g: _Build, query: str, key: str) -> str:
    how = g.how("scores")
    if how == "einsum":
        made = g.Einsum(query, key, equation="bhsd,bhtd->bhst")
    elif how == "mul and sum":
        made = g.ReduceSum(g.Mul(g.Unsqueeze(query, [3]), g.Unsqueeze(key, [2])), [-1], keepdims=0)
    elif how == "keys left":
        made = g.Transpose(g.MatMul(key, g.Transpose(query, perm=[0, 1, 3, 2])), perm=[0, 1, 3, 2])
    elif how == "flat heads":
        rows = g.MatMul(_flat(g, query), g.Transpose(_flat(g, key), perm=[0, 2, 1]))
        shape = g.Concat(g.Shape(query, start=0, end=3), g.dim(key, 2), axis=0)
        made = g.Reshape(rows, shape)
    elif how == "gemm":
        two = [g.Squeeze(t, [0, 1]) for t in (query, key)]
        made = g.Unsqueeze(g.Gemm(*two, transB=1), [0, 1])
    elif how == "unsqueezed":
        column = g.MatMul(g.Unsqueeze(key, [2]), g.Unsqueeze(query, [-1]))
        made = g.Squeeze(column, [-1])
    else:
        made = g.MatMul(query, g.Transpose(key, perm=[0, 1, 3, 2]))
    return made


def _softmax(g: _Build, scores: str, mask: str) -> tuple[str, str | None]:
    """Weights, and what the products with values are divided by, if that comes later."""
    if g.how("scale") == "scores":
        scores = g.Mul(scores, g.f(g.s.size**-0.5))
    if g.how("scale") == "sqrt of size":
        scores = g.Div(scores, g.Sqrt(g.Cast(g.constant(g.s.size), to=_FLOAT)))
    if g.s.softcap:
        scores = g.Mul(g.Tanh(g.Div(scores, g.f(g.s.softcap))), g.f(g.s.softcap))
    how = g.how("softmax")
    if how == "masked after exp":
        top = g.ReduceMax(scores, [-1], keepdims=1)
        weights = g.Mul(g.Exp(g.Sub(scores, top)), g.Cast(mask, to=_FLOAT))
        return g.Div(weights, g.ReduceSum(weights, [-1], keepdims=1)), None
    scores = _masked(g, scores, mask)
    if how == "other axis":
        rank = 5 if g.how("repeat").startswith("5-D") and g.s.heads > g.s.kv_heads and not _is_split(g) else 4
        perm = [*range(rank - 2), rank - 1, rank - 2]
        return g.Transpose(g.Softmax(g.Transpose(scores, perm=perm), axis=-2), perm=perm), None
    if how == "log-sum-exp":
        return g.Exp(g.Sub(scores, g.ReduceLogSumExp(scores, [-1], keepdims=1))), None
    if how == "log of sum":
        return g.Exp(g.Sub(scores, g.Log(g.ReduceSum(g.Exp(scores), [-1], keepdims=1)))), None
    if how == "log-softmax":
        return g.Exp(g.LogSoftmax(scores, axis=-1)), None
    if how == "2-D rows":
        rows = g.Softmax(g.Reshape(scores, g.sizes(-1, g.keys)), axis=1)
        return g.Reshape(rows, g.Shape(scores)), None
    if how == "1-D rows":
        rows = g.Softmax(g.Reshape(scores, g.sizes(g.batch, -1, g.keys)), axis=-1)
        return g.Reshape(rows, g.Shape(scores)), None
    if how in ("exp and sum", "exp, max and sum", "late", "pow"):
        if how != "exp and sum":
            scores = g.Sub(scores, g.ReduceMax(scores, [-1], keepdims=1))
        powers = g.Pow(g.f(np.e), scores) if how == "pow" else g.Exp(scores)
        total = g.ReduceSum(powers, [-1], keepdims=1)
        return (powers, total) if how == "late" else (g.Div(powers, total), None)
    return g.Softmax(scores, axis=-1), None


def _is_split(g: _Build) -> bool:
    return g.how("repeat") == "split" or "gemm" in (g.how("scores"), g.how("values"))


def _masked(g: _Build, scores: str, mask: str) -> str:
    how = g.how("apply")
    if how == "hide":
        return g.Where(g.Not(mask), g.f(-_FAR), scores)
    if how == "add":
        return g.Add(scores, g.Where(mask, g.f(0.0), g.f(-_FAR)))
    if how == "mul":
        shown = g.Cast(mask, to=_FLOAT)
        return g.Add(g.Mul(scores, shown), g.Mul(g.Sub(shown, g.f(1.0)), g.f(_FAR)))
    if how == "sub":
        return g.Sub(scores, g.Mul(g.Sub(g.f(1.0), g.Cast(mask, to=_FLOAT)), g.f(_FAR)))
    if how == "min":
        return g.Min(scores, g.Where(mask, g.f(_FAR), g.f(-_FAR)))
    if how == "infinity":
        return g.Where(mask, scores, g.f(-np.inf))
    if how == "expanded":
        return g.Where(g.Expand(mask, g.Shape(scores)), scores, g.f(-_FAR))
    return g.Where(mask, scores, g.f(-_FAR))


def _merged(g: _Build, result: str) -> str:
    """``[B, H, S, D]`` -> ``[B, S, E]``."""
    s, how = g.s, g.how("merge")
    width = s.heads * s.size
    weight = g.rng.standard_normal((width, width)) / np.sqrt(width)
    if how == "einsum":
        return g.Einsum(result, g.f(weight.reshape(s.heads, s.size, width)), equation="bhsd,hde->bse")
    if how == "concat":
        heads = [g.Squeeze(t, [1]) for t in _apart(g, result, s.heads)]
        return g.MatMul(g.Concat(*heads, axis=-1), g.f(weight))
    if how == "sum of heads":
        made = g.MatMul(result, g.f(weight.reshape(s.heads, s.size, width)))
        return g.ReduceSum(made, [1], keepdims=0)
    return g.MatMul(g.Reshape(g.Transpose(result, perm=[0, 2, 1, 3]), [0, 0, width]), g.f(weight))
