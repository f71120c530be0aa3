"""The importer against decoders whose meaning was changed at random.

A mutated model is its own specification: the importer refuses it by an error of its own, or the rewritten model gives
the numbers that the mutated one gives in ONNX Runtime. Anything else is a bug.
"""

from __future__ import annotations

import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from mutations import Mutator

from trt_kvcache.errors import TrtKvCacheError, VerificationError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.steps.step import Step
from trt_kvcache.verify import VerifyOptions, verify_import
from trt_kvcache.verify.compare import difference, tolerance
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.sessions import RunError, open_session

VERIFY = VerifyOptions(batch=3, chunks=(4, 2), tokens=4)
_SECONDS = 20  # for one import


def judge(path: Path, options: PlanOptions, verify: VerifyOptions = VERIFY) -> tuple[str, str]:
    """The importer's verdict on a model: a word and its reason.

    Args:
        path: of the model.
        options: to import it.
        verify: to compare both.

    Returns:
        ``"refused"``: by an error of ours. ``"equal"``: the rewritten model gives the numbers. ``"ill"``: the original
        does not run. ``"mixed rows"``, ``"rounding"``, ``"not finite"``: its numbers say nothing.
        ``"wrong"``: other numbers. ``"foreign"``: an error that is not ours. ``"slow"``.
    """
    started = time.monotonic()
    try:
        with _alarm(3 * _SECONDS):
            imported = import_model(path, options)
    except TrtKvCacheError as error:
        return "refused", str(error)
    except TimeoutError:
        return "slow", f"more than {3 * _SECONDS} s"
    except Exception:  # noqa: BLE001 - this is what is looked for
        return "foreign", traceback.format_exc()
    if time.monotonic() - started > _SECONDS:
        return "slow", f"{time.monotonic() - started:.0f} s"
    try:
        report = verify_import(imported, verify)
        if not report.passed and not report.original_engine.startswith("ONNX Runtime"):
            return "ill", f"{report.original_engine} ran it: {report.failure}"
        report.check()
    except VerificationError as error:
        return _no_specification(imported, verify) or "wrong", str(error)
    except TrtKvCacheError as error:
        return "ill", str(error)
    except Exception:  # noqa: BLE001
        return "foreign", traceback.format_exc()
    return "equal", ""


def _no_specification(imported: ImportedModel, verify: VerifyOptions) -> str | None:
    """Why the numbers of an original say nothing: it mixes the rows of a batch, or rounding decides."""
    source = imported.source
    if not imported.plan.original:
        return None
    check = Verification(imported, verify, source.proto, imported.model, source.path.parent, twin=False)
    batch, random_signs = check.limits.batch, np.random.default_rng(0)
    for length in (check.limits.length or 3, check.limits.length or 1):
        step = Step(length, (4,) * batch, (4 + length,) * batch)
        feeds = {**check.inputs.shared(step), **check._contents(step, 0.0, 0)}
        try:
            session = check._open_original(feeds)
            alone = session.run(feeds)
            near = dict(feeds)
            for name in (c.role.name for c in check.caches if feeds[c.role.name].dtype.kind == "f"):
                signs = random_signs.choice([-1, 1], feeds[name].shape)
                near[name] = (feeds[name] * (1 + 2 * np.finfo(feeds[name].dtype).eps * signs)).astype(feeds[name].dtype)
            rounded = session.run(near)
            floats = [n for n, v in alone.items() if v.dtype.kind == "f"]
            if not all(np.isfinite(alone[n]).all() for n in floats):
                return "not finite"
            if any(difference(alone[n], rounded[n])[1] > 0.3 * tolerance(alone[n].dtype, twin=False) for n in floats):
                return "rounding"
            if batch == 1:
                continue
            before, check.interface.together = check.interface.together, batch
            try:
                together = session.run(feeds)
            finally:
                check.interface.together = before
        except (RunError, TrtKvCacheError):
            continue
        if any(difference(alone[n], together[n])[1] > 1e-3 for n in alone):
            return "mixed rows"
    return "not finite" if _overflows(check) else None


def _overflows(check: Verification) -> bool:
    """True if products leave float16 at random steps: ONNX Runtime holds some of them in float32, where they fit."""
    model = onnx.shape_inference.infer_shapes(check.source.proto)
    products = {node.output[0] for node in model.graph.node if node.op_type == "MatMul"}
    products -= {o.name for o in model.graph.output}
    halves = [v for v in model.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16]
    halves = [v for v in halves if v.name in products]
    if not halves or check.interface is None:
        return False
    model.graph.output.extend(halves)
    batch, length = check.limits.batch, check.limits.length or 4
    for past in range(0, (check.limits.linear or 2 * length) - length, 3):
        step = Step(length, (past,) * batch, (past + length,) * batch)
        feeds = {**check.inputs.shared(step), **check._contents(step, 0.0, 0)}
        for rows, start in check.interface.groups(feeds):
            given = check.interface.feeds(feeds, rows, start)
            try:
                session = open_session(model, check.source.path.parent, given, check.free_bytes, reference=False)[0]
                outputs = session.run(given)
            except RunError:
                continue
            if any(np.isinf(outputs[v.name]).any() for v in halves):
                return True
    return False


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mutant(source: Path, folder: Path, seed: int, kinds: Sequence[str] = ()) -> tuple[Path, str]:
    """Writes a mutated copy of a model, weights beside it; returns its path and what was done."""
    for data in source.parent.glob("*.data"):
        if not (folder / data.name).exists():
            shutil.copy(data, folder / data.name)
    model = onnx.load(source, load_external_data=False)
    done = Mutator(model, seed, kinds).mutate()
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path, done
