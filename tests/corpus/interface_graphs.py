"""Decoders whose inputs say by the graph alone what they are, and what the importer reads of their interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx
from cases import packed_model
from concat_graphs import decoders
from decoders import DecoderConfig
from decoders import make_decoder as make_static
from graphs import Dim, Graph, attention_model, renamed, scatter_model
from onnx import TensorProto, parser

from corpus import Entry, built

B, S = "batch", "sequence_len"
HIDDEN, HEADS, SIZE, CAPACITY, VOCAB, POSITIONS = 32, 2, 8, 16, 100, 64
FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL


class Decoder(Graph):
    """A decoder of one layer, built part by part; what a test leaves out takes its usual form.

    Structure of mobius-onnx with static caches: 3-D caches, axis 1, 3-D Attention.
    """

    def __init__(self, batch: Dim = B, sequence: Dim = S) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.batch, self.sequence = batch, sequence

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape) / np.sqrt(shape[0]), np.float32)

    def ids(self, name: str = "input_ids") -> str:
        return self.input(name, INT64, [self.batch, self.sequence])

    def embed(self, ids: str) -> str:
        return self.Gather(self.weight(VOCAB, HIDDEN), ids)

    def rotary(self, x: str, positions: str) -> str:
        tables = [self.Gather(self.weight(POSITIONS, SIZE // 2), positions) for _ in range(2)]
        return self.RotaryEmbedding(x, *tables, num_heads=HEADS)

    def finish(
        self, hidden: str, positions: str | None = None, indices: str | None = None, mask: str = "", logits: bool = True
    ) -> Decoder:
        positions = self.ids("position_ids") if positions is None else positions
        indices = self.input("write_indices", INT64, [self.batch]) if indices is None else indices
        lengths = self.input("nonpad_kv_seqlen", INT64, [self.batch])
        width = HEADS * SIZE
        query, key, value = (self.MatMul(hidden, self.weight(HIDDEN, width)) for _ in range(3))
        if positions:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        for kind, update in (("key", key), ("value", value)):
            past = self.input(f"{kind}_cache.0", FLOAT, [self.batch, CAPACITY, width])
            self.TensorScatter(past, update, indices, out=f"updated_{past}", axis=1)
            self.output(f"updated_{past}", FLOAT, [self.batch, CAPACITY, width])
        inputs = [query, "updated_key_cache.0", "updated_value_cache.0", mask, "", "", lengths]
        y = self.node("Attention", inputs, q_num_heads=HEADS, kv_num_heads=HEADS)
        x = self.Add(hidden, self.MatMul(y, self.weight(width, HIDDEN)))
        if logits:
            self.MatMul(x, self.weight(HIDDEN, VOCAB), out="logits")
            self.output("logits", FLOAT, [self.batch, self.sequence, VOCAB])
        else:
            self.Identity(x, out="hidden_out")
            self.output("hidden_out", FLOAT, [self.batch, self.sequence, HIDDEN])
        return self


def _offset_index(d: Decoder) -> Decoder:
    """One more than the write index is not a write index; feeding it as one would be wrong by one row."""
    return d.finish(d.embed(d.ids()), indices=d.Sub(d.input("x", INT64, [B]), 1))


def _block(d: Decoder) -> Decoder:
    d.finish(d.input("x", FLOAT, [B, S, HIDDEN]), d.ids("p"), logits=False)
    d.MatMul("hidden_out", d.weight(HIDDEN, HIDDEN), out="projected")
    d.output("projected", FLOAT, [B, S, HIDDEN])
    return d


def _padding(d: Decoder) -> Decoder:
    padding = d.Cast(d.input("attention_mask", INT64, [B, "k"]), to=FLOAT)
    inverse = d.Sub(d.constant(1.0, np.float32), padding)
    bias = d.Mul(inverse, d.constant(-1e9, np.float32))
    return d.finish(d.embed(d.ids()), mask=d.Unsqueeze(bias, [1, 2]))


def _compared(d: Decoder) -> Decoder:
    """Positions that are compared with keys are no mask."""
    where = d.ids("where")
    mask = d.GreaterOrEqual(d.Unsqueeze(where, [1, 3]), np.arange(CAPACITY))
    return d.finish(d.embed(d.ids()), where, mask=mask)


def _names_alone(d: Decoder) -> Decoder:
    d.input("attention_mask", INT64, [B, "past + new"])
    d.input("whatever", INT64, ["n"])
    return d.finish(d.embed(d.ids()))


def _mask(d: Decoder, *shape: Dim) -> Decoder:
    return d.finish(d.embed(d.ids()), mask=d.input("m", BOOL, shape))


def _two_token_inputs(d: Decoder, first: str, second: str) -> Decoder:
    table = d.weight(VOCAB, HIDDEN)
    parts = [d.Gather(table, d.ids(name)) for name in (first, second)]
    d.input("attention_mask", INT64, [B, "past + new"])
    return d.finish(d.node("Add", parts))


GRAPHS: dict[str, Callable[[Decoder], Decoder]] = {
    "plain": lambda d: d.finish(d.embed(d.ids())),
    "an index with an offset": _offset_index,
    "embeddings instead of tokens": lambda d: d.finish(d.input("x", FLOAT, [B, S, HIDDEN])),
    "a block without logits": _block,
    "a padding mask that becomes a bias": _padding,
    "positions compared with keys": _compared,
    "names, where the graph says nothing": _names_alone,
    "two token inputs": partial(_two_token_inputs, first="a", second="input_ids"),
}
MASKS: tuple[tuple[Dim, ...], ...] = ((B, 1, S, CAPACITY), (S, "past + new"), (B, 1, S, B), (B, 1, B, CAPACITY))


def interface(build: Callable[[Decoder], Decoder], batch: Dim = B, sequence: Dim = S) -> onnx.ModelProto:
    return build(Decoder(batch, sequence)).model()


def shuffled(seed: int) -> onnx.ModelProto:
    """Neither names nor the order of inputs matter."""
    model, rng = interface(GRAPHS["plain"]), np.random.default_rng(seed)
    values = [model.graph.input[i] for i in rng.permutation(len(model.graph.input))]
    values = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in values]
    del model.graph.input[:]
    model.graph.input.extend(values)
    names = [v.name for v in (*values, *model.graph.output)]
    return renamed(model, {name: f"t{n}" for name, n in zip(names, rng.permutation(99), strict=False)})


def prefixed(prefix: str) -> onnx.ModelProto:
    """`onnx.compose.add_prefix`; the importer's own inputs come without it."""
    model = onnx.compose.add_prefix(interface(GRAPHS["two token inputs"]), prefix)
    return renamed(model, {f"{prefix}{name}": name for name in ("write_indices", "nonpad_kv_seqlen")})


