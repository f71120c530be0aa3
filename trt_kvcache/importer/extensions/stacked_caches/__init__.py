"""Caches of several layers in one tensor, taken apart before anything else looks at them.

    past [L, 2, B, N, P, H] -- Gather(i) -- Gather(0) -- Concat -- Unsqueeze, Concat -> present [L, 2, B, N, P + S, H]

        becomes

    past.0.0 [B, N, P, H] -- Concat -> present.0.0 [B, N, P + S, H]     and so on for past.0.1 .. past.(L - 1).1

one axis after the other                        levels (uses)
one place of a tensor, without the tensor       pieces, operators
caches with the text first                      order
the model as exported, in verify                session

Every edit is an identity, operator by operator: no samples are needed. Later stages see each cache by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions import Rewritten
from trt_kvcache.importer.extensions.stacked_caches.levels import Level, batch_of
from trt_kvcache.importer.extensions.stacked_caches.order import put_batch_first
from trt_kvcache.importer.extensions.stacked_caches.session import open_original as open_original
from trt_kvcache.importer.graph import fold_identities
from trt_kvcache.importer.normalize.idioms.writes import find_candidates
from trt_kvcache.importer.plan import CachePlan, InterfaceChange, Stack, StackPart
from trt_kvcache.importer.protos import shape_of

__all__ = ["open_original", "rewrite"]

_Move = tuple[tuple[int, ...], tuple[int, ...], str, str]  # places before and after a step, and names


def rewrite(model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> Rewritten:
    """Take apart what holds several caches; see `trt_kvcache.importer.extensions`.

    Raises:
        UnsupportedModelError: something reads or writes such a tensor in a way that is none of one cache by itself, or
            a cache comes back in another place.
    """
    whole = {v.name: (io, v) for io, vs in (("input", model.graph.input), ("output", model.graph.output)) for v in vs}
    parts = {name: [StackPart(name, (None,) * len(shape_of(v) or ()))] for name, (_, v) in whole.items()}
    while True:
        taken = onnx.shape_inference.infer_shapes(model, data_prop=True)
        graph: gs.Graph = gs.import_onnx(taken)
        fold_identities(graph)
        graph.toposort()
        made = Level(graph, taken, weights).split()
        if not made:
            break
        for name, held in parts.items():
            parts[name] = [part for old in held for part in _refined(old, made)]
        model = _export(graph, model)
    if orders := put_batch_first(graph, batch_of(graph)):
        model = _export(graph, model)
        parts = {name: [replace(p, order=orders.get(p.name)) for p in held] for name, held in parts.items()}
    stacks = tuple(
        Stack(name, whole[name][0], tuple(shape_of(whole[name][1]) or ()), tuple(held))
        for name, held in parts.items()
        if held[0].name != name or held[0].order is not None
    )
    if not stacks:
        return Rewritten(model)
    pairs = [(c.past.name, c.present.name) for c in find_candidates(graph) if not c.reason]
    _check_slots(stacks, pairs, [t.name for t in (*graph.inputs, *graph.outputs)])
    return Rewritten(model, partial(_finish, stacks))


def _finish(stacks: tuple[Stack, ...], plan: CachePlan) -> CachePlan:
    """The plan with the tensors as exported; what changes is said of these."""
    pairs = [(c.past, c.present) for c in plan.caches if c.carried] + [(s.past, s.present) for s in plan.states]
    _check_slots(stacks, pairs, [t.name for t in plan.tensors])  # of operators that hold caches, and states, too
    return replace(plan, stacks=stacks, changes=tuple(_changes(stacks, plan.changes)))


def _refined(old: StackPart, made: Mapping[str, tuple[int, Sequence[str]]]) -> Iterator[StackPart]:
    if old.name not in made:
        yield old
        return
    axis, names = made[old.name]
    place = [i for i, at in enumerate(old.place) if at is None][axis]
    for number, name in enumerate(names):
        yield replace(old, name=name, place=(*old.place[:place], number, *old.place[place + 1 :]))


def _changes(stacks: Sequence[Stack], changes: Sequence[InterfaceChange]) -> Iterator[InterfaceChange]:
    """The changes of each cache, from the tensor in which it lay; then all other changes."""
    ends = {(c.io, c.old.partition(" ")[0]): c for c in changes if c.old}
    parts = {(stack.io, part.name) for stack in stacks for part in stack.parts}
    for stack in stacks:
        for part in stack.parts:
            own = [str(d) for d, at in zip(stack.shape, part.place, strict=True) if at is None]
            shape = [own[a] for a in part.order or range(len(own))]
            end = ends.get((stack.io, part.name))
            new = f"{part.name} [{', '.join(shape)}]" if end is None else end.new
            whys = ["one tensor for each cache"] if len(stack.parts) > 1 else []
            whys += ["the batch comes first"] if part.order is not None else []
            why = "; ".join([*whys, *([end.why] if end is not None and end.why else [])])
            yield InterfaceChange(stack.io, _at(stack, part), new, why)
    yield from (c for c in changes if (c.io, c.old.partition(" ")[0]) not in parts)


def _at(stack: Stack, part: StackPart) -> str:
    """Where a cache lies, such as ``past[0, 1] of [4, 2, B, 8, P, 64]``."""
    places = [":" if at is None else str(at) for at in part.place]
    while places and places[-1] == ":":
        places.pop()
    at = f"[{', '.join(places)}] of" if places else ""
    return f"{stack.name}{at} [{', '.join(map(str, stack.shape))}]"


def _export(graph: gs.Graph, like: onnx.ModelProto) -> onnx.ModelProto:
    graph.cleanup(remove_unused_graph_inputs=False).toposort()
    model: onnx.ModelProto = gs.export_onnx(graph)
    del model.graph.value_info[:]
    model.ir_version = like.ir_version
    return model


def _check_slots(stacks: Sequence[Stack], pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> None:
    """Refuse a model that gives a cache back in another place than that in which it takes it.

    Args:
        stacks: the tensors that hold several caches.
        pairs: names of caches before and after a step.
        names: of inputs and outputs, in their order.
    """
    slots: dict[str, tuple[Stack | None, tuple[int, ...]]] = {name: (None, (i,)) for i, name in enumerate(names)}
    apart = {part.name: (s, tuple(i for i in part.place if i is not None)) for s in stacks for part in s.parts}
    moved: dict[tuple[str, str], list[_Move]] = {}
    for past, present in (pair for pair in pairs if apart.keys() & {*pair}):
        (before, start), (after, end) = ((slots | apart).get(name, (None, (0,))) for name in (past, present))
        key = (before.name if before else "", after.name if after else "")
        moved.setdefault(key, []).append((start, end, past, present))
    shapes = {s.name: s.shape for s in stacks}
    for (before_name, after_name), found in moved.items():
        same = before_name and after_name and _fits(shapes[before_name], shapes[after_name])
        wrong = [f for f in found if f[0] != f[1]] if same else [] if _keeps_order(found) else found
        if wrong:
            _, _, past, present = min(wrong)
            raise UnsupportedModelError(
                f"the model takes a cache as '{past}' and gives it back as '{present}': what it writes for one layer, "
                "another one would read in the next step. Supported are models that write every cache to the place "
                "that they read it from: stack the caches in the order of the layers, both in the model's inputs and "
                "in its outputs"
            )


def _fits(before: Sequence[int | str], after: Sequence[int | str]) -> bool:
    """True if an output can be the input of the next step as it is."""
    return len(before) == len(after) and all(
        a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(before, after, strict=True)
    )


def _keeps_order(found: Sequence[_Move]) -> bool:
    """True if places only count along other axes than before."""
    rank = len(found[0][0])
    for perm in permutations(range(rank)):
        ordered = sorted(found, key=lambda f: [f[0][p] for p in perm])
        if [f[1] for f in ordered] == sorted(f[1] for f in ordered):
            return True
    return False
