"""Faults that an engine may have, planted, and proofs that have to refuse them; and right engines, which they must not.

A fault is an edit of a rewritten model, or of the runner that runs it on the CPU: no GPU is needed, and nothing here
ran on one. Models are the stored exports, and decoders of `scripts/decoders.py` with rings, long caches and large
vocabularies, each in float32, float16 and bfloat16; with `--real`, exports of trained models. A right engine is the
rewritten model as it is, and with its numbers moved at random by twice the rounding of its type. By hand::

    PYTHONPATH=tests:tests/corpus:scripts python tests/proof_faults.py --faults 400
    PYTHONPATH=tests:tests/corpus:scripts python tests/proof_faults.py --faults 400 --capacity 300 --real FOLDER
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import msgspec
import numpy as np
import onnx
from decoders import DecoderConfig, write_decoder
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_kvcache.compare.bounds import Bounds
from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.proof import Proof
from trt_kvcache.compare.proof_recording import record_proof
from trt_kvcache.compare.rounding import UNITS, with_rounding
from trt_kvcache.errors import SessionError, TrtKvCacheError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions, Role
from trt_kvcache.importer.check import Checked
from trt_kvcache.importer.interface import index_limits
from trt_kvcache.importer.protos import iter_scopes, iter_tensors
from trt_kvcache.importer.steps.runnable import state_type
from trt_kvcache.runtime.ort import ort_runner
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.replay import Replay, replay
from trt_kvcache.runtime.runner import Array, StepBatch

MODELS = Path(__file__).parent / "models"
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
CAPACITY, BATCH, CHUNK, LOGITS = 40, 4, 8, 4


@dataclass
class Subject:
    """A model with its proof.

    Attributes:
        rewritten: what runs: the rewritten model; of a bfloat16 one its float32 twin.
    """

    name: str
    dtype: str
    imported: ImportedModel
    proof: Proof
    rewritten: ModelProto
    batch: int

    def open(self, model: ModelProto | None = None) -> Any:
        """A runner of the rewritten model, or of a form of it."""
        twin = self.dtype == "bfloat16"
        plan = _floats(self.imported.plan) if twin else self.imported.plan
        made = replace(self.imported, plan=plan, model=model or self.rewritten)
        with (
            patch.object(ort_runner, "import_unchecked", lambda *_, **__: (made, SimpleNamespace(result=Checked))),
            patch.object(ort_runner, "fuse_attention", lambda model, _: model),  # it follows the plan, not the fault
        ):
            runner = OnnxRuntimeRunner("model.onnx", max_batch=self.batch)
        return TwinRunner(runner, self.imported.plan) if twin else runner

    def replay(self, runner: Any) -> Replay:
        try:
            return replay(runner, self.proof)
        finally:
            runner.close()


class TwinRunner:
    """A float32 twin as a runner of bfloat16: caches hold what bfloat16 holds."""

    def __init__(self, runner: OnnxRuntimeRunner, plan: CachePlan) -> None:
        self._runner, self.plan = runner, plan
        self._kept = {t.name for t in plan.tensors if t.dtype == "bfloat16"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, batch: StepBatch) -> Array:
        wide = tuple(
            replace(c, arrays={n: a.astype(np.float32) if n in self._kept else a for n, a in c.arrays.items()})
            for c in batch.constants
        )
        embeds = None if batch.embeds is None else batch.embeds.astype(np.float32)
        return self._runner.step(replace(batch, constants=wide, embeds=embeds))

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        data = self._runner.read_row(name, row, tokens)
        return data.astype(ml_dtypes.bfloat16) if name in self._kept else data

    def write_row(self, name: str, row: int, data: Array) -> None:
        self._runner.write_row(name, row, data.astype(np.float32) if name in self._kept else data)


def _floats(plan: CachePlan) -> CachePlan:
    text = msgspec.json.encode(plan).decode().replace('"bfloat16"', '"float"')
    return msgspec.json.decode(text, type=CachePlan)


def retyped(model: ModelProto, dtype: str) -> ModelProto:
    """A model in another float type; its weights lie inside."""
    made = ModelProto()
    made.CopyFrom(model)
    target, floats = DTYPES[dtype], set(DTYPES.values())
    stashes = [a for scope in iter_scopes(made) for n in scope.node for a in n.attribute if a.name == "stash_type"]
    state_type(made, floats, target)
    for attribute in stashes:
        attribute.i = TensorProto.FLOAT
    for tensor in iter_tensors(made):
        if tensor.data_type in floats:
            with np.errstate(over="ignore"):
                values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(target))
            if values.dtype == np.float16:
                values = np.clip(values, np.finfo(np.float16).min, np.finfo(np.float16).max)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return made


def subject(name: str, path: Path, options: PlanOptions, chunk: int = CHUNK, batch: int = BATCH) -> Subject:
    """Record the proof of a model."""
    imported = import_model(path, options)
    tables = index_limits(imported.model, imported.plan)
    bounds = Bounds(batch, chunk, LOGITS, min(tables.positions.values(), default=None))
    proof = record_proof(imported, bounds)
    rewritten = imported.model
    if proof.facts.dtype == "bfloat16":
        rewritten, _ = Float32Copies(path.parent).copy(rewritten, path.parent)
    return Subject(name, proof.facts.dtype, imported, proof, rewritten, batch)


def stored(dtype: str, only: Sequence[str] = ()) -> Iterator[tuple[str, Callable[[Path], Subject]]]:
    """Each stored export in a type: its name, and what makes it a subject, in an empty folder."""
    for path in sorted(MODELS.glob("**/*.onnx")):
        name = path.parent.relative_to(MODELS).as_posix()
        grows = name.startswith(("optimum/", "ort-genai/", "transformers/")) or "_dynamic_" in name
        options = PlanOptions(capacity=CAPACITY) if grows else PlanOptions()
        if not only or any(part in name for part in only):
            yield f"{name} {dtype}", partial(_stored, f"{name} {dtype}", path, dtype, options)


def _stored(name: str, path: Path, dtype: str, options: PlanOptions, folder: Path) -> Subject:
    model = retyped(onnx.load(path), dtype)
    onnx.save(model, folder / "model.onnx")
    return subject(name, folder / "model.onnx", options)


def real(folder: Path, dtype: str, capacity: int, batch: int) -> tuple[str, Callable[[Path], Subject]]:
    """An export of a trained model in a type, as `stored` gives others."""
    name = f"{folder.name} {dtype}"

    def make(scratch: Path) -> Subject:
        model = retyped(onnx.load(folder / "model.onnx"), dtype)
        onnx.save(model, scratch / "model.onnx", save_as_external_data=True, location="model.onnx.data")
        return subject(name, scratch / "model.onnx", PlanOptions(capacity=capacity), 256, batch)

    return name, make


def decoders() -> Iterator[tuple[str, Callable[[Path], Subject]]]:
    """Decoders with rings, with caches longer than a span, and with many tokens."""
    for dtype in DTYPES:
        for kind, config in (
            ("long", DecoderConfig(dtype=dtype, capacity=320)),
            ("ring", DecoderConfig(dtype=dtype, capacity=24, mode="circular")),
            ("large vocabulary", DecoderConfig(dtype=dtype, capacity=64, vocab=4096)),
            ("far", DecoderConfig(dtype=dtype, capacity=1200)),
            ("far ring", DecoderConfig(dtype=dtype, capacity=800, mode="circular")),
        ):
            yield f"{kind} {dtype}", partial(_decoder, f"{kind} {dtype}", config)


def _decoder(name: str, config: DecoderConfig, folder: Path) -> Subject:
    return subject(name, write_decoder(folder / "model.onnx", config), PlanOptions())


Edit = Callable[[ModelProto], None]


def _nodes(model: ModelProto, *ops: str) -> list[NodeProto]:
    return [n for n in model.graph.node if n.op_type in ops]


def _constant(model: ModelProto, values: Any, dtype: Any = np.int64) -> str:
    name = f"fault/{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(values, dtype), name))
    return name


def _insert(model: ModelProto, at: int, place: int, op: str, *others: str, **attributes: Any) -> None:
    """Put an operator before one input of the node with this number."""
    node = model.graph.node[at]
    name = f"fault/{op}/{at}/{place}"
    new = helper.make_node(op, [node.input[place], *others], [name], name, **attributes)
    node.input[place] = name
    model.graph.node.insert(at, new)


def _after(model: ModelProto, at: int, op: str, *others: str, **attributes: Any) -> None:
    """Put an operator after the first output of a node."""
    node = model.graph.node[at]
    name = node.output[0]
    node.output[0] = f"fault/before/{name}"
    model.graph.node.insert(
        at + 1, helper.make_node(op, [node.output[0], *others], [name], f"fault/{op}", **attributes)
    )


def _bypass(model: ModelProto, at: int, place: int = 0) -> None:
    """A node gives what it reads."""
    node = model.graph.node[at]
    new = helper.make_node("Identity", [node.input[place]], [node.output[0]], f"fault/{node.name}")
    model.graph.node.insert(at, new)
    model.graph.node.remove(node)


def _set(model: ModelProto, at: int, name: str, value: Any) -> None:
    node = model.graph.node[at]
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _other_op(model: ModelProto, at: int, op: str) -> None:
    model.graph.node[at].op_type = op


def _changed_weight(model: ModelProto, name: str, change: Callable[[Array], Array], folder: str) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    values = numpy_helper.to_array(tensor, folder)
    tensor.CopyFrom(numpy_helper.from_array(change(values.copy()).astype(values.dtype), name))


def _exchanged(model: ModelProto, at: int) -> None:
    given = model.graph.node[at].input
    given[1], given[2] = given[2], given[1]


def _without_head(model: ModelProto, at: int) -> None:
    """The first query head gives nothing: its neighbours' numbers stay."""
    dtype, name = _float_dtype(model), model.graph.node[at].output[0]
    zero, one, ends, axis = (_constant(model, v) for v in ([0], [1], [1 << 30], [1]))
    _after(model, at, "Identity")
    whole, made = f"fault/before/{name}", [f"fault/{part}/{name}" for part in ("first", "none", "rest")]
    added = [
        helper.make_node("Slice", [whole, zero, one, axis], [made[0]], "fault/first"),
        helper.make_node("Mul", [made[0], _constant(model, 0, dtype)], [made[1]], "fault/none"),
        helper.make_node("Slice", [whole, one, ends, axis], [made[2]], "fault/rest"),
        helper.make_node("Concat", made[1:], [name], "fault/heads", axis=1),
    ]
    del model.graph.node[at + 1]
    for number, node in enumerate(added):
        model.graph.node.insert(at + 1 + number, node)


