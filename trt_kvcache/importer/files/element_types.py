"""Element types that contradict each other, which ONNX's checker lets pass and ONNX Runtime does not load.

Converters to float16 leave such models: onnxconverter-common (1.16) and what is built on it keep a Cast to float32 and
state its result as float16, or add float32 to float16.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import GraphProto, NodeProto

from trt_kvcache.errors import InvalidModelError
from trt_kvcache.importer.protos import DEFAULT_DOMAINS, describe, dtype_name, elem_type_of, is_op

_ADVICE = (
    "ONNX Runtime does not load it either; convert the model again with another tool, such as "
    "onnxruntime.transformers.float16, or export it in the wanted type"
)
_QUANTIZED = (
    "ONNX Runtime does not load it either; quantize the export in float32: quantize_dynamic of onnxruntime leaves such "
    "types of float16, and NVIDIA ModelOpt quantizes ONNX files of float32 (high_precision_dtype='fp16' makes the rest "
    "float16); a torch model that ModelOpt quantized is exported as model.half()"
)
_FUSED: dict[str, tuple[int, ...]] = {
    "RotaryEmbedding": (0, 2, 3), "SkipLayerNormalization": (0, 1, 2), "SkipSimplifiedLayerNormalization": (0, 1, 2),
    "BiasGelu": (0, 1), "FastGelu": (0, 1), "FusedMatMul": (0, 1),
}  # fmt: skip
"""Of ONNX Runtime's own operators, the operands of one type: its optimizers make caches of float32 for float16."""


def check_element_types(graph: GraphProto, version: int | None, source: str) -> None:
    """Compare what nodes read and write with what ONNX defines for their operators.

    Args:
        graph: with the types that follow in it, as far as shape inference found them.
        version: of the ONNX operators.
        source: the file's name, for messages.

    Raises:
        InvalidModelError: naming the node.
    """
    is_quantized = any("QuantizeLinear" in n.op_type or n.domain == "trt" for n in graph.node)
    advice = _QUANTIZED if is_quantized else _ADVICE
    infos = (*graph.value_info, *graph.output, *graph.input)
    types = {info.name: kind for info in infos if (kind := elem_type_of(info))}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        to = next((a.i for a in node.attribute if a.name == "to"), 0) if is_op(node, "Cast") else 0
        stated = types.get(node.output[0], to) if to else 0
        if to != stated:
            raise InvalidModelError(
                f"{source}: {describe(node)} casts to {dtype_name(to)}, and the model states {dtype_name(stated)} for "
                f"its result; {advice}"
            )
        for first, other in _operands(node, version):
            one, two = types.get(first, 0), types.get(other, 0)
            if one and two and one != two:
                whose = "ONNX" if node.domain in DEFAULT_DOMAINS else "ONNX Runtime"
                raise InvalidModelError(
                    f"{source}: {describe(node)} reads '{first}' of {dtype_name(one)} and '{other}' of "
                    f"{dtype_name(two)}, where {whose} demands one type; {advice}"
                )


def _operands(node: NodeProto, version: int | None) -> Iterator[tuple[str, str]]:
    """Pairs of operands that must be of one type."""
    if node.domain == "com.microsoft":
        names = [node.input[i] for i in _FUSED.get(node.op_type, ()) if i < len(node.input) and node.input[i]]
        yield from ((names[0], name) for name in names[1:])
        return
    if version is None or node.domain not in DEFAULT_DOMAINS or not onnx.defs.has(node.op_type, version, ""):
        return
    formal = onnx.defs.get_schema(node.op_type, version, "").inputs
    firsts: dict[str, str] = {}
    for index, name in enumerate(node.input):
        what = formal[min(index, len(formal) - 1)] if formal else None
        if what is None or not name or not what.is_homogeneous or "(" in what.type_str:
            continue
        yield firsts.setdefault(what.type_str, name), name
