"""Families of models that few exports need. Each has a module of its own, loaded only for a model of that family.

To add a family: write a record below, and a module with a function for each station at which it has something to do.

    rewrite(model, weights)        in front of recognition: edits the flat model    -> Rewritten
    open_original(plan, open)      in `verify`: runs the model as exported          -> opens a session

`encoders` has no record: a build and a session ask for it where there is an encoder beside the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import onnx

from trt_kvcache.importer.graph import FLOATS
from trt_kvcache.importer.plan import CachePlan
from trt_kvcache.importer.protos import elem_type_of, shape_of

if TYPE_CHECKING:
    from trt_kvcache.verify.sessions import Session

__all__ = ["EXTENSIONS", "Extension", "Rewritten", "load", "opener_of", "rewrite_before_recognition"]

Opener = Callable[[dict[str, Any]], "Session"]


@dataclass(frozen=True)
class Rewritten:
    """A model that an extension has edited.

    Attributes:
        model: the model; the same object where nothing was to do.
        finish: adds to the plan what the plan cannot know from the edited model; None: nothing.
    """

    model: onnx.ModelProto
    finish: Callable[[CachePlan], CachePlan] | None = None


@dataclass(frozen=True)
class Extension:
    """One family: at each station where it has something to do, a cheap test, which loads nothing.

    Where a test says yes, the function of the station's name is called in the module.

    Attributes:
        name: of the module in this folder.
        rewrite: tests the flat model, by operators and ranks.
        open_original: tests the plan.
    """

    name: str
    rewrite: Callable[[onnx.ModelProto], bool] | None = None
    open_original: Callable[[CachePlan], bool] | None = None


def load(name: str) -> Any:
    """The module of an extension."""
    return import_module(f"{__name__}.{name}")


def rewrite_before_recognition(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]
) -> tuple[onnx.ModelProto, list[Callable[[CachePlan], CachePlan]]]:
    """Let every extension that applies edit a model.

    Args:
        model: flat, with named nodes and without functions; large inline weights are stand-ins. Not changed.
        weights: the detached weights.

    Returns:
        The model, and what finishes its plan.

    Raises:
        UnsupportedModelError: the model is of a family, but not as the family is supported.
    """
    finishes = []
    for extension in EXTENSIONS:
        if extension.rewrite is not None and extension.rewrite(model):
            done: Rewritten = load(extension.name).rewrite(model, weights)
            model = done.model
            finishes += [done.finish] if done.finish is not None else []
    return model, finishes


def opener_of(plan: CachePlan, open_session: Opener) -> Opener:
    """What opens a session of the model as exported whose inputs and outputs are those that the plan knows.

    Args:
        plan: of the model.
        open_session: opens a session of the model as exported, given the inputs of a step.
    """
    for extension in EXTENSIONS:
        if extension.open_original is not None and extension.open_original(plan):
            open_session = load(extension.name).open_original(plan, open_session)
    return open_session


_CHOICES = ("Gather", "Slice", "Split", "Squeeze")
_WRITES = ("Concat", "ScatterND", "ScatterElements")
_THROUGH = ("Transpose", "Unsqueeze", "Reshape", "Identity", "Cast", "ScatterND", "ScatterElements", "Concat", "Where")


def _stacks_caches(model: onnx.ModelProto) -> bool:
    """Places of a cache input are chosen, an output of rank 5 is joined, or a cache grows along its first axis."""
    ranks = {v.name: len(shape_of(v) or ()) for v in model.graph.input if elem_type_of(v) in FLOATS}
    reached = {name for name, rank in ranks.items() if rank > 3}
    first = {name: (0, -rank) for name, rank in ranks.items() if rank > 2}  # where their first axis lies
    joined = {v.name for v in model.graph.output if len(shape_of(v) or (0,) * 9) > 4}
    for node in model.graph.node:
        if node.op_type in _CHOICES and node.input[0] in reached:
            return True
        if node.op_type == "Transpose" and node.input[0] in first:
            perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), [0])
            first[node.output[0]] = (perm.index(0), perm.index(0) - len(perm))
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        if node.op_type in _WRITES and any(axis in first.get(name, ()) for name in node.input):
            return True
        if node.op_type == "Concat" and joined & set(node.output):
            return True
        if node.op_type in _THROUGH and any(name in reached for name in node.input):
            reached.update(node.output)
    return False


EXTENSIONS = (Extension("stacked_caches", rewrite=_stacks_caches, open_original=lambda plan: bool(plan.stacks)),)
