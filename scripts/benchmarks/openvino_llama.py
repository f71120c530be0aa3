"""A decoder of scripts/decoders.py as OpenVINO's own representation, with its caches as state: for openvino-genai.

As OpenVINO's tools write a Llama: each cache is a variable that grows by Concat, read through `beam_idx`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from decoders import DecoderConfig
from onnx import numpy_helper


def export_openvino(path: Path, config: DecoderConfig, folder: Path) -> Path:
    """Write ``openvino_model.xml`` to a new `folder`, from a float32 decoder in the mobius form of scripts/decoders.py.

    Raises `ImportError` if openvino or openvino-genai is not installed.
    """
    import openvino
    import openvino_genai  # noqa: F401 - the peer runs elsewhere: its lack would show there

    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    folder.mkdir()
    openvino.save_model(_Llama(weights, config).model(), folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


class _Llama:
    def __init__(self, weights: dict[str, np.ndarray], config: DecoderConfig) -> None:
        import openvino
        from openvino import opset13

        self._ov, self._op, self._weights, self._config = openvino, opset13, weights, config
        self._sinks: list[Any] = []

    def model(self) -> Any:
        op, config = self._op, self._config
        names = {"input_ids": np.int64, "attention_mask": np.int64, "position_ids": np.int64, "beam_idx": np.int32}
        inputs = {n: op.parameter([-1] if n == "beam_idx" else [-1, -1], dtype) for n, dtype in names.items()}
        for name, tensor in inputs.items():
            tensor.output(0).set_names({name})
        ids, mask, positions, self._beam = inputs.values()
        self._batch = op.gather(op.shape_of(ids), self._ints(0), self._ints(0))
        rows = op.gather(op.shape_of(mask), self._number(1), self._ints(0))
        keys = op.unsqueeze(op.range(self._number(0), rows, self._number(1), "i64"), self._ints(0, 1, 2))
        seen = op.less_equal(keys, op.unsqueeze(positions, self._ints(1, 3)))
        bias = op.select(seen, self._float(0), self._float(np.finfo(np.float32).min))
        self._cos, self._sin = (self._angles(part, positions) for part in ("cos", "sin"))
        x = op.gather(op.constant(self._weights["embed.weight"]), ids, self._ints(0))
        for i in range(config.layers):
            x = self._layer(x, i, bias)
        logits = self._dot(self._norm(x, "norm.weight"), "head.weight")
        logits.output(0).set_names({"logits"})
        return self._ov.Model([op.result(logits)], self._sinks, [*inputs.values()], "decoder")

    def _layer(self, x: Any, i: int, bias: Any) -> Any:
        op, config, name = self._op, self._config, f"layers.{i}"
        normed = self._norm(x, f"{name}.attention_norm.weight")
        q = self._rotate(self._heads(self._dot(normed, f"{name}.q.weight"), config.query_heads))
        k = self._rotate(self._heads(self._dot(normed, f"{name}.k.weight"), config.kv_heads))
        v = self._heads(self._dot(normed, f"{name}.v.weight"), config.kv_heads)
        past = f"past_key_values.{i}"
        k, v = self._kept(k, f"{past}.keypresent.{i}.key"), self._kept(v, f"{past}.valuepresent.{i}.value")
        attended = op.transpose(op.scaled_dot_product_attention(q, k, v, bias), self._ints(0, 2, 1, 3))
        rows = op.reshape(attended, self._ints(0, 0, config.query_heads * config.head_size), True)
        x = op.add(x, self._dot(rows, f"{name}.o.weight"))
        normed = self._norm(x, f"{name}.mlp_norm.weight")
        gate, up = (self._dot(normed, f"{name}.{part}.weight") for part in ("gate", "up"))
        return op.add(x, self._dot(op.multiply(op.swish(gate), up), f"{name}.down.weight"))

    def _kept(self, new: Any, name: str) -> Any:
        """Return a cache with its new rows, repeated for the query heads that share a head."""
        op, config = self._op, self._config
        heads, size = config.kv_heads, config.head_size
        empty = op.broadcast(self._float(0), op.concat([self._batch, self._ints(heads, 0, size)], 0))
        shape = self._ov.PartialShape([-1, heads, -1, size])
        past = op.read_value(empty, name, self._ov.Type.f32, shape)
        held = op.concat([op.gather(past, self._beam, self._ints(0)), new], 2)
        self._sinks.append(op.assign(held, name))
        if heads == config.query_heads:
            return held
        times = self._ints(1, 1, config.query_heads // heads, 1, 1)
        wide = op.broadcast(op.unsqueeze(held, self._ints(2)), times, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(wide, self._ints(0, config.query_heads, -1, size), True)

    def _angles(self, part: str, positions: Any) -> Any:
        half = self._op.gather(self._op.constant(self._weights[f"rotary.{part}"]), positions, self._ints(0))
        return self._op.unsqueeze(self._op.concat([half, half], -1), self._ints(1))

    def _rotate(self, x: Any) -> Any:
        op = self._op
        first, second = op.split(x, self._number(3), 2).outputs()
        turned = op.concat([op.negative(second), first], -1)
        return op.add(op.multiply(x, self._cos), op.multiply(turned, self._sin))

    def _norm(self, x: Any, name: str) -> Any:
        op = self._op
        mean = op.reduce_mean(op.power(x, self._float(2)), self._ints(-1), True)
        root = op.sqrt(op.add(mean, self._float(1e-6)))
        return op.multiply(op.divide(x, root), op.constant(self._weights[name]))

    def _dot(self, x: Any, name: str) -> Any:
        return self._op.matmul(x, self._op.constant(np.ascontiguousarray(self._weights[name].T)), False, True)

    def _heads(self, x: Any, count: int) -> Any:
        split = self._op.reshape(x, self._ints(0, 0, count, self._config.head_size), True)
        return self._op.transpose(split, self._ints(0, 2, 1, 3))

    def _ints(self, *values: int) -> Any:
        return self._op.constant(np.array(values, np.int64))

    def _number(self, value: int) -> Any:
        return self._op.constant(np.int64(value))

    def _float(self, value: float) -> Any:
        return self._op.constant(np.float32(value))