def holder(domain: str, op: str) -> onnx.ModelProto:
    """An operator of others that holds caches, or a whole decoder, where no cache is seen."""
    g = Graph()
    g.input("input_ids", INT64, [B, S])
    g.node(op, ["input_ids"], "y", domain)
    g.output("y", INT64, [B, S])
    return g.model(24, [domain])


HOLDERS = (
    ("com.microsoft", "WhisperBeamSearch"), ("LlmExporter", "FusedAttention"), ("", "XlaDynamicUpdateSlice"),
)  # fmt: skip


def text(inputs: str, outputs: str, nodes: str) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 11, opset_import: ["" : 24]> graph ({inputs}) => ({outputs}) {{ {nodes} }}'
    )


def beside(length: str = "L") -> onnx.ModelProto:
    """Another tensor is as long as the caches, whatever their length is called."""
    return text(
        f"float[batch,{length},8] past, float[batch,S,8] update, float[batch,L] beside",
        f"float[batch,{length},8] present, float[batch,L] beside_out",
        "present = TensorScatter <axis = 1> (past, update)  beside_out = Neg (beside)",
    )


def unused_outputs(opset: int = 24) -> onnx.ModelProto:
    """TensorRT refuses nodes that list outputs which nobody reads; ONNX forbids those of Attention from opset 25 on."""
    d = Decoder()
    scale = d.constant(np.ones(HIDDEN), np.float32)
    x = d.LayerNormalization(d.embed(d.ids()), scale, out=["normed", "mean", "deviation"])
    d.finish(d.LayerNormalization(x, scale, out=["kept", "kept_mean"]))
    d.output("kept_mean", FLOAT, [B, S, 1])
    attention = next(n for n in d.nodes if n.op_type == "Attention")
    attention.output.extend(["unused_k", "unused_v"])
    return d.model(opset)


def two_caches() -> onnx.ModelProto:
    """Updates of two types, which one plugin writes."""
    graph = Graph()
    for name in ("INT4", "INT64"):
        dtype = TensorProto.DataType.Value(name)
        past = graph.input(f"past_{name}", dtype, ["B", 2, 6, 4])
        update = graph.input(f"update_{name}", dtype, ["B", 2, "S", 4])
        indices = graph.input(f"write_indices_{name}", TensorProto.INT64, ["B"])
        graph.TensorScatter(past, update, indices, out=f"present_{name}", mode="linear", axis=2)
        graph.output(f"present_{name}", dtype, ["B", 2, 6, 4])
    return graph.model()


