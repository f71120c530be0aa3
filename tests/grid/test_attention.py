"""Attention beside caches, generated: rewritten, it equals a numpy reference, at every span; and it builds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import decoder_attention
from harness import Feeds, build, imported, random_array, random_feeds, run_rewritten
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from reference import attention, tensor_scatter

from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.plan import AttentionKind, CacheLayout, PlanOptions, Role

CAPACITY = 12
BATCH = 3
STEP = 3
"""Queries per step where their number is a symbol."""
TOLERANCE = {np.dtype(np.float32): 2e-5, np.dtype(np.float16): 1e-2, np.dtype(ml_dtypes.bfloat16): 6e-2}
MASKS: dict[str, tuple[int | str, ...]] = {
    "4d": ("B", 1, "S", CAPACITY), "heads": ("B", "N", "S", CAPACITY), "3d": ("N", "S", CAPACITY),
    "2d": ("S", CAPACITY), "1d": (CAPACITY,), "row": ("B", 1, 1, CAPACITY), "open": ("B", 1, "S", "keys"),
    "short": ("B", 1, "S", CAPACITY - 3), "short2d": ("S", CAPACITY - 3),
}  # fmt: skip
"""Mask shapes; ``N`` is the number of query heads, ``keys`` a symbol that is the capacity at most."""


@dataclass(frozen=True)
class Case:
    """One decoder layer, see `cases.decoder_attention`; `mask` is a key of `MASKS` after ``bool-`` or ``float-``."""

    layout: str = "bnsh"
    causal: bool = True
    nonpad: bool = True
    mask: str = ""
    single: bool = False
    dtype: str = "FLOAT"
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    value_head_size: int = 16
    softcap: float = 0.0
    precision: int = 0
    scale: float = 0.0
    left: int = -1
    right: int = -1
    span: bool = True
    preserve: bool = False

    def __str__(self) -> str:
        parts = [self.layout, self.dtype.lower(), f"{self.heads}q{self.kv_heads}kv", f"h{self.head_size}"]
        parts += [self.mask] if self.mask else []
        flags = ("causal", "nonpad", "single", "preserve")
        parts += [name for name in flags if getattr(self, name)]
        parts += [] if self.span else ["nospan"]
        parts += [f"v{self.value_head_size}"] if self.value_head_size != self.head_size else []
        options = ("softcap", "precision", "scale")
        parts += [f"{name}{getattr(self, name):g}" for name in options if getattr(self, name)]
        parts += [f"window{self.left},{self.right}"] if max(self.left, self.right) >= 0 else []
        return "-".join(parts)

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the node that differ from their defaults."""
        attrs: dict[str, Any] = {"is_causal": 1} if self.causal else {}
        attrs |= {"softcap": self.softcap} if self.softcap else {}
        attrs |= {"softmax_precision": self.precision} if self.precision else {}
        attrs |= {"scale": self.scale} if self.scale else {}
        attrs |= {"left_window_size": self.left} if self.left >= 0 else {}
        attrs |= {"right_window_size": self.right} if self.right >= 0 else {}
        return attrs

    def mask_shape(self) -> tuple[int | str, ...] | None:
        """The mask's declared shape."""
        if not self.mask:
            return None
        queries: int | str = 1 if self.single else "S"
        names: dict[int | str, int | str] = {"N": self.heads, "S": queries}
        return tuple(names.get(dim, dim) for dim in MASKS[self.mask.split("-")[1]])

    @property
    def mask_dtype(self) -> int:
        return TensorProto.BOOL if self.mask.startswith("bool") else TensorProto.DataType.Value(self.dtype)

    def model(self) -> Any:
        return decoder_attention(
            dtype=TensorProto.DataType.Value(self.dtype),
            head_size=self.head_size,
            value_head_size=self.value_head_size,
            layout=self.layout,
            length=1 if self.single else "S",
            capacity=CAPACITY,
            heads=self.heads,
            kv_heads=self.kv_heads,
            nonpad=self.nonpad,
            mask=self.mask_shape(),
            mask_dtype=self.mask_dtype,
            opset=25 if max(self.left, self.right) >= 0 else 24,
            **self.attrs,
        )


