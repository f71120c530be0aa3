"""Rounding to few bits inside of an attention: pairs of QuantizeLinear and DequantizeLinear.

    present -- Unsqueeze, Expand, Reshape, Transpose, Mul(number), Quantize, Dequantize -- K or V
    present -- Mul(number), Quantize, Dequantize -- Unsqueeze, Expand, Reshape, Transpose -- K or V

Calibration rounds what a product reads right before it. With one scale for a whole tensor that does the same to every
number, wherever it is moved to, so it changes places with what only moves numbers (`round_first`). Rows of a cache are
rounded one by one then, before heads are repeated, which `latent_attention` knows how to follow.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import (
    Emitter,
    consumers,
    contains,
    dims,
    elem_type,
    input_or_none,
    is_op,
    producer,
    replace_uses,
)
from trt_kvcache.importer.graph import small_constant as constant
from trt_kvcache.importer.normalize.candidate import may_be_cache
from trt_kvcache.importer.normalize.views import is_float_cast, trace_back
from trt_kvcache.importer.operators import MOVES
from trt_kvcache.importer.planning.rounding import Rounding

_WRITERS = {"Concat": -1, "ScatterND": 2, "ScatterElements": 2, "TensorScatter": 1}
_ADVICE = "leave the products of the attention out of the quantization (ModelOpt: nodes_to_exclude)"


def round_first(graph: gs.Graph, caches: Collection[str]) -> None:
    """Edit, in place, rounding after moves of a cache in a sorted graph; `caches` are names of caches with new rows."""
    emitter = Emitter(graph)
    for node in [n for n in graph.nodes if is_op(n, "DequantizeLinear")]:
        chain = _chain(node, caches)
        moves = [n for n in chain if is_op(n, *MOVES)]
        if not moves or not any(is_op(n, "QuantizeLinear") for n in chain):
            continue
        tensor = chain[0].inputs[_data(chain[0])]
        for old in (*(n for n in chain if not is_op(n, *MOVES)), *moves):
            tensor = _copy(emitter, old, tensor)
        replace_uses(node.outputs[0], tensor)
    graph.cleanup().toposort()


def round_new_rows(graph: gs.Graph) -> None:
    """Edit, in place, caches of which all rows are rounded in each step, so that only new ones are.

        present = Dequantize(Quantize(Concat(past, new)))    ->    present = Concat(past, Dequantize(Quantize(new)))

    Without repeated heads, what a product reads is the model's own output, and calibration rounds that. The past comes
    from steps before, so its rows are rounded already, and rounding them again changes nothing: shown for each number
    that there is.
    """
    emitter = Emitter(graph)
    for present in graph.outputs:
        dequantize = producer(_before_cast(present))
        quantize = _reads_only(dequantize, "DequantizeLinear")
        writer = _reads_only(quantize, "QuantizeLinear")
        place = None if writer is None else _new_rows(graph, writer)
        if dequantize is None or quantize is None or writer is None or place is None:
            continue
        pair = read_pair(dequantize, f"the cache '{present.name}'")
        if pair is None or not pair[1].is_stable(elem_type(quantize.inputs[1])):
            continue
        writer.inputs[place] = _copy(emitter, dequantize, _copy(emitter, quantize, writer.inputs[place]))
        rounded, dequantize.outputs = dequantize.outputs[0], []
        writer.outputs = [rounded]
    graph.cleanup().toposort()
    _check_presents(graph)


def _reads_only(node: gs.Node | None, op: str) -> gs.Node | None:
    """The maker of the numbers that `node` alone reads, if it is an `op`."""
    if node is None or not is_op(node, op):
        return None
    tensor = node.inputs[0]
    return producer(tensor) if len(consumers(tensor)) == 1 else None


def _new_rows(graph: gs.Graph, writer: gs.Node) -> int | None:
    """The operand of a node that holds new rows, if it writes these, and nothing else, into a cache."""
    if not is_op(writer, *_WRITERS) or contains(graph.outputs, writer.outputs[0]):
        return None
    sources = [trace_back(_before_cast(trace_back(tensor))) for tensor in writer.inputs]
    pasts = [place for place, source in enumerate(sources) if may_be_cache(graph, source)]
    if is_op(writer, "Concat"):
        return 1 - pasts[0] if len(pasts) == 1 and len(sources) == 2 else None
    return _WRITERS[writer.op] if pasts == [0] else None


def _check_presents(graph: gs.Graph) -> None:
    """Refuse caches that a step gives back rounded: all their rows, new and old."""
    for present in graph.outputs:
        rounded = trace_back(_before_cast(present))
        before = _rounds(rounded)
        writer = None if before is None else producer(trace_back(before.inputs[0]))
        pasts = [] if writer is None else [_unrounded(tensor) for tensor in writer.inputs]
        past = next((t for t in pasts if may_be_cache(graph, t)), None)
        if before is None or writer is None or past is None:
            continue
        readers = [n.name for n in consumers(rounded) if not is_op(n, "Cast", "Shape")]
        raise UnsupportedModelError(
            f"QuantizeLinear '{before.name}' rounds the cache '{past.name}' as a whole in each step, old rows as "
            f"well as new ones, before it becomes '{present.name}'; supported is rounding of new rows before they "
            "are written, or of a float cache where attention reads it, so that nothing rounds an output of the model: "
            f"leave {' and '.join(map(repr, readers)) or 'its readers'} out of the quantization (ModelOpt: "
            f"nodes_to_exclude), or quantize products alone, not {writer.op} (onnxruntime: "
            "op_types_to_quantize=['MatMul', 'Gemm'])"
        )


def _unrounded(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor that is moved, cast and rounded on its way to `tensor`."""
    while True:
        source = _before_cast(trace_back(tensor))
        if (quantize := _rounds(source)) is not None:
            source = quantize.inputs[0]
        if source is tensor:
            return source
        tensor = source


