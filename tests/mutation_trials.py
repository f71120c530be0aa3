"""The importer against decoders whose meaning was changed at random.

A mutated model is its own specification: the importer refuses it by an error of its own, or the rewritten model gives
the numbers that the mutated one gives in ONNX Runtime. Anything else is a bug.
"""

import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
from mutations import Mutator

from trt_kvcache.errors import TrtKvCacheError, VerificationError
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.verify import VerifyOptions, verify_import

VERIFY = VerifyOptions(batch=3, chunks=(4, 2), tokens=4, station=("rewritten",), tolerance=1e-3)
_SECONDS = 20  # for one import


def judge(path: Path, options: PlanOptions, verify: VerifyOptions = VERIFY) -> tuple[str, str]:
    """The importer's verdict on a model: a word and its reason.

    Args:
        path: of the model.
        options: to import it.
        verify: to compare both.

    Returns:
        ``"refused"``: by an error of ours. ``"equal"``: the rewritten model gives the numbers. ``"ill"``: the original
        does not run. ``"mixed rows"``: its numbers say nothing.
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
        verify_import(imported, verify).check()
    except VerificationError as error:
        return _no_specification(imported, verify) or "wrong", str(error)
    except TrtKvCacheError as error:
        return "ill", str(error)
    except Exception:  # noqa: BLE001
        return "foreign", traceback.format_exc()
    return "equal", ""


def _no_specification(imported: ImportedModel, verify: VerifyOptions) -> str | None:
    """Why the numbers of an original say nothing: with one text alone both give the same, so it mixes rows."""
    try:
        alone = verify_import(imported, replace(verify, batch=1))
    except TrtKvCacheError:
        return None
    return "mixed rows" if alone.passed else None


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


def mutant(source: Path, folder: Path, seed: int) -> tuple[Path, str]:
    """Writes a mutated copy of a model, weights beside it; returns its path and what was done."""
    for data in source.parent.glob("*.data"):
        if not (folder / data.name).exists():
            shutil.copy(data, folder / data.name)
    model = onnx.load(source, load_external_data=False)
    done = Mutator(model, seed).mutate()
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path, done
