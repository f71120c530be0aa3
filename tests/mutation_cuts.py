"""Faults in rewritten models, and in the way in which the check cuts them: whole models, which nobody cuts, decide.

`faulty` changes a rewritten model at random: whatever the check takes, `verify` has to find equal. `Miscut` plants a
fault in the check's own cutting (a region that nobody runs, boundaries that are exchanged, a tensor that is taken for
another, blind digests) and in the rewritten model a fault that it hides: `verify` has to find that one.
"""

import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
from mutations import Mutator, alike, types_of
from onnx import helper

from trt_kvcache import PlanOptions, TrtKvCacheError
from trt_kvcache.importer import import_model, pipeline
from trt_kvcache.importer.check import checker, misfit
from trt_kvcache.importer.check import region as cutting
from trt_kvcache.importer.check.hashed_graph import Graph
from trt_kvcache.importer.check.models import pair_models
from trt_kvcache.importer.prepare import Prepared
from trt_kvcache.verify import VerifyOptions, verify_import

VERIFY = VerifyOptions(batch=3, chunks=(4, 2), tokens=4, station=("rewritten",))
CAPACITY = 24
KINDS = (
    "constant", "attribute", "swap", "rewire", "relative", "bypass", "inserted", "outputs_swapped", "one_cache",
    "past_for_present",
)  # fmt: skip


class Pair:
    """A model and its rewritten form, with the questions that are asked of both."""

    def __init__(self, path: Path, options: PlanOptions) -> None:
        self.imported = import_model(path, options)
        self.prepared: Prepared = pipeline.prepare(self.imported.source.proto, options)

    def passes(self, rewritten: onnx.ModelProto) -> str:
        """Empty if the check takes a rewritten model; else the reason that it gives."""
        plan, folder = self.imported.plan, self.imported.source.path.parent
        if why := misfit(rewritten, plan):
            return why
        try:
            verdicts = checker.check_models(self.prepared.reference, rewritten, plan, self.prepared.weights, folder)
        except (TrtKvCacheError, IndexError) as error:  # IndexError: an axis that a tensor has not; no ONNX
            return str(error)
        return next((f"{v.name}: {v.why}" for v in verdicts if v.answer != "equal"), "")

    def differs(self, rewritten: onnx.ModelProto) -> str:
        """Empty if both whole models give the same numbers; else the difference."""
        try:
            verify_import(replace(self.imported, model=rewritten), VERIFY).check()
        except TrtKvCacheError as error:
            return str(error)
        return ""


def faulty(pair: Pair, seed: int) -> tuple[onnx.ModelProto, str]:
    """The rewritten model with a fault, and what was done; names of tensors may be exchanged as well."""
    made = deepcopy(pair.imported.model)
    rng = random.Random(seed)
    done = Mutator(made, seed, KINDS).mutate()
    if rng.random() < 0.3:
        done += f"; {_exchange_names(made.graph, rng)}"
    return made, done


def _exchange_names(graph: onnx.GraphProto, rng: random.Random) -> str:
    """Two tensors get each other's name: a join of that name stands for something else."""
    fixed = {v.name for v in (*graph.input, *graph.output)}
    names = [name for node in graph.node for name in node.output if name and name not in fixed]
    one, two = rng.sample(names, 2)
    new = {one: two, two: one}
    for node in graph.node:
        for field in (node.input, node.output):
            field[:] = [new.get(name, name) for name in field]
    return f"names of {one} and {two} exchanged"


def trial(pair: Pair, seed: int) -> tuple[str, str]:
    """The check's verdict on a fault: ``"refused"``, ``"equal"``, or ``"wrong"`` if it takes other numbers.

    ``"ill"``: ONNX Runtime does not even open the model, as with a division by a constant 0, so that it has no numbers.
    """
    model, done = faulty(pair, seed)
    if pair.passes(model):
        return "refused", done
    why = pair.differs(model)
    if "Exception during initialization" in why:
        return "ill", done
    return ("wrong", f"{done}: {why}") if why else ("equal", done)


# Faults in the cutting, each with a fault in the rewritten model that it hides.

