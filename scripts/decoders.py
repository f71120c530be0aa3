"""Writes small ONNX decoders with TensorScatter KV caches, for the demo, the tests and the benchmarks.

    python scripts/decoders.py OUT.onnx --form mobius --dtype float16 --capacity 256

The weights are random, from a seed: only structure and numerics matter. Each layer is RMSNormalization, grouped-query
attention with rotary positions over a TensorScatter cache, and a gated MLP. Weights above `--external-threshold` bytes
go to ``OUT.onnx.data``, drawn and written block by block, so that a model of many gigabytes needs little memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

FORMS = ("mobius", "heads-major", "seq-major", "five-d")
DTYPES: dict[str, tuple[int, npt.DTypeLike]] = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}
_BLOCK = 1 << 24  # elements drawn at a time
_ALIGNMENT = 4096  # of tensors in the external file, so that they can be mapped into memory


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Attributes:
        layers: number of decoder layers.
        hidden: width of the residual stream; the MLP is twice as wide.
        query_heads, kv_heads: equal for multi-head attention, else grouped-query attention.
        head_size: of queries and keys; even, for the rotary embedding.
        value_head_size: of values; None: as `head_size`.
        capacity: rows of each cache, or the name of a symbol.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``, of weights, activations and caches.
        form: of the caches. ``"mobius"``: ``[B, S_max, N*H]``, axis 1, 3-D Attention with three outputs;
            ``"heads-major"``: ``[B, N, S_max, H]``, axis -2; ``"seq-major"``: ``[B, S_max, N, H]``, axis 1, transposed
            for attention; ``"five-d"``: keys and values in one ``[B, 2, N, S_max, H]``, axis -2.
        mode: ``"linear"``, or ``"circular"``: a sliding window over the last `capacity` tokens. Circular models with
            `sequence` 1 take `nonpad_kv_seqlen` (the smaller of all tokens and the capacity); others take `attn_mask`.
        batch, sequence: sizes, or names of symbols.
        mask: an input `attn_mask` ``[B, 1, S, S_max]``: ``"none"``, ``"bool"`` or ``"float"`` (added to the scores);
            circular models of several tokens per step always have a bool mask.
        lengths: an input `nonpad_kv_seqlen` ``[B]``, which also aligns the causal mask.
        causal: `is_causal` of linear models.
        softcap: of the attention scores; 0: none.
        softmax_precision: a dtype, or None.
        opset: of the default domain.
        positions: rows of the rotary tables.
        seed: of the weights.
    """

    layers: int = 2
    hidden: int = 64
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    value_head_size: int | None = None
    vocab: int = 256
    capacity: int | str = 64
    dtype: str = "float32"
    form: str = "mobius"
    mode: str = "linear"
    batch: int | str = "batch"
    sequence: int | str = "sequence_len"
    mask: str = "none"
    lengths: bool = True
    causal: bool = True
    softcap: float = 0.0
    softmax_precision: str | None = None
    opset: int = 24
    positions: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"dtype": tuple(DTYPES), "form": FORMS, "mode": ("linear", "circular"),
                   "mask": ("none", "bool", "float")}  # fmt: skip
        for name, legal in choices.items():
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(legal)}")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads is {self.query_heads}; it must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_size % 2:
            raise ValueError(f"head_size is {self.head_size}; the rotary embedding needs an even size")
        if self.form == "five-d" and self.value_size != self.head_size:
            raise ValueError("the five-d form holds keys and values in one tensor: value_head_size must be head_size")

    @property
    def value_size(self) -> int:
        """Head size of the values."""
        return self.head_size if self.value_head_size is None else self.value_head_size

    @property
    def mask_input(self) -> str:
        """Dtype of the input `attn_mask`: ``"bool"`` or ``"float"``, or ``"none"`` if there is no such input."""
        return "bool" if self.mode == "circular" and self.sequence != 1 else self.mask

    @property
    def length_input(self) -> bool:
        """True if there is an input `nonpad_kv_seqlen`."""
        return self.lengths and not (self.mode == "circular" and self.sequence != 1)


Weight = tuple[str, tuple[int, ...], float, float]
"""Name, shape, mean and half width of the uniform distribution of one tensor."""


