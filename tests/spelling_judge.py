"""Judge the models of `spellings`: the rewritten model's logits against ONNX Runtime on the original."""

import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from spellings import CAPACITY, VOCABULARY, Spelling, make, twin

from trt_kvcache.errors import AmbiguousRoleError, TrtKvCacheError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions, Role
from trt_kvcache.importer.pipeline import ImportedModel

EQUAL, REFUSED, WRONG, TRACE, UNRUN, UNLIKE = "equal", "refused", "wrong", "trace", "not run", "not the same decoder"
STEPS = (4, 1, 3, 1, 1)
GARBAGE = 1e4
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def texts(batch: int) -> Iterator[Array]:
    """The new tokens of each step."""
    rng = np.random.default_rng(5)
    for length in STEPS:
        yield rng.integers(0, VOCABULARY, (batch, length))


def exported(model: onnx.ModelProto, batch: int) -> list[Array]:
    """The logits of each step of a model as exported, which gets its presents back as pasts."""
    run = session(model)
    tokens, *others = _ordered(run, model)
    names = [o.name for o in run.get_outputs()]
    caches = [i for i in others if i.type == "tensor(float)"]
    sizes = {"past": 0, "batch": batch}
    held = {i.name: np.zeros([sizes.get(d, d) for d in i.shape], np.float32) for i in caches}
    past, made = 0, []
    for ids in texts(batch):
        length = ids.shape[1]
        feeds: dict[str, Array] = {tokens.name: ids, **held}
        for i in others:
            if i in caches:
                continue
            if i.shape == ["sequence"]:
                feeds[i.name] = past + np.arange(length)
            elif "total" in i.shape:
                feeds[i.name] = np.ones((batch, past + length), np.int64)
            else:
                feeds[i.name] = np.broadcast_to(past + np.arange(length), ids.shape)
        logits, *presents = run.run(names, {n: np.ascontiguousarray(v) for n, v in feeds.items()})
        made.append(logits)
        held = dict(zip(held, presents, strict=True))
        past += length
    return made


def _ordered(run: ort.InferenceSession, model: onnx.ModelProto) -> list[Any]:
    """Inputs with the tokens first: their ids look up the embeddings."""
    looked_up = next(n.input[1] for n in model.graph.node if n.op_type == "Gather")
    return sorted(run.get_inputs(), key=lambda i: i.name != looked_up)


def rewritten(made: ImportedModel, batch: int) -> list[Array]:
    """The logits of each step of the rewritten model, of which unused rows hold garbage."""
    run, plan = session(made.model), made.plan
    rng = np.random.default_rng(7)
    held: dict[str, Array] = {}
    for cache in plan.caches:
        shape = [batch if isinstance(d, str) else d for d in cache.physical_shape]
        held[cache.past] = (GARBAGE * rng.standard_normal(shape)).astype(np.float32)
    past, made_of = 0, []
    names = [o.name for o in run.get_outputs()]
    logits = next(n for n in names if n not in {c.present for c in plan.caches})
    for ids in texts(batch):
        length, feeds = ids.shape[1], dict(held)
        for t in plan.tensors:
            if t.io == "input" and t.name not in held:
                feeds[t.name] = {
                    Role.TOKENS: ids,
                    Role.POSITIONS: np.broadcast_to(past + np.arange(length), ids.shape[2 - len(t.shape) :]),
                    Role.WRITE_INDICES: np.full(batch, past),
                    Role.VALID_LENGTHS: np.full(batch, past + length),
                    Role.SPAN: np.arange(past + length),
                }[t.role]  # fmt: skip
        span = plan.logits_span
        if span is not None:
            feeds[span.name] = np.arange(length)
        given = {i.name: np.ascontiguousarray(feeds[i.name]) for i in run.get_inputs()}
        outs = dict(zip(names, run.run(names, given), strict=True))
        made_of.append(outs[logits])
        held = {c.past: outs[c.present] for c in plan.caches}
        past += length
    return made_of


def judge(spelling: Spelling) -> Outcome:
    model = make(spelling)
    batch = 1 if model.graph.input and _fixed_batch(model) else 2
    try:
        wanted = exported(model, batch)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime does not run it
        return Outcome(UNRUN, f"{error}"[:300])
    usual = exported(make(twin(spelling)), batch)
    if why := _apart(usual, wanted):
        return Outcome(UNLIKE, why)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        try:
            made = _import(path)
        except TrtKvCacheError as error:
            return Outcome(REFUSED, f"{type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 - a bug
            return Outcome(TRACE, traceback.format_exc())
        try:
            found = rewritten(made, batch)
        except Exception:  # noqa: BLE001
            return Outcome(TRACE, "running: " + traceback.format_exc())
    why = _apart(wanted, found)
    return Outcome(WRONG, why) if why else Outcome(EQUAL)


def _import(path: Path) -> ImportedModel:
    """Where names say nothing, with the config that the refusal wrote."""
    try:
        return import_model(path, PlanOptions(capacity=CAPACITY))
    except AmbiguousRoleError as error:
        config = path.with_suffix(".yaml")
        config.write_text(str(error)[str(error).index("roles: {") :])
        return import_model(path, PlanOptions(capacity=CAPACITY, config=str(config)))


def _fixed_batch(model: onnx.ModelProto) -> bool:
    out = model.graph.output[0].type.tensor_type.shape.dim[0]
    return bool(out.HasField("dim_value"))


def _apart(one: Sequence[Array], other: Sequence[Array]) -> str:
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-3, atol=1e-4):
            far = "" if a.shape != b.shape else f", {np.abs(a - b).max():.3g} apart"
            return f"step {step}: {a.shape} and {b.shape}{far}"
    return ""
