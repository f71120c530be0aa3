"""The net: plans, refusals and verdicts of many models, recorded in `net.txt` and compared with what they are now.

`corpus` makes the models::

    python tests/net.py                     plan all, say what differs from the record; exit code 1 if anything does
    python tests/net.py --quick             stored exports only
    python tests/net.py --verify            run both models of each plan in ONNX Runtime as well
    python tests/net.py --write [PATTERN]   record; with a pattern such as 'cut/*' those models only
    python tests/net.py -j 2 --only 'mutant/*' --show

A change on purpose is recorded with ``--write PATTERN`` in the commit that makes it, so that its diff shows the change.
Each model has a line: its key, what the plan decides or how the error begins, and the verdict, with tabs between them.
A model that cannot be made any longer is "gone". Models that are taken now and were refused, or the other way round,
come first.
"""

from __future__ import annotations

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
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PATHS = (TESTS.parent, TESTS.parent / "scripts", TESTS, TESTS / "corpus")
sys.path[:0] = [str(p) for p in PATHS if str(p) not in sys.path]
os.environ["TRT_KVCACHE_VERDICTS"] = "off"  # each run finds its own

from corpus import FAMILIES, Entry, entries  # noqa: E402

from trt_kvcache.importer import import_model  # noqa: E402
from trt_kvcache.importer.plan import CachePlan, PlanOptions  # noqa: E402
from trt_kvcache.verify import VerifyOptions, verify_import  # noqa: E402

RECORD = TESTS / "net.txt"
SECONDS, WIDTH = 60, 100  # for one model; characters of an error
VERIFY = VerifyOptions(batch=2, chunks=(4, 2), tokens=2, station=("rewritten",))


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


def treat(entry: Entry, verify: bool) -> tuple[str, str, str]:
    """Key, facts or error, and verdict of one model; the verdict is empty where none was asked for."""
    key, make, options = entry
    signal.signal(signal.SIGALRM, _ring)
    with tempfile.TemporaryDirectory() as folder:

        def said(error: Exception) -> str:
            words = str(getattr(error, "message", error)).replace(f"{folder}/", "").replace("\n", " / ")
            return f"{type(error).__name__}: {re.sub(r'[^ ]*/(?=[^/ ]*[.]onnx)', '', words)[:WIDTH]}"

        try:
            path = make(Path(folder))
            signal.alarm(SECONDS)
            imported = import_model(path, PlanOptions(**options))
            found = facts(imported.plan)
        except Exception as error:  # noqa: BLE001 - an error that is none of ours is a fact, too
            return key, said(error), ""
        finally:
            signal.alarm(0)
        if not verify:
            return key, found, ""
        try:
            signal.alarm(2 * SECONDS)
            verify_import(imported, VERIFY).check()
        except Exception as error:  # noqa: BLE001
            return key, found, re.sub(r"[\d.e+-]*\d", "#", said(error))
        finally:
            signal.alarm(0)
    return key, found, "equal"


def is_error(line: str) -> bool:
    """True if a model was refused."""
    return re.match(r"\w+(Error|Exception)?: ", line) is not None


def _ring(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def load() -> dict[str, tuple[str, str]]:
    """Read the record: facts and verdict by key."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    record = {}
    for line in lines:
        key, found, verdict = line.split("\t")
        record[key] = (found, verdict)
    return record


def dump(record: dict[str, tuple[str, str]]) -> None:
    """Write the record."""
    RECORD.write_text("".join(f"{key}\t{record[key][0]}\t{record[key][1]}\n" for key in sorted(record)))


def run(corpus: list[Entry], jobs: int, verify: bool) -> Iterator[tuple[str, str, str]]:
    """Treat all, in `jobs` processes."""
    global _corpus
    _corpus = corpus
    if jobs == 1:
        yield from (treat(entry, verify) for entry in corpus)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(_treat_one, range(len(corpus)), [verify] * len(corpus), chunksize=4)


_corpus: list[Entry] = []


def _treat_one(index: int, verify: bool) -> tuple[str, str, str]:
    return treat(_corpus[index], verify)


def _taken(recorded: tuple[str, str] | None) -> bool:
    return recorded is not None and not is_error(recorded[0])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs="?", const="*", metavar="PATTERN", help="record, instead of comparing")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="compare those models only")
    parser.add_argument("--quick", action="store_true", help="stored exports only")
    parser.add_argument("--verify", action="store_true", help="verify what is taken, too")
    parser.add_argument("--show", action="store_true", help="print the facts")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="processes")
    given = parser.parse_args()
    started = time.monotonic()
    pattern = given.write or given.only
    families = ("stored_exports",) if given.quick else FAMILIES
    record = load()
    known = "stored/" if given.quick else ""
    asked = {key for key in record if fnmatch.fnmatch(key, pattern) and key.startswith(known)}
    found: dict[str, tuple[str, str]] = {}
    for key, line, verdict in run(entries(pattern, families), given.j, given.verify):
        found[key] = (line, verdict if given.verify else record.get(key, ("", ""))[1])
        if given.show:
            sys.stdout.write("\n".join([key, line, *filter(None, [verdict])]) + "\n\n")
    gone = ("gone", "")
    differing = [key for key in sorted({*asked, *found}) if record.get(key, ("new", "")) != found.get(key, gone)]
    for key in sorted(differing, key=lambda key: _taken(record.get(key)) == _taken(found.get(key))):
        for sign, (line, verdict) in (("-", record.get(key, ("new", ""))), ("+", found.get(key, gone))):
            sys.stdout.write(f"{sign} {key}: {line} {verdict}\n")
    seconds = time.monotonic() - started
    other = sum(_taken(record.get(key)) != _taken(found.get(key)) for key in differing)
    sys.stdout.write(f"{len(found)} models, {len(differing)} differ ({other} in being taken), {seconds:.0f} s\n")
    if given.write:
        dump({key: value for key, value in record.items() if key not in asked} | found)
        return 0
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
