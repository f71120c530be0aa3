"""Bodies against ONNX Runtime's own kernels, for all operators without weights in 4 or 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from builder import build_in_child
from graphs import Graph
from lowering import CONTRIB, Array, lowered, one_operator, run
from onnx import TensorProto

from trt_kvcache.importer import lower, simplify

DTYPES = (np.float32, np.float16)
RANDOM = np.random.default_rng(7)


def random(dtype: Any, *shape: int, scale: float = 3.0) -> Array:
    return (RANDOM.standard_normal(shape) * scale).astype(dtype)


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        op: the operator.
        feeds: what it reads; a name in `inputs` that is none of them is left out.
        inputs: names, in the order of the operator.
        attrs: attributes.
        outputs: names.
        exact: bit for bit; else two roundings of float16 at values up to 16, a few of float32.
        kind: element type of the results, if it is not that of the first input.
    """

    op: str
    feeds: dict[str, Array]
    inputs: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    exact: bool = False
    kind: int = 0

    def __str__(self) -> str:
        first = next(iter(self.feeds.values()))
        return f"{self.op} {first.dtype} {list(first.shape)} {' '.join(self.feeds)} {self.attrs} {len(self.outputs)}"

    def model(self) -> onnx.ModelProto:
        names = self.inputs.split() or list(self.feeds)
        given = [name if name in self.feeds else "" for name in names]
        while not given[-1]:
            given.pop()
        domain = "" if self.op == "SimplifiedLayerNormalization" else CONTRIB
        outputs = list(self.outputs)
        return one_operator(self.op, self.feeds, given, outputs, domain=domain, kind=self.kind, **self.attrs)


def some(feeds: dict[str, Array], *optional: str) -> Iterator[dict[str, Array]]:
    """The feeds without and with each of the optional ones."""
    for given in product((False, True), repeat=len(optional)):
        left = {name for name, is_given in zip(optional, given, strict=True) if not is_given}
        yield {name: value for name, value in feeds.items() if name not in left}


def norms(dtype: Any) -> Iterator[Case]:
    x, g = random(dtype, 2, 5, 64), random(dtype, 64)
    for axis, epsilon in product((-1, 2, 1), (1e-6, 1e-2)):
        feeds = {"x": x, "g": random(dtype, *x.shape[axis:])}
        yield Case("SimplifiedLayerNormalization", feeds, attrs={"axis": axis, "epsilon": epsilon}, exact=True)
    wide = {"x": x, "g": random(np.float32, 64)}
    yield Case("SimplifiedLayerNormalization", wide, kind=TensorProto.FLOAT, exact=dtype == np.float32)
    for outputs, shape in product((("y",), ("y", "", "", "sum")), ((2, 5, 64), (10, 64))):
        for feeds in some({"x": random(dtype, *shape), "skip": random(dtype, *shape), "g": g, "b": g}, "b"):
            yield Case("SkipSimplifiedLayerNormalization", feeds, attrs={"epsilon": 1e-5}, outputs=outputs)
    for outputs, skip in product((("y",), ("y", "", "", "sum")), ((2, 5, 64), (1, 5, 64), (5, 64))):
        for feeds in some({"x": x, "skip": random(dtype, *skip), "g": g, "s": g, "b": random(dtype, 64)}, "s", "b"):
            yield Case("SkipLayerNormalization", feeds, "x skip g s b", {"epsilon": 1e-5}, outputs)


