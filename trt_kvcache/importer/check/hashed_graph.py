"""Reads a model for the check: separates constants from nodes, and digests how each tensor is computed.

Two tensors with the same digest are equal by construction, even in different graphs. A digest does not depend on names,
the order of nodes or of commutative operands, default attributes, Identity nodes, or how a constant is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence

import onnx
from onnx import TensorProto, numpy_helper
from onnx.inliner import inline_local_functions

from trt_kvcache.importer.protos import DEFAULT_DOMAINS, constant_value, copied, is_op, names_read

_COMMUTATIVE = ("Add", "And", "Equal", "Mul", "Or", "Xor")
_SMALL = 1 << 16  # bytes; digests of larger constants (weights) contain names instead of contents


class Graph:
    """A model without functions, with its nodes, constants and readers of tensors.

    Attributes:
        inputs: graph inputs without a default value, by name.
        constants: initializers and values of Constant nodes, by name.
        nodes: all other nodes, in topological order.
        makes: the node that computes a tensor, by the tensor's name.
        reads: names of the tensors that a node reads, by `id` of the node.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = inline_local_functions(model) if model.functions else model
        graph = self.model.graph
        self.constants = {t.name: t for t in graph.initializer}
        self.inputs = {value.name: value for value in graph.input if value.name not in self.constants}
        self.outputs = [value.name for value in graph.output]
        nodes = [*_without_identities(graph)]
        self.constants |= {n.output[0]: value for n in nodes if (value := constant_value(n)) is not None}
        self.nodes = [n for n in nodes if n.output[0] not in self.constants]
        self.makes = {name: node for node in self.nodes for name in node.output if name}
        self.reads = {id(node): names_read(node) for node in self.nodes}
        held = {*self.makes, *self.constants, *self.inputs}  # other names belong to the body of a node
        self._inner = {id(n): sorted(self.reads[id(n)].difference(n.input) & held) for n in self.nodes}
        self._places = {id(node): place for place, node in enumerate(self.nodes)}
        self._opsets = {entry.domain: entry.version for entry in self.model.opset_import}
        self._digests: dict[str, str] = {}
        self._attributes: dict[int, list[tuple[str, bytes]]] = {}

    def constant_digest(self, name: str) -> str:
        """Return a digest of a small constant's contents; for a large constant, of its name, type and shape."""
        if name not in self._digests:
            self._digests[name] = _digest_of(_contents(self.constants[name], name))
        return self._digests[name]

    def attributes(self, node: onnx.NodeProto) -> list[tuple[str, bytes]]:
        """Return the attributes of a node whose values differ from their defaults."""
        if id(node) not in self._attributes:
            self._attributes[id(node)] = self._stated(node) if node.attribute else []
        return self._attributes[id(node)]

    def _stated(self, node: onnx.NodeProto) -> list[tuple[str, bytes]]:
        key = "" if node.domain in DEFAULT_DOMAINS else node.domain
        try:
            known = onnx.defs.get_schema(node.op_type, self._opsets.get(key, 1), key).attributes
        except onnx.defs.SchemaError:
            known = {}
        defaults = {name: _said(a.default_value) for name, a in known.items() if a.default_value.name}
        said = [(a.name, _said(a)) for a in node.attribute]
        return sorted((name, value) for name, value in said if defaults.get(name) != value)

    def digests(
        self, leaves: Mapping[str, str], taken: Container[str] = (), nodes: Sequence[onnx.NodeProto] | None = None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return two maps from names to digests: of all tensors, and of the computation of tensors in `taken`.

        `leaves` are digests of inputs. A tensor in `taken` counts as equal in both models, so the first map has a
        digest of its name, not of its computation. `nodes` is the part of the graph to digest (None: all).
        """
        seen = dict(leaves)
        own: dict[str, str] = {}

        def of(name: str) -> str:
            if not name:
                return ""
            if name not in seen and name in self.constants:
                seen[name] = self.constant_digest(name)
            return seen.get(name, f"unknown:{name}")

        for node in self.nodes if nodes is None else nodes:
            inputs = [of(name) for name in node.input]
            while inputs and not inputs[-1]:
                inputs.pop()
            if _is_commutative(node):
                inputs.sort()
            if is_op(node, "Identity"):
                results = {node.output[0]: inputs[0]}
            else:
                inner = [of(n) for n in self._inner[id(node)]]
                domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
                whole = _digest_of((domain, node.op_type, self.attributes(node), inputs, inner))
                results = {name: f"{whole}.{i}" for i, name in enumerate(node.output) if name}
            for name, digest in results.items():
                if name in leaves:  # an input of `nodes` that one of these nodes also computes
                    continue
                if name in taken:
                    own[name] = digest
                    digest = f"join:{name}"
                seen[name] = digest
        return seen, own

    def operands(self, node: onnx.NodeProto, digests: Mapping[str, str]) -> list[str]:
        """Return the tensors that a node reads. Operands of a commutative operator are sorted by their digests."""
        direct = sorted(node.input, key=lambda n: digests.get(n, "")) if _is_commutative(node) else node.input
        return [*direct, *self._inner[id(node)]]

    def tainted(self, roots: Iterable[str], *, through: Container[str] = (), shapes: bool = True) -> set[str]:
        """Return all tensors that depend on `roots`. Stop at `through`; also at Shape nodes if `shapes` is False."""
        tainted = set(roots)
        for node in self.nodes:
            if not shapes and node.op_type in ("Shape", "Size"):
                continue
            if not tainted.isdisjoint(self.reads[id(node)]):
                tainted.update(name for name in node.output if name and name not in through)
        return tainted

    def cone(self, outputs: Iterable[str], stop: Container[str]) -> tuple[list[onnx.NodeProto], list[str], list[str]]:
        """Return the nodes that compute `outputs` from inputs and `stop` tensors; names of both; names of constants."""
        todo = list(outputs)
        wanted = set(todo)
        seen: set[str] = set()
        keep: dict[int, onnx.NodeProto] = {}
        fed: dict[str, None] = {}
        used: dict[str, None] = {}
        while todo:
            name = todo.pop()
            if not name or name in seen:
                continue
            seen.add(name)
            if name in self.constants:
                used[name] = None
            elif name in self.makes and (name in wanted or name not in stop):
                node = self.makes[name]
                keep[self._places[id(node)]] = node
                todo += sorted(self.reads[id(node)])
            elif name in stop or name in self.inputs:
                fed[name] = None
        return [keep[place] for place in sorted(keep)], list(fed), sorted(used)


def _without_identities(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """Yield the nodes except Identity. Input and output of an Identity get one name, if possible that of an output."""
    fixed = {v.name for v in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    fixed.update(*(names_read(node) - set(node.input) for node in graph.node))  # bodies keep the names that they read
    names: dict[str, str] = {}

    def of(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    identities, gone = [n for n in graph.node if is_op(n, "Identity")], set[int]()
    for node in identities:
        source, result = of(node.input[0]), of(node.output[0])
        if result in fixed and source in fixed:
            continue
        gone.add(id(node))
        old, new = (source, result) if result in fixed else (result, source)
        names[old] = new
    for node in graph.node:
        if id(node) in gone:
            continue
        if any(n in names for n in (*node.input, *node.output)):
            copy = copied(node)
            copy.input[:] = [of(n) for n in node.input]
            copy.output[:] = [of(n) for n in node.output]
            yield copy
        else:
            yield node


def _is_commutative(node: onnx.NodeProto) -> bool:
    return node.op_type in _COMMUTATIVE and node.domain in DEFAULT_DOMAINS


def _contents(tensor: TensorProto, name: str) -> object:
    if tensor.data_location != TensorProto.EXTERNAL and tensor.ByteSize() <= _SMALL:
        values = numpy_helper.to_array(tensor)
        return values.shape, values.dtype.str, values.tobytes()
    return tuple(tensor.dims), tensor.data_type, [(e.key, e.value) for e in tensor.external_data], name


def _said(a: onnx.AttributeProto) -> bytes:
    """Return the value of an attribute as bytes; equal tensors give equal bytes, however they are stored."""
    if a.type == a.TENSOR and a.t.data_location != TensorProto.EXTERNAL:
        values = numpy_helper.to_array(a.t)
        return repr((values.shape, values.dtype.str)).encode() + values.tobytes()
    bare = copied(a)
    bare.ClearField("name")
    bare.ClearField("doc_string")
    return bytes(bare.SerializeToString(deterministic=True))


def _digest_of(said: object) -> str:
    return hashlib.sha1(repr(said).encode(), usedforsecurity=False).hexdigest()
