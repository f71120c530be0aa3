"""The situations that the support matrix lists: one list for the tests and for the table in `docs/support.md`.

Each case is a model, what the native ONNX parser and builder do with it (`Native`, checked by ``tests/facts``), and
what this package does with it (`Ours`, checked by ``tests/conformance/test_matrix.py``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from graphs import Dim, Graph, attention_model, scatter_model
from onnx import TensorProto
from scan_graphs import STEPS, scan
from scan_graphs import decoder as scanning_decoder

from corpus import Entry, built
from trt_kvcache.importer.cache_plan import AttentionKind, PhysicalLayout, Route

FLOAT, HALF, BF16, BOOL, INT64 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.BOOL,
    TensorProto.INT64,
)
CACHE: tuple[Dim, ...] = ("B", 2, 16, 8)
"""The cache of most cases: two heads, capacity 16, head size 8."""
NO_KERNEL = "Attention operation was not supported by a dedicated kernel"


@dataclass(frozen=True)
class Native:
    """The outcome in TensorRT for RTX of the model as it is.

    Attributes:
        stage: ``"parse"`` or ``"build"`` where that fails, ``"crash"`` where the process dies, ``"built"`` otherwise.
        words: part of the error.
        wrong: for a model that builds, what the engine silently gets wrong.
        doubt: for a model that builds, what nothing promises.
    """

    stage: str
    words: str = ""
    wrong: str = ""
    doubt: str = ""

    def __str__(self) -> str:
        if self.stage == "built":
            if self.wrong:
                return f"builds, **silently wrong**: {self.wrong}"
            return f"builds; {self.doubt}" if self.doubt else "works"
        if self.stage == "crash":
            return "building kills the process"
        return f"{'parsing' if self.stage == 'parse' else 'building'} fails: `{self.words}`"


@dataclass(frozen=True)
class Ours:
    """The treatment that this package gives the model.

    Attributes:
        text: the cell of the matrix.
        route, layout: of the only cache, where there is one.
        kind: of every Attention node, where there is one.
        refusal: part of the message of the refusal.
    """

    text: str
    route: Route | None = None
    layout: PhysicalLayout | None = None
    kind: AttentionKind | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Case:
    """One row of the matrix.

    Attributes:
        ranges: (min, opt, max) of symbolic dimensions for the build.
        sizes: of symbolic dimensions where numbers are compared.
        capacity: the option of the same name.
        computed: outputs that are computed; all others are moved, bit for bit.
    """

    key: str
    situation: str
    model: Callable[[], onnx.ModelProto]
    native: Native
    ours: Ours
    ranges: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    capacity: int | None = None
    computed: tuple[str, ...] = ("output",)


def updated(
    before: str = "",
    after: str = "",
    past_output: bool = False,
    reader: bool = False,
    chained: bool = False,
    twice: bool = False,
) -> onnx.ModelProto:
    """One update of a 4-D cache with something unusual around it."""
    graph = Graph()
    past = graph.input("past", HALF, CACHE)
    update = graph.input("update", HALF, ["B", 2, "S", 8])
    indices = graph.input("write_indices", INT64, ["B"])
    if before:
        past = graph.node(before, [past] if before == "Identity" else [past, past])
    present = graph.TensorScatter(past, update, indices, out="middle" if chained or after else "present")
    if chained:
        graph.TensorScatter(present, graph.input("second", HALF, ["B", 2, 1, 8]), indices, out="present")
    if after:
        present = graph.node(after, [present, present], "summed")
        graph.output("summed", HALF, CACHE)
    else:
        graph.output("present", HALF, CACHE)
    if twice:
        graph.TensorScatter(past, update, out="other")
        graph.output("other", HALF, CACHE)
    if reader:
        graph.Add(past, past, out="doubled")
        graph.output("doubled", HALF, CACHE)
    if past_output:
        graph.output("past", HALF, CACHE)
    return graph.model()


def fresh_cache() -> onnx.ModelProto:
    """An update of a cache that the graph makes itself."""
    graph = Graph()
    update = graph.input("update", HALF, [2, 2, "S", 8])
    graph.TensorScatter(graph.constant(np.zeros((2, 2, 16, 8)), np.float16), update, out="present")
    graph.output("present", HALF, [2, 2, 16, 8])
    return graph.model()


def packed_model(
    form: str | None = "packed_nhd",
    lengths: bool = True,
    indices: bool = True,
    dtype: int = HALF,
    domain: str = "",
    mode: str | None = None,
    integer: int = TensorProto.INT32,
) -> onnx.ModelProto:
    """One packed update: tokens ``[T, N, H]`` of all rows back to back, with cumulative lengths ``[B + 1]``."""
    graph = Graph()
    inputs = [graph.input("past", dtype, CACHE), graph.input("update", dtype, ["T", 2, 8])]
    inputs.append(graph.input("write_indices", integer, ["B"]) if indices else "")
    if lengths:
        inputs.append(graph.input("lengths", integer, ["B_plus_1"]))
    attrs = {k: v for k, v in (("update_form", form), ("mode", mode)) if v}
    graph.node("TRT_KVCacheUpdate", inputs, "present", domain=domain, **attrs)
    graph.output("present", dtype, CACHE)
    return graph.model(domains=[domain] if domain else [])


def decoder_attention(
    dtype: int = HALF,
    head_size: int = 16,
    value_head_size: int | None = None,
    layout: str = "bnsh",
    length: Dim = "S",
    mode: str = "linear",
    capacity: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    nonpad: bool = True,
    mask: tuple[Dim, ...] | None = None,
    mask_dtype: int = BOOL,
    outputs: int = 1,
    opset: int = 24,
    **attrs: object,
) -> onnx.ModelProto:
    """One decoder layer's caches and attention.

    `layout` is that of the caches: ``"bnsh"`` 4-D `[B, N, S_max, H]`; ``"bsnh"`` 4-D `[B, S_max, N, H]`, transposed for
    attention; ``"bsd"`` 3-D `[B, S_max, N*H]` with a 3-D Attention.
    """
    graph = Graph()
    axis = 2 if layout == "bnsh" else 1

    def shape(n: int, tokens: Dim, size: int) -> list[Dim]:
        return {"bnsh": ["B", n, tokens, size], "bsnh": ["B", tokens, n, size], "bsd": ["B", tokens, n * size]}[layout]

    query = graph.input("query", dtype, ["B", "S" if length == "S" else length, heads * head_size]
                        if layout == "bsd" else ["B", heads, length, head_size])  # fmt: skip
    indices = graph.input("write_indices", INT64, ["B"])
    read = []
    for name, size in (("key", head_size), ("value", value_head_size or head_size)):
        past = graph.input(f"past_{name}", dtype, shape(kv_heads, capacity, size))
        update = graph.input(f"new_{name}", dtype, shape(kv_heads, length, size))
        present = graph.TensorScatter(past, update, indices, out=f"present_{name}", axis=axis, mode=mode)
        graph.output(present, dtype, shape(kv_heads, capacity, size))
        read.append(graph.Transpose(present, perm=[0, 2, 1, 3]) if layout == "bsnh" else present)
    inputs = [query, *read, graph.input("mask", mask_dtype, mask) if mask is not None else "", "", ""]
    inputs.append(graph.input("nonpad_kv_seqlen", INT64, ["B"]) if nonpad else "")
    while not inputs[-1]:
        inputs.pop()
    if layout == "bsd":
        attrs = {"q_num_heads": heads, "kv_num_heads": kv_heads, **attrs}
    graph.node("Attention", inputs, ["output", "unused_key", "unused_value"][:outputs], **attrs)
    size = value_head_size or head_size
    graph.output("output", dtype, ["B", length, heads * size] if layout == "bsd" else ["B", heads, length, size])
    return graph.model(opset)


IN_PLACE = "in place"
NATIVE, FUNCTIONAL = Route.NATIVE, Route.FUNCTIONAL
AS_IS, VIEW, HEADS_MAJOR = PhysicalLayout.AS_IS, PhysicalLayout.VIEW, PhysicalLayout.HEADS_MAJOR
FUSED, DECOMPOSED, LOWERED = AttentionKind.FUSED, AttentionKind.DECOMPOSED, AttentionKind.LOWERED


def _typed(name: str, native: Native, ours: Ours) -> Case:
    dtype = TensorProto.DataType.Value(name)
    title = {"FLOAT8E4M3FN": "fp8 (e4m3fn)", "FLOAT4E2M1": "fp4 (e2m1)"}.get(name, name.lower())
    return Case(f"dtype-{name.lower()}", f"cache of {title}", lambda: scatter_model(dtype=dtype), native, ours)


_COPIES = "plain operators, a copy per step, with a warning"


def _not_a_cache_type(name: str) -> Native:
    return Native("parse", f"cache has type {name} but must have type Float, Half, or BFloat16")


CACHE_CASES: tuple[Case, ...] = (
    Case("plain", "4-D cache, axis -2, linear; dynamic batch and update length", scatter_model, Native("built"),
         Ours(IN_PLACE, NATIVE, AS_IS)),
    Case("axis-2", "the same, axis 2", lambda: scatter_model(axis=2), Native("built"), Ours(IN_PLACE, NATIVE, AS_IS)),
    Case("no-indices", "`write_indices` absent", lambda: scatter_model(indices=False), Native("built"),
         Ours(IN_PLACE, NATIVE, AS_IS)),
    Case("fp32", "cache of fp32", lambda: scatter_model(dtype=FLOAT), Native("built"), Ours(IN_PLACE, NATIVE, AS_IS)),
    Case("bf16", "cache of bf16", lambda: scatter_model(dtype=BF16), Native("built"), Ours(IN_PLACE, NATIVE, AS_IS)),
    Case("axis-1", "axis 1 on a 4-D cache `[B, S_max, N, H]`", lambda: scatter_model(("B", 16, 2, 8), 1),
         Native("parse", "Sequence dimension must be -2"), Ours("in place, as a 4-D view", NATIVE, VIEW)),
    Case("axis-3", "axis 3 (or -1), any other axis", lambda: scatter_model(("B", 2, 8, 16), 3),
         Native("parse", "Sequence dimension must be -2"), Ours("in place, as a 4-D view", NATIVE, VIEW)),
    Case("rank-3", "3-D cache `[B, S_max, N*H]`", lambda: scatter_model(("B", 16, 16), 1),
         Native("parse", "past_cache tensor is required to be 4D"), Ours("in place, as a 4-D view", NATIVE, VIEW)),
    Case("rank-5", "5-D cache", lambda: scatter_model(("B", 2, 2, 16, 8)),
         Native("parse", "past_cache tensor is required to be 4D"), Ours("in place, as a 4-D view", NATIVE, VIEW)),
    Case("circular-1", "`mode=\"circular\"`, one token per update", lambda: scatter_model(mode="circular", length=1),
         Native("parse", "Only linear mode is supported"), Ours("in place: linear at the index modulo the capacity",
                                                                NATIVE, AS_IS)),
    Case("circular", "`mode=\"circular\"`, several tokens per update", lambda: scatter_model(mode="circular"),
         Native("parse", "Only linear mode is supported"),
         Ours("in place, under the recorded contract that no update straddles the wrap; or `--fallback functional`",
              NATIVE, AS_IS)),
    _typed("INT8", _not_a_cache_type("Int8"), Ours(_COPIES, FUNCTIONAL)),
    _typed("INT32", _not_a_cache_type("Int32"), Ours(_COPIES, FUNCTIONAL)),
    _typed("INT64", _not_a_cache_type("Int64"), Ours(_COPIES, FUNCTIONAL)),
    _typed("BOOL", _not_a_cache_type("Bool"), Ours(_COPIES, FUNCTIONAL)),
    _typed("UINT8", _not_a_cache_type("UInt8"), Ours("refused by name", refusal="uint8")),
    _typed("FLOAT8E4M3FN", _not_a_cache_type("FP8"), Ours("refused by name", refusal="float8e4m3fn")),
    _typed("INT4", _not_a_cache_type("Int4"), Ours("refused by name", refusal="int4")),
    _typed("FLOAT4E2M1", _not_a_cache_type("FP4"), Ours("refused by name", refusal="float4e2m1")),
    _typed("INT16", Native("parse", "Failed to convert ONNX date type"), Ours("refused by name", refusal="int16")),
    _typed("DOUBLE", Native("built", wrong="the cache becomes fp32"), Ours("refused by name", refusal="double")),
    Case("symbolic", "symbolic cache length", lambda: scatter_model(("B", 2, "S_max", 8)),
         Native("parse", "must have a static sequence length dimension"), Ours("in place, `--capacity N` sets it",
                                                                               NATIVE, AS_IS), capacity=16),
    Case("digits", "cache length written as the symbol `\"16\"`", lambda: scatter_model(("B", 2, "16", 8)),
         Native("parse", "must have a static sequence length dimension"), Ours(IN_PLACE, NATIVE, AS_IS)),
    Case("packed", "packed update (`TRT_KVCacheUpdate`, `update_form=\"packed_nhd\"`)", packed_model, Native("built"),
         Ours("in place", NATIVE, AS_IS), ranges={"B_plus_1": (2, 3, 5)}),
)  # fmt: skip

SITUATION_CASES: tuple[Case, ...] = (
    Case("past-computed", "the cache is not a graph input", lambda: updated(before="Add"),
         Native("build", "The cache tensor must be a network input"), Ours(_COPIES, FUNCTIONAL)),
    Case("past-constant", "the graph makes the cache itself", fresh_cache,
         Native("build", "The cache tensor must be a network input"), Ours(_COPIES, FUNCTIONAL)),
    Case("present-inside", "the updated cache is not a graph output", lambda: updated(after="Add"),
         Native("build", "The output tensor must be a network output"), Ours(_COPIES, FUNCTIONAL)),
    Case("chained", "two updates chained on one cache", lambda: updated(chained=True),
         Native("build", "The output tensor must be a network output"), Ours(_COPIES, FUNCTIONAL)),
    Case("past-twice", "one cache, two updates side by side", lambda: updated(twice=True),
         Native("build", "Input index already mapped to an output_index"), Ours(_COPIES, FUNCTIONAL)),
    Case("past-read", "the cache before the update is read elsewhere", lambda: updated(reader=True),
         Native("built", doubt="nothing orders that read before the write in place"), Ours(_COPIES, FUNCTIONAL)),
)  # fmt: skip

ATTENTION_CASES: tuple[Case, ...] = (
    Case("nonpad", "`nonpad_kv_seqlen`", decoder_attention,
         Native("built", wrong="the input is dropped, stale rows are attended"),
         Ours("explicit mask, fused kernel", kind=FUSED)),
    Case("causal", "`is_causal` beside a cache", lambda: decoder_attention(is_causal=1),
         Native("built", wrong="aligned to the upper left: a decode step sees one key"),
         Ours("explicit mask, aligned to the lower right", kind=FUSED)),
    Case("outputs", "3 or 4 outputs on the node", lambda: decoder_attention(outputs=3),
         Native("parse", "TensorRT only supports Attention nodes with one output"),
         Ours("unused outputs dropped", kind=FUSED)),
    Case("mobius", "3-D caches, 3-D attention, three outputs (mobius-onnx `--static-cache`)",
         lambda: decoder_attention(layout="bsd", outputs=3, is_causal=1),
         Native("parse", "past_cache tensor is required to be 4D"),
         Ours("in place, held as `[B, N, S_max, H]`", NATIVE, HEADS_MAJOR, FUSED)),
    Case("mask-causal", "`attn_mask` together with `is_causal`",
         lambda: decoder_attention(mask=("B", 1, "S", 16), is_causal=1),
         Native("parse", "Option mask cannot be used together with CausalMaskKind other than kNONE"),
         Ours("merged into one mask", kind=FUSED)),
    Case("mask-short", "`attn_mask` shorter than the keys",
         lambda: decoder_attention(mask=("B", 1, "S", 12)),
         Native("parse", "mask must be broadcastable"), Ours("padded, or fewer keys are read", kind=FUSED),
         sizes={"keys": 12}),
    Case("softcap", "`softcap`", lambda: decoder_attention(softcap=5.0),
         Native("parse", "Setting softcap is not supported"), Ours("plain operators", kind=LOWERED)),
    Case("precision", "`softmax_precision`", lambda: decoder_attention(softmax_precision=1),
         Native("parse", "Setting softmax precision is not supported"), Ours("plain operators", kind=LOWERED)),
    Case("head-sizes", "K and V of different head sizes", lambda: decoder_attention(value_head_size=32),
         Native("parse", "Key and Value must have the same shape"), Ours("plain operators", kind=LOWERED)),
    Case("attention-fp32", "fp32", lambda: decoder_attention(dtype=FLOAT), Native("build", NO_KERNEL),
         Ours("`decomposable` set on the parsed network", kind=DECOMPOSED)),
    Case("head-320", "head size above 256 or below 9", lambda: decoder_attention(head_size=320),
         Native("build", NO_KERNEL), Ours("`decomposable` set on the parsed network", kind=DECOMPOSED)),
    Case("few-heads", "fewer than 4 query heads, one query at a time",
         lambda: decoder_attention(heads=2, kv_heads=1, length=1, nonpad=False),
         Native("build", NO_KERNEL),
         Ours("`decomposable` set on the parsed network", kind=DECOMPOSED)),
    Case("one-head", "one query head, with a mask",
         lambda: decoder_attention(heads=1, kv_heads=1, nonpad=False, mask=("B", 1, "S", 16)),
         Native("build", NO_KERNEL),
         Ours("`decomposable` set on the parsed network", kind=DECOMPOSED)),
    Case("head-20", "a bool mask, head size not a multiple of 8",
         lambda: decoder_attention(head_size=20, nonpad=False, mask=("B", 1, "S", 16)),
         Native("build", "CHECK(op->input_layouts().size() > idx) failed"), Ours("plain operators", kind=LOWERED)),
    Case("window", "`left_window_size` (opset 25)", lambda: decoder_attention(opset=25, left_window_size=4),
         Native("built", wrong="the window is dropped"), Ours("explicit mask", kind=FUSED)),
    Case("in-op-cache", "`past_key`, `past_value` of a fixed length (cache inside Attention)",
         lambda: attention_model(past=8),
         Native("parse", "Setting past_key for the Attention node is not supported"),
         Ours("refused by name", refusal="past_key")),
)  # fmt: skip

SCAN_CASES = (
    Case("scan-repeat", "Tile or Expand before it, any number of tokens", lambda: scan("Tile", cached=True),
         Native("build", "CHECK(is_const()) failed"), Ours("repeated by Concat", route=Route.NATIVE),
         ranges=STEPS, computed=("new_state", "scanned")),
    Case("scan-attention", "attention before it, any number of tokens", scanning_decoder,
         Native("crash"), Ours("that attention as plain operators", route=Route.NATIVE),
         computed=("new_state", "present_k1", "present_v1", "output")),
)  # fmt: skip

GROUPS: tuple[tuple[str, tuple[Case, ...]], ...] = (
    ("Cache updates", CACHE_CASES),
    ("Caches inside the graph", SITUATION_CASES),
    ("Attention beside a cache", ATTENTION_CASES),
    ("A Scan over the tokens (linear attention)", SCAN_CASES),
)
ALL_CASES: tuple[Case, ...] = tuple(case for _, cases in GROUPS for case in cases)


def entries() -> Iterator[Entry]:
    for case in ALL_CASES:
        yield from built("case", {case.key: case.model}, **({"capacity": case.capacity} if case.capacity else {}))