def no_heads() -> onnx.ModelProto:
    """Attention that needs plain operators, of an unknown number of heads."""
    model = attention_model(softcap=5.0)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].ClearField("dim_value")
    return model


def packed(past: int = 4, update: int = 3, cache: int = TensorProto.FLOAT16, index: int = TensorProto.INT32) -> Any:
    model = packed_model(integer=index)
    shapes = {"past": past, "present": past, "update": update}
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.tensor_type
        if value.name in ("past", "present"):
            kind.elem_type = cache
        while len(kind.shape.dim) > shapes.get(value.name, 1):
            del kind.shape.dim[-1]
    return model


def entries() -> Iterator[Entry]:
    yield from _interfaces()
    yield from _lengths()
    yield from _rules()
    yield from _routes()


(_ANY,) = (t for t in onnx.defs.get_schema("TensorScatter", 24).type_constraints if t.type_param_str == "T")
TYPES = sorted(name.removeprefix("tensor(").removesuffix(")").upper() for name in _ANY.allowed_type_strs)


def _routes() -> Iterator[Entry]:
    """The route of an update, for each type, mode and length; and that of a packed one."""
    linear = {name: partial(scatter_model, dtype=TensorProto.DataType.Value(name)) for name in TYPES}
    circular = {str(n): partial(scatter_model, mode="circular", length=n) for n in (1, 3, 4, "S")}
    circular["no indices"] = partial(scatter_model, mode="circular", indices=False)
    packs = {m: partial(packed_model, mode=m) for m in ("linear", "circular")}
    for target in ("tensorrt", "tensorrt-rtx"):
        yield from built(f"route, {target}", linear, target=target)
        yield from built(f"route, {target}", {f"packed {m}": pack for m, pack in packs.items()}, target=target)
        for fallback in ("auto", "contract", "functional"):
            yield from built(f"route, {target}, {fallback}", circular, target=target, fallback=fallback)
    yield from built("route, before 11", {"packed": packs["linear"]}, target="tensorrt", packed_native=False)


def _rules() -> Iterator[Entry]:
    rows: dict[str, Callable[[], onnx.ModelProto]] = {
        f"{axis} {shape}": partial(scatter_model, (B, *shape), axis, dtype=TensorProto.INT4)
        for axis, shape in ((2, (2, 16, 3)), (1, (16, 5)), (3, (3, 5, 16)))
    }
    rows["types of one definition"] = two_caches
    yield from built("plugin", rows, target="tensorrt")
    wrong: tuple[dict[str, Any], ...] = (
        {"past": 3}, {"update": 2}, {"cache": TensorProto.FLOAT}, {"index": TensorProto.INT8})  # fmt: skip
    yield from built("packed", {str(how): partial(packed, **how) for how in wrong})
    yield from built("attention of no heads", {"softcap": no_heads})
    for name, value in (("sliding", "round"), ("target", None), ("capacity", "64")):
        yield from built(f"option {name}", {str(value): scatter_model}, **{name: value})


def _interfaces() -> Iterator[Entry]:
    models = {name: partial(interface, build) for name, build in GRAPHS.items()}
    models |= {f"mask {shape}": partial(interface, lambda d, shape=shape: _mask(d, *shape)) for shape in MASKS}
    models["prefixed"] = partial(prefixed, "dec/")
    models["renamed"] = partial(shuffled, 0)
    models["no names of axes"] = partial(interface, GRAPHS["plain"], "", 1)
    models["unused outputs"] = unused_outputs
    yield from built("interface", models)
    name = "trt_kvcache/attention"
    yield from decoders("taken names", {name: {"after": lambda g, x: g.Identity(x, out=name)}})
    yield from built("holder", {f"{domain} {op}": partial(holder, domain, op) for domain, op in HOLDERS}, capacity=8)


def _lengths() -> Iterator[Entry]:
    tables = {f"{rows} rows": partial(make_static, DecoderConfig(capacity=64, positions=rows)) for rows in (40, 64)}
    yield from built("table of positions", tables)
    open_, fixed = partial(scatter_model, ("B", 2, "L", 8)), scatter_model
    yield from built("capacity, none", {"open": open_})
    for capacity in (0, 32):
        yield from built(f"capacity, {capacity}", {"fixed": fixed, "open": open_}, capacity=capacity)
    yield from built("capacity, 16", {"beside": beside, "nameless": partial(beside, "?")}, capacity=16)
    yield from built("capacity, 4", {"long update": partial(scatter_model, ("B", 2, "L", 8), length=6)}, capacity=4)
    yield from built("capacity, digits", {"digits": partial(scatter_model, ("3", "2", "16", "8"))})
