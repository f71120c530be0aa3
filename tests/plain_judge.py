"""Judge the models of `plain_graphs`: the rewritten model against an interpreter in NumPy of its own."""

import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from harness import Array, Feeds, build, run, to_logical, to_physical
from mutation_cuts import KINDS
from mutations import Mutator
from onnx import helper, numpy_helper
from plain_graphs import VOCABULARY, Plain
from reference import attention, tensor_scatter

from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer import ImportedModel
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, Dim, Role, UpdateMode
from trt_kvcache.importer.check import check_rewrite
from trt_kvcache.importer.interface.exported_interface import PASSED_ON
from trt_kvcache.importer.pipeline import import_model, plan_model, rewrite_model

EQUAL, REFUSED, WRONG, SHAPE, CONTRACT = "equal", "refused", "wrong", "shape differs from plan", "contract of nobody"
REWRITE, RUN, BUILD, FOREIGN, VACUOUS = "rewrite failed", "run failed", "build failed", "foreign exception", "vacuous"
GARBAGE, MILD = 1e4, 0.5


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """`length` tokens per row, written from `starts`; `valid` of each row count afterwards."""

    length: int
    starts: tuple[int, ...]
    valid: tuple[int, ...]


def evaluate(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """All outputs of a model, each node in NumPy: products, softmax and sums in float64."""
    values: dict[str, Any] = {"": None}
    values |= {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values |= feeds
    with np.errstate(all="ignore"):
        for node in model.graph.node:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            result = _OPERATORS[node.op_type](*(values[name] for name in node.input), **attributes)
            results = result if isinstance(result, tuple) else (result,)
            values.update((n, r) for n, r in zip(node.output, results, strict=False) if n)
    return {value.name: values[value.name] for value in model.graph.output}


def _attend(q: Array, k: Array, v: Array, mask: Array | None = None, _a: None = None, _b: None = None,
            lengths: Array | None = None, **attributes: Any) -> tuple[Any, ...]:  # fmt: skip
    y, scores = attention(q, k, v, mask, lengths, **attributes)
    return y, None, None, scores


def _reshape(x: Array, shape: Array) -> Array:
    return x.reshape([x.shape[i] if size == 0 else int(size) for i, size in enumerate(shape)])


def _slice(x: Array, starts: Array, ends: Array, axes: Array) -> Array:
    cut = [slice(None)] * x.ndim
    for start, end, axis in zip(starts, ends, axes, strict=True):
        cut[int(axis)] = slice(int(start), int(end))
    return x[tuple(cut)]


def _sum(x: Array, axes: Array) -> Array:
    wide = x.astype(np.float64) if x.dtype.kind not in "iub" else x
    return wide.sum(axis=tuple(int(a) for a in axes), keepdims=True).astype(x.dtype)


def _quantize(x: Array, scale: Array, zero: Array) -> Array:
    limits = np.iinfo(zero.dtype)
    codes = np.rint(x.astype(np.float64) / np.float64(scale)) + np.float64(zero)
    return np.clip(codes, limits.min, limits.max).astype(zero.dtype)


def _float(function: Callable[..., Any]) -> Callable[..., Any]:
    """In float64, and rounded to the type of the first operand."""
    return lambda *xs: function(*(x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in xs)).astype(
        xs[0].dtype
    )


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": _float(np.add),
    "And": np.logical_and,
    "Attention": _attend,
    "Cast": lambda x, to: x.astype(helper.tensor_dtype_to_np_dtype(to)),
    "DequantizeLinear": lambda x, s, z: ((x.astype(np.float64) - np.float64(z)) * np.float64(s)).astype(s.dtype),
    "Expand": lambda x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(int(d) for d in shape))),
    "Gather": lambda x, i, axis=0: np.take(x, i, axis=axis),
    "Greater": np.greater,
    "Identity": lambda x: x,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "MatMul": _float(np.matmul),
    "Min": np.minimum,
    "Mul": _float(np.multiply),
    "Neg": _float(np.negative),
    "QuantizeLinear": _quantize,
    "Range": np.arange,
    "ReduceSum": lambda x, axes, keepdims=1: _sum(x, axes),
    "Reshape": _reshape,
    "Shape": lambda x, start=0, end=None: np.array(x.shape[start:end], np.int64),
    "Slice": _slice,
    "Squeeze": lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(int(a) for a in axes)),
    "Sub": _float(np.subtract),
    "TensorScatter": lambda p, u, w=None, axis=-2, mode=b"linear": tensor_scatter(p, u, w, axis, mode.decode()),
    "Transpose": lambda x, perm: np.transpose(x, perm),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(int(a) for a in axes)),
    "Where": np.where,
}


