"""What the importer makes of decoders whose meaning was changed at random.

A mutated model is its own specification: the importer refuses it by an error of its own, or the rewritten model gives
the numbers that the mutated one gives in ONNX Runtime. Anything else is a bug. By hand, at scale::

    PYTHONPATH=tests python tests/mutation_trials.py --seeds 0:500 tests/models/optimum/llama/model.onnx ...

With ``--lengths``, and ``--kinds odd``, both run in steps of every length behind every past, as far as there is time.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
from mutations import Mutator

from trt_kvcache.errors import TrtKvCacheError, VerificationError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.steps.schedule import Limits, Step
from trt_kvcache.verify import VerifyOptions, decode, verify_import
from trt_kvcache.verify.compare import difference, tolerance
from trt_kvcache.verify.decode import Verification
from trt_kvcache.verify.report import VerifyReport
from trt_kvcache.verify.schedule import Episode
from trt_kvcache.verify.sessions import EngineError

VERIFY = VerifyOptions(batch=3, chunks=(4, 2), tokens=4)
_SECONDS = 20  # for one import
_PAIRS = 300  # of P and S, beside those of one new token and those of no past


def judge(
    path: Path, options: PlanOptions, verify: VerifyOptions = VERIFY, *, lengths: bool = False
) -> tuple[str, str]:
    """What the importer makes of a model: a word and its reason.

    Args:
        path: of the model.
        options: to import it.
        verify: to compare both.
        lengths: run steps of every length, not those of `verify`.

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
        report = _at_every_length(imported, verify) if lengths else verify_import(imported, verify)
        if not report.passed and not report.original_engine.startswith("ONNX Runtime"):
            return "ill", f"{report.original_engine} ran it: {report.failure}"
        report.check()
    except VerificationError as error:
        if lengths and _alone(imported, verify):
            return "mixed rows", str(error)
        return _no_specification(imported, verify) or "wrong", str(error)
    except TrtKvCacheError as error:
        return "ill", str(error)
    except Exception:  # noqa: BLE001
        return "foreign", traceback.format_exc()
    return "equal", ""


def _at_every_length(imported: ImportedModel, verify: VerifyOptions) -> VerifyReport:
    with patch.object(decode, "plan_schedule", every_length):
        return verify_import(imported, verify)


def _alone(imported: ImportedModel, verify: VerifyOptions) -> bool:
    """Whether one row at a time has the same numbers."""
    try:
        return _at_every_length(imported, replace(verify, batch=1)).passed
    except TrtKvCacheError:
        return False


def every_length(limits: Limits, _: VerifyOptions) -> tuple[Episode, ...]:
    """Steps of one length each: one new token behind every past, every prompt, and others between them."""
    room = limits.linear or min(limits.circular)
    pairs = [(p, s) for s, p in product(range(1, room + 1), range(room)) if p + s <= room]
    pairs = [(p, s) for p, s in pairs if limits.length in (None, s) and s <= limits.longest]
    rest = [(p, s) for p, s in pairs if p and s > 1]
    kept = set(random.Random(0).sample(rest, min(_PAIRS, len(rest))))
    rows = limits.batch if limits.ragged else 1
    steps = []
    for length in sorted({s for _, s in pairs}):
        pasts = [p for p, s in pairs if s == length and (not p or s in (1, limits.length) or (p, s) in kept)]
        for first in range(0, len(pasts), rows):
            starts = tuple(pasts[first : first + rows])
            starts = (*starts, *starts[-1:] * (limits.batch - len(starts)))
            steps.append(Step(length, starts, tuple(start + length for start in starts)))
    return tuple(Episode("decode", (step,)) for step in steps)


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
        except (EngineError, TrtKvCacheError):
            continue
        if any(difference(alone[n], together[n])[1] > 1e-3 for n in alone):
            return "mixed rows"
    return None


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


def mutant(source: Path, folder: Path, seed: int, kinds: Sequence[str] = (), capacity: int = 64) -> tuple[Path, str]:
    """Writes a mutated copy of a model, weights beside it; returns its path and what was done."""
    for data in source.parent.glob("*.data"):
        if not (folder / data.name).exists():
            shutil.copy(data, folder / data.name)
    model = onnx.load(source, load_external_data=False)
    done = Mutator(model, seed, kinds, capacity).mutate()
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path, done


def main() -> None:
    """Mutates models and prints one line for each mutation."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--seeds", default="0:20", help="FIRST:LAST")
    parser.add_argument("--capacity", type=int, help="of caches that grow")
    parser.add_argument("--kinds", nargs="*", default=(), help="of changes; all where left out")
    parser.add_argument("--lengths", action="store_true", help="compare at every length")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    for seed in range(first, last):
        for source in arguments.models:
            with tempfile.TemporaryDirectory() as folder:
                path, done = mutant(source, Path(folder), seed, arguments.kinds, arguments.capacity or 64)
                word, reason = judge(path, PlanOptions(capacity=arguments.capacity), lengths=arguments.lengths)
            line = "\t".join((word, str(source), str(seed), done, " | ".join(reason.splitlines()[-4:])))
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