def weights(config: DecoderConfig) -> Iterator[Weight]:
    """Yield every random weight of the model, in the order in which they are drawn."""
    width, inner = config.hidden, 2 * config.hidden

    def matrix(name: str, rows: int, columns: int) -> Weight:
        return name, (rows, columns), 0.0, (3.0 / rows) ** 0.5

    yield "embed.weight", (config.vocab, width), 0.0, 1.0
    for i in range(config.layers):
        yield f"layers.{i}.attention_norm.weight", (width,), 1.0, 0.1
        yield matrix(f"layers.{i}.q.weight", width, config.query_heads * config.head_size)
        yield matrix(f"layers.{i}.k.weight", width, config.kv_heads * config.head_size)
        yield matrix(f"layers.{i}.v.weight", width, config.kv_heads * config.value_size)
        yield matrix(f"layers.{i}.o.weight", config.query_heads * config.value_size, width)
        yield f"layers.{i}.mlp_norm.weight", (width,), 1.0, 0.1
        yield matrix(f"layers.{i}.gate.weight", width, inner)
        yield matrix(f"layers.{i}.up.weight", width, inner)
        yield matrix(f"layers.{i}.down.weight", inner, width)
    yield "norm.weight", (width,), 1.0, 0.1
    yield matrix("head.weight", width, config.vocab)


