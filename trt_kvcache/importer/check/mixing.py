"""Finds models that mix the sequences of a batch, or the tokens of a step, outside of attention.

    long = ReduceMax(positions) > 4096                  one value for the whole batch (LongRoPE, dynamic NTK)
    cos  = Cos(positions * Where(long, long_factors, short_factors))

Models that mix sequences are refused. To find them, two batches that share one sequence are compared. If tokens of a
step depend on each other (as with a mean over the step), sessions must not split prompts. To find this, the same tokens
run in one step and one by one.

Two kinds of nodes do not run; random numbers replace their results. The first are regions with caches, because the
check compares these with the original row by row. The others compute each token separately: products with large
weights, lookups in large tables, and mixtures of experts. The inputs of both kinds are compared.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.cpu import RunError, UnfusedSession
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import Role
from trt_kvcache.importer.check import Verdict
from trt_kvcache.importer.check.models import ModelPair
from trt_kvcache.importer.check.region import Region, unread
from trt_kvcache.importer.check.tolerances import sequence_axis, token
from trt_kvcache.importer.interface import IndexLimits
from trt_kvcache.importer.operators import ROUNDS
from trt_kvcache.importer.protos import FLOATS, Array, int_attribute, is_op, names_read, part_of
from trt_kvcache.importer.steps.cache_contents import all_contents, drawn_normal, find_caches, find_states
from trt_kvcache.importer.steps.drawn_inputs import DrawnInputs, Step, draw_constants, read_limits, span_inputs
from trt_kvcache.importer.steps.probe import UNKNOWN, Term
from trt_kvcache.importer.steps.runnable import open_types

Feeds = dict[str, Array]
Load = Callable[[onnx.ModelProto], onnx.ModelProto]
Shape = tuple[Term, ...]

_FAILED = re.compile(r"running (\w+) node\. Name:'([^']*)'")  # in messages of ONNX Runtime
_TABLES = ("Gather", "GatherND", "GatherElements", "Slice", "RotaryEmbedding")
_STRIDE = 7919  # the inputs' numbers start this far apart in the pool of random numbers
_BATCH, _LENGTH = 3, 3  # sizes of a step, if the model does not fix them
_PAST = 5  # tokens before a step that is compared with steps of one token
_LARGE = 1 << 18  # numbers; larger weights are not read
_MOST = 1 << 24  # the most numbers of a constant whose operator may mix tokens; such a constant is read
_ROUNDED = 5e-2
_EXACT = 1e-5  # sums may be taken in another order


def find_mixing(pair: ModelPair, regions: Sequence[Region], limits: IndexLimits, load: Load) -> Verdict | None:
    """Return a verdict if the model mixes sequences, or tokens of a step, outside of attention and cache updates."""

    @lru_cache
    def outside(batch: int, length: int, **how: bool) -> _Outside:
        return _Outside(pair, regions, batch, length, limits, load, **how)

    verdict = None
    for find in (_mixed_sequences, _mixed_tokens):
        with suppress(RunError, OptionError, UnsupportedModelError):
            verdict = verdict or find(pair, outside)
            # An error here is no verdict: the rewrite does not change these nodes.
    return verdict


def _mixed_sequences(pair: ModelPair, outside: Callable[..., _Outside]) -> Verdict | None:
    steps = read_limits(pair.plan, _BATCH)
    longest = steps.length or min(_LENGTH, steps.longest - 1)
    capacity = min((c.capacity for c in pair.plan.caches), default=0)
    batch = min((n for s in pair.plan.states if isinstance(n := s.shape[0], int)), default=steps.batch)
    if batch < 2 or longest < 1 or capacity <= longest:
        return None
    is_fixed = any(isinstance(c.logical_shape[0], int) for c in pair.plan.caches)
    for length in dict.fromkeys((longest, steps.length or 1)):  # some models run only in steps of one token
        last = capacity - length
        both = outside(batch, length, whole=is_fixed)
        if not both.error(0):
            break
        if not outside(1, length, whole=is_fixed).error(0):
            return Verdict("", "alone")
    else:
        return None
    if most := both.failing_past(last):
        return Verdict(str(most - 1 + length), "ends", both.why_it_ends(most))
    starts = ((0, last), (last, 0)) if steps.ragged else ((0, 0), (last, last))
    for (own, other), row in product(starts, (0, batch - 1)):
        if name := both.first_mixed_sequence(own, other, row):
            return Verdict(name, "dependent")
    return None


def _mixed_tokens(pair: ModelPair, outside: Callable[..., _Outside]) -> Verdict | None:
    steps = read_limits(pair.plan, _BATCH)
    length = steps.length or min(_LENGTH, steps.longest - 1)
    rows = min((c.capacity for c in pair.plan.caches), default=0)
    if pair.plan.prefill_in_one_step or pair.plan.states or not 1 < length <= rows:
        return None
    start = min(_PAST, rows - length) if steps.indexed else 0
    name = outside(steps.batch, length, whole=False).first_mixed_token(start)  # arguments as in `_mixed_sequences`
    return Verdict(outside(steps.batch, length, inner=True).first_mixed_token(start) or name, "mixed") if name else None


class _Outside:
    """The rewritten model without the changed parts that read caches (regions), as a model that can run.

    A step has `batch` sequences with `length` new tokens each. With `inner`, all tensors are outputs. With `whole`, the
    model contains the regions, too. Models with a fixed batch need this: all their rows start at the same position, so
    a comparison of regions cannot use sequences of different lengths.
    """

    def __init__(
        self, pair: ModelPair, regions: Sequence[Region], batch: int, length: int, limits: IndexLimits, load: Load, *,
        whole: bool = False, inner: bool = False,
    ) -> None:  # fmt: skip
        self._plan, self._batch, self._length, self._limits = pair.plan, batch, length, limits
        graph = pair.rewritten
        self._is_fixed = any(isinstance(c.logical_shape[0], int) for c in pair.plan.caches)
        pasts = {c.past for c in pair.plan.caches}
        stops, read = ({}, []) if whole else _caches_left_out(pair, regions, pasts)
        products, lookups = _large_left_out(pair, read)
        stops |= products
        after = set() if whole else graph.tainted(pasts, through=stops, shapes=False)
        known = after.union(products)
        ends = [n for n in dict.fromkeys([*read, *graph.outputs]) if n not in known and n in graph.makes]
        if inner:
            ends = [name for node in graph.cone(ends, stops)[0] for name in node.output if name]
        nodes, self._fed, used = graph.cone([*ends, *(node.input[1] for node, _ in lookups)], stops)
        nodes, ends = [*nodes, *(node for node, _ in lookups)], [*ends, *(node.output[0] for node, _ in lookups)]
        if not ends:
            raise RunError("all outputs are computed in regions with caches")
        # Graph outputs may be results of regions, for example in a model that consists of one attention.
        self._of_caches = graph.tainted(pasts, through=stops.keys() - ends, shapes=False)
        shapes = {name: _shape(pair, name) for name in ends}
        if inner:  # integers may legally depend on the number of tokens of a step
            floats = {n for n in ends if (k := pair.kinds[1].get(n)) and k.elem_type in FLOATS}
            shapes = {name: shape for name, shape in shapes.items() if name in floats}
        self._shapes = {n: s for n, s in shapes.items() if s and sequence_axis(s) is not None and _separates_tokens(s)}
        self._axes = {t.name: t.axes.index("batch") for t in pair.plan.tensors if t.name in ends and "batch" in t.axes}
        self._axes |= {name: axis for name, shape in shapes.items() if (axis := self._axis(shape)) is not None}
        self._exact = not any(node.op_type in ROUNDS for node in nodes)
        self._stops = {name: stops[name] for name in self._fed if name in stops}
        kinds = {name: graph.inputs[name].type.tensor_type.elem_type for name in self._fed if name not in stops}
        inputs = [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in self._fed]
        constants = [graph.constants[name] for name in used]
        if large := next((t for t in constants if math.prod(t.dims) > _MOST), None):
            raise RunError(f"the constant '{large.name}' is too large to run the operator that reads it")
        model = load(part_of(graph.model, nodes, inputs, ends, constants))
        model.graph.initializer.extend(table for _, table in lookups)
        self._unread = unread([model], pasts)
        self._session = UnfusedSession(open_types(model, wide=True))

    def _axis(self, shape: Shape | None) -> int | None:
        """Return the axis of a shape that contains the sequences: the batch, or the batch times other sizes."""
        if shape and self._is_fixed:  # shapes are numbers: the batch is first
            return 0 if not shape[0].sequence and shape[0].factor % self._batch == 0 else None
        return next((i for i, term in enumerate(shape or ()) if term.batch == 1), None)

    def error(self, past: int) -> str:
        """Return ONNX Runtime's error in a step after `past` tokens, such as an index beyond a table; empty if none."""
        try:
            self._session.run(self._feeds([past] * self._batch, 0))
        except RunError as error:
            return str(error)
        return ""

    def why_it_ends(self, past: int) -> str:
        found = _FAILED.search(self.error(past))
        if found is None:
            return "the model cannot compute later positions"
        op, name = found.groups()
        if op in _TABLES:
            return f"a table of positions ends there ({op} '{name}')"
        return f"{op} '{name}' does not run after more tokens"

    def failing_past(self, last: int) -> int:
        """Return the fewest past tokens, up to `last`, after which ONNX Runtime fails (as at a table's end); or 0."""
        if not self.error(last):
            return 0
        return bisect_left(range(last), True, key=lambda past: bool(self.error(past)))

    def first_mixed_sequence(self, own: int, other: int, row: int) -> str:
        """Return the first tensor in which sequence `row` differs between two batches; empty if none.

        Sequence `row` has `own` past tokens in both batches. All other sequences have `own` past tokens in the first
        batch, and `other` in the second.
        """
        starts = [own] * self._batch, [own if b == row else other for b in range(self._batch)]
        feeds = [self._feeds(s, seed) for seed, s in enumerate(starts)]
        alone, beside = (self._session.run(fed) for fed in (feeds[0], self._with_row(feeds, row)))
        for name, axis in self._axes.items():
            # The batch may be the outer or the inner factor of an axis.
            parts = self._of_row(alone[name], axis, row), (*[slice(None)] * axis, slice(row, None, self._batch))
            if not any(self._same_part(alone[name][of], beside[name][of]) for of in parts):
                return str(name)
        return ""

    def _same_part(self, a: Array, b: Array) -> bool:
        both = tuple(map(slice, np.minimum(a.shape, b.shape)))
        return self._same(a[both], b[both])

    def first_mixed_token(self, start: int) -> str:
        """Return the first tensor that changes if a step is split into single tokens; empty if none does."""
        feeds, short = self._feeds([start] * self._batch, 0), self._feeds([start] * self._batch, 0, 1)
        span = self._plan.logits_span
        fed = {*self._fed} - {*self._stops} - ({span.name} if span is not None else set())
        first = self._of_token(feeds, 0)
        if any(first[name].shape != short[name].shape for name in fed) or not all(
            map(_separates_tokens, self._stops.values())
        ):
            raise RunError("an input has no separate axis for the tokens of a step")
        whole = self._session.run(feeds)
        for place in range(self._length):
            alone = self._session.run(self._of_token(feeds, place))
            for name, shape in self._shapes.items():
                ours, single = token(whole[name], shape, place), token(alone[name], shape, 0)
                if name not in self._of_caches and not self._same(ours, single):
                    return str(name)
        return ""

    def _of_token(self, feeds: Mapping[str, Array], place: int) -> Feeds:
        taken = {name: token(feeds[name], shape, place) for name, shape in self._stops.items()}
        for tensor in (t for t in self._plan.tensors if t.name in feeds and t.name not in taken):
            values = feeds[tensor.name]
            if "sequence" in tensor.axes:
                values = np.take(values, [place], tensor.axes.index("sequence"))
            if tensor.role is Role.WRITE_INDICES:
                values = values + np.asarray(place, values.dtype)
            if tensor.role is Role.VALID_LENGTHS:
                values = values + np.asarray(place + 1 - self._length, values.dtype)
            taken[tensor.name] = values
        return {**feeds, **taken}

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
        constants = draw_constants(self._plan, self._batch, 0)
        inputs = DrawnInputs(self._plan, self._limits, constants, np.random.default_rng(seed), unknown=UNKNOWN)
        feeds: Feeds = inputs.shared(step) | span_inputs(self._plan, step, "full")
        caches = {
            c.role.name: c for c in (*find_caches(self._plan), *find_states(self._plan)) if c.role.name in self._fed
        }
        for name in self._unread & caches.keys():  # only its shape is read
            cache = caches.pop(name)
            feeds[name] = cache.to_physical(np.zeros(cache.logical_shape(self._batch), np.float32))
        for name, values in all_contents(caches, seed, starts, 1.0, 0):
            feeds[name] = caches[name].to_physical(values)
        for number, (name, shape) in enumerate(self._stops.items()):
            place = _STRIDE * (number * 2 + seed + 1)
            feeds[name] = drawn_normal([t.at(self._batch, length) for t in shape], place)
        return feeds

    def _with_row(self, feeds: Sequence[Feeds], row: int) -> Feeds:
        """Return the inputs of the second batch, except that sequence `row` comes from the first batch."""
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
        size = values.shape[axis] // self._batch
        return (*[slice(None)] * axis, slice(row * size, (row + 1) * size))