def products(dtype: Any) -> Iterator[Case]:
    x, b = random(dtype, 2, 5, 64), random(dtype, 64)
    for op, feeds in product(("Gelu", "FastGelu", "BiasGelu"), some({"x": x, "b": b}, "b")):
        if ("b" in feeds) in {"Gelu": (False,), "FastGelu": (False, True), "BiasGelu": (True,)}[op]:
            yield Case(op, feeds, exact=dtype == np.float32)
    for attrs in ({}, {"alpha": 1.0}, {"alpha": 0.5}):
        yield Case("QuickGelu", {"x": x}, attrs=attrs)
    if dtype == np.float16:  # no kernels
        return
    for ta, tb, tba, tbb in product((0, 1), repeat=4):
        feeds = {"a": raw(random(dtype, 2, 3, 4, 5), ta, tba), "b": raw(random(dtype, 2, 3, 5, 6), tb, tbb)}
        attrs = {"alpha": 1.5, "transA": ta, "transB": tb, "transBatchA": tba, "transBatchB": tbb}
        yield Case("FusedMatMul", feeds, attrs=attrs)
    for first, second in (((4,), (4, 3)), ((2, 4), (4,))):  # vectors are not transposed
        attrs = {"transA": int(len(first) == 1), "transB": int(len(second) == 1)}
        yield Case("FusedMatMul", {"a": random(dtype, *first), "b": random(dtype, *second)}, attrs=attrs)
    conv = {"x": random(dtype, 2, 6, 5), "w": random(dtype, 6, 1, 4), "b": random(dtype, 6)}
    conv["past"] = random(dtype, 2, 6, 3)
    for activation, feeds in product(("none", "silu", "swish"), some(conv, "b")):
        yield Case("CausalConvWithState", feeds, "x w b past", {"activation": activation, "ndim": 1}, ("y", "s"))


def raw(effective: Array, swap: int, batch: int) -> Array:
    """The input that FusedMatMul turns into `effective`."""
    value = np.swapaxes(effective, -1, -2) if swap else effective
    return np.ascontiguousarray(np.moveaxis(value, -2, 0) if batch else value)


def rotations(dtype: Any) -> Iterator[Case]:
    given: tuple[dict[str, int], ...] = ({}, {"num_heads": 4}, {"num_heads": 4, "rotary_embedding_dim": 8})
    for rank, one, turned, attrs in product((3, 4), (False, True), (0, 1), given):
        half = attrs.get("rotary_embedding_dim", 16) // 2
        feeds = {
            "x": random(dtype, 2, 3, 64) if rank == 3 else random(dtype, 2, 4, 3, 16),
            "p": np.array([2]) if one else np.array([[1, 0, 5], [4, 9, 2]]),
            "cos": random(dtype, 10, half),
            "sin": random(dtype, 10, half),
        }
        yield Case("RotaryEmbedding", feeds, attrs={"interleaved": turned, **attrs}, exact=True)
    sections = ([2, 3, 3], [4, 2, 2], [8, 0, 0], [0, 8, 0], [0, 0, 8], [0, 1, 7])
    for rank, part, layout, section in product((3, 4), (0, 16), (0, 1), sections):
        size = part + 4 if part else 16
        feeds = {
            "x": random(dtype, 2, 3, 4 * size) if rank == 3 else random(dtype, 2, 4, 3, size),
            "p": RANDOM.integers(0, 10, (3, 2, 3)),
            "cos": random(dtype, 10, 8),
            "sin": random(dtype, 10, 8),
        }
        attrs = {"mrope_section": section, "mrope_layout": layout, "num_heads": 4, "rotary_embedding_dim": part}
        yield Case("MRotaryEmbedding", feeds, attrs={"interleaved": layout, **attrs}, exact=True)


def attentions(dtype: Any) -> Iterator[Case]:
    if dtype == np.float16:
        return
    heads, size, names = 4, 16, "q k v b mask bias"
    for rank, value_size, attrs in product((3, 4), (8, 16), ({}, {"scale": 0.2}, {"unidirectional": 1})):
        if rank == 4 and value_size != size:
            continue
        sizes = {"k": size, "v": value_size}
        queries = 7 if attrs.get("unidirectional") else 3
        feeds = {"q": random(dtype, 2, queries, heads * size, scale=1)}
        feeds |= {n: random(dtype, *((2, 7, heads * s) if rank == 3 else (2, heads, 7, s))) for n, s in sizes.items()}
        feeds |= {"b": random(dtype, heads * (2 * size + value_size)), "bias": random(dtype, 1, 1, queries, 7)}
        for own in some(feeds, "b", "bias") if rank == 3 else some({n: feeds[n] for n in "qkv"}):
            yield Case("MultiHeadAttention", own, names, {"num_heads": heads, **attrs})
    feeds = {"x": random(dtype, 2, 3, 24, scale=1), "w": random(dtype, 24, 48, scale=0.3), "b": random(dtype, 48)}
    yield Case("Attention", feeds, attrs={"num_heads": 2, "unidirectional": 1})
    feeds = feeds | {"w": random(dtype, 24, 40, scale=0.3), "b": random(dtype, 40)}
    yield Case("Attention", feeds, attrs={"num_heads": 2, "qkv_hidden_sizes": [16, 16, 8]})


