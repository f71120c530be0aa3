"""Raise a model to the opset of the canonical form (24: TensorScatter, Attention with `nonpad_kv_seqlen`).

ONNX's own converter rewrites what changed between versions, in bodies of control flow too:

    opset 17: ReduceMean<axes=[-1]>(x)    opset 24: ReduceMean(x, [-1])
    opset 17: Split(x) -> 2 outputs       opset 24: Split<num_outputs=2>(x) -> 2 outputs

It aborts at operators that the source version lacks, which exporters do write into the default domain
(SimplifiedLayerNormalization), and it forgets metadata, functions and stated shapes. So such operators wait in a domain
of their own meanwhile, and of its result only the nodes are taken. There waits Softmax of opset 11 and 12 as well, for
which the converter writes Flatten, Softmax and Reshape, which nobody knows as attention: along the last axis it stays.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import version_converter

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.protos import DEFAULT_DOMAINS, describe, nested_scopes, opset_version, shape_of

OPSET = 24
"""The version that the canonical form needs at least."""

_OLDEST = 11  # what ONNX Runtime's converter of GPT-2 still writes
_SOFTMAX_BY_AXIS = 13  # before, Softmax goes over its axis and all behind it
_PARKED = "trt_kvcache.parked"


def raise_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model at opset 24; a model at 24 or beyond is returned as it is.

    Initializers, whether inside the model, external or stand-ins, stay as they are and are never read. So do operators
    of other domains, and operators of the default domain that `model`'s version does not have.

    Args:
        model: with its functions inlined. Not changed.

    Raises:
        UnsupportedModelError: the version is below 11, a Softmax of it goes over several axes, or ONNX's converter
            cannot raise an operator.
    """
    version = opset_version(model)
    if version is None or version >= OPSET:
        return model
    if version < _OLDEST:
        raise UnsupportedModelError(
            f"the model is of opset {version}; supported are {_OLDEST} and later: export it with opset {OPSET}"
        )
    parked = onnx.ModelProto()
    parked.CopyFrom(model)
    parked.opset_import.add(domain=_PARKED, version=1)
    unknown = [node for node in _nodes(parked.graph) if node.domain in DEFAULT_DOMAINS and not _known(node, version)]
    axes = _softmax_axes(parked) if version < _SOFTMAX_BY_AXIS else {}
    for node in unknown:
        node.domain = _PARKED
    try:
        converted = version_converter.convert_version(parked, OPSET)
    except (RuntimeError, version_converter.ConvertError) as error:
        raise UnsupportedModelError(
            f"ONNX's version converter cannot raise the model from opset {version} to {OPSET} "
            f"({_culprit(model, str(error))}): export it with opset {OPSET}"
        ) from error
    raised = _transplant(model, converted)
    _check_last(raised, axes, version)
    return raised


def _known(node: onnx.NodeProto, version: int) -> bool:
    return bool(onnx.defs.has(node.op_type, version, ""))


def _softmax_axes(model: onnx.ModelProto) -> dict[str, int]:
    """By what they write, the axes of Softmax that go over all that is behind these; they become -1, the last.

    Args:
        model: of an opset before 13. Changed.
    """
    axes = {}
    for node in [n for n in _nodes(model.graph) if n.op_type == "Softmax" and n.domain in DEFAULT_DOMAINS]:
        axes[node.output[0]] = next((int(a.i) for a in node.attribute if a.name == "axis"), 1)
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("axis", -1))
        node.domain = _PARKED
    return axes


def _check_last(model: onnx.ModelProto, axes: dict[str, int], version: int) -> None:
    """Refuse Softmax of which the axis was not the last one, or may not have been.

    Raises:
        UnsupportedModelError: naming the node.
    """
    if all(axis == -1 for axis in axes.values()):
        return
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known = (*inferred.graph.value_info, *inferred.graph.output)
    ranks = {v.name: len(shape) for v in known if (shape := shape_of(v)) is not None}
    for node in _nodes(model.graph):
        axis = axes.get(node.output[0], -1) if node.op_type == "Softmax" else -1
        rank = ranks.get(node.output[0])
        if axis not in (-1, None if rank is None else rank - 1):
            raise UnsupportedModelError(
                f"Softmax '{node.name}' of opset {version} goes over axis {axis} and all behind it, of "
                f"{'an unknown number' if rank is None else rank}; supported is the last axis alone: export the model "
                f"with opset {OPSET}"
            )


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for scope in nested_scopes(graph):
        yield from scope.node


def _transplant(model: onnx.ModelProto, converted: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with the nodes of `converted`, and the constants that these need in addition."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    metadata = {_outputs(node): node.metadata_props for node in model.graph.node if node.metadata_props}
    for node in _nodes(converted.graph):
        if node.domain == _PARKED:
            node.ClearField("domain")
        if (kept := metadata.get(_outputs(node))) is not None and not node.metadata_props:
            node.metadata_props.extend(kept)
    del result.graph.node[:]
    result.graph.node.extend(converted.graph.node)
    own = {tensor.name for tensor in model.graph.initializer}
    result.graph.initializer.extend(t for t in converted.graph.initializer if t.name not in own)
    for entry in result.opset_import:
        if entry.domain in DEFAULT_DOMAINS:
            entry.version = OPSET
    result.ir_version = max(model.ir_version, 10)  # the IR that opset 24's element types need
    return result


def _outputs(node: onnx.NodeProto) -> tuple[str, ...]:
    return tuple(node.output)


def _culprit(model: onnx.ModelProto, words: str) -> str:
    """The converter's last words, and the node that they are about where they name an operator."""
    last = words.strip().splitlines()[-1].split("failed: ")[-1] if words.strip() else "no reason given"
    operator = last.rsplit(" for ", 1)[-1]
    node = next((n for n in _nodes(model.graph) if n.op_type == operator), None)
    return f"{describe(node)}: {last}" if node is not None else last