def _rounds(tensor: gs.Tensor) -> gs.Node | None:
    """The QuantizeLinear of a tensor that is dequantized after it."""
    node = producer(tensor)
    before = producer(node.inputs[0]) if node is not None and is_op(node, "DequantizeLinear") else None
    return before if before is not None and is_op(before, "QuantizeLinear") else None


def _before_cast(tensor: gs.Tensor) -> gs.Tensor:
    node = producer(tensor)
    return node.inputs[0] if node is not None and is_float_cast(node) else tensor


def _chain(node: gs.Node, caches: Collection[str]) -> list[gs.Node]:
    """The nodes from a cache to `node`, which all move numbers or do the same to each; none where there is no such."""
    chain = []
    while True:
        if not is_op(node, *MOVES) and not _does_alike(node):
            return []
        chain.append(node)
        tensor = node.inputs[_data(node)]
        if tensor.name in caches:
            return chain[::-1]
        before = producer(tensor)
        if before is None:
            return []
        node = before


def _does_alike(node: gs.Node) -> bool:
    """True if a node does the same to every number."""
    if is_op(node, "QuantizeLinear", "DequantizeLinear"):
        return not node.attrs.get("block_size") and all(_is_number(t) for t in node.inputs[1:] if not t.is_empty())
    if is_op(node, "Mul", "Div"):
        return _is_number(node.inputs[1 - _data(node)]) and not (is_op(node, "Div") and _data(node))
    return is_float_cast(node)


def _data(node: gs.Node) -> int:
    """The input that is no number, of a Mul or Div."""
    return int(is_op(node, "Mul", "Div") and _is_number(node.inputs[0]))


def _is_number(tensor: gs.Tensor) -> bool:
    shape = dims(tensor)
    value = constant(tensor)
    return value is not None and value.size == 1 and (shape is None or len(shape) <= 1)


def _copy(emitter: Emitter, node: gs.Node, tensor: gs.Tensor) -> gs.Variable:
    """The same operator on another tensor."""
    inputs = list(node.inputs)
    inputs[_data(node)] = tensor
    old = node.outputs[0]
    kind = old.dtype if not is_op(node, *MOVES) else tensor.dtype
    output = gs.Variable(emitter.name("rounded"), dtype=kind)
    emitter.graph.nodes.append(gs.Node(node.op, emitter.name(f"rounded:{node.op}"), dict(node.attrs), inputs, [output]))
    return output


def read_pair(node: gs.Node | None, what: str) -> tuple[gs.Tensor, Rounding] | None:
    """The tensor that a QuantizeLinear and then `node`, a DequantizeLinear, round, and how; None: they are not these.

    `what` says in messages what they round.

    Raises:
        UnsupportedModelError: they are not one rounding with one scale and without a zero point.
    """
    if node is None or not is_op(node, "DequantizeLinear"):
        return None
    before = producer(node.inputs[0])
    if before is None or not is_op(before, "QuantizeLinear"):
        return None
    scales, zeros = zip(*(_numbers(n) for n in (before, node)), strict=True)
    point = input_or_none(before, 2)
    kind = elem_type(before.outputs[0] if point is None else point)
    scale, zero = scales[0], zeros[0]
    if scale is None or scale <= 0 or zero != 0 or (scales[1], zeros[1]) != (scale, zero) or not kind:
        raise UnsupportedModelError(
            f"QuantizeLinear '{before.name}' and DequantizeLinear '{node.name}' round {what} with scales {scales} and "
            f"zero points {zeros} (None: not one constant for the whole tensor); supported are one positive scale and "
            f"no zero point, the same in both: quantize symmetrically (onnxruntime: ActivationSymmetric), or {_ADVICE}"
        )
    if int(before.attrs.get("saturate", 1)) == 0:
        raise UnsupportedModelError(
            f"QuantizeLinear '{before.name}' rounds {what} without saturation: what is too large becomes NaN; export "
            "with saturate=1"
        )
    return before.inputs[0], Rounding(scale, kind)


def _numbers(node: gs.Node) -> tuple[float | None, float | None]:
    """Scale and zero point; None where they are no single constant."""
    scale, point = node.inputs[1], input_or_none(node, 2)
    return _number(constant(scale)), 0.0 if point is None else _number(constant(point))


def _number(value: npt.NDArray[Any] | None) -> float | None:
    return float(value.reshape(())) if value is not None and value.size == 1 else None