def episodes(plain: Plain, plan: CachePlan, rng: np.random.Generator) -> Iterator[tuple[Step, ...]]:
    """Steps over one set of caches each: as a caller of the engine goes on from its starts, within the contract."""
    batch = plain.batch or 3
    longest = min([c.contract.max_update_length for c in plan.caches if c.contract and c.contract.max_update_length]
                  + [3, plain.room])  # fmt: skip
    lengths = [longest, 1, 2, 1, 1, 1, 1, 1, 1]
    straddle = {c.capacity for c in plan.caches if c.contract and c.contract.no_straddle}

    def go(starts: Sequence[int]) -> tuple[Step, ...]:
        steps, places = [], list(starts)
        for wanted in lengths:
            length = plain.length or min(wanted, longest)
            if straddle:
                ends = min(rows - p % rows for rows in straddle for p in places)
                if plain.length is None:
                    length = min(length, ends)
                elif length > ends:
                    break
            if not plain.circular and max(places) + length > plain.room:
                break
            steps.append(Step(length, tuple(places), tuple(min(p + length, plain.room) for p in places)))
            places = [p + length for p in places] if plain.indexed else places
        return tuple(steps)

    length = plain.length or min(2, longest)
    if not plain.indexed:
        yield tuple(
            Step(s, (0,) * batch, (s,) * batch) for s in ({1, length, longest} if not plain.length else {length})
        )
    else:
        yield go([0] * batch)
        ends = plain.capacity if plain.circular else plain.room
        if plain.same:
            starts = [[n] * batch for n in (3, max(ends - 3, 0))]
        else:
            starts = [
                [(2 + 3 * row) % max(ends - 2, 1) for row in range(batch)],
                [max(ends - 2 - row, 0) for row in range(batch)],
            ]
        if plain.circular:
            starts.append([ends - 1 + (0 if plain.same else row) for row in range(batch)])
            starts.append([2 * ends + 3 + (0 if plain.same else 2 * row) for row in range(batch)])
        for given in starts:
            if straddle and plain.length:
                given = [p - p % plain.length for p in given]
            if steps := go(given):
                yield steps
    if plain.short and not plain.same and plain.indexed:
        ring = not plain.circular and any(
            c.mode is UpdateMode.CIRCULAR for c in plan.caches
        )  # all tokens of a row count, or none
        less = length if ring else max(length - 1, 0)
        yield (Step(length, (0,) * batch, tuple((0, length, less)[row % 3] for row in range(batch))),)
        if not straddle and 4 + length <= plain.room:
            starts = [4 - row % 3 for row in range(batch)]
            valid = tuple((0, p + length, p + less)[(row + 1) % 3] for row, p in enumerate(starts))
            yield (Step(length, tuple(starts), valid),)


def contract_of_nobody(plain: Plain, plan: CachePlan) -> str:
    """The cache whose fixed updates cannot all stay before the end, or nothing."""
    for cache in plan.caches:
        if cache.contract and cache.contract.no_straddle and plain.length and cache.capacity % plain.length:
            return f"updates of {plain.length} rows into {cache.capacity}"
    return ""