Regions = list[cutting.Region]
Fault = tuple[object, str, Any]
_find, _digests = cutting.find_regions, Graph.digests


class Miscut:
    """The check with a fault in its cutting.

    Args:
        pair: of models.
        seed: of the fault.

    Attributes:
        name: of the kind of fault.
        hides: the rewritten model with a fault that the check does not see, if nothing else of it does.
    """

    def __init__(self, pair: Pair, seed: int) -> None:
        self._random = random.Random(seed)
        self._right = pair.imported.model
        kinds = (
            self._unproven, self._crossed, self._lost_present, self._one_key, self._other_region, self._same_name,
            self._other_tensor, self._blind_for_attributes, self._blind_for_constants, self._unread_outputs,
        )  # fmt: skip
        kind = kinds[seed % len(kinds)]
        self.name = kind.__name__.strip("_").replace("_", " ")
        plan = pair.imported.plan
        self._regions = _find(pair_models(pair.prepared.reference, self._right, plan))
        self._makes = Graph(self._right).makes
        self.hides = onnx.ModelProto()
        self.hides.CopyFrom(self._right)
        self._faults = kind()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The check is wrong as long as this is open."""
        with ExitStack() as stack:
            for owner, name, value in self._faults:
                stack.enter_context(patch.object(owner, name, value))
            yield

    def _double(self, name: str, *, output: bool = False) -> None:
        """All readers of a tensor get twice its value; or the caller alone."""
        graph = self.hides.graph
        node = next(n for n in graph.node if name in n.output)
        for other in graph.node:
            if output or other is node:
                for field in (other.input, other.output):
                    field[:] = [f"{name}/half" if n == name else n for n in field]
        place = list(graph.node).index(node) + 1
        graph.node.insert(place, helper.make_node("Add", [f"{name}/half"] * 2, [name], f"{name}/double"))

    def _mutate(self, kind: str) -> None:
        Mutator(self.hides, self._random.randrange(1 << 30), (kind,)).mutate()

    def _change(self, change: Callable[[Regions], Regions]) -> list[Fault]:
        return [(checker, "find_regions", lambda given: change(_find(given)))]

    def _unproven(self) -> list[Fault]:
        """A join that is taken for equal."""
        region = self._random.choice([r for r in self._regions if r.joins])
        join = self._random.choice(sorted(region.joins))
        self._double(join)
        return self._change(lambda regions: [r for r in regions if join not in r.joins])

    def _lost_present(self) -> list[Fault]:
        """A cache that is not compared."""
        lost = self._random.choice([p for r in self._regions for p in r.presents])
        self._double(lost, output=True)
        return self._change(
            lambda regions: [
                replace(r, presents=tuple(p for p in r.presents if p != lost), key=r.key + lost) for r in regions
            ]
        )

    def _crossed(self) -> list[Fault]:
        """Two boundaries of a region that are exchanged in the rewritten model."""
        pairs = [
            (i, j, k)
            for i, r in enumerate(self._regions)
            for j, k in combinations(range(len(r.boundaries)), 2)
            if r.boundaries[j].shape == r.boundaries[k].shape
        ]
        if not pairs:
            return self._unproven()
        i, j, k = self._random.choice(pairs)
        one, two = (self._regions[i].boundaries[n].names[1][0] for n in (j, k))
        for node in self.hides.graph.node:
            if set(node.output) & {n for node in self._regions[i].models[1].graph.node for n in node.output}:
                node.input[:] = [{one: two, two: one}.get(n, n) for n in node.input]

        def cross(regions: Regions) -> Regions:
            made = list(regions)
            for n, region in enumerate(made):
                names = [b.names[1][:1] for b in region.boundaries]
                if (one,) in names and (two,) in names:
                    new = {(one,): (two,), (two,): (one,)}
                    swapped = [
                        replace(b, names=(b.names[0], new.get(b.names[1], b.names[1]))) for b in region.boundaries
                    ]
                    made[n] = replace(region, boundaries=tuple(swapped), key=f"{region.key} crossed")
            return made

        return self._change(cross)

    def _one_key(self) -> list[Fault]:
        """All regions have one verdict: that of the first."""
        self._double(self._random.choice([n for r in self._regions[1:] or self._regions for n in r.joins]))
        return self._change(lambda regions: [replace(r, key="one") for r in regions])

    def _other_region(self) -> list[Fault]:
        one, two = self._random.sample(range(len(self._regions)), 2)
        name = next(iter(self._regions[one].joins), "")
        if name:
            self._double(name)

        def other(regions: Regions) -> Regions:
            return [regions[two] if n == one and two < len(regions) else r for n, r in enumerate(regions)]

        return self._change(other)

    def _same_name(self) -> list[Fault]:
        """A tensor that counts as equal because of its name."""
        name = self._random.choice(sorted(self._makes))
        self._double(name)
        return _taken({name: f"taken:{name}"})

    def _other_tensor(self) -> list[Fault]:
        types = types_of(self._right)
        pairs = [(a, b) for a, b in permutations(sorted(self._makes), 2) if alike(types.get(a), types.get(b))]
        one, two = self._random.choice(pairs)
        for node in self.hides.graph.node:
            node.input[:] = [two if n == one and two not in node.output else n for n in node.input]
        return _taken({one: "taken", two: "taken"})

    def _blind_for_attributes(self) -> list[Fault]:
        """Digests without attributes."""
        self._mutate("attribute")
        return [(Graph, "attributes", lambda graph, node: [])]

    def _blind_for_constants(self) -> list[Fault]:
        """Digests without the contents of constants."""
        self._mutate("constant")
        return [(Graph, "constant_digest", lambda graph, name: str(list(graph.constants[name].dims)))]

    def _unread_outputs(self) -> list[Fault]:
        """Outputs that no region covers count as equal."""
        outputs = [v.name for v in self._right.graph.output if v.name in self._makes]
        joins = {n for r in self._regions for n in (*r.joins, *r.presents)}
        self._double(self._random.choice([n for n in outputs if n not in joins] or outputs), output=True)
        return [(cutting, "_ends", lambda *_: [])]


def _taken(digests: dict[str, str]) -> list[Fault]:
    """Tensors with digests of their own, for all that read them."""

    def made(
        graph: Graph,
        leaves: Mapping[str, str],
        taken: Container[str] = (),
        nodes: Sequence[onnx.NodeProto] | None = None,
    ) -> tuple[dict[str, str], dict[str, str]]:
        if nodes is not None:  # the key of a region
            return _digests(graph, leaves, taken, nodes)
        names = {n for n in digests if n in graph.makes}
        kept = graph.nodes
        graph.nodes = [_without(node, names) for node in kept]
        try:
            seen, own = _digests(graph, {**leaves, **{n: digests[n] for n in names}}, taken)
        finally:
            graph.nodes = kept
        return seen, own

    return [(Graph, "digests", made)]


def _without(node: onnx.NodeProto, names: set[str]) -> onnx.NodeProto:
    if names.isdisjoint(node.output):
        return node
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.output[:] = ["" if n in names else n for n in node.output]
    return made


def exposed(pair: Pair, seed: int) -> tuple[str, str]:
    """The kind of a wrong cut, and who finds it.

    Returns:
        The kind, and ``"whole models"``: the check takes a fault, and the whole models differ. ``"refused"``: it
        refuses a right model, or breaks. ``"elsewhere"``: another part of it sees the fault. ``"equal"``: the fault
        changes no numbers. ``"missed"``: the right check takes a fault, too, and the whole models differ.
    """
    wrong = Miscut(pair, seed)
    try:
        with wrong.planted():
            if pair.passes(pair.imported.model):
                return wrong.name, "refused"
            taken = not pair.passes(wrong.hides)
    except (LookupError, ValueError, AssertionError):
        return wrong.name, "refused"
    if not pair.differs(wrong.hides):
        return wrong.name, "equal"
    if not pair.passes(wrong.hides):
        return wrong.name, "missed"
    return wrong.name, "whole models" if taken else "elsewhere"
