"""The net: many models, each of which is refused, or taken and right; those of `promises.txt` are taken.

`corpus` makes the models::

    python tests/net.py -j 2                plan all; exit code 1 if a promise is broken or a plan ends in a trace
    python tests/net.py --quick             the promised ones only
    python tests/net.py --verify            run both models of each plan in ONNX Runtime as well
    python tests/net.py --only 'edited/*' --show
    python tests/net.py -j 2 --save before.txt       before a change
    python tests/net.py -j 2 --against before.txt    after it: what became refused or taken, what differs

An outcome is "refused", by an error of ours, or "taken"; with ``--verify``, "equal" if both models give the same
numbers, and "taken" if `verify` cannot decode the model. "wrong" and "trace" break the promise for every model.
"""

import argparse
import fnmatch
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PATHS = (TESTS.parent, TESTS.parent / "scripts", TESTS, TESTS / "corpus")
sys.path[:0] = [str(p) for p in PATHS if str(p) not in sys.path]
os.environ["TRT_KVCACHE_VERDICTS"] = "off"  # each run finds its own

from corpus import Entry, entries  # noqa: E402

from trt_kvcache.errors import TrtKvCacheError, VerificationError  # noqa: E402
from trt_kvcache.importer import import_model  # noqa: E402
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions, Route  # noqa: E402
from trt_kvcache.verify import VerifyOptions, verify_import  # noqa: E402

PROMISES = TESTS / "promises.txt"
SECONDS, WIDTH = 60, 100  # for one model; characters of an error
VERIFY = VerifyOptions(batch=2, chunks=(4, 2), tokens=2, station=("rewritten",))
ELSEWHERE = ("node/", "case/", "route, ")
"""Begin the keys of single nodes, whose numbers `conformance` compares."""
REFUSED, TAKEN, EQUAL, WRONG, TRACE = "refused", "taken", "equal", "wrong", "trace"


@dataclass(frozen=True)
class Promises:
    """What `promises.txt` says."""

    models: dict[str, bool]
    """Keys of models that are taken and right; True where a cache may be copied."""
    cells: dict[str, tuple[str, ...]]
    """Families that are right, by exporter."""
    spellings: dict[str, float]
    """Share of the drawn spellings that is taken, of growing and fixed caches."""


def promises() -> Promises:
    """Read `promises.txt`."""
    models: dict[str, bool] = {}
    cells: dict[str, tuple[str, ...]] = {}
    spellings: dict[str, float] = {}
    for line in PROMISES.read_text(encoding="utf-8").splitlines():
        if line.startswith("cells "):
            exporter, _, families = line.removeprefix("cells ").partition(": ")
            cells[exporter] = tuple(families.split())
        elif line.startswith("spellings "):
            _, caches, share = line.split()
            spellings[caches] = float(share.removesuffix("%")) / 100
        elif line and not line.startswith("#"):
            key, _, how = line.partition("\t")
            if key in models or how not in ("", "copied"):
                raise ValueError(f"{PROMISES.name}: {line!r} is twice there, or says more than 'copied'")
            models[key] = how == "copied"
    return Promises(models, cells, spellings)


@dataclass(frozen=True)
class Outcome:
    """What became of a model."""

    key: str
    word: str
    facts: str
    """What the plan decides, or how the error begins."""
    in_place: bool = True
    reason: str = ""
    """Why it is wrong, or is not verified."""


_SIDES = ("input", "output")


def facts(plan: CachePlan) -> str:
    """The decisions of a plan, in one line: its caches, attentions, states, and the inputs beside tokens and caches."""
    masks = {m.name: " ".join([*_flags(m), *(["own"] if m.mask else [])]) for m in plan.masks}
    caches = [
        f"{c.mode.value} {c.form.value} {c.route.value} {c.dtype} {_shape(c.logical_shape)} {c.layout.value}"
        for c in plan.caches
    ]
    attention = [
        f"{a.kind.value} {a.dtype} {a.query_heads}/{a.kv_heads} of {a.head_size}/{a.value_head_size} "
        f"{masks.get(a.mask or '', 'no mask')}"
        for a in plan.attention
    ]
    states = [f"state {s.dtype} {_shape(s.shape)}" for s in plan.states]
    carried = {name for c in plan.caches for name in (c.past, c.present)}
    roles = {io: sorted({t.role.value for t in plan.tensors if t.io == io and t.name not in carried}) for io in _SIDES}
    others = [f"{io} {' '.join(roles[io])}" for io in _SIDES]
    span = [] if plan.logits_span is None else [f"logits span {plan.logits_span.axis}"]
    return "; ".join([*_counted(caches), *_counted(attention), *_counted(states), *others, *span])


def _flags(mask: Any) -> list[str]:
    """The fields of a mask that are set."""
    hidden = ("name", "mask", "guarded")
    shown = {name: getattr(value, "value", value) for name, value in vars(mask).items() if name not in hidden}
    return [
        name if value is True or isinstance(value, str) else f"{name} {value}"
        for name, value in shown.items()
        if value not in (None, False, -1, ())
    ]


def _shape(dims: Any) -> str:
    return re.sub(r"unk__\d+", "?", f"[{', '.join(map(str, dims))}]")


def _counted(lines: list[str]) -> list[str]:
    return [f"{n} x {line}" for line, n in Counter(lines).items()]