def _caches_left_out(
    pair: ModelPair, regions: Sequence[Region], pasts: set[str]
) -> tuple[dict[str, Shape], list[str]]:  # fmt: skip
    """Return shapes of the results of all parts with caches, by name, and the tensors that these parts read."""
    graph = pair.rewritten
    stops: dict[str, Shape] = {}
    read: list[str] = []
    for region in regions:
        if pasts & {v.name for v in region.models[1].graph.input}:
            stops |= region.joins
            read += [name for b in region.boundaries for name in b.names[1]]
    after = graph.tainted(pasts, through=stops, shapes=False)
    for node in graph.nodes:  # caches that the rewrite did not change have no regions
        if not after.isdisjoint(names_read(node)):
            read += [name for name in node.input if name and name not in after]
            shape = _shape(pair, node.output[0]) if is_op(node, "Attention") else None
            if shape is not None:
                stops[node.output[0]] = shape
    return stops, read


def _large_left_out(
    pair: ModelPair, read: list[str]
) -> tuple[dict[str, Shape], list[tuple[NodeProto, TensorProto]]]:  # fmt: skip
    """Find operators with large weights that compute tokens separately, and make small substitutes for lookups."""
    graph, stops, lookups = pair.rewritten, dict[str, Shape](), []
    large = {name for name, t in graph.constants.items() if math.prod(t.dims) > _LARGE}
    for node in graph.nodes:
        inputs, shape = [name for name in node.input if name], _shape(pair, node.output[0])
        if large.isdisjoint(inputs):
            continue
        data = [name for name in inputs if name not in graph.constants and name not in large]
        if not data:
            large.update(node.output)  # computed weights, for example dequantized ones
        elif shape is not None and _is_by_token(node, large):
            stops[node.output[0]] = shape
            read += data
            table = _shape(pair, node.input[0]) if is_op(node, "Gather") else None
            if table is not None:
                name = f"{node.output[0]}:rows"
                rows = np.arange(table[int_attribute(node, "axis")].factor, dtype=np.float32)
                lookup = helper.make_node("Gather", [f"{name}/table", node.input[1]], [name], node.name)
                lookups.append((lookup, numpy_helper.from_array(rows, f"{name}/table")))
    return stops, lookups


def _is_by_token(node: NodeProto, large: set[str]) -> bool:
    if is_op(node, "Gather"):
        return node.input[0] in large
    if node.op_type in ("MatMulNBits", "QMoE", "MoE"):
        return node.input[0] not in large
    right = node.input[1] in large and node.input[0] not in large
    return right and (is_op(node, "MatMul") or (is_op(node, "Gemm") and not int_attribute(node, "transA")))


def _separates_tokens(shape: Sequence[Term]) -> bool:
    return sum(t.sequence > 0 for t in shape) == (sequence_axis(shape) is not None)


def _shape(pair: ModelPair, name: str) -> Shape | None:
    return next((k.shape for kinds in reversed(pair.kinds) if (k := kinds.get(name)) and k.shape is not None), None)
