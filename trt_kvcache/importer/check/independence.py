"""Refuse models whose sequences depend on each other: a text must not change with its neighbours in the batch.

    long = ReduceMax(positions) > 4096                  one answer for the whole batch (LongRoPE, dynamic NTK)
    cos  = Cos(positions * Where(long, long_factors, short_factors))

Regions of caches are compared with the original row by row. This module runs all operators outside of these regions, in
two batches that share one sequence. The results of that sequence must be equal in both batches. The module also runs
the tokens of a step one by one. If they differ from the tokens of one step, as with a mean over the step, sessions must
not split prompts. Random weights of rank 1 replace large weights, which keeps all dependences. This module skips
mixtures of large experts, and caches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.check.compare import sequence_axis, token
from trt_kvcache.importer.check.pair import ModelPair
from trt_kvcache.importer.check.process import Verdict
from trt_kvcache.importer.check.region import Region
from trt_kvcache.importer.check.shapes import UNKNOWN, Term
from trt_kvcache.importer.operators import ROUNDS
from trt_kvcache.importer.planning.index_limits import IndexLimits
from trt_kvcache.importer.protos import is_op, names_read, part_of
from trt_kvcache.importer.steps.contents import all_contents, drawn_normal, find_caches, find_states
from trt_kvcache.importer.steps.inputs import StepInputs, draw_constants, span_inputs
from trt_kvcache.importer.steps.runnable import open_types
from trt_kvcache.importer.steps.sessions import RunError, UnfusedSession
from trt_kvcache.importer.steps.single_tokens import SingleTokens
from trt_kvcache.importer.steps.step import Step, read_limits

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
Load = Callable[[onnx.ModelProto], onnx.ModelProto]

_FAILED = re.compile(r"running (\w+) node\. Name:'([^']*)'")  # in the words of ONNX Runtime
_TABLES = ("Gather", "GatherND", "GatherElements", "Slice", "RotaryEmbedding")
_STRIDE = 7919  # places between the numbers of two boundaries
_BATCH, _LENGTH = 3, 3  # of a step, if the model does not fix them
_PAST = 5  # tokens before a step of which one is compared with all
_LARGEST = 1 << 18  # numbers in a constant that stands for itself
_ROUNDED = 5e-2
_EXACT = 1e-5  # experts take as many tokens as come, and sums are taken in another order then


def compare_batches(pair: ModelPair, regions: Sequence[Region], limits: IndexLimits, load: Load) -> Verdict | None:
    """Judge all operators outside of the regions of caches; `load` gives a model the data of its weights.

    Returns None if no sequence depends on its neighbours, and no token on the other tokens of its step. Also returns
    None if ONNX Runtime cannot run this part of the model.
    """

    @lru_cache
    def outside(batch: int, length: int, **how: bool) -> _Outside:
        return _Outside(pair, regions, batch, length, limits, load, **how)

    verdict = None
    for compare in (_sequences, _tokens):
        with suppress(RunError, OptionError, UnsupportedModelError):
            verdict = verdict or compare(pair, outside)
            # The rewrite changes no node here, and no region depends on this run.
    return verdict


def _sequences(pair: ModelPair, outside: Callable[..., _Outside]) -> Verdict | None:
    steps = read_limits(pair.plan, _BATCH)
    longest = steps.length or min(_LENGTH, steps.longest - 1)
    capacity = min((c.capacity for c in pair.plan.caches), default=0)
    batch = min((n for s in pair.plan.states if isinstance(n := s.shape[0], int)), default=steps.batch)
    if batch < 2 or longest < 1 or capacity <= longest:
        return None
    is_fixed = any(isinstance(c.logical_shape[0], int) for c in pair.plan.caches)
    for length in dict.fromkeys((longest, steps.length or 1)):  # some models run in steps of one token only
        last = capacity - length
        both = outside(batch, length, whole=is_fixed)
        if both.runs(0):
            break
        if outside(1, length, whole=is_fixed).runs(0):
            return Verdict("", "alone")
    else:
        return None
    if most := both.longest_past(last):
        return Verdict(str(most - 1 + length), "ends", both.why_it_ends(most))
    starts = ((0, last), (last, 0)) if steps.ragged else ((0, 0), (last, last))
    for (own, other), row in product(starts, (0, batch - 1)):
        if name := both.first_dependent(own, other, row):
            return Verdict(name, "dependent")
    return None


def _tokens(pair: ModelPair, outside: Callable[..., _Outside]) -> Verdict | None:
    """Judge whether tokens of one step depend on each other. Models with states are skipped."""
    steps = read_limits(pair.plan, _BATCH)
    length = steps.length or min(_LENGTH, steps.longest - 1)
    rows = min((c.capacity for c in pair.plan.caches), default=0)
    if pair.plan.prefill_in_one_step or pair.plan.states or not 1 < length <= rows:
        return None
    start = min(_PAST, rows - length) if steps.indexed else 0
    name = outside(steps.batch, length, whole=False).first_counted(start)
    if not name:
        return None
    return Verdict(outside(steps.batch, length, inner=True).first_counted(start) or name, "mixed")


class _Outside:
    """The rewritten model without the regions that read caches, or all of it (`whole`); `inner`: output all tensors.

    Exports of a fixed batch cannot start rows at different positions, so that regions cannot compare such steps.
    Steps are of `batch` sequences with `length` new tokens each.
    """

    def __init__(
        self, pair: ModelPair, regions: Sequence[Region], batch: int, length: int, limits: IndexLimits, load: Load, *,
        whole: bool = False, inner: bool = False,
    ) -> None:  # fmt: skip
        self._plan, self._batch, self._length, self._limits = pair.plan, batch, length, limits
        graph = pair.rewritten
        self._is_fixed = any(isinstance(c.logical_shape[0], int) for c in pair.plan.caches)
        pasts = {c.past for c in pair.plan.caches}
        stops, wanted = ({}, []) if whole else _ends(pair, regions, pasts)
        after = set() if whole else graph.tainted(pasts, through=stops, shapes=False)
        every = dict.fromkeys([*wanted, *graph.outputs])
        ends = [name for name in every if name not in after and name in graph.makes]
        if not ends:
            raise RunError("nothing is computed outside of the regions of caches")
        if inner:
            ends = [name for node in graph.cone(ends, stops)[0] for name in node.output if name]
        # Ends that are results of regions themselves, as of a model that is one attention.
        self._of_caches = graph.tainted(pasts, through=stops.keys() - ends, shapes=False)
        shapes = {name: _shape(pair, name) for name in ends}
        self._shapes = {
            name: shape
            for name, shape in shapes.items()
            if shape and sequence_axis(shape) is not None and _separates_tokens(shape)
        }
        self._axes = {t.name: t.axes.index("batch") for t in pair.plan.tensors if t.name in ends and "batch" in t.axes}
        self._axes |= {name: axis for name, shape in shapes.items() if (axis := self._axis(shape)) is not None}
        nodes, self._fed, used = graph.cone(ends, stops)
        nodes, constants = _light(nodes, {name: graph.constants[name] for name in used}, pair)
        self._exact = not any(node.op_type in ROUNDS for node in nodes)
        self._stops = {name: stops[name] for name in self._fed if name in stops}
        kinds = {name: graph.inputs[name].type.tensor_type.elem_type for name in self._fed if name not in stops}
        inputs = [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in self._fed]
        model = part_of(graph.model, nodes, inputs, ends, constants)
        self._session = UnfusedSession(open_types(load(model), wide=True))

    def _axis(self, shape: tuple[Term, ...] | None) -> int | None:
        """The axis along which sequences lie, alone or as the outer factor of the axis."""
        if shape and self._is_fixed:  # shapes are numbers: the batch is first
            return 0 if not shape[0].sequence and shape[0].factor % self._batch == 0 else None
        return next((i for i, term in enumerate(shape or ()) if term.batch == 1), None)

    def runs(self, past: int) -> bool:
        """True if the model runs after `past` tokens per sequence. ONNX Runtime fails beyond the end of a table."""
        try:
            self._session.run(self._feeds([past] * self._batch, 0))
        except RunError:
            return False
        return True

    def why_it_ends(self, past: int) -> str:
        """Say which operator does not run after `past` tokens."""
        try:
            self._session.run(self._feeds([past] * self._batch, 0))
        except RunError as error:
            if found := _FAILED.search(str(error)):
                op, name = found.groups()
                return (
                    f"a table of positions ends there ({op} '{name}')" if op in _TABLES else f"{op} '{name}' ends there"
                )
        return "what is computed of positions ends there"

    def longest_past(self, last: int) -> int:
        """The smallest past, up to `last`, after which the model does not run; 0 if it runs after `last`.

        TensorRT returns arbitrary numbers beyond the end of a table.
        """
        if self.runs(last):
            return 0
        runs, fails = 0, last
        while fails - runs > 1:
            middle = (runs + fails) // 2
            runs, fails = (middle, fails) if self.runs(middle) else (runs, middle)
        return fails

    def first_dependent(self, own: int, other: int, row: int) -> str:
        """Name the first tensor in which the sequence `row` differs between the two batches; empty if none differs.

        Before the step, sequences of the first batch hold `own` tokens. In the second batch the others hold `other`.
        """
        starts = [own] * self._batch, [own if b == row else other for b in range(self._batch)]
        feeds = [self._feeds(s, seed) for seed, s in enumerate(starts)]
        alone, beside = (self._session.run(fed) for fed in (feeds[0], self._with_row(feeds, row)))
        for name, axis in self._axes.items():
            rows = self._of_row(alone[name], axis, row), self._inner(alone[name], axis, row)
            if not any(self._same_part(alone[name][of], beside[name][of]) for of in rows):
                return str(name)
        return ""

    def _same_part(self, a: Array, b: Array) -> bool:
        both = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        return self._same(a[both], b[both])

    def first_counted(self, start: int) -> str:
        """Name the first tensor in which tokens differ between one step and steps of one token; empty if none differs.

        Raises:
            RunError: the part of an input that belongs to a token is unknown.
        """
        starts, tokens = [start] * self._batch, SingleTokens(self._plan)
        feeds, short = self._feeds(starts, 0), self._feeds(starts, 0, 1)
        first = tokens.single(feeds, 0)
        spans = {self._plan.logits_span.name} if self._plan.logits_span is not None else set()
        fed = {*self._fed} & {*first} - {*self._stops} - spans
        if any(first[name].shape != short[name].shape for name in fed) or not all(
            map(_separates_tokens, self._stops.values())
        ):
            raise RunError("an input has no axis of its own for the tokens of a step")
        whole = self._session.run(feeds)

        def run(place: int, inputs: Feeds) -> Feeds:
            return self._session.run(inputs | {n: token(feeds[n], shape, place) for n, shape in self._stops.items()})

        names = {name: shape for name, shape in self._shapes.items() if name not in self._of_caches}
        for place, alone in enumerate(tokens.one_by_one(feeds, run)):
            for name, shape in names.items():
                if not self._same(token(whole[name], shape, place), token(alone[name], shape, 0)):
                    return str(name)
        return ""

    def _same(self, a: Array, b: Array) -> bool:
        if np.array_equal(a, b):
            return True
        if a.dtype.kind != "f" or a.shape != b.shape:
            return False
        allowed = (_EXACT if self._exact else _ROUNDED) * np.abs(a[np.isfinite(a)]).max(initial=0)
        return np.allclose(a, b, rtol=0, atol=float(allowed), equal_nan=True)

    def _feeds(self, starts: Sequence[int], seed: int, length: int | None = None) -> Feeds:
        length = length or self._length
        step = Step(length, tuple(starts), tuple(s + length for s in starts))
        rng = np.random.default_rng(seed)
        constants = draw_constants(self._plan, self._batch, 0, twin=True)
        inputs = StepInputs(self._plan, self._limits, constants, rng, twin=True, unknown=UNKNOWN)
        feeds: Feeds = inputs.shared(step)
        feeds |= span_inputs(self._plan, step, "full")
        caches = {
            c.role.name: c for c in (*find_caches(self._plan), *find_states(self._plan)) if c.role.name in self._fed
        }
        for name, values in all_contents(caches, seed, starts, 1.0, 0):
            feeds[name] = caches[name].to_physical(values)
        for number, (name, shape) in enumerate(self._stops.items()):
            place = _STRIDE * (number * 2 + seed + 1)
            feeds[name] = drawn_normal([t.at(self._batch, length) for t in shape], place)
        return feeds

    def _with_row(self, feeds: Sequence[Feeds], row: int) -> Feeds:
        """The feeds of the second batch, with sequence `row` taken from the first batch."""
        inputs = [t for t in self._plan.tensors if t.io == "input"]
        axes = {t.name: t.axes.index("batch") for t in inputs if "batch" in t.axes}
        axes |= {t.name: 0 for t in inputs if t.name not in axes and self._is_fixed and t.shape[:1] == (self._batch,)}
        axes |= {s.role.name: 0 for s in find_states(self._plan)}
        mixed = {}
        for name, first in feeds[0].items():
            axis = self._axis(self._stops[name]) if name in self._stops else axes.get(name)
            if axis is None or first.shape[axis] % self._batch:
                mixed[name] = first
                continue
            mixed[name] = feeds[1][name].copy()
            place = self._of_row(first, axis, row)
            mixed[name][place] = first[place]
        return mixed

    def _of_row(self, values: Array, axis: int, row: int) -> tuple[slice, ...]:
        """The part of one sequence."""
        size = values.shape[axis] // self._batch
        return (*[slice(None)] * axis, slice(row * size, (row + 1) * size))

    def _inner(self, values: Array, axis: int, row: int) -> tuple[slice, ...]:
        """The part of one sequence where sequences are the inner one of several along an axis."""
        return (*[slice(None)] * axis, slice(row, None, self._batch))


def _ends(pair: ModelPair, regions: Sequence[Region], pasts: set[str]) -> tuple[dict[str, tuple[Term, ...]], list[str]]:
    """The results of the regions of caches and of experts, with shapes, and the tensors that these regions read."""
    graph = pair.rewritten
    ends: dict[str, tuple[Term, ...]] = {}
    taken: list[str] = []
    for region in regions:
        if pasts & {v.name for v in region.models[1].graph.input} or _reads_experts(region):
            ends |= region.joins
            taken += [name for b in region.boundaries for name in b.names[1]]
    after = graph.tainted(pasts, through=ends, shapes=False)
    for node in graph.nodes:  # of caches that were canonical before
        if not after.isdisjoint(names_read(node)):
            taken += [name for name in node.input if name and name not in after]
            shape = _shape(pair, node.output[0]) if is_op(node, "Attention") else None
            if shape is not None:
                ends[node.output[0]] = shape
    return ends, taken


def _separates_tokens(shape: Sequence[Term]) -> bool:
    """True if the tokens of a step lie along one axis alone, or nothing is as long as they are."""
    return sum(t.sequence > 0 for t in shape) == (sequence_axis(shape) is not None)


def _reads_experts(region: Region) -> bool:
    """True if tokens choose among large matrices: stand-ins of rank 1 exist only for products and lookups."""
    weights = region.models[1].graph.initializer
    return any(math.prod(t.dims[1:]) > _LARGEST for t in weights if len(t.dims) > 2)


def _shape(pair: ModelPair, name: str) -> tuple[Term, ...] | None:
    return next((k.shape for kinds in reversed(pair.kinds) if (k := kinds.get(name)) and k.shape is not None), None)


def _light(
    nodes: Sequence[NodeProto], constants: Mapping[str, TensorProto], pair: ModelPair
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Replace large constants with random stand-ins; all dependences stay.

    Raises:
        RunError: an unsupported operator reads a large constant.
    """
    shapes = {name: tuple(t.dims) for name, t in constants.items()}
    large = {name for name, shape in shapes.items() if math.prod(shape) > _LARGEST}
    drawn = {name: t for name, t in constants.items() if name not in large}
    light: list[NodeProto] = []
    for node in nodes:
        inputs = {name for name in node.input if name}
        is_constant = bool(inputs) and shapes.keys() >= inputs
        constant = {name: _fixed(pair, name) for name in node.output if name and is_constant}
        if large.isdisjoint(inputs):
            light.append(node)
        elif is_constant:
            drawn |= {name: _random(name, shape) for name, shape in constant.items() if math.prod(shape) <= _LARGEST}
        else:
            light += _rank_one(node, shapes, large, drawn)
        shapes |= constant
        large |= {name for name, shape in constant.items() if math.prod(shape) > _LARGEST}
    read = {name for node in light for name in names_read(node)}
    computed = {name for node in light for name in node.output}
    return light, [t for name, t in drawn.items() if name in read and name not in computed]