def treat(entry: Entry, verify: bool) -> Outcome:
    """Plan one model, and verify it if asked to."""
    key, make, options = entry
    signal.signal(signal.SIGALRM, _ring)
    with tempfile.TemporaryDirectory() as folder:

        def said(error: Exception) -> str:
            words = str(getattr(error, "message", error)).replace(f"{folder}/", "")
            return f"{type(error).__name__}: {re.sub(r'[^ ]*/(?=[^/ ]*[.]onnx)', '', words)}"

        try:
            path = make(Path(folder))
            signal.alarm(SECONDS)
            imported = import_model(path, PlanOptions(**options))
        except TrtKvCacheError as error:
            words = said(error)
            if "\n" in words or len(words.partition(": ")[2]) < 20:
                return Outcome(key, TRACE, words[:WIDTH], reason="no refusal of one line that says what was found")
            return Outcome(key, REFUSED, words[:WIDTH])
        except Exception as error:  # noqa: BLE001 - an error that is none of ours is an outcome, too
            return Outcome(key, TRACE, said(error).replace("\n", " / ")[:WIDTH])
        finally:
            signal.alarm(0)
        plan = imported.plan
        found, in_place = facts(plan), all(c.route is not Route.FUNCTIONAL for c in plan.caches)
        if not verify or key.startswith(ELSEWHERE):
            return Outcome(key, TAKEN, found, in_place)
        word, reason = EQUAL, ""
        try:
            signal.alarm(2 * SECONDS)
            verify_import(imported, VERIFY).check()
        except VerificationError as error:
            word, reason = WRONG, said(error)
        except TrtKvCacheError as error:  # verify does not decode it
            word, reason = TAKEN, said(error)
        except Exception as error:  # noqa: BLE001
            word, reason = TRACE, said(error)
        finally:
            signal.alarm(0)
        return Outcome(key, word, found, in_place, reason[:WIDTH])


def broken(outcome: Outcome, promised: dict[str, bool], verified: bool) -> str:
    """The promise that an outcome breaks, or nothing.

    Args:
        outcome: of one model.
        promised: see `Promises.models`.
        verified: it was asked to be verified.
    """
    key, word = outcome.key, outcome.word
    if word in (WRONG, TRACE):
        return f"{word}: {outcome.reason or outcome.facts}"
    if key not in promised:
        return ""
    if word == REFUSED:
        return f"promised, and refused: {outcome.facts}"
    if verified and word != EQUAL and not key.startswith(ELSEWHERE):
        return f"promised, and not verified: {outcome.reason}"
    if not (outcome.in_place or promised[key]):
        return f"promised in place, and copied: {outcome.facts}"
    return ""


def _ring(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def run(corpus: list[Entry], jobs: int, verify: bool) -> Iterator[Outcome]:
    """Treat all, in `jobs` processes."""
    global _corpus
    _corpus = corpus
    if jobs == 1:
        yield from (treat(entry, verify) for entry in corpus)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(_treat_one, range(len(corpus)), [verify] * len(corpus), chunksize=4)


_corpus: list[Entry] = []


def _treat_one(index: int, verify: bool) -> Outcome:
    return treat(_corpus[index], verify)


def compare(before: dict[str, tuple[str, str]], outcomes: list[Outcome]) -> Iterator[str]:
    """What differs from a saved run, as lines: what became refused or taken first."""
    later = {o.key: (REFUSED if o.word == REFUSED else TAKEN, o.facts) for o in outcomes}
    both = [key for key in later if key in before and before[key] != later[key]]
    for key in sorted(both, key=lambda key: before[key][0] == later[key][0]):
        (old, old_facts), (new, new_facts) = before[key], later[key]
        yield f"{key}: {'differs' if old == new else f'became {new}'}\n- {old_facts}\n+ {new_facts}\n"
    new = [key for key in later if key not in before]
    if new:
        yield f"{len(new)} models are new: {', '.join(new[:9])}\n"


def load(path: Path) -> dict[str, tuple[str, str]]:
    """A saved run: word and facts by key."""
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return {key: (word, found) for key, word, found in lines}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="those models only")
    parser.add_argument("--quick", action="store_true", help="promised models only")
    parser.add_argument("--verify", action="store_true", help="verify what is taken, too")
    parser.add_argument("--show", action="store_true", help="print the facts")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write words and facts")
    parser.add_argument("--against", type=Path, metavar="FILE", help="print what differs from those saved")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="processes")
    given = parser.parse_args()
    started = time.monotonic()
    promised = promises().models
    corpus = [entry for entry in entries(given.only) if not given.quick or entry[0] in promised]
    gone = [key for key in promised if fnmatch.fnmatch(key, given.only) and key not in {entry[0] for entry in corpus}]
    outcomes, faults = [], [f"{key}: promised, and no model of the corpus" for key in gone]
    for outcome in run(corpus, given.j, given.verify):
        outcomes.append(outcome)
        if given.show:
            sys.stdout.write("\n".join([outcome.key, outcome.word, outcome.facts, outcome.reason]).rstrip() + "\n\n")
        if fault := broken(outcome, promised, given.verify):
            faults.append(f"{outcome.key}: {fault}")
    if given.against:
        sys.stdout.writelines(compare(load(given.against), outcomes))
    if given.save:
        words = {o.key: REFUSED if o.word == REFUSED else TAKEN for o in outcomes}
        lines = [f"{o.key}\t{words[o.key]}\t{o.facts}\n" for o in outcomes]
        given.save.write_text("".join(sorted(lines)), encoding="utf-8")
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    counts = ", ".join(f"{n} {word}" for word, n in sorted(Counter(o.word for o in outcomes).items()))
    sys.stdout.write(f"{counts}; {len(faults)} promises broken; {time.monotonic() - started:.0f} s\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