def _float_dtype(model: ModelProto) -> Any:
    kinds = {t.data_type for t in iter_tensors(model)}
    return np.float16 if TensorProto.FLOAT16 in kinds else np.float32


def edits(subject: Subject, seed: int) -> Iterator[tuple[str, Edit]]:
    """Faults of the graph: what was done, and the edit of a copy of the rewritten model."""
    model, rng, folder = subject.rewritten, np.random.default_rng(seed), str(subject.imported.source.path.parent)
    weights = {t.name: t for t in model.graph.initializer}
    layer, last = 0, len(_nodes(model, "Attention")) - 1
    for at, node in enumerate(model.graph.node):
        op = node.op_type
        if layer not in (0, 2, last // 2, last - 1, last, last + 1):
            layer += op == "Attention"
            continue
        layer += op == "Attention"
        if op == "LessOrEqual":
            yield "mask: the newest key hidden", partial(_other_op, at=at, op="Less")
            yield "mask: one key too many", lambda m, at=at: _insert(m, at, 1, "Add", _constant(m, 1))
            yield "mask: shifted by one", lambda m, at=at: _insert(m, at, 0, "Add", _constant(m, 1))
        elif op == "Attention":
            yield "attention: wrong scale", partial(_set, at=at, name="scale", value=0.4)
            yield "attention: another softcap", partial(_set, at=at, name="softcap", value=0.5)
            scale = next((a.f for a in node.attribute if a.name == "scale"), 0)
            if scale:
                yield "attention: scale 10 % larger", partial(_set, at=at, name="scale", value=1.1 * scale)
            yield "attention: K and V exchanged", partial(_exchanged, at=at)
            if not any(a.name == "q_num_heads" for a in node.attribute):
                yield "attention: a head of zeros", partial(_without_head, at=at)
            if len(node.input) > 3 and node.input[3]:
                yield "attention: no mask", lambda m, at=at: m.graph.node[at].input.__setitem__(3, "")
            if len(node.input) > 3:
                yield (
                    "attention: K for V",
                    lambda m, at=at: m.graph.node[at].input.__setitem__(2, m.graph.node[at].input[1]),
                )
        elif op == "TensorScatter":
            yield from _writes(model, at, node)
        elif op == "RotaryEmbedding":
            yield "rotation: missing", partial(_bypass, at=at)
            yield "rotation: interleaved", partial(_set, at=at, name="interleaved", value=1)
        elif op == "Neg":
            yield "rotation: wrong sign", partial(_bypass, at=at)
        elif op in ("Cos", "Sin"):
            yield "rotation: wrong function", partial(_other_op, at=at, op="Sin" if op == "Cos" else "Cos")
        elif op in ("Sigmoid", "Tanh", "Relu", "Gelu", "Erf"):
            yield "activation: missing", partial(_bypass, at=at)
        elif op in ("RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization"):
            yield "norm: missing", partial(_bypass, at=at)
            yield (
                "norm: weights missing",
                lambda m, n=node.input[1]: (
                    n in weights and _changed_weight(m, n, lambda w: np.roll(w, 1) * 0.5, folder)
                ),
            )
        elif op == "Sqrt":
            yield "norm: without root", partial(_bypass, at=at)
        elif op == "Softmax":
            yield "softmax: another axis", partial(_set, at=at, name="axis", value=1)
        elif op == "Add" and not any(n in weights for n in node.input) and "trt_kvcache" not in node.name:
            yield "residual: missing", partial(_bypass, at=at, place=1)
        elif op == "MatMul" and len(node.input) > 1 and node.input[1] in weights:
            yield from _products(model, at, node, weights[node.input[1]], rng, folder)
    counted = (Role.WRITE_INDICES, Role.VALID_LENGTHS, Role.POSITIONS)
    for name in [t.name for t in subject.imported.plan.tensors if t.io == "input" and t.role in counted]:
        readers = [(i, j) for i, n in enumerate(model.graph.node) for j, x in enumerate(n.input) if x == name]
        if readers:
            for offset in (1, -1):
                yield f"{name}: off by {offset}", partial(_offset, name=name, offset=offset)
    if any(n == "attention_span" for node in model.graph.node for n in node.input):
        yield "span: short by one", _short_span
    outputs = {v.name for v in model.graph.output}
    head = next((i for i, n in enumerate(model.graph.node) if n.output[0] in outputs and n.op_type == "MatMul"), None)
    if head is not None:
        yield (
            "logits: one column",
            lambda m, at=head: _after(
                m, at, "Mul", _constant(m, [1] * 7 + [3] + [1] * (subject.proof.facts.vocab - 8), _float_dtype(m))
            ),
        )
        yield "logits: 20% larger", lambda m, at=head: _after(m, at, "Mul", _constant(m, 1.2, _float_dtype(m)))
        yield "logits: not a number", lambda m, at=head: _after(m, at, "Sqrt")


def _writes(model: ModelProto, at: int, node: NodeProto) -> Iterator[tuple[str, Edit]]:
    yield "write: one row late", lambda m: _insert(m, at, 2, "Add", _constant(m, 1))
    yield "write: at row 0", lambda m: _insert(m, at, 2, "Mul", _constant(m, 0))
    yield "write: rows of zeros", lambda m: _insert(m, at, 1, "Mul", _constant(m, 0, _float_dtype(m)))
    others = [n for n in _nodes(model, "TensorScatter") if n is not node]
    twin = next((n for n in others if n.input[0] != node.input[0]), None)
    if twin is not None:
        updates, pasts = (node.input[1], twin.input[1]), (node.input[0], twin.input[0])

        def exchange(m: ModelProto, place: int, pair: tuple[str, str]) -> None:
            for n in _nodes(m, "TensorScatter"):
                if n.input[place] in pair:
                    n.input[place] = pair[1 - pair.index(n.input[place])]

        yield "write: into another layer's cache", partial(exchange, place=0, pair=pasts)
        makes = {o: i for i, n in enumerate(model.graph.node) for o in n.output}
        if makes.get(updates[1], len(makes)) < at:
            yield "write: rows of another cache", lambda m: m.graph.node[at].input.__setitem__(1, updates[1])
    present = node.output[0]

    def stale(m: ModelProto) -> None:
        for n in m.graph.node:
            for place, name in enumerate(n.input):
                if name == present:
                    n.input[place] = node.input[0]

    yield "read: the cache before the step", stale

    def lost(m: ModelProto) -> None:
        m.graph.node[at].output[0] = f"fault/{present}"
        for n in m.graph.node:
            for place, name in enumerate(n.input):
                if name == present:
                    n.input[place] = f"fault/{present}"
        m.graph.node.insert(0, helper.make_node("Identity", [node.input[0]], [present], "fault/lost"))

    yield "write: lost", lost


def _products(
    model: ModelProto, at: int, node: NodeProto, weight: TensorProto, rng: np.random.Generator, folder: str
) -> Iterator[tuple[str, Edit]]:
    name, size = node.input[1], int(weight.dims[-1])
    column = int(rng.integers(0, max(size // 16, 1))) * 16

    def zero(w: Array) -> Array:
        w[..., column : column + 16] = 0
        return w

    def larger(w: Array) -> Array:
        w[..., ::2] *= 2  # a norm after it, of heads or of all, would cancel one factor
        return w

    yield "product: one head wrong", partial(_changed_weight, name=name, change=zero, folder=folder)
    yield (
        "product: columns moved",
        partial(_changed_weight, name=name, change=lambda w: np.roll(w, 1, -1), folder=folder),
    )
    yield (
        "product: half of the columns twice as large",
        partial(_changed_weight, name=name, change=larger, folder=folder),
    )

    def overflow(m: ModelProto) -> None:
        dtype = _float_dtype(m)
        large = _constant(m, 1e4, dtype)
        _after(m, at, "Div", large)
        _after(m, at, "Cast", to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
        _after(m, at, "Cast", to=TensorProto.FLOAT16)
        _after(m, at, "Mul", large)

    yield "product: overflows float16", overflow


def _offset(model: ModelProto, name: str, offset: int) -> None:
    kind = next(v for v in model.graph.input if v.name == name).type.tensor_type.elem_type
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    other, made = _constant(model, offset, dtype), f"fault/{name}"
    zero = _constant(model, 0, dtype)
    for node in model.graph.node:
        node.input[:] = [made if n == name else n for n in node.input]
    model.graph.node.insert(0, helper.make_node("Max", [f"{made}/moved", zero], [made], f"{made}/max"))
    model.graph.node.insert(0, helper.make_node("Add", [name, other], [f"{made}/moved"], f"{made}/add"))


def _short_span(model: ModelProto) -> None:
    """Attention ends one row before the span does."""
    ends = [_constant(model, [i]) for i in (0, -1)]
    for node in model.graph.node:
        node.input[:] = ["fault/span" if n == "attention_span" else n for n in node.input]
    model.graph.node.insert(0, helper.make_node("Slice", ["attention_span", *ends], ["fault/span"], "fault/short"))


class FaultyRunner:
    """A runner of which one thing is wrong."""

    def __init__(self, runner: Any, fault: str, rng: random.Random) -> None:
        self._runner = runner
        self._fault = fault.removesuffix(", of the last layer")
        caches = [c.past for c in runner.plan.caches if c.carried]
        self._cache = caches[-1] if fault != self._fault else rng.choice(caches)
        self._steps = 0
        self._last: Array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, batch: StepBatch) -> Array:
        runner, fault = self._runner, self._fault
        decode = batch.length == 1
        rows = range(batch.first_row, batch.first_row + batch.rows)
        self._steps += 1
        before = {r: runner.read_row(self._cache, r, 1 << 30) for r in rows}
        if fault == "decode: the token of the step before" and decode:
            batch = replace(batch, tokens=(batch.tokens + 1) % runner.vocab)
        elif fault == "decode: one position late" and decode:
            batch = replace(batch, starts=batch.starts + 1)
        elif fault == "rows: the first of the buffer" and batch.first_row:
            batch = replace(batch, first_row=0)
        elif fault == "cache: a stale row" and decode and batch.starts.min() > 0:
            for r in rows:
                runner.write_row(self._cache, r, np.zeros_like(before[r][..., :1, :]))
        elif fault == "rows: all at the first one's place":
            batch = replace(batch, starts=np.full_like(batch.starts, batch.starts[0]))
        logits = np.array(runner.step(batch))
        if fault == "cache: writes of one layer lost":
            for r in rows:
                runner.write_row(self._cache, r, before[r])
        elif fault == "cache: the next row written, too":
            for r, start in zip(rows, batch.starts, strict=True):
                data = runner.read_row(self._cache, r, 1 << 30)
                data[..., (int(start) + batch.length) % data.shape[-2], :] = 1
                runner.write_row(self._cache, r, data)
        elif fault == "cache: another sequence's row written":
            other = next((r for r in range(runner.max_batch) if r not in rows), None)
            if other is not None:
                data = runner.read_row(self._cache, other, 1 << 30)
                data[..., 0, :] = 1
                runner.write_row(self._cache, other, data)
        elif fault == "rows: logits exchanged" and len(logits) > 1:
            logits = logits[::-1]
        elif fault == "decode: logits of the step before" and decode and self._last is not None:
            logits, self._last = self._last[:, -1:], logits
            return logits
        elif fault == "decode: half of the logits" and decode:
            logits[..., logits.shape[-1] // 2 :] = 0
        elif (
            fault == "wrap: rows from the second turn on lost"
            and int(batch.starts.max()) + 1 > before[rows[0]].shape[-2]
        ):
            for r in rows:
                runner.write_row(self._cache, r, before[r])
        elif fault == "chunk: all positions are the last" and not decode:
            logits = np.repeat(logits[:, -1:], logits.shape[1], 1)
        elif fault == "third step: garbage" and self._steps == 3:
            logits = logits * 0
        self._last = logits
        return logits


RUNNER_FAULTS = (
    "decode: the token of the step before", "decode: one position late", "rows: the first of the buffer",
    "cache: a stale row", "rows: all at the first one's place", "cache: writes of one layer lost",
    "cache: the next row written, too", "cache: another sequence's row written", "rows: logits exchanged",
    "decode: logits of the step before", "decode: half of the logits", "wrap: rows from the second turn on lost",
    "chunk: all positions are the last", "third step: garbage", "cache: a stale row, of the last layer",
    "cache: writes of one layer lost, of the last layer",
)  # fmt: skip


def faults(subject: Subject, seed: int) -> list[tuple[str, Edit | None]]:
    """All faults of a subject, in a random order; None: it is one of the runner."""
    found: list[tuple[str, Edit | None]] = [*edits(subject, seed), *((name, None) for name in RUNNER_FAULTS)]
    random.Random(f"{seed} {subject.name}").shuffle(found)
    return found


def trial(subject: Subject, name: str, edit: Edit | None, seed: int, right: Replay) -> str:
    """The outcome of a fault.

    Returns:
        ``"refused"``, ``"missed"``; ``"equal"``: it changes no number; ``"unfit"``: the model does not run with it.
    """
    model = None
    if edit is not None:
        model = ModelProto()
        model.CopyFrom(subject.rewritten)
        edit(model)
    try:
        runner = subject.open(model)
        if edit is None:
            runner = FaultyRunner(runner, name, random.Random(seed))
        found = subject.replay(runner)
    except (SessionError, TrtKvCacheError):
        return "unfit"
    if not found.passed:
        return "refused"
    return "equal" if _alike(found, right) else "missed"


def _alike(one: Replay, two: Replay) -> bool:
    pairs = zip(one.outputs, two.outputs, strict=True)
    return all(abs(a.part - b.part) <= 1e-5 for a, b in pairs)


def alarms(subject: Subject, seeds: Sequence[int]) -> list[str]:
    """Refusals of right engines: as it is, and rounded in other ways than the recording was."""
    found = []
    for seed in (None, *seeds):
        model = None
        if seed is not None:
            model = with_rounding(subject.rewritten, 2 * UNITS[subject.dtype], 1000 + seed)
        report = subject.replay(subject.open(model))
        if not report.passed:
            found.append(f"{'as it is' if seed is None else f'rounding {seed}'}: {report.findings[0]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=400, help="to plant, spread over all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roundings", type=int, default=3, help="of each right engine")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of models")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--real", nargs="*", type=Path, default=[], help="folders of exports, instead of stored ones")
    parser.add_argument("--capacity", type=int, default=300, help="of their caches")
    parser.add_argument("--batch", type=int, default=BATCH, help="that they are built for")
    asked = parser.parse_args()
    makers = [*decoders(), *(pair for dtype in asked.dtypes for pair in stored(dtype))]
    if asked.real:
        makers = [real(folder, dtype, asked.capacity, asked.batch) for dtype in asked.dtypes for folder in asked.real]
    makers = [(n, m) for n, m in makers if (not asked.only or any(o in n for o in asked.only))]
    makers = [(n, m) for n, m in makers if any(n.endswith(f" {d}") for d in asked.dtypes)]
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    wrong, without = [], Counter[str]()
    for number, (name, make) in enumerate(makers):
        with tempfile.TemporaryDirectory() as folder:
            try:
                made = make(Path(folder))
            except TrtKvCacheError as error:
                without[_short(error)] += 1
                continue
            counts["models"] += 1
            found = [f"false alarm: {name}: {why}" for why in alarms(made, range(asked.roundings))]
            wrong += found
            for line in found:
                _say(line)
            counts["right engines"] += 1 + asked.roundings
            right = made.replay(made.open())
            share = -(-(asked.faults - counts["faults"]) // max(len(makers) - number, 1))
            for fault, edit in faults(made, asked.seed):
                if share <= 0:
                    break
                outcome = trial(made, fault, edit, asked.seed, right)
                counts[outcome] += 1
                if outcome in ("refused", "missed"):
                    counts["faults"] += 1
                    kinds[fault] += 1
                    share -= 1
                    sys.stderr.write(f"{name}: {fault}: {outcome}\n")
                if outcome == "missed":
                    _say(f"missed: {name}: {fault}")
        sys.stderr.write(f"{name}: {dict(counts)}\n")
    for why, count in without.items():
        _say(f"no proof, {count} models: {why}")
    _say(f"{counts['models']} models, {counts['right engines']} right engines, {len(wrong)} false alarms")
    _say(
        f"{counts['faults']} faults of {len(kinds)} kinds: {counts['refused']} refused, {counts['missed']} missed "
        f"({counts['refused'] / max(counts['faults'], 1):.1%}); {counts['equal']} changed no number, "
        f"{counts['unfit']} do not run"
    )
    return int(bool(wrong) or counts["refused"] < 0.99 * counts["faults"])


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _short(error: Exception) -> str:
    return str(error).split(": ", 1)[-1][:110]


if __name__ == "__main__":
    sys.exit(main())