def _fixed(pair: ModelPair, name: str) -> tuple[int, ...]:
    shape = _shape(pair, name)
    if shape is None:
        raise RunError(f"the shape of the constant '{name}' is not known")
    return tuple(t.factor for t in shape)


def _rank_one(
    node: NodeProto, shapes: Mapping[str, tuple[int, ...]], large: set[str], drawn: dict[str, TensorProto]
) -> Iterator[NodeProto]:
    """Yield a product with a weight, or a lookup in a table, with ``u v^T`` in place of the weight.

    Raises:
        RunError: the operator is another one.
    """
    output = node.output[0]
    names = [f"{output}:{part}" for part in ("u", "v", "inner", "product")]

    def draw(*dims: tuple[int, ...]) -> None:
        for name, shape in zip(names, dims, strict=False):
            drawn[name] = _random(name, shape)

    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    place = next(i for i, name in enumerate(node.input) if name in large)
    weight = shapes.get(node.input[place], ())
    lead: tuple[int, ...] = ()
    if is_op(node, "Gather") and place == 0 and int(attributes.get("axis", 0)) == 0:
        draw((weight[0], *[1] * (len(weight) - 1)), weight[1:])
        yield helper.make_node("Gather", [names[0], node.input[1]], names[2:3], axis=0)
        yield helper.make_node("Mul", [names[2], names[1]], [output])
        return
    if node.op_type == "MatMulNBits":
        rows, columns, data, place = int(attributes["K"]), int(attributes["N"]), node.input[0], 1
    elif node.op_type in ("MatMul", "Gemm") and place < 2 and len(weight) > 1:
        turned = bool(attributes.get("transB" if place else "transA", 0))
        rows, columns = reversed(weight[-2:]) if turned else weight[-2:]
        lead, data = weight[:-2], node.input[1 - place]
        if is_op(node, "Gemm") and attributes.get("transA" if place else "transB", 0):
            yield helper.make_node("Transpose", [data], [f"{output}:data"], perm=[1, 0])
            data = f"{output}:data"
    else:
        raise RunError(f"{node.op_type} '{node.name}' reads a large constant")
    draw((*lead, rows, 1), (*lead, 1, columns))
    added = node.input[2] if is_op(node, "Gemm") and len(node.input) > 2 and node.input[2] else ""
    product_ = names[3] if added else output
    order = (data, names[0], names[1]) if place else (names[1], data, names[0])
    yield helper.make_node("MatMul", [order[0], order[1]], names[2:3])
    yield helper.make_node("MatMul", [names[2], order[2]] if place else [names[0], names[2]], [product_])
    if added:
        yield helper.make_node("Add", [product_, added], [output])


def _random(name: str, shape: tuple[int, ...]) -> TensorProto:
    seed = int.from_bytes(name.encode()[-8:], "little")
    return numpy_helper.from_array(np.random.default_rng(seed).standard_normal(shape, np.float32), name)
