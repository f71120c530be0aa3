"""Shapes behind ONNX Runtime's own operators, of which ONNX's shape inference knows nothing and where it stops.

Quantizers and fusions put these operators into a model and leave out what shapes come behind them. Here a twin of the
model is inferred, in which operators of ONNX stand in for them that give results of the same shape and type, and of
which nothing else is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_kvcache.importer.protos import DEFAULT_DOMAINS, shape_of

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

_NORM = "SimplifiedLayerNormalization"
"""Of ONNX Runtime, and found in ONNX's own domain."""


def infer_shapes(model: ModelProto) -> ModelProto:
    """`model` with the shapes that follow in it, behind ONNX Runtime's own operators too.

    Args:
        model: of opset 13 at least. Not changed.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    if not any(_is_contrib(node) for node in model.graph.node):
        return inferred
    stand_ins = _StandIns(inferred)
    twin = ModelProto()
    twin.CopyFrom(model)
    del twin.graph.node[:]
    for node in model.graph.node:
        twin.graph.node.extend(stand_ins.of(node) if _is_contrib(node) else [node])
    if not stand_ins.made:
        return inferred
    twin.graph.initializer.extend(stand_ins.sizes)
    known = {info.name for info in inferred.graph.value_info if shape_of(info) is not None}
    own = {name for node in model.graph.node for name in node.output} - known
    own -= {info.name for info in model.graph.output}
    found = onnx.shape_inference.infer_shapes(twin, data_prop=True).graph.value_info
    news = {info.name: info for info in found if info.name in own and shape_of(info) is not None}
    kept = [info for info in inferred.graph.value_info if info.name not in news]
    del inferred.graph.value_info[:]
    inferred.graph.value_info.extend([*kept, *news.values()])
    return inferred


def _is_contrib(node: NodeProto) -> bool:
    return node.domain == CONTRIB or (node.op_type == _NORM and node.domain in DEFAULT_DOMAINS)


class _StandIns:
    """Makes stand-ins; `sizes` are the initializers that they need, `made` how many there are."""

    def __init__(self, model: ModelProto) -> None:
        self.sizes: list[TensorProto] = []
        self.made = 0
        self._weights = {t.name: tuple(t.dims) for t in model.graph.initializer}
        self._packed = {t.name for t in model.graph.initializer if t.data_type == TensorProto.UINT8}
        self._infos = {info.name: info for info in (*model.graph.input, *model.graph.value_info)}

    def of(self, node: NodeProto) -> list[NodeProto]:
        """What stands in for a node; nothing where its shapes are not known here."""
        nodes = list(_MAKERS[node.op_type](self, node)) if node.op_type in _MAKERS else []
        self.made += bool(nodes)
        return nodes

    def shape(self, name: str) -> tuple[int | str, ...]:
        """The shape of a weight, or of what inference knows already; empty: unknown."""
        return self._weights.get(name) or shape_of(self._infos.get(name)) or ()

    def same(self, node: NodeProto) -> Iterator[NodeProto]:
        """The first result has the shape of the first operand, and its sum, of operators that have one, too."""
        results = [node.output[index] for index in (0, 3) if index < len(node.output) and node.output[index]]
        for result in results:
            yield helper.make_node("Identity", node.input[:1], [result])

    def norm(self, node: NodeProto) -> Iterator[NodeProto]:
        """The scale says of which type the result is."""
        yield helper.make_node("CastLike", node.input[:2], node.output[:1])

    def product(self, node: NodeProto) -> Iterator[NodeProto]:
        yield from self.wide(node, _int(node, "N", 0))

    def wide(self, node: NodeProto, width: int | None) -> Iterator[NodeProto]:
        """The shape of the first operand, but for the last size; nothing where that is unknown."""
        if width:
            weight = f"{node.output[0]}/{CONTRIB}"
            yield from self.filled(weight, (1, width), node.input[0])
            yield helper.make_node("Einsum", [node.input[0], weight], node.output[:1], equation="...i,jk->...k")

    def filled(self, name: str, shape: tuple[int, ...], like: str) -> Iterator[NodeProto]:
        """A tensor of a shape, and of the type of `like`."""
        self.sizes.append(helper.make_tensor(f"{name}/shape", TensorProto.INT64, [len(shape)], shape))
        yield helper.make_node("ConstantOfShape", [f"{name}/shape"], [f"{name}/filled"])
        yield helper.make_node("CastLike", [f"{name}/filled", like], [name])

    def fused_matmul(self, node: NodeProto) -> Iterator[NodeProto]:
        operands = list(node.input)
        if _int(node, "transBatchA", 0) or _int(node, "transBatchB", 0):
            return
        for index, name in enumerate(("transA", "transB")):
            if _int(node, name, 0):
                operands[index] = f"{node.output[0]}/{name}"
                yield helper.make_node("Einsum", [node.input[index]], [operands[index]], equation="...ij->...ji")
        yield helper.make_node("MatMul", operands, node.output)

    def fused_gemm(self, node: NodeProto) -> Iterator[NodeProto]:
        a, b = (_int(node, name, 0) for name in ("transA", "transB"))
        yield helper.make_node("Gemm", node.input, node.output, transA=a, transB=b)

    def gather(self, node: NodeProto) -> Iterator[NodeProto]:
        data, indices, scales = node.input[:3]
        shape = list(self._weights.get(data, ()))
        if shape:
            shape[-1] *= 8 // _int(node, "bits", 4) if data in self._packed else 1
            table = f"{node.output[0]}/{CONTRIB}"
            yield from self.filled(table, tuple(shape), scales)
            yield helper.make_node("Gather", [table, indices], node.output[:1], axis=_int(node, "gather_axis", 0))

    def embedded(self, node: NodeProto) -> Iterator[NodeProto]:
        for result in [node.output[index] for index in (0, 2) if index < len(node.output) and node.output[index]]:
            yield helper.make_node("Gather", [node.input[2], node.input[0]], [result])

    def grouped(self, node: NodeProto) -> Iterator[NodeProto]:
        if len(node.input) > 1 and node.input[1]:
            yield from self.same(NodeProto(input=node.input[:1], output=node.output[:1]))
        elif len(node.input) > 3 and (past := self.shape(node.input[3])) and isinstance(past[-1], int):
            yield from self.wide(node, _int(node, "num_heads", 0) * past[-1])

    def heads(self, node: NodeProto) -> Iterator[NodeProto]:
        value = self.shape(node.input[2]) if len(node.input) > 2 else ()
        heads = _int(node, "num_heads", 0) if len(value) == 4 else 1
        if value and isinstance(value[-1], int):
            yield from self.wide(node, heads * value[-1])
        elif not value and len(node.input) > 2 and node.input[2]:  # of a rank that only the twin's inference finds
            equation = "...si,...tk->...sk"
            yield helper.make_node("Einsum", [node.input[0], node.input[2]], node.output[:1], equation=equation)

    def projected(self, node: NodeProto) -> Iterator[NodeProto]:
        weight = self._weights.get(node.input[1], ())
        sizes = next((list(a.ints) for a in node.attribute if a.name == "qkv_hidden_sizes"), [])
        yield from self.wide(node, sizes[2] if len(sizes) == 3 else weight[-1] // 3 if weight else None)


_MAKERS: dict[str, Callable[[_StandIns, NodeProto], Iterator[NodeProto]]] = {
    _NORM: _StandIns.norm,
    **dict.fromkeys(
        (
            "SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "RotaryEmbedding", "MRotaryEmbedding",
            "Gelu", "FastGelu", "BiasGelu", "QuickGelu",
        ),
        _StandIns.same,
    ),
    "FusedMatMul": _StandIns.fused_matmul,
    "FusedGemm": _StandIns.fused_gemm,
    "MatMulNBits": _StandIns.product,
    "GatherBlockQuantized": _StandIns.gather,
    "EmbedLayerNormalization": _StandIns.embedded,
    "GroupQueryAttention": _StandIns.grouped,
    "MultiHeadAttention": _StandIns.heads,
    "Attention": _StandIns.projected,
}  # fmt: skip


def _int(node: NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)
