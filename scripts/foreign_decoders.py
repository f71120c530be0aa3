"""Writes ONNX decoders in the forms of exporters that do not know TensorScatter, for tests and benchmarks.

    python scripts/foreign_decoders.py OUT.onnx --form concat

The model is the random Llama of scripts/decoders.py (weights, rotary positions, grouped-query attention), with the
caches of one of these exporters, or with latent attention:

    concat              optimum-onnx: Concat, attention of plain operators, opset 18
    concat-attention    torch.onnx.export, DynamicCache: Concat, Attention-24 with a mask
    past-attention      mobius-onnx, dynamic: Attention-24 with past_key and past_value
    gqa                 onnxruntime-genai: com.microsoft.GroupQueryAttention with packed Q, K and V
    shared              mobius-onnx, Gemma 4: the same; the second half of the layers reads the caches of the first half
    scatter             torch.onnx.export, StaticCache: ScatterND into `capacity` rows, Attention-24 with a mask
    shift               own torch code: cat(past[:, :, S:], new) in `capacity` rows, the caller's mask, Attention-24
    latents             torch.onnx.export, DeepSeek V3: caches of latents (four times as wide as a head) and of the
                        rotated part of keys (half as wide as a head); all keys and values are computed from both
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from decoders import DecoderConfig, weights
from onnx import TensorProto, helper, numpy_helper

FORMS = ("concat", "concat-attention", "past-attention", "gqa", "shared", "scatter", "shift", "latents")
GROUPED = ("gqa", "shared")
F32, I64, BOOL, I32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.INT32
MICROSOFT = "com.microsoft"


class _Builder:
    """Nodes under construction. `add` returns the name of the node's first output."""

    def __init__(self, form: str, config: DecoderConfig) -> None:
        self.form = form
        self.config = config
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        name: str = "",
        outputs: Sequence[str] = (),
        domain: str = "",
        **attrs: Any,
    ) -> str:
        name = name or f"{op}_{len(self.nodes)}"
        made = helper.make_node(op, list(inputs), [name, *outputs], name=f"node/{name}", domain=domain, **attrs)
        self.nodes.append(made)
        return name

    def ints(self, *values: int) -> str:
        return self.array("ints." + "_".join(map(str, values)), np.array(values, np.int64))

    def scalar(self, value: int) -> str:
        return self.array(f"scalar.{value}", np.array(value, np.int64))

    def floats(self, value: float) -> str:
        return self.array(f"float.{value}", np.array(value, np.float32))

    def array(self, name: str, value: np.ndarray) -> str:
        self.initializers[name] = numpy_helper.from_array(value, name)
        return name

    def input(self, name: str, dtype: int, *shape: int | str) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, *shape: int | str) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def size(self, tensor: str, axis: int) -> str:
        """Return the name of one size of a tensor, int64 ``[1]``."""
        return self.add("Shape", [tensor], start=axis, end=axis + 1)

    def range(self, start: str, end: str) -> str:
        start, end = (self.add("Squeeze", [t]) if t not in self.initializers else t for t in (start, end))
        return self.add("Range", [start, end, self.scalar(1)])


