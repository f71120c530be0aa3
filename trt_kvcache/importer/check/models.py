"""Prepares the exported and the rewritten model for the check: matches inputs, infers shapes, compares outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import families
from trt_kvcache.importer.cache_plan import CachePlan, OriginalRole, OriginalTensor, Role, TensorRole
from trt_kvcache.importer.check.hashed_graph import Graph
from trt_kvcache.importer.protos import FLOATS, dtype_name
from trt_kvcache.importer.steps.original_interface import COUNTED
from trt_kvcache.importer.steps.probe import Kind, Kinds, Term


@dataclass
class ModelPair:
    """The graphs of the original and the rewritten model, with types and shapes of all tensors.

    `shared` are inputs that mean the same in both models. `refuted` are tensors that differed in a comparison.
    `last_positions` are tensors of the rewritten model that depend on the number of wanted logits.
    """

    original: Graph
    rewritten: Graph
    plan: CachePlan
    kinds: tuple[Kinds, Kinds]
    shared: frozenset[str]
    refuted: set[str] = field(default_factory=set)
    last_positions: set[str] = field(default_factory=set)

    @property
    def sides(self) -> tuple[Graph, Graph]:
        """The graphs of the original and the rewritten model."""
        return self.original, self.rewritten


def pair_models(original: onnx.ModelProto, rewritten: onnx.ModelProto, plan: CachePlan) -> ModelPair:
    """Read both models for the check. The check uses only the roles of inputs and outputs from the plan."""
    sides = (Graph(_runnable(original)), Graph(_runnable(rewritten)))
    roles = {t.name: t for t in plan.tensors if t.io == "input"}
    caches = {t.name for t in plan.tensors if t.io == "input" and t.role is Role.CACHE} | {c.past for c in plan.caches}
    constants = {t.name for t in plan.original if t.role is OriginalRole.CONSTANT}
    constants |= {name for name, t in roles.items() if t.role is Role.CONSTANT}

    def axes_of(t: TensorRole | OriginalTensor) -> tuple[str, ...]:
        """Return the axes of an input. An unknown axis of a constant input is the length of the encoder's output."""
        return tuple(
            "encoder" if a == "?" and t.name in constants else "sequence" if a == "kept" else a for a in t.axes
        )

    if plan.original:
        shared = _same(plan) - caches
        first = {t.name: (t.shape, axes_of(t)) for t in plan.original if t.io == "input"}
    else:
        shared = set(sides[0].inputs) & set(sides[1].inputs) - caches
        first = {name: (t.shape, axes_of(t)) for name, t in roles.items() if name in shared}
        first |= {c.past: (c.logical_shape, ("batch",)) for c in plan.caches}
    second = {name: (t.shape, axes_of(t)) for name, t in roles.items()}
    batch = next((c.logical_shape[0] for c in plan.caches if isinstance(c.logical_shape[0], int)), None)
    pair = ModelPair(
        *sides, plan, (Kinds(sides[0].model, first, batch), Kinds(sides[1].model, second, batch)), frozenset(shared)
    )
    if plan.logits_span is not None:
        pair.last_positions = sides[1].tainted([plan.logits_span.name])
    return pair


def _runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    return families.for_cpu(families.define(model))[0]


def _same(plan: CachePlan) -> set[str]:
    after = {t.name: t for t in plan.tensors if t.io == "input"}
    return {
        t.name
        for t in plan.original
        if t.io == "input"
        and t.name in after
        and after[t.name].role is COUNTED.get(t.role, after[t.name].role)
        and len(t.shape) == len(after[t.name].shape)
        and not (
            t.role is OriginalRole.MASK and t.axes[-1:] != after[t.name].axes[-1:] and t.axes[-1:] != ("capacity",)
        )
    }


def check_interface(pair: ModelPair, presents: set[str]) -> None:
    """Refuse a model whose outputs differ from the plan in name, type or shape."""
    original, rewritten = pair.sides
    gone = [c.old for c in pair.plan.changes if c.io == "output" and not c.new]
    for name in (name for name in original.outputs if name not in rewritten.outputs):
        if not any(old.startswith(f"{name} ") for old in gone):
            raise UnsupportedModelError(
                f"the rewritten model has no output '{name}', but the plan does not list it as removed"
            )
        if _depends_on_text(pair, name):
            raise UnsupportedModelError(
                f"the rewritten model has no output '{name}', which depends on the tokens; a rewrite may remove only "
                "counters and copies of inputs"
            )
    for name in rewritten.outputs:
        if name not in original.outputs:
            raise UnsupportedModelError(f"the rewritten model has an output '{name}', but the original does not")
    span = pair.plan.logits_span
    if span is not None and span.output not in pair.last_positions:
        raise UnsupportedModelError(
            f"the rewritten model's output '{span.output}' does not depend on the input '{span.name}', which says for "
            "how many last positions logits are computed"
        )
    for name in sorted(presents):
        if any(name not in graph.makes for graph in pair.sides):
            raise UnsupportedModelError(
                f"the cache '{name}' must be an output of both models, but is an output of only one"
            )
    for tensor in (t for t in pair.plan.tensors if t.io == "output"):
        # Shape inference does not know how many logits a span selects. Then use the shape of the original.
        known = [k for kinds in reversed(pair.kinds) if (k := kinds.get(tensor.name))]
        kind = next((k for k in known if k.shape is not None), known[0])
        if not _is_planned(kind, tensor):
            raise UnsupportedModelError(
                f"the rewritten model's output '{tensor.name}' is {kind}, but the plan says {tensor.dtype} "
                f"[{', '.join(map(str, tensor.shape))}]"
            )


def _depends_on_text(pair: ModelPair, name: str) -> bool:
    """True if an output of the original depends on tokens or float inputs, and is not just a copy of an input."""
    graph = pair.original
    inputs = {n for n, v in graph.inputs.items() if v.type.tensor_type.elem_type in FLOATS}
    inputs |= {t.name for t in pair.plan.original if t.role is OriginalRole.TOKENS}
    same, _ = graph.digests({n: n for n in graph.inputs})
    return name in graph.tainted(inputs, shapes=False) and same.get(name) not in graph.inputs


def _is_planned(kind: Kind, tensor: TensorRole) -> bool:
    if kind.elem_type and dtype_name(kind.elem_type) != tensor.dtype:
        return False
    if kind.shape is None:
        return True
    sizes = {"batch": Term(1, 1, 0), "sequence": Term(1, 0, 1)}
    wanted = [
        Term(d, 0, 0) if isinstance(d, int) else sizes.get(a) for d, a in zip(tensor.shape, tensor.axes, strict=True)
    ]
    return len(wanted) == len(kind.shape) and all(w in (None, t) for w, t in zip(wanted, kind.shape, strict=True))