class Caller:
    def __init__(self, plain: Plain, rng: np.random.Generator, garbage: float) -> None:
        self.plain, self.rng, self.garbage = plain, rng, garbage
        self.values = {v.name: v for v in plain.model.graph.input}

    def shape(self, name: str, step: Step, keys: int) -> list[int]:
        sizes = dict.fromkeys("BW", len(step.starts)) | {"S": step.length, "L": self.plain.capacity, "T": keys}
        dims = self.values[name].type.tensor_type.shape.dim
        return [d.dim_value if d.HasField("dim_value") else sizes[d.dim_param] for d in dims]

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.values[name].type.tensor_type.elem_type))

    def pasts(self, step: Step) -> Feeds:
        """Caches before a step: tokens up to its starts, garbage after them."""
        found = {}
        for name, part in self.plain.parts.items():
            if part == "past":
                shape, dtype = self.shape(name, step, 0), self.dtype(name)
                past = self.random(shape, dtype)
                axis = self.plain.axes[name]
                for row, start in enumerate(step.starts):
                    if start < shape[axis]:
                        place = (row, *[slice(None)] * (axis - 1), slice(start, None))
                        past[place] = np.asarray(self.bad(dtype)).astype(dtype)
                found[name] = past
        return found

    def bad(self, dtype: np.dtype[Any]) -> float:
        return self.garbage if dtype.kind not in "iu" else np.iinfo(dtype).max if self.garbage > MILD else 9

    def random(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        if dtype.kind in "iu":
            return self.rng.integers(np.iinfo(dtype).min // 4, np.iinfo(dtype).max // 4, shape).astype(dtype)
        if dtype.kind == "b":
            return self.rng.random(shape) < 0.5
        return self.rng.standard_normal(shape).astype(dtype)

    def feeds(self, step: Step, keys: int) -> Feeds:
        """Everything but caches."""
        feeds: Feeds = {}
        for name, part in self.plain.parts.items():
            shape, dtype = self.shape(name, step, keys), self.dtype(name)
            if part == "ids":
                feeds[name] = self.rng.integers(0, VOCABULARY, shape).astype(dtype)
            elif part == "values":
                feeds[name] = self.random(shape, dtype)
            elif part in ("start", "valid"):
                feeds[name] = np.array(step.starts if part == "start" else step.valid)[: shape[0]].astype(dtype)
            elif part == "mask":
                feeds[name] = self.mask(shape, dtype, step, keys)
            elif part == "rows":
                feeds[name] = self.rng.integers(0, self.plain.capacity, shape)
        return feeds

    def mask(self, shape: list[int], dtype: np.dtype[Any], step: Step, keys: int) -> Array:
        """Each query sees tokens up to its own, some hidden; what all queries or rows share hides more."""
        width = shape[-1]
        last = np.array(step.starts)[:, None] + np.arange(step.length)
        seen = np.arange(width) <= last[:, :, None]  # [B, S, K]
        hidden = self.rng.random(seen.shape) < 0.2
        hidden[..., 0] = False
        seen = (seen & ~hidden)[:, None]
        full = [1] * (4 - len(shape)) + shape
        for axis in (0, 2):
            if full[axis] == 1:
                seen = seen.all(axis=axis, keepdims=True)
        seen = np.broadcast_to(seen, full).reshape(shape)
        if dtype.kind == "b":
            return seen.copy()
        if dtype.kind in "iu":
            return np.where(seen, self.rng.integers(-2, 2, shape), -30).astype(dtype)
        bias = self.rng.uniform(-1, 1, shape)
        return np.where(seen, bias, -np.inf if self.plain.seed % 2 else -1e4).astype(dtype)


class _DiffersError(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def judge(plain: Plain, *, build_too: bool = False) -> Outcome:
    """Plan, rewrite, run and compare one model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(plain.model, path)
        try:
            plan = plan_model(path, plain.options)
        except TrtKvCacheError as error:
            return _refused(plain, error)
        except Exception:  # noqa: BLE001 - that is what it looks for
            return Outcome(FOREIGN, traceback.format_exc(limit=-1).strip().splitlines()[-1])
        try:
            result = import_model(path, plain.options)
            written = Path(folder) / "rewritten.onnx"
            rewrite_model(path, written, plain.options)
            rewritten = onnx.load(written)
            onnx.checker.check_model(rewritten, full_check=True)
        except Exception as error:  # noqa: BLE001
            return Outcome(REWRITE, _line(error))
        if result.plan != plan:
            return Outcome(REWRITE, "the rewrite has another plan")
        try:
            outcome = _compare(plain, plan, rewritten)
        except _DiffersError as error:
            return Outcome(error.kind, str(error))
        except Exception as error:  # noqa: BLE001
            return Outcome(RUN, _line(error))
        if build_too and outcome.kind == EQUAL and plain.options.target.value == "tensorrt-rtx":
            built = build(ImportedModel(result.source, plan, rewritten))
            if built.stage != "built":
                return Outcome(BUILD, str(built)[:300])
        return outcome


def trial(plain: Plain, seed: int) -> Outcome:
    """The check on a fault in the rewritten model, and the interpreter on what the check takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(plain.model, path)
        try:
            result = import_model(path, plain.options)
        except TrtKvCacheError as error:
            return _refused(plain, error)
        wrong = deepcopy(result.model)
        done = Mutator(wrong, seed, KINDS).mutate()
        try:
            check_rewrite(result.source.proto, wrong, result.plan, {}, Path(folder))
        except TrtKvCacheError as error:
            return Outcome(REFUSED, f"{done}: {error}")
        try:
            outcome = _compare(plain, result.plan, wrong)
        except _DiffersError as error:
            return Outcome(error.kind, f"{done}: {error}")
        return Outcome(outcome.kind, f"{done}: {outcome.detail}")


def _refused(plain: Plain, error: TrtKvCacheError) -> Outcome:
    text = str(error)
    if not text or any(ord(c) < 32 or ord(c) == 127 for c in text):
        return Outcome(FOREIGN, f"a message of several lines or control characters: {text[:120]!r}")
    return Outcome(REFUSED, f"{type(error).__name__}: {text}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:220]}"


def _compare(plain: Plain, plan: CachePlan, rewritten: onnx.ModelProto) -> Outcome:
    _check_interface(plan, rewritten)
    if why := contract_of_nobody(plain, plan):
        return Outcome(CONTRACT, why)
    compared = 0
    rng = np.random.default_rng(plain.seed)
    # The plan takes away, and names, outputs that are an input of the same name.
    gone = {c.old.split()[0] for c in plan.changes if c.io == "output" and c.why == PASSED_ON} & plain.parts.keys()
    for steps in episodes(plain, plan, rng):
        garbage = MILD if plain.faint or _garbage_counts(plain, steps[0]) else _large(plain)
        caller = Caller(plain, np.random.default_rng(plain.seed), garbage)
        logical = caller.pasts(steps[0])
        physical = _to_physical(plan, logical, steps[0], garbage)
        for step in steps:
            longest = max(step.valid)
            keys = min(max(longest, 1) + int(rng.integers(0, 3)), plain.room)
            feeds = caller.feeds(step, keys)
            want = {n: v for n, v in evaluate(plain.model, {**logical, **feeds}).items() if n not in gone}
            got: Feeds = {}
            for least in (True, False):
                got = run(rewritten, _as_planned(plain, plan, {**feeds, **physical}, step, least))
                where = f"{step} with {'the least' if least else 'every'} key"
                try:
                    compared += _compare_outputs(plain, plan, want, got, step, where)
                except _DiffersError:
                    # The sum of a score and -10,000 has few digits left; a query that sees no other key says nothing.
                    masks = {n: v for n, v in feeds.items() if n in plain.masks and v.dtype.kind != "b"}
                    low = {
                        n: np.where(v < _LOW, v * rng.uniform(1, 2, v.shape), v).astype(v.dtype)
                        for n, v in masks.items()
                    }
                    other = evaluate(plain.model, {**logical, **feeds, **low})
                    certain = {n: _where_equal(v, other[n]) for n, v in want.items()}
                    compared += _compare_outputs(plain, plan, certain, got, step, where)
            logical = {past: want[present] for past, present in plain.presents.items()}
            carried = {c.past: got[c.present] for c in plan.caches if c.carried}
            physical = {p: carried[p] if p in carried else logical[p] for p in physical}
    return Outcome(EQUAL) if compared else Outcome(VACUOUS, "nothing but NaN, or no step")


def _large(plain: Plain) -> float:
    """ONNX Runtime hides scores of float16 by adding the lowest number, which those of larger garbage outweigh."""
    half = any(v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16 for v in plain.model.graph.input)
    return 100.0 if half else GARBAGE


def _garbage_counts(plain: Plain, step: Step) -> bool:
    """True if rows that hold no token count in the model as exported."""
    found = []
    for garbage in (GARBAGE, MILD):
        caller = Caller(plain, np.random.default_rng(1), garbage)
        pasts = caller.pasts(step)
        outputs = evaluate(plain.model, {**pasts, **caller.feeds(step, min(max(*step.valid, 1), plain.room))})
        beside = {"past", "view", "scores"}
        found.append({n: a for n, a in outputs.items() if n not in plain.presents.values()
                      and n.split("_")[0] not in beside})  # fmt: skip
    return any(
        not np.array_equal(found[0][n].astype(float), found[1][n].astype(float), equal_nan=True) for n in found[0]
    )


def _check_interface(plan: CachePlan, model: onnx.ModelProto) -> None:
    """The rewritten model declares the inputs and outputs of the plan."""
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        planned = {t.name: t for t in plan.tensors if t.io == io}
        declared = {v.name: v for v in values}
        if planned.keys() != declared.keys():
            raise _DiffersError(SHAPE, f"{io}s: planned {sorted(planned)}, found {sorted(declared)}")
        for name, tensor in planned.items():
            kind = declared[name].type.tensor_type
            dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
            if onnx.TensorProto.DataType.Name(kind.elem_type).lower() != tensor.dtype:
                raise _DiffersError(SHAPE, f"{io} '{name}' is planned {tensor.dtype} and declared otherwise")
            fixed = [
                (a, b)
                for a, b in zip(dims, tensor.shape, strict=False)
                if isinstance(a, int) and (isinstance(b, int) or io == "input")
            ]
            if len(dims) != len(tensor.shape) or any(a != b for a, b in fixed):
                raise _DiffersError(SHAPE, f"{io} '{name}' is planned {list(tensor.shape)} and declared {dims}")


def _as_planned(plain: Plain, plan: CachePlan, feeds: Feeds, step: Step, least: bool) -> Feeds:
    """Feeds with the added inputs; masks that the plan lets be shorter are."""
    fed = dict(feeds)
    longest = max(max(step.valid), max(step.starts) + step.length if "mask" in plain.parts.values() else 0, 1)
    for span in plan.spans:
        fed[span.name] = np.arange(min(longest, span.capacity) if least else span.capacity, dtype=np.int64)
    if plan.logits_span is not None:
        fed[plan.logits_span.name] = np.arange(1 if least else 64)
    for tensor in plan.tensors:
        if tensor.io == "input" and tensor.role is Role.MASK and tensor.name in plain.masks and "keys" in tensor.axes:
            fixed = isinstance(plain.masks[tensor.name].shape[-1], int)
            if fixed and least:
                fed[tensor.name] = fed[tensor.name][..., : min(longest, plain.capacity)]
    for tensor in plan.tensors:
        if tensor.io == "input" and fed[tensor.name].dtype != _dtype(tensor.dtype):
            raise _DiffersError(SHAPE, f"input '{tensor.name}' is planned {tensor.dtype}")
    return {t.name: fed[t.name] for t in plan.tensors if t.io == "input"}


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name.upper())))


def _is_ring(plain_rows: int, cache: CacheUpdate) -> bool:
    return cache.mode is UpdateMode.CIRCULAR and cache.capacity < plain_rows


def _to_physical(plan: CachePlan, logical: Feeds, step: Step, garbage: float) -> Feeds:
    """Caches as the plan has them; of a ring, the newest rows."""
    physical = dict(logical)
    for cache in plan.caches:
        if cache.past not in logical:
            continue
        past, axis = logical[cache.past], cache.sequence_axis
        if _is_ring(past.shape[axis], cache):
            ring = np.moveaxis(np.full_like(past, garbage), axis, 1)[:, : cache.capacity].copy()
            lines = np.moveaxis(past, axis, 1)
            for row, start in enumerate(step.starts):
                for position in range(max(0, start - cache.capacity), start):
                    ring[row, position % cache.capacity] = lines[row, position]
            past = np.moveaxis(ring, 1, axis)
        physical[cache.past] = to_physical(cache, past)
    return physical


def _compare_outputs(plain: Plain, plan: CachePlan, want: Feeds, got: Feeds, step: Step, where: str) -> int:
    caches = {c.present: c for c in plan.caches if c.carried}
    planned = {t.name: t for t in plan.tensors if t.io == "output"}
    if set(got) != set(want):
        raise _DiffersError(SHAPE, f"outputs {sorted(got)}, of the original {sorted(want)}")
    compared = 0
    for name, expected in want.items():
        result, tensor = got[name], planned[name]
        if result.dtype != expected.dtype or result.dtype != _dtype(tensor.dtype):
            raise _DiffersError(
                SHAPE, f"'{name}' is {result.dtype}, planned {tensor.dtype}, was {expected.dtype}; {where}"
            )
        _check_dims(plain, plan, name, tensor.shape, result, step, where)
        if name in caches:
            if _is_ring(expected.shape[caches[name].sequence_axis], caches[name]):
                expected, result = _newest(caches[name], expected, result, step)
            else:
                result = to_logical(caches[name], result)
        elif plan.logits_span is not None and name == plan.logits_span.output:
            expected = expected[:, -result.shape[1] :] if result.shape[1] else expected
        if result.shape != expected.shape:
            raise _DiffersError(SHAPE, f"'{name}' is {list(result.shape)}, was {list(expected.shape)}; {where}")
        coarse = any(node.op_type == "QuantizeLinear" for node in plain.model.graph.node)  # ties go either way
        compared += _close(name, result, expected, where, 2e-1 if coarse else _TOLERANCE.get(str(expected.dtype), 0))
    return compared


def _check_dims(
    plain: Plain, plan: CachePlan, name: str, shape: tuple[Dim, ...], result: Array, step: Step, where: str
) -> None:
    known = {"B": len(step.starts), "S": step.length, "L": plain.capacity}
    pairs = list(zip(shape, result.shape, strict=False))
    wrong = [d for d, size in pairs if (known.get(d, size) if isinstance(d, str) else d) != size]
    if len(shape) != result.ndim or (wrong and not (plan.logits_span and name == plan.logits_span.output)):
        raise _DiffersError(SHAPE, f"'{name}' is {list(result.shape)}, planned {list(shape)}; {where}")


def _newest(cache: CacheUpdate, expected: Array, result: Array, step: Step) -> tuple[Array, Array]:
    """The rows of a ring that hold tokens, and the same of the original."""
    lines = np.moveaxis(expected, cache.sequence_axis, 1)
    ring = np.moveaxis(result, cache.physical_sequence_axis, 1)
    pairs = [
        (lines[row, position].reshape(-1), ring[row, position % cache.capacity].reshape(-1))
        for row, start in enumerate(step.starts)
        for position in range(max(0, start + step.length - cache.capacity), start + step.length)
    ]
    return np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs])