def make_foreign(form: str, config: DecoderConfig) -> onnx.ModelProto:
    """Return a float32 decoder in one of `FORMS`, with inputs and outputs named as the exporter names them.

    Only the forms ``"scatter"`` and ``"shift"`` use `capacity`; none uses `dtype`, `mode` and `mask`.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; it must be one of {', '.join(FORMS)}")
    b, c = _Builder(form, config), config
    rng = np.random.default_rng(c.seed)
    for name, shape, mean, half_width in weights(c):
        b.array(name, (mean + half_width * (2 * rng.random(shape, dtype=np.float32) - 1)).astype(np.float32))
    if form == "latents":
        for i in range(c.layers):
            _latent_weights(b, f"layers.{i}", rng)
    tokens = b.input("input_ids", I64, "batch", "sequence")
    if form not in GROUPED:
        b.input("position_ids", I64, "batch", "sequence")
    if form == "scatter":
        b.input("cur_len", I64)
    elif form == "shift":
        b.input("attention_mask", BOOL, "batch", 1, "sequence", c.capacity)
    else:
        b.input("attention_mask", I64, "batch", "past + sequence")
    b.output("logits", F32, "batch", "sequence", c.vocab)
    x = b.add("Gather", ["embed.weight", tokens], "embed", axis=0)
    shared = _shared(b)
    for i in range(c.layers):
        p = f"layers.{i}"
        attended = _attention(b, i, _norm(b, x, f"{p}.attention_norm"), shared)
        x = b.add("Add", [x, b.add("MatMul", [attended, f"{p}.o.weight"])])
        normed = _norm(b, x, f"{p}.mlp_norm")
        gate = b.add("MatMul", [normed, f"{p}.gate.weight"])
        gate = b.add("Mul", [gate, b.add("Sigmoid", [gate])])
        gated = b.add("Mul", [gate, b.add("MatMul", [normed, f"{p}.up.weight"])])
        x = b.add("Add", [x, b.add("MatMul", [gated, f"{p}.down.weight"])])
    b.add("MatMul", [_norm(b, x, "norm"), "head.weight"], "logits")
    read = {name for node in b.nodes for name in node.input}
    initializers = [t for name, t in b.initializers.items() if name in read]
    graph = helper.make_graph(b.nodes, form, b.inputs, b.outputs, initializers)
    opset = {"concat": 18, "latents": 18, "gqa": 21, "shared": 21}.get(form, 24)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets[: 2 if form in GROUPED else 1], ir_version=10)


def _norm(b: _Builder, x: str, name: str) -> str:
    if b.form in GROUPED:
        return b.add("SimplifiedLayerNormalization", [x, f"{name}.weight"], epsilon=1e-6, axis=-1, stash_type=1)
    if b.form == "past-attention":
        return b.add("RMSNormalization", [x, f"{name}.weight"], epsilon=1e-6, axis=-1)
    mean = b.add("ReduceMean", [b.add("Pow", [x, b.floats(2.0)]), b.ints(-1)], keepdims=1)
    root = b.add("Sqrt", [b.add("Add", [mean, b.floats(1e-6)])])
    return b.add("Mul", [f"{name}.weight", b.add("Mul", [x, b.add("Reciprocal", [root])])])


def _shared(b: _Builder) -> dict[str, str]:
    c, shared = b.config, {}
    size = _rotary_size(b)
    frequencies = (10000.0 ** (-np.arange(0, size, 2) / size)).astype(np.float32)
    angles = np.arange(c.positions, dtype=np.float32)[:, None] * frequencies
    if b.form in (*GROUPED, "past-attention"):
        shared["cos"], shared["sin"] = b.array("cos_cache", np.cos(angles)), b.array("sin_cache", np.sin(angles))
    else:
        positions = b.add("Cast", [b.add("Unsqueeze", ["position_ids", b.ints(-1)])], to=F32)
        half = b.add("Mul", [positions, b.array("inv_freq", frequencies[None, None])])
        both = b.add("Concat", [half, half], axis=-1)
        shared |= {n: b.add("Unsqueeze", [b.add(op, [both]), b.ints(1)]) for n, op in (("cos", "Cos"), ("sin", "Sin"))}
    if b.form in GROUPED:
        tokens = b.add("Sub", [b.add("ReduceSum", ["attention_mask", b.ints(1)], keepdims=0), b.ints(1)])
        total = b.add("Gather", [b.add("Shape", ["attention_mask"]), b.scalar(1)], axis=0)
        return shared | {"seqlens": b.add("Cast", [tokens], to=I32), "total": b.add("Cast", [total], to=I32)}
    if b.form == "past-attention":
        shared |= {n: b.add("Gather", [shared[n], "position_ids"], axis=0) for n in ("cos", "sin")}
        visible = b.add("Unsqueeze", [b.add("Cast", ["attention_mask"], to=BOOL), b.ints(1)])
        sizes = b.add("Concat", [b.add("Shape", ["input_ids"]), b.size("attention_mask", 1)], axis=0)
        return shared | {"mask": b.add("Unsqueeze", [b.add("Expand", [visible, sizes]), b.ints(1)])}
    new = b.size("input_ids", 1)
    if b.form == "shift":
        return shared | {"mask": "attention_mask", "new": new}
    if b.form == "scatter":
        rows = b.add("Add", [b.range(b.scalar(0), new), "cur_len"])
        shared["rows"] = b.add("Unsqueeze", [rows, b.ints(-1)])
        keys = b.array("rows", np.arange(c.capacity)[None, None, None])
        length = b.ints(c.capacity)
    else:
        past = b.size(_past_name(0, "key"), 2)
        length = b.add("Add", [past, new])
        rows = b.range(past, length)
        keys = b.add("Unsqueeze", [b.range(b.scalar(0), length), b.ints(0, 1, 2)])
    visible = b.add("LessOrEqual", [keys, b.add("Unsqueeze", [rows, b.ints(0, 1, 3)])])
    if b.form != "scatter":
        tokens = b.add("Unsqueeze", [b.add("Cast", ["attention_mask"], to=BOOL), b.ints(1, 2)])
        visible = b.add("And", [visible, tokens])
    sizes = b.add("Concat", [b.size("input_ids", 0), b.ints(1), new, length], axis=0)
    shared["mask"] = b.add("Expand", [visible, sizes])
    if b.form in ("concat", "latents"):
        lowest = b.floats(float(np.finfo(np.float32).min))
        shared["mask"] = b.add("Where", [shared["mask"], b.floats(0.0), lowest])
    return shared


def _past_name(layer: int, part: str) -> str:
    return f"past_key_values.{layer}.{part}"


def _attention(b: _Builder, i: int, x: str, shared: dict[str, str]) -> str:
    """Add projections, positions, caches and attention of layer `i`; return ``[B, S, N_q * H]``."""
    if b.form == "latents":
        return _latent_attention(b, i, x, shared)
    c, p = b.config, f"layers.{i}"
    n, h = c.kv_heads, c.head_size
    fixed = b.form in ("scatter", "shift")
    rows: int | str = c.capacity if fixed else "past"
    total: int | str = c.capacity if fixed else "past + sequence"
    lengths = [shared[name] for name in ("seqlens", "total", "cos", "sin") if b.form in GROUPED]
    attrs = {"num_heads": c.query_heads, "kv_num_heads": n, "scale": h**-0.5, "do_rotary": 1, "rotary_interleaved": 0}
    if b.form == "shared" and (source := i - (c.layers + 1) // 2) >= 0:
        q = b.add("MatMul", [x, f"{p}.q.weight"])
        empty = b.add("ConstantOfShape", [b.add("Concat", [b.size(q, 0), b.ints(0, n * h)], axis=0)])
        held = [f"present.{source}.{part}" for part in ("key", "value")]
        inputs = [q, empty, empty, *held, *lengths]
        return b.add("GroupQueryAttention", inputs, f"{p}.attention", (), MICROSOFT, **attrs)
    past = [b.input(_past_name(i, part), F32, "batch", n, rows, h) for part in ("key", "value")]
    present = [b.output(f"present.{i}.{part}", F32, "batch", n, total, h) for part in ("key", "value")]
    if b.form in GROUPED:
        arrays = [numpy_helper.to_array(b.initializers[f"{p}.{part}.weight"]) for part in "qkv"]
        packed = b.add("MatMul", [x, b.array(f"{p}.qkv.weight", np.concatenate(arrays, axis=1))])
        inputs = [packed, "", "", *past, *lengths]
        return b.add("GroupQueryAttention", inputs, f"{p}.attention", present, MICROSOFT, **attrs)
    q, k, v = (b.add("MatMul", [x, f"{p}.{part}.weight"]) for part in "qkv")
    if b.form == "past-attention":
        heads = ((q, c.query_heads), (k, n))
        q, k = (b.add("RotaryEmbedding", [t, shared["cos"], shared["sin"]], num_heads=m) for t, m in heads)
        return b.add("Attention", [q, k, v, shared["mask"], *past], f"{p}.attention", present,
                     q_num_heads=c.query_heads, kv_num_heads=n, scale=h**-0.5, is_causal=1)  # fmt: skip
    q, k, v = (_split(b, t, m) for t, m in ((q, c.query_heads), (k, n), (v, n)))
    q, k = (_rotate(b, t, shared) for t in (q, k))
    write = {"scatter": _scatter, "shift": _shift}.get(b.form, _grow)
    for old, update, new in zip(past, (k, v), present, strict=True):
        write(b, old, update, new, shared)
    keys, values = (_repeat(b, t) for t in present)
    if b.form == "concat":
        return _plain(b, f"{p}.attention", q, keys, values, shared["mask"], h)
    out = b.add("Attention", [q, keys, values, shared["mask"]], f"{p}.attention", scale=h**-0.5)
    return b.add("Reshape", [b.add("Transpose", [out], perm=[0, 2, 1, 3]), b.ints(0, 0, -1)])


def _plain(b: _Builder, name: str, q: str, keys: str, values: str, mask: str, size: int) -> str:
    scores = b.add("MatMul", [q, b.add("Transpose", [keys], perm=[0, 1, 3, 2])])
    scores = b.add("Add", [b.add("Mul", [scores, b.floats(size**-0.5)]), mask])
    out = b.add("MatMul", [b.add("Softmax", [scores], axis=-1), values], name)
    return b.add("Reshape", [b.add("Transpose", [out], perm=[0, 2, 1, 3]), b.ints(0, 0, -1)])


def _rotary_size(b: _Builder) -> int:
    return b.config.head_size // (2 if b.form == "latents" else 1)


def _latent_weights(b: _Builder, p: str, rng: np.random.Generator) -> None:
    """Add the weights of latent attention, which replace the weights of K and V."""
    c, rotated = b.config, _rotary_size(b)
    rank = 4 * c.head_size
    shapes = {
        "q_latent": (c.hidden, c.query_heads * (c.head_size + rotated)),
        "kv_a": (c.hidden, rank + rotated),
        "kv_b": (rank, c.query_heads * 2 * c.head_size),
    }
    for name, shape in shapes.items():
        b.array(f"{p}.{name}.weight", (rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[0] ** 0.5)))
    b.array(f"{p}.kv_norm.weight", np.ones(rank, np.float32))


def _latent_attention(b: _Builder, i: int, x: str, shared: dict[str, str]) -> str:
    """Add latent attention of layer `i`; return ``[B, S, N_q * H]``."""
    c, p = b.config, f"layers.{i}"
    n, h, rotated = c.query_heads, c.head_size, _rotary_size(b)
    widths = {"key": 4 * h, "value": rotated}
    past = [b.input(_past_name(i, part), F32, "batch", 1, "past", w) for part, w in widths.items()]
    present = [b.output(f"present.{i}.{part}", F32, "batch", 1, "past + sequence", w) for part, w in widths.items()]
    q = b.add("Reshape", [b.add("MatMul", [x, f"{p}.q_latent.weight"]), b.ints(0, 0, n, h + rotated)])
    q = b.add("Transpose", [q], perm=[0, 2, 1, 3])
    plain, turned = _two(b, q, h, rotated)
    q = b.add("Concat", [plain, _rotate(b, turned, shared)], axis=-1)
    compressed = b.add("Unsqueeze", [b.add("MatMul", [x, f"{p}.kv_a.weight"]), b.ints(1)])
    latents, shared_key = _two(b, compressed, 4 * h, rotated)
    _grow(b, past[0], _norm(b, latents, f"{p}.kv_norm"), present[0], shared)
    _grow(b, past[1], _rotate(b, shared_key, shared), present[1], shared)
    flat = b.add("MatMul", [present[0], f"{p}.kv_b.weight"])
    shape = b.add("Concat", [b.size(present[0], 0), b.size(present[0], 2), b.ints(n, 2 * h)], axis=0)
    both = b.add("Transpose", [b.add("Reshape", [flat, shape])], perm=[0, 2, 1, 3])
    keys, values = _two(b, both, h, h)
    keys = b.add("Concat", [keys, b.add("Expand", [present[1], b.ints(1, n, 1, 1)])], axis=-1)
    return _plain(b, f"{p}.attention", q, keys, values, shared["mask"], h + rotated)


def _two(b: _Builder, x: str, first: int, second: int) -> tuple[str, str]:
    rest = f"{x}_rest"
    return b.add("Split", [x, b.ints(first, second)], outputs=[rest], axis=-1), rest


def _split(b: _Builder, x: str, heads: int) -> str:
    """Turn ``[B, S, N*H]`` into ``[B, N, S, H]``."""
    x = b.add("Reshape", [x, b.ints(0, 0, heads, b.config.head_size)])
    return b.add("Transpose", [x], perm=[0, 2, 1, 3])


def _rotate(b: _Builder, x: str, shared: dict[str, str]) -> str:
    """Add ``x * cos + rotate_half(x) * sin``."""
    half = _rotary_size(b) // 2
    first = b.add("Slice", [x, b.ints(0), b.ints(half), b.ints(-1)])
    second = b.add("Slice", [x, b.ints(half), b.ints(2 * half), b.ints(-1)])
    turned = b.add("Concat", [b.add("Neg", [second]), first], axis=-1)
    return b.add("Add", [b.add("Mul", [x, shared["cos"]]), b.add("Mul", [turned, shared["sin"]])])


def _grow(b: _Builder, past: str, update: str, present: str, shared: dict[str, str]) -> None:
    b.add("Concat", [past, update], present, axis=-2)


def _shift(b: _Builder, past: str, update: str, present: str, shared: dict[str, str]) -> None:
    kept = b.add("Slice", [past, shared["new"], b.ints(2**62), b.ints(2)])
    b.add("Concat", [kept, update], present, axis=2)


def _scatter(b: _Builder, past: str, update: str, present: str, shared: dict[str, str]) -> None:
    """Add nodes that write the new rows of a cache, as torch.onnx exports `index_copy`."""
    major, new = (b.add("Transpose", [t], perm=[2, 0, 1, 3]) for t in (past, update))
    b.add("Transpose", [b.add("ScatterND", [major, shared["rows"], new])], present, perm=[1, 2, 0, 3])


def _repeat(b: _Builder, x: str) -> str:
    """Repeat each head of a cache for its group of query heads, as transformers' `repeat_kv` does."""
    c = b.config
    if c.query_heads == c.kv_heads:
        return x
    sizes = [b.size(x, 0), b.ints(c.kv_heads, c.query_heads // c.kv_heads), b.size(x, 2), b.ints(c.head_size)]
    wide = b.add("Expand", [b.add("Unsqueeze", [x, b.ints(2)]), b.add("Concat", sizes, axis=0)])
    flat = b.add("Concat", [sizes[0], b.ints(c.query_heads), *sizes[2:]], axis=0)
    return b.add("Reshape", [wide, flat])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUT.onnx", type=Path)
    parser.add_argument("--form", choices=FORMS, default="concat")
    parser.add_argument("--capacity", type=int, default=256, help="rows of the caches of the forms scatter and shift")
    given = parser.parse_args(arguments)
    onnx.save(make_foreign(given.form, DecoderConfig(capacity=given.capacity)), given.output)
    print(given.output)


if __name__ == "__main__":
    main()