CASES = [case for make in (norms, products, rotations, attentions) for dtype in DTYPES for case in make(dtype)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_body(case: Case) -> None:
    model = case.model()
    result = lowered(model)
    for expected, got in zip(run(model, case.feeds), run(result, case.feeds), strict=True):
        assert expected.dtype == got.dtype
        tolerance = 0 if case.exact else 4e-3 if expected.dtype == np.float16 else 8e-6
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    for node in result.graph.node:  # TensorRT for RTX dies on a rotation of rank 3 without num_heads
        if node.op_type == "RotaryEmbedding":
            assert [a.i for a in node.attribute if a.name == "num_heads"] == [4] * (case.feeds["x"].ndim == 3)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("outputs", [["y", "k2", "v2"], ["y", "", "v2"]])
def test_presents_without_a_past(rank: int, outputs: list[str]) -> None:
    """mobius-onnx's cross-attention: its presents are its keys and values."""
    sizes = {"q": (4, 3), "k": (2, 5), "v": (2, 5)}
    feeds = {n: random(np.float32, *((2, s, h * 16) if rank == 3 else (2, h, s, 16))) for n, (h, s) in sizes.items()}
    attrs = {"q_num_heads": 4, "kv_num_heads": 2} if rank == 3 else {}
    model = one_operator("Attention", feeds, ["q", "k", "v"], outputs, domain="", **attrs)
    result = lowered(model)
    assert all(len(node.output) == 1 for node in result.graph.node)
    for before, after in zip(run(model, feeds), run(result, feeds), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_types_and_ranks_that_bodies_find_one_after_the_other() -> None:
    """Nothing says what lies between these operators but their own bodies."""
    graph = Graph()
    graph.input("x", TensorProto.FLOAT16, [2, 4, 8])
    for index in range(3):
        graph.FusedMatMul("x" if not index else f"y{index - 1}", "x", out=f"z{index}", domain=CONTRIB, transB=1)
        graph.QuickGelu(f"z{index}", out=f"w{index}", domain=CONTRIB)
        graph.FusedMatMul(f"w{index}", "x", out=f"y{index}", domain=CONTRIB, alpha=0.01)
    graph.output("y2", TensorProto.FLOAT16, [2, 4, 8])
    result = lowered(graph.model(24, [CONTRIB]))
    x = random(np.float16, 2, 4, 8, scale=1)
    expected = x.astype(np.float32)
    for _ in range(3):
        z = expected @ np.swapaxes(x.astype(np.float32), 1, 2)
        expected = 0.01 * (z / (1 + np.exp(-1.702 * z))) @ x.astype(np.float32)
    np.testing.assert_allclose(run(result, {"x": x})[0], expected, rtol=2e-2, atol=2e-3)


BUILT = {f"{c.op} {c.feeds[next(iter(c.feeds))].ndim} {len(c.feeds)}": c for c in CASES if "float16" in str(c)}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", BUILT)
def test_tensorrt_builds(name: str) -> None:
    outcome = build_in_child(lowered(BUILT[name].model()).SerializeToString(), [{}])
    assert outcome.stage == "built", outcome.words


def test_every_operator_with_a_body_loads_the_bodies() -> None:
    """A MatMul has a body only if a DequantizeLinear computes its weight."""
    assert {*lower._OF_ONNX} - {"MatMul"} | {"DequantizeLinear"} == {*simplify._WITH_BODIES}