_LOW = -1e3  # of numbers in a mask that hide a key
_TOLERANCE = {"float32": 5e-4, "float16": 3e-2, "bfloat16": 2e-1, "float64": 1e-4}


def _where_equal(values: Array, other: Array) -> Array:
    """NaN in place of vectors that are not the same in both."""
    same = ((values == other) | (values != values)).all(-1, keepdims=True)
    return values if values.dtype.kind in "iub" else np.where(same, values, values.dtype.type("nan"))


def _close(name: str, result: Array, expected: Array, where: str, tolerance: float) -> int:
    """The count of numbers that were compared; those that are NaN in the original say nothing."""
    if expected.dtype.kind in "iub":
        # A number close to the middle of two steps goes to either, and so do those that a later layer makes of it.
        bad = np.abs(result.astype(int) - expected.astype(int)) > 2
        count = expected.size
    else:
        one, two = (x.astype(np.float64) for x in (result, expected))
        asked = ~np.isnan(two)
        with np.errstate(invalid="ignore"):
            far = np.abs(one - two) > tolerance * (1 + np.abs(two))
        bad, count = asked & ~(one == two) & (far | np.isnan(one) | ~np.isfinite(two)), int(asked.sum())
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        text = f"'{name}'{list(place)} is {float(result[place]):g}, was {float(expected[place]):g}"
        raise _DiffersError(WRONG, f"{text} ({int(bad.sum())} of {bad.size}); {where}")
    return count