class _Graph:
    """Nodes under construction. `add` returns the name of the node's first output."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def add(self, op: str, inputs: Sequence[str], name: str, outputs: int = 1, **attributes: Any) -> str:
        names = [name, *(f"{name}.output_{i}" for i in range(1, outputs))]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"{name}/{op}", **attributes))
        return name

    def ints(self, *values: int) -> str:
        name = "const." + "_".join(map(str, values))
        self.constants[name] = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return name

    def scalar(self, value: int) -> str:
        name = f"const.scalar_{value}"
        self.constants[name] = helper.make_tensor(name, TensorProto.INT64, [], [value])
        return name

    def value(self, name: str, dtype: int, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    def cache(self, name: str, shape: Sequence[int | str]) -> tuple[str, str]:
        """Declare a cache; return the names of past and present."""
        dtype = DTYPES[self.config.dtype][0]
        self.inputs.append(self.value(name, dtype, *shape))
        self.outputs.append(self.value(f"updated_{name}", dtype, *shape))
        return name, f"updated_{name}"


def _heads(g: _Graph, x: str, heads: int, size: int, *, transpose: bool) -> str:
    """Turn ``[B, S, N*H]`` into ``[B, S, N, H]``, or with `transpose` into ``[B, N, S, H]``."""
    x = g.add("Reshape", [x, g.ints(0, 0, heads, size)], f"{x}.heads")
    return g.add("Transpose", [x], f"{x}.transposed", perm=[0, 2, 1, 3]) if transpose else x


def _scatter(g: _Graph, cache: tuple[str, str], update: str, axis: int) -> str:
    return g.add("TensorScatter", [cache[0], update, "write_indices"], cache[1], axis=axis, mode=g.config.mode)


def _attention_block(g: _Graph, i: int, x: str) -> str:
    """Add projections, rotary positions, cache updates and attention of layer `i`; return ``[B, S, N_q * H_v]``."""
    c, p = g.config, f"layers.{i}"
    batch, rows, n, h, hv = c.batch, c.capacity, c.kv_heads, c.head_size, c.value_size
    q, k, v = (g.add("MatMul", [x, f"{p}.{part}.weight"], f"{p}.{part}") for part in "qkv")
    flat = c.form == "mobius"

    def rotate(t: str, heads: int) -> str:
        attributes = {"num_heads": heads} if flat else {}
        return g.add("RotaryEmbedding", [t, "rotary.cos", "rotary.sin", "position_ids"], f"{t}.rotary", **attributes)

    if not flat:
        q, k = (_heads(g, t, heads, h, transpose=True) for t, heads in ((q, c.query_heads), (k, n)))
        v = _heads(g, v, n, hv, transpose=c.form != "seq-major")
    q, k = rotate(q, c.query_heads), rotate(k, n)

    if c.form == "mobius":
        keys = _scatter(g, g.cache(f"key_cache.{i}", [batch, rows, n * h]), k, 1)
        values = _scatter(g, g.cache(f"value_cache.{i}", [batch, rows, n * hv]), v, 1)
    elif c.form == "heads-major":
        keys = _scatter(g, g.cache(f"key_cache.{i}", [batch, n, rows, h]), k, -2)
        values = _scatter(g, g.cache(f"value_cache.{i}", [batch, n, rows, hv]), v, -2)
    elif c.form == "seq-major":
        k = g.add("Transpose", [k], f"{p}.k.rows", perm=[0, 2, 1, 3])
        keys = _scatter(g, g.cache(f"key_cache.{i}", [batch, rows, n, h]), k, 1)
        values = _scatter(g, g.cache(f"value_cache.{i}", [batch, rows, n, hv]), v, 1)
        keys = g.add("Transpose", [keys], f"{p}.keys", perm=[0, 2, 1, 3])
        values = g.add("Transpose", [values], f"{p}.values", perm=[0, 2, 1, 3])
    else:
        k, v = (g.add("Unsqueeze", [t, g.ints(1)], f"{t}.part") for t in (k, v))
        both = g.add("Concat", [k, v], f"{p}.kv", axis=1)
        present = _scatter(g, g.cache(f"kv_cache.{i}", [batch, 2, n, rows, h]), both, -2)
        keys, values = (g.add("Gather", [present, g.scalar(j)], f"{p}.kv.{j}", axis=1) for j in (0, 1))

    attributes: dict[str, int | float] = {"scale": h**-0.5}
    if flat:
        attributes |= {"q_num_heads": c.query_heads, "kv_num_heads": n}
    if c.mode == "linear" and c.causal:
        attributes["is_causal"] = 1
    if c.softcap:
        attributes["softcap"] = c.softcap
    if c.softmax_precision:
        attributes["softmax_precision"] = DTYPES[c.softmax_precision][0]
    mask = "attn_mask" if c.mask_input != "none" else ""
    inputs = [q, keys, values, mask, "", "", "nonpad_kv_seqlen" if c.length_input else ""]
    while not inputs[-1]:
        inputs.pop()
    # mobius-onnx declares the outputs present_key and present_value as well, and leaves them unused. From opset 25 on
    # ONNX forbids them next to `nonpad_kv_seqlen`.
    outputs = 3 if flat and c.opset < 25 else 1
    out = g.add("Attention", inputs, f"{p}.attention", outputs=outputs, **attributes)
    if flat:
        return out
    out = g.add("Transpose", [out], f"{p}.attention.rows", perm=[0, 2, 1, 3])
    return g.add("Reshape", [out, g.ints(0, 0, c.query_heads * hv)], f"{p}.attention.flat")


def _graph(config: DecoderConfig) -> _Graph:
    g = _Graph(config)
    c, dtype = config, DTYPES[config.dtype][0]
    tokens = (c.batch, c.sequence)
    g.inputs = [g.value("input_ids", TensorProto.INT64, *tokens), g.value("position_ids", TensorProto.INT64, *tokens)]
    g.inputs.append(g.value("write_indices", TensorProto.INT64, c.batch))
    if c.length_input:
        g.inputs.append(g.value("nonpad_kv_seqlen", TensorProto.INT64, c.batch))
    if c.mask_input != "none":
        mask_dtype = TensorProto.BOOL if c.mask_input == "bool" else dtype
        g.inputs.append(g.value("attn_mask", mask_dtype, c.batch, 1, c.sequence, c.capacity))
    g.outputs = [g.value("logits", dtype, *tokens, c.vocab)]

    x = g.add("Gather", ["embed.weight", "input_ids"], "embed", axis=0)
    for i in range(c.layers):
        p = f"layers.{i}"
        normed = g.add("RMSNormalization", [x, f"{p}.attention_norm.weight"], f"{p}.attention_norm", epsilon=1e-6)
        attended = g.add("MatMul", [_attention_block(g, i, normed), f"{p}.o.weight"], f"{p}.o")
        x = g.add("Add", [x, attended], f"{p}.attention_residual")
        normed = g.add("RMSNormalization", [x, f"{p}.mlp_norm.weight"], f"{p}.mlp_norm", epsilon=1e-6)
        gate = g.add("MatMul", [normed, f"{p}.gate.weight"], f"{p}.gate")
        gate = g.add("Mul", [gate, g.add("Sigmoid", [gate], f"{p}.gate.sigmoid")], f"{p}.gate.silu")
        gated = g.add("Mul", [gate, g.add("MatMul", [normed, f"{p}.up.weight"], f"{p}.up")], f"{p}.gated")
        x = g.add("Add", [x, g.add("MatMul", [gated, f"{p}.down.weight"], f"{p}.down")], f"{p}.mlp_residual")
    x = g.add("RMSNormalization", [x, "norm.weight"], "norm", epsilon=1e-6)
    g.add("MatMul", [x, "head.weight"], "logits")
    return g


def _rotary(config: DecoderConfig) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    frequencies = 10000.0 ** (-np.arange(0, config.head_size, 2) / config.head_size)
    angles = np.arange(config.positions)[:, None] * frequencies[None, :]
    yield "rotary.cos", np.cos(angles)
    yield "rotary.sin", np.sin(angles)


def _blocks(rng: np.random.Generator, weight: Weight, dtype: npt.DTypeLike) -> Iterator[bytes]:
    """Draw one tensor, a bounded number of elements at a time."""
    _, shape, mean, half_width = weight
    for start in range(0, prod(shape), _BLOCK):
        block = rng.random(min(_BLOCK, prod(shape) - start), dtype=np.float32)
        yield (mean + half_width * (2 * block - 1)).astype(dtype).tobytes()


def _write_external(data: BinaryIO, blocks: Iterable[bytes], tensor: onnx.TensorProto) -> None:
    data.write(bytes(-data.tell() % _ALIGNMENT))
    offset = data.tell()
    data.writelines(blocks)
    place = {"location": Path(data.name).name, "offset": str(offset), "length": str(data.tell() - offset)}
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
        tensor.external_data.add(key=key, value=value)


def make_decoder(config: DecoderConfig, data: BinaryIO | None = None, threshold: int = 1024) -> onnx.ModelProto:
    """Return a decoder of random weights.

    `data` is an open, empty file for weights of `threshold` bytes and more; None: all weights are inside the model.
    Inputs: `input_ids` and `position_ids` int64 ``[B, S]``, `write_indices` and `nonpad_kv_seqlen` int64 ``[B]``,
    `attn_mask` (if the config has one) and the caches. Outputs: `logits` ``[B, S, vocab]`` and ``updated_<cache>``.
    """
    g = _graph(config)
    dtype, array_dtype = DTYPES[config.dtype]
    rng = np.random.default_rng(config.seed)
    initializers = list(g.constants.values())

    def add(name: str, shape: tuple[int, ...], blocks: Iterable[bytes]) -> None:
        tensor = TensorProto(name=name, dims=shape, data_type=dtype)
        if data is not None and prod(shape) * np.dtype(array_dtype).itemsize >= threshold:
            _write_external(data, blocks, tensor)
        else:
            tensor.raw_data = b"".join(blocks)
        initializers.append(tensor)

    for name, table in _rotary(config):
        add(name, table.shape, [table.astype(array_dtype).tobytes()])
    for weight in weights(config):
        add(weight[0], weight[1], _blocks(rng, weight, array_dtype))
    graph = helper.make_graph(g.nodes, "decoder", g.inputs, g.outputs, initializers)
    # IR version 11 is the first one with opset 24's data types, and what the exporters write.
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", config.opset)], ir_version=11)


def write_decoder(path: str | Path, config: DecoderConfig, external_threshold: int | None = None) -> Path:
    """Write a decoder to `path`; weights of `external_threshold` bytes and more go to ``<path>.data``."""
    path = Path(path)
    if external_threshold is None:
        onnx.save(make_decoder(config), path)
    else:
        with Path(f"{path}.data").open("wb") as data:
            onnx.save(make_decoder(config, data, external_threshold), path)
    return path


def _int_or_symbol(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUT.onnx")
    parser.add_argument("--external-threshold", type=int, help="bytes from which a weight goes to OUT.onnx.data")
    types = typing.get_type_hints(DecoderConfig)
    converters: dict[Any, Any] = {
        int: int,
        int | None: int,
        float: float,
        int | str: _int_or_symbol,
        str: str,
        str | None: str,
    }
    for field in dataclasses.fields(DecoderConfig):
        option = "--" + field.name.replace("_", "-")
        if types[field.name] is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(option, type=converters[types[field.name]], default=field.default)
    given = vars(parser.parse_args(arguments))
    output, threshold = given.pop("output"), given.pop("external_threshold")
    try:
        config = DecoderConfig(**given)
    except ValueError as error:
        parser.error(str(error))
    print(write_decoder(output, config, threshold))


if __name__ == "__main__":
    main()
