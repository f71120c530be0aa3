"""Tokens sorted by the experts that they chose, in blocks of equal size: all sizes follow from the number of tokens.

    T tokens choose k of E experts each: P = T * k pairs
    blocks of b = min(T, P // (E // 2 + 1) + 1) rows, n = min(P, E + E // 2) of them, one expert each

    expert 0: [t0 t3 t4] [t7 -- --]      expert 2: [t1 t3 --]      ...      not needed: [-- -- --]

    rows    = Gather(x, tokens [n * b])            [n, b, H]: what is not filled repeats the first token
    result  = rows @ Gather(weights, experts [n])  two batched products
    y       = sum over k of shares * Gather(result, places [T, k])

n blocks always suffice: an expert of c pairs takes Ceil(c / b), in all up to P // b + E, and P // b <= E // 2; never
more than P. What is computed in rows that nobody chose is never read, so no number of a token reaches another.

One form serves all phases. A step of one token has k blocks of one row and reads the weights of k experts. Beyond, each
weight is read one and a half times at most, and products are three times those of the chosen pairs alone. The weights
of each pair (``batched_mm`` of transformers) would take P copies of an expert instead: for 512 tokens of gpt-oss-20b in
float16 102 GB in a layer. All experts for all tokens would take E / k times the products: 8 times for gpt-oss-20b, 16
for Qwen3 30B. n and b only grow with T, because TensorRT for RTX 1.7.1 reserves memory for the largest of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.graph import BOOL, FLOAT, INT64, Emitter

__all__ = ["Routing", "in_blocks", "route", "weighted_sum"]


@dataclass(frozen=True)
class Routing:
    """Who goes where.

    Attributes:
        shares: float32 ``[T, k, 1]``.
        places: rows of the blocks, int64 ``[T, k]``.
        tokens: of each row, int64 ``[n * b]``.
        experts: of each block, int64 ``[n]``.
        blocks: the numbers n and b, int64 ``[1]`` each.
    """

    shares: gs.Tensor
    places: gs.Tensor
    tokens: gs.Tensor
    experts: gs.Tensor
    blocks: tuple[gs.Tensor, gs.Tensor]


def route(emitter: Emitter, logits: gs.Tensor, k: int, experts: int, normalized: bool) -> Routing:
    """Choose experts and assign rows.

    Args:
        emitter: of the graph.
        logits: ``[T, E]``, of any floating-point type.
        k: experts of each token.
        experts: E.
        normalized: whether shares are the Softmax of the chosen logits, or those of the Softmax of all.
    """
    scores = emitter.op("Cast", [logits], "router", FLOAT, to=FLOAT)
    if not normalized:
        scores = emitter.op("Softmax", [scores], "router", FLOAT, axis=-1)
    top = emitter.op("TopK", [scores, emitter.ints([k])], "router_top", FLOAT, axis=-1)
    chosen = gs.Variable(emitter.name("router_chosen"), dtype=INT64)
    top.inputs[0].outputs.append(chosen)
    shares = emitter.op("Softmax", [top], "router_shares", FLOAT, axis=-1) if normalized else top
    shares = emitter.op("Unsqueeze", [shares, emitter.ints([-1])], "router_shares", FLOAT)

    length = emitter.op("Shape", [logits], "tokens", INT64, start=0, end=1)
    pairs = emitter.op("Mul", [length, emitter.ints([k])], "pairs", INT64)
    spare = experts // 2
    most = emitter.op("Add", [emitter.op("Div", [pairs, emitter.ints([spare + 1])], "rows", INT64), emitter.ints([1])],
                      "rows", INT64)  # fmt: skip
    rows = emitter.op("Min", [most, length], "rows", INT64)
    blocks = emitter.op("Min", [pairs, emitter.ints([experts + spare])], "blocks", INT64)

    listed = emitter.op("Reshape", [chosen, emitter.ints([-1, 1])], "pair_experts", INT64)
    equal = emitter.op("Equal", [listed, emitter.constant(np.arange(experts)[None])], "pair_experts", BOOL)
    hot = emitter.op("Cast", [equal], "pair_experts", FLOAT, to=FLOAT)
    running = emitter.op("CumSum", [hot, emitter.ints(0)], "pair_count", FLOAT)
    counts = emitter.op("ReduceSum", [hot, emitter.ints([0])], "counts", FLOAT, keepdims=0)
    size = emitter.op("Cast", [rows], "rows", FLOAT, to=FLOAT)
    needed = emitter.op("Ceil", [emitter.op("Div", [counts, size], "needed", FLOAT)], "needed", FLOAT)
    ends = emitter.op("CumSum", [needed, emitter.ints(0)], "ends", FLOAT)
    begins = emitter.op("Mul", [emitter.op("Sub", [ends, needed], "begins", FLOAT), size], "begins", FLOAT)
    counted = emitter.op("Mul", [emitter.op("Add", [running, begins], "places", FLOAT), hot], "places", FLOAT)
    places = emitter.op("ReduceSum", [counted, emitter.ints([1])], "places", FLOAT, keepdims=0)  # counted from 1
    places = emitter.op("Cast", [emitter.op("Sub", [places, emitter.scalar(1, FLOAT)], "places", FLOAT)],
                        "places", INT64, to=INT64)  # fmt: skip

    tokens = emitter.op("Div", [_range(emitter, pairs), emitter.ints([k])], "pair_tokens", INT64)
    room = emitter.op("Mul", [blocks, rows], "room", INT64)
    first = emitter.op("Expand", [emitter.ints([0]), room], "row_tokens", INT64)
    tokens = emitter.op("ScatterElements", [first, places, tokens], "row_tokens", INT64, axis=0)

    index = emitter.op("Cast", [_range(emitter, blocks)], "block", FLOAT, to=FLOAT)
    index = emitter.op("Unsqueeze", [index, emitter.ints([-1])], "block", FLOAT)
    passed = emitter.op("LessOrEqual", [ends, index], "block_passed", BOOL)
    passed = emitter.op("Cast", [passed], "block_passed", FLOAT, to=FLOAT)
    owner = emitter.op("ReduceSum", [passed, emitter.ints([1])], "block_experts", FLOAT, keepdims=0)
    owner = emitter.op("Min", [owner, emitter.scalar(experts - 1, FLOAT)], "block_experts", FLOAT)
    owner = emitter.op("Cast", [owner], "block_experts", INT64, to=INT64)

    apart = emitter.op("Shape", [chosen], "places", INT64)
    return Routing(shares, emitter.op("Reshape", [places, apart], "places", INT64), tokens, owner, (blocks, rows))


def in_blocks(emitter: Emitter, x: gs.Tensor, width: int, routing: Routing) -> gs.Tensor:
    """``x [T, H] -> [n, b, H]``."""
    rows = emitter.op("Gather", [x, routing.tokens], "block_rows")
    shape = emitter.op("Concat", [*routing.blocks, emitter.ints([width])], "block_shape", INT64, axis=0)
    return emitter.op("Reshape", [rows, shape], "block_rows")


def weighted_sum(emitter: Emitter, result: gs.Tensor, width: int, routing: Routing, kind: int) -> gs.Tensor:
    """What each token's experts gave ``[n, b, H]``, by their shares: ``[T, H]`` of type `kind`, summed in float32."""
    rows = emitter.op("Reshape", [result, emitter.ints([-1, width])], "expert_rows", kind)
    own = emitter.op("Gather", [rows, routing.places], "expert_results", kind)
    if kind != FLOAT:
        own = emitter.op("Cast", [own], "expert_results", FLOAT, to=FLOAT)
    shared = emitter.op("Mul", [own, routing.shares], "expert_shares", FLOAT)
    total = emitter.op("ReduceSum", [shared, emitter.ints([1])], "expert_sum", FLOAT, keepdims=0)
    return total if kind == FLOAT else emitter.op("Cast", [total], "expert_sum", kind, to=kind)


def _range(emitter: Emitter, length: gs.Tensor) -> gs.Tensor:
    """``0 .. length - 1`` of a length ``[1]``."""
    end = emitter.op("Squeeze", [length, emitter.ints([0])], "range_end", INT64)
    return emitter.op("Range", [emitter.ints(0), end, emitter.ints(1)], "range", INT64)