def lengths_to_try(case: Case, queries: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Valid lengths: as a decode loop has them; then any, with rows that hold less than the step, and empty ones."""
    yield rng.integers(queries, CAPACITY + 1, BATCH)
    if case.nonpad:
        yield np.array([0, queries - 1, CAPACITY])


def poison_unused_rows(case: Case, feeds: Feeds, lengths: np.ndarray, rng: np.random.Generator) -> None:
    """Ordinary values in the rows that count, large garbage in those that must not be read."""
    for name in ("past_key", "past_value"):
        cache = random_array(rng, TensorProto.DataType.Value(case.dtype), feeds[name].shape)
        rows = cache.swapaxes(1, 2) if case.layout == "bnsh" else cache
        for b, length in enumerate(lengths):
            rows[b, length:] *= np.array(500, cache.dtype)
        feeds[name] = cache


def random_mask(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A random mask, with a query that sees nothing at all; float ones hold -inf as well as numbers."""
    seen = rng.random(shape) < 0.7
    if len(shape) > 1:
        seen[..., 0, :] = False
    if case.mask.startswith("bool"):
        return seen
    bias = random_array(rng, case.mask_dtype, shape)
    return np.where(seen, bias, np.array(-np.inf, bias.dtype))


def expected(case: Case, feeds: Feeds) -> Feeds:
    """Outputs by the reference."""
    axis = 2 if case.layout == "bnsh" else 1
    result: Feeds = {}
    read = []
    for name in ("key", "value"):
        present = tensor_scatter(feeds[f"past_{name}"], feeds[f"new_{name}"], feeds["write_indices"], axis)
        result[f"present_{name}"] = present
        read.append(present.transpose(0, 2, 1, 3) if case.layout == "bsnh" else present)
    heads = {"q_num_heads": case.heads, "kv_num_heads": case.kv_heads}
    result["output"], _ = attention(
        feeds["query"], *read, feeds.get("mask"), feeds.get("nonpad_kv_seqlen"), **heads, **case.attrs
    )
    return result


def check_same(got: Feeds, want: Feeds) -> None:
    """Caches bit for bit, attention within the rounding of its type."""
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        if name.startswith("present"):
            np.testing.assert_array_equal(got[name], array)
        else:
            bits = TOLERANCE[array.dtype]
            np.testing.assert_allclose(
                got[name].astype(np.float64), array.astype(np.float64), rtol=bits, atol=bits, err_msg=name
            )


def check(case: Case, folder: Path) -> ImportedModel:
    """Reference against rewritten model over lengths, spans and shorter masks; then a build."""
    layout = CacheLayout.PRESERVE if case.preserve else CacheLayout.AUTO
    model = case.model()
    result = imported(model, folder, PlanOptions(attention_span=case.span, cache_layout=layout))
    rng = np.random.default_rng(list(str(case).encode()))
    queries = 1 if case.single else STEP
    relaxed = [t.name for t in result.plan.tensors if t.role is Role.MASK and "keys" in t.axes]
    for lengths in lengths_to_try(case, queries, rng):
        feeds = random_feeds(model, {"B": BATCH, "S": queries, "keys": CAPACITY}, rng)
        poison_unused_rows(case, feeds, lengths if case.nonpad else np.full(BATCH, CAPACITY), rng)
        feeds["write_indices"] = np.clip(lengths - queries, 0, CAPACITY - queries)
        if case.nonpad:
            feeds["nonpad_kv_seqlen"] = lengths
        if case.mask:
            feeds["mask"] = random_mask(case, feeds["mask"].shape, rng)
        want = expected(case, feeds)
        longest = max(int(lengths.max()), 1)
        for span in sorted({longest, (longest + CAPACITY + 1) // 2, CAPACITY}):
            check_same(run_rewritten(result, feeds, {s.name: span for s in result.plan.spans}), want)
        if relaxed and not case.nonpad and feeds["mask"].shape[-1] > 5:
            feeds["mask"] = feeds["mask"][..., :5]
            check_same(run_rewritten(result, feeds), expected(case, feeds))
    outcome = build(result)
    assert outcome.stage == "built", str(outcome)
    return result


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_size = draw(st.sampled_from((4, 8, 12, 16, 16, 20, 24, 264)))
    kv_heads = draw(st.sampled_from((1, 2)))
    shape = draw(st.sampled_from(tuple(MASKS)))
    return Case(
        layout=draw(st.sampled_from(("bnsh", "bsnh", "bsd"))),
        causal=draw(st.booleans()),
        nonpad=draw(st.booleans()),
        mask=draw(st.sampled_from(("", f"bool-{shape}", f"float-{shape}"))),
        single=draw(st.booleans()),
        dtype=draw(st.sampled_from(("FLOAT", "FLOAT16", "FLOAT16", "BFLOAT16"))),
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))),
        kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=draw(st.sampled_from((head_size, head_size, 8))),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        precision=draw(st.sampled_from((0, 0, 0, 1, 10, 11))),
        scale=draw(st.sampled_from((0.0, 0.25))),
        left=draw(st.sampled_from((-1, -1, 0, 3))),
        right=draw(st.sampled_from((-1, -1, 0, 2))),
        span=draw(st.booleans()),
        preserve=draw(st.booleans()),
    )


def judge(case: Case) -> None:
    """Equal and built; and the plan says how."""
    with tempfile.TemporaryDirectory() as folder:
        result = check(case, Path(folder))
    (plan,) = result.plan.attention
    lowered = case.softcap or case.value_head_size != case.head_size
    if lowered or case.precision not in (0, TensorProto.DataType.Value(case.dtype)):
        assert plan.kind is AttentionKind.LOWERED
    elif case.dtype == "FLOAT":
        assert plan.kind is AttentionKind.DECOMPOSED
    elif case.head_size in (16, 24) and case.heads > 1:
        assert plan.kind is AttentionKind.FUSED
    assert [s.capacity for s in result.plan.spans] == ([CAPACITY] if case.span and case.nonpad else [])
    layouts = {cache.layout.value for cache in result.plan.caches}
    if case.layout == "bnsh":
        assert layouts == {"as-is"}
    else:
        assert layouts == {"view" if case.preserve else "heads-major"}


FOUND = settings(derandomize=True, deadline=None, database=None)


@pytest.mark.slow
@settings(FOUND, max_examples=3)
@given(case=cases())
def test_some_forms(case: Case) -> None:
    judge(case)


@pytest.mark.slow
@settings(FOUND, max_examples=400)
@given(case=cases())
def test_many_forms(case: Case) -> None:
    judge(case)
