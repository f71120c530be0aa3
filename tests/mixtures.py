"""Mixtures of experts as ONNX Runtime's operators (MoE, QMoE), with random weights, and their definition in numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from graphs import Graph
from onnx import helper

Array = np.ndarray[Any, Any]
DOMAIN = "com.microsoft"


def packed(numbers: Array, bits: int) -> Array:
    """Numbers ``[.., n]`` as bytes, two of 4 bits in each, the first in the low half; rows end with a whole byte."""
    if bits == 8:
        return numbers.astype(np.uint8)
    even = np.concatenate([numbers, np.zeros_like(numbers[..., : numbers.shape[-1] % 2])], -1).astype(np.uint8)
    return even[..., ::2] | even[..., 1::2] << 4


@dataclass(frozen=True)
class Mixture:
    """A node, its weights, and what it computes.

    Attributes:
        experts, k, hidden, inner: sizes.
        bits: of weights; 0: MoE, of floats.
        block: columns of a scale; 0: one for each row.
        zeros: whether there are zero points.
        limit, alpha, beta: of swiglu.
        tokens: of the input, or None for an open number.
        rank: of the input.
    """

    experts: int = 6
    k: int = 2
    hidden: int = 64
    inner: int = 32
    bits: int = 0
    block: int = 32
    zeros: bool = False
    bias: bool = True
    activation: str = "swiglu"
    limit: float | None = 1.5
    alpha: float = 1.702
    beta: float = 1.0
    normalized: bool = True
    dtype: Any = np.float32
    tokens: int | None = None
    rank: int = 2
    seed: int = 0

    @property
    def op(self) -> str:
        return "QMoE" if self.bits else "MoE"

    @property
    def kind(self) -> int:
        """The ONNX element type."""
        return helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))

    @property
    def attributes(self) -> dict[str, Any]:
        """Those that onnxruntime-genai writes."""
        made: dict[str, Any] = {
            "k": self.k, "activation_type": self.activation, "normalize_routing_weights": int(self.normalized),
            "use_sparse_mixer": 0,
        }  # fmt: skip
        if self.activation == "swiglu":
            made |= {"swiglu_fusion": 1, "activation_alpha": float(self.alpha), "activation_beta": float(self.beta)}
            made |= {} if self.limit is None else {"swiglu_limit": float(self.limit)}
        if self.bits:
            made |= {"expert_weight_bits": self.bits} | ({"block_size": self.block} if self.block else {})
        return made

    def weights(self) -> tuple[dict[str, Array], tuple[Array, Array]]:
        """The constants by the operator's names, and both linear layers in float64, ``[E, rows, columns]``."""
        rng = np.random.default_rng(self.seed)
        wide = self.inner * (2 if self.activation == "swiglu" else 1)
        constants: dict[str, Array] = {}
        dense = []
        for i, (rows, columns) in enumerate(((wide, self.hidden), (self.hidden, self.inner)), 1):
            if self.bits:
                dense.append(self._quantized(rng, constants, i, rows, columns))
            else:
                values = (rng.standard_normal((self.experts, rows, columns)) / columns**0.5).astype(self.dtype)
                constants[f"fc{i}_experts_weights"] = values
                dense.append(values.astype(np.float64))
            if self.bias:
                constants[f"fc{i}_experts_bias"] = rng.standard_normal((self.experts, rows)).astype(self.dtype)
        return constants, (dense[0], dense[1])

    def _quantized(self, rng: Any, constants: dict[str, Array], i: int, rows: int, columns: int) -> Array:
        width, top = self.block or columns, 2**self.bits
        blocks = -(-columns // width)
        numbers = rng.integers(0, top, (self.experts, rows, columns))
        scales = rng.uniform(0.5, 1, (self.experts, rows, blocks)) / columns**0.5 / top * 4
        scales = (scales * rng.choice([-1, 1], scales.shape)).astype(self.dtype)
        zeros = np.full(scales.shape, top // 2)
        constants[f"fc{i}_experts_weights"] = packed(numbers, self.bits)
        constants[f"fc{i}_scales"] = scales if self.block else scales[..., 0]
        if self.zeros:
            zeros = rng.integers(0, top, scales.shape)
            constants[f"fc{i}_zero_points"] = packed(zeros if self.block else zeros[..., 0], self.bits)
        factors, middles = (np.repeat(v, width, -1)[..., :columns] for v in (scales.astype(np.float64), zeros))
        dense: Array = (numbers - middles) * factors
        return dense

    def model(self, **attributes: Any) -> onnx.ModelProto:
        """The node alone, between ``x``, ``logits`` and ``y``; None takes an attribute away."""
        constants, _ = self.weights()
        graph = Graph()
        named = {name: graph.constant(value, value.dtype) for name, value in constants.items()}
        length = "T" if self.tokens is None else self.tokens
        shape = [length, self.hidden] if self.rank == 2 else [1, length, self.hidden]
        named |= {
            "x": graph.input("x", self.kind, shape),
            "logits": graph.input("logits", self.kind, [length, self.experts]),
        }
        order = ["x", "logits", "fc1_experts_weights", "fc1_experts_bias", "fc2_experts_weights", "fc2_experts_bias"]
        if self.bits:
            order[3:3], order[6:6] = ["fc1_scales"], ["fc2_scales"]
            order += ["", "", "", "fc1_zero_points", "fc2_zero_points"]
        inputs = [named.get(name, "") for name in order]
        while not inputs[-1]:
            inputs.pop()
        given = {k: v for k, v in (self.attributes | attributes).items() if v is not None}
        graph.node(self.op, inputs, "y", domain=DOMAIN, **given)
        graph.output("y", self.kind, shape)
        return graph.model(24, [DOMAIN])

    def feeds(self, tokens: int, spread: float = 2) -> dict[str, Array]:
        """Random tokens; the logits of experts differ by about `spread`."""
        rng = np.random.default_rng(tokens)
        x = rng.standard_normal((tokens, self.hidden)).astype(self.dtype)
        logits = (rng.standard_normal((tokens, self.experts)) * spread).astype(self.dtype)
        return {"x": x if self.rank == 2 else x[None], "logits": logits}

    def expected(self, feeds: dict[str, Array]) -> Array:
        """The operator by its definition, token by token in float64."""
        constants, (first, second) = self.weights()
        biases = [constants.get(f"fc{i}_experts_bias") for i in (1, 2)]
        x, logits = feeds["x"].reshape(-1, self.hidden).astype(np.float64), feeds["logits"].astype(np.float64)
        y = np.zeros_like(x)
        for t, scores in enumerate(logits):
            chosen = np.argsort(-scores, kind="stable")[: self.k]
            shares = np.exp(scores - scores.max())
            shares /= shares[chosen].sum() if self.normalized or self.bits else shares.sum()
            for e in chosen:
                inner = first[e] @ x[t] + (0 if biases[0] is None else biases[0][e])
                outer = second[e] @ self._activated(inner) + (0 if biases[1] is None else biases[1][e])
                y[t] += shares[e] * outer
        result: Array = y.reshape(feeds["x"].shape)
        return result

    def _activated(self, x: Array) -> Array:
        made: Array
        if self.activation == "swiglu":
            limit = np.inf if self.limit is None else self.limit
            gate, linear = np.minimum(x[::2], limit), np.clip(x[1::2], -limit, limit)
            made = gate / (1 + np.exp(-self.alpha * gate)) * (linear + self.beta)
        elif self.activation == "gelu":
            made = x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
        elif self.activation == "silu":
            made = x / (1 + np.exp(-x))
        else:
            made = np.maximum(x, 0) if self.activation == "relu" else x
        return made
