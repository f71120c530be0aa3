"""Faults planted into the networks that TensorRT's parser made, and whether a comparison finds and names them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.network_comparison import LIMIT, NetworkComparison, compare_network
from trt_kvcache.compare.numpy_network import Network, Node
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.files.signed_weights import for_tensorrt
from trt_kvcache.importer.serialize import serialize_model

_SWAPPED = {"SUB", "DIV", "POW", "LESS", "GREATER"}
_OTHER = {
    "SUM": "SUB", "SUB": "SUM", "PROD": "SUM", "DIV": "PROD", "LESS": "GREATER", "GREATER": "LESS", "AND": "OR",
    "OR": "AND", "MAX": "MIN", "MIN": "MAX", "EQUAL": "LESS",
    "SIN": "COS", "COS": "SIN", "NEG": "ABS", "EXP": "ABS", "SQRT": "RECIP", "RECIP": "SQRT", "NOT": None,
    "AVG": "SUM",
    "SIGMOID": "TANH", "TANH": "SIGMOID", "RELU": "TANH", "GELU_TANH": "RELU", "GELU_ERF": "RELU",
}  # fmt: skip


@dataclass
class Parsed:
    """A parsed network, and what has to live as long."""

    network: Any
    content: bytes
    imported: ImportedModel
    alive: tuple[Any, ...]

    def compare(self) -> NetworkComparison:
        folder = self.imported.source.path.parent
        return compare_network(self.network, TRT, self.content, folder, self.imported.plan)


def _trt() -> Any:
    import tensorrt_rtx

    return tensorrt_rtx


TRT = _trt()
LOGGER = TRT.Logger(TRT.Logger.INTERNAL_ERROR)


def parsed(imported: ImportedModel, content: bytes) -> Parsed:
    builder = TRT.Builder(LOGGER)
    network = builder.create_network(0)
    parser = TRT.OnnxParser(network, LOGGER)
    assert parser.parse(content, str(imported.source.path)), parser.get_error(0).desc()
    return Parsed(network, content, imported, (builder, parser))


def read(path: Path, capacity: int | None = None) -> tuple[ImportedModel, bytes]:
    imported = import_model(path, PlanOptions(capacity=capacity, beyond_length=True))
    assert not for_tensorrt(imported.model, imported.source.path.parent), "its weights are replaced"
    return imported, serialize_model(imported.model)


def _constant(layer: Any, values: np.ndarray) -> None:
    layer.weights = TRT.Weights(values)


def _edits(
    node: Node, rng: np.random.Generator, network: Any, keep: list[Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Edits that a layer allows, by what they do."""
    layer = node.layer
    word = str(getattr(layer, "op", None) or (layer.type if node.op_type == "ACTIVATION" else "")).rsplit(".", 1)[-1]
    if (node.op_type == "ELEMENTWISE" and word in _SWAPPED) or node.op_type == "MATRIX_MULTIPLY":
        one, other = layer.get_input(0), layer.get_input(1)
        yield "operands", lambda: (layer.set_input(0, other), layer.set_input(1, one))
    if node.op_type in ("ELEMENTWISE", "UNARY", "REDUCE", "ACTIVATION") and _OTHER.get(word):
        field = "type" if node.op_type == "ACTIVATION" else "op"
        kind = {"ELEMENTWISE": "ElementWiseOperation", "UNARY": "UnaryOperation", "REDUCE": "ReduceOperation"}
        members = getattr(TRT, kind.get(node.op_type, "ActivationType"))
        yield "operation", lambda: setattr(layer, field, getattr(members, _OTHER[word]))
    if node.op_type == "REDUCE":
        yield "axes", lambda: setattr(layer, "axes", layer.axes >> 1 or 2)
    if node.op_type == "SELECT":
        one, other = layer.get_input(1), layer.get_input(2)
        yield "branches", lambda: (layer.set_input(1, other), layer.set_input(2, one))
    if node.op_type == "CONCATENATION" and layer.num_inputs == 2:
        one, other = layer.get_input(0), layer.get_input(1)
        yield "order", lambda: (layer.set_input(0, other), layer.set_input(1, one))
    if node.op_type == "CONSTANT" and node.dtypes[0] in ("FLOAT", "HALF"):
        values = np.array(layer.weights)
        if values.size:
            changed = values.copy()
            if values.size == 1 or rng.random() < 0.5:
                changed *= np.asarray(1.02, values.dtype)
                word = "2 % larger"
            else:
                at = rng.integers(values.size)
                changed.reshape(-1)[at] += np.asarray(0.5, values.dtype)
                word = "one number"
            keep.append(changed)
            yield f"constant, {word}", lambda: _constant(layer, changed)
    if node.op_type == "CONSTANT" and node.dtypes[0] == "INT64" and tuple(layer.shape) == ():
        moved = np.array(layer.weights) + 1
        keep.append(moved)
        yield "index", lambda: _constant(layer, moved)
    if node.op_type == "SLICE" and layer.num_inputs == 1:
        start, shape = list(layer.start), list(layer.shape)
        axis = next((i for i, s in enumerate(start) if s == 0 and shape[i] < layer.get_input(0).shape[i]), None)
        if axis is not None:
            yield "start", lambda: setattr(layer, "start", [s + (i == axis) for i, s in enumerate(start)])
    if node.op_type == "SHUFFLE":
        order = tuple(layer.second_transpose)
        if len(layer.get_output(0).shape) == 4 and order[:4] == (0, 2, 1, 3):
            yield "transpose", lambda: setattr(layer, "second_transpose", TRT.Permutation([0, 1, 2, 3]))
    if node.op_type == "ATTENTION_INPUT":
        attention = layer.attention
        if attention.mask is None:
            yield "causal", lambda: setattr(attention, "causal_kind", TRT.CausalMaskKind.UPPER_LEFT)
        keys, values = layer.get_input(1), layer.get_input(2)
        yield "keys and values", lambda: (attention.set_input(1, values), attention.set_input(2, keys))
    if node.op_type == "KV_CACHE_UPDATE":
        others = [
            other
            for other in (network.get_layer(i) for i in range(network.num_layers))
            if other.type == TRT.LayerType.KV_CACHE_UPDATE and other.name != layer.name
        ]
        if others:
            other = others[rng.integers(len(others))].get_input(1)
            yield "another update", lambda: layer.set_input(1, other)
    if node.op_type == "CUMULATIVE":
        yield "exclusive", lambda: setattr(layer, "exclusive", not layer.exclusive)
    if node.op_type == "GATHER" and layer.get_input(0).shape[0] == layer.get_input(0).shape[-1]:
        yield "axis", lambda: setattr(layer, "axis", len(layer.get_input(0).shape) - 1 - layer.axis)


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        what: the edit, and the layer.
        seen: the comparison found a difference.
        changes: the network's outputs change by more than rounding.
        named: the layer that is named is the edited one, or the first that reads it and gives a tensor of the model.
    """

    what: str
    seen: bool
    changes: bool
    named: bool
    finding: str


def plant(imported: ImportedModel, content: bytes, seed: int) -> Fault | None:
    rng, keep = np.random.default_rng(seed), []
    exact = parsed(imported, content)
    broken = parsed(imported, content)
    nodes = Network(broken.network, TRT).nodes
    kinds = sorted({n.op_type for n in nodes})
    for _ in range(50):
        kind = kinds[rng.integers(len(kinds))]
        among = [n for n in nodes if n.op_type == kind]
        node = among[rng.integers(len(among))]
        edits = list(_edits(node, rng, broken.network, keep))
        if edits:
            break
    else:
        return None
    what, edit = edits[rng.integers(len(edits))]
    try:
        edit()
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None
    result = broken.compare()
    if "fails on inputs" in result.finding or "reads its own output" in result.finding:
        return None  # no network has such a fault: TensorRT would refuse its shapes
    changes = _changes(exact, broken)
    named = _named(result.finding, node, broken)
    return Fault(f"{what}: {node}", bool(result.finding), changes, named, result.finding or result.note)


def _changes(exact: Parsed, broken: Parsed) -> bool:
    """Compare two networks with each other, without the model."""
    from trt_kvcache.compare.differences import share_between
    from trt_kvcache.compare.rewritten_model import Rewritten
    from trt_kvcache.compare.text_inputs import TextInputs
    from trt_kvcache.importer.interface import index_limits
    from trt_kvcache.importer.steps.drawn_inputs import read_limits

    imported = exact.imported
    limits = read_limits(imported.plan, 2)
    inputs = TextInputs(imported.plan, index_limits(imported.model, imported.plan), seed=7)
    steps = Rewritten(imported.plan, inputs, seed=7)
    steps.start(limits.batch)
    left, right = Network(exact.network, TRT), Network(broken.network, TRT)
    for length in (4, 1, 3, 1):
        piece = Piece(limits.length or min(length, limits.longest), tuple(range(limits.batch)))
        feeds = steps.feeds(piece)
        wanted, had = left.run(feeds), right.run(feeds)
        if any(share_between(v, had[n]) > 2 * LIMIT for n, v in wanted.items()):
            return True
        steps.accept(piece, wanted)
    return False


def _named(finding: str, node: Node, broken: Parsed) -> bool:
    """The layer in a finding is the edited one, or reads it through layers whose tensors are none of the model."""
    known = {name for n in broken.imported.model.graph.node for name in n.output}
    reached: set[str] = set()
    for other in Network(broken.network, TRT).nodes:
        half = other.op_type == "ATTENTION_OUTPUT" and other.name.removesuffix("Output") == node.name.removesuffix(
            "Input"
        )
        if other.name == node.name or half or reached & {*other.input}:
            if f"'{other.name}' (" in finding:
                return True
            if not known & {*other.output}:
                reached |= {*other.output}
    return False
