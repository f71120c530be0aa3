"""The net: plans, refusals and verdicts of many models, recorded in `net.json` and compared with what they are now.

`corpus` makes the models::

    python tests/net.py                     plan all, say what differs from the record; exit code 1 if anything does
    python tests/net.py --quick             stored exports only
    python tests/net.py --verify            run both models of each plan in ONNX Runtime as well
    python tests/net.py --write [PATTERN]   record; with a pattern such as 'cut/*' those models only
    python tests/net.py -j 2 --only 'mutant/*' --show

A change on purpose is recorded with ``--write PATTERN`` in the commit that makes it, so that its diff shows the change.
Each model has a list of lines: one for each fact of its plan, or one that says the error. Verdicts have lists of their
own. A model that cannot be made any longer is "gone".
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PATHS = (TESTS.parent, TESTS.parent / "scripts", TESTS, TESTS / "corpus")
sys.path[:0] = [str(p) for p in PATHS if str(p) not in sys.path]
os.environ["TRT_KVCACHE_VERDICTS"] = "off"  # each run finds its own

from corpus import FAMILIES, Entry, entries  # noqa: E402

from trt_kvcache.errors import TrtKvCacheError  # noqa: E402
from trt_kvcache.importer import import_model  # noqa: E402
from trt_kvcache.importer.plan import CachePlan, PlanOptions  # noqa: E402
from trt_kvcache.verify import VerifyOptions, verify_import  # noqa: E402

RECORD = TESTS / "net.json"
SECONDS = 60  # for one model
VERIFY = VerifyOptions(batch=2, chunks=(4, 2), tokens=2)


def facts(plan: CachePlan) -> list[str]:
    """Facts of a plan, one a line; equal facts of several layers are one line with their number."""
    masks = {m.name: _fields(replace(m, name="", mask=m.mask and "own"), "name") for m in plan.masks}
    lines = [_cache(c) for c in plan.caches]
    for a in plan.attention:
        heads = f"heads {a.query_heads}/{a.kv_heads}, sizes {a.head_size}/{a.value_head_size}"
        caches = f"{len(a.caches)} caches, keys {a.keys}, mask {masks.get(a.mask or '', 'none')}"
        lines.append(f"attention {a.kind.value} {a.dtype} {heads}, {caches}")
    lines += [f"state {s.past} -> {s.present} {s.dtype} {_shape(s.shape)}" for s in plan.states]
    lines = _counted(lines)
    lines.append(f"{len(plan.masks)} masks, opset {plan.opset}, {len(plan.inlined)} inlined")
    carried = {n for c in plan.caches for n in (c.past, c.present)}
    for t in plan.tensors:
        if t.name not in carried:
            lines.append(f"{t.io} {t.name} {t.role.value} {t.dtype} {_shape(t.shape)} {_shape(t.axes)}")
    lines += [f"span {s.name} {s.symbol} {s.capacity}" for s in plan.spans]
    if plan.logits_span is not None:
        found = plan.logits_span
        lines.append(
            f"logits span {found.name}, output {found.output}, axis {found.axis}, {len(found.readers)} readers"
        )
    changes = [f"change {c.io}: {c.old or 'nothing'} -> {c.new or 'nothing'}" for c in plan.changes]
    originals = [f"original {o.io} {o.name} {o.role.value} {_shape(o.axes)}{_odd(o)}" for o in plan.original]
    lines += _counted([*changes, *originals])
    lines += [f"stack {s.io} {s.name} {_shape(s.shape)} {[(p.name, p.place) for p in s.parts]}" for s in plan.stacks]
    lines += [f"warning {w}" for w in plan.warnings] + [f"note {n}" for n in plan.notes]
    return lines


def _cache(c: Any) -> str:
    names = f"cache {c.past} -> {c.present} {c.idiom} {c.dtype} {_shape(c.logical_shape)} axis {c.sequence_axis}"
    held = f"{c.layout.value} {_shape(c.physical_shape)}, {c.mode.value} {c.form.value} of {c.update_length}"
    rules = f"{c.contract}, capacity {c.capacity}, {len(c.readers)} readers, carried {c.carried}"
    return f"{names}, {held}, {c.route.value}, {rules}"


def _odd(o: Any) -> str:
    """Fields that few originals set."""
    odd = {"kept": o.kept, "order": o.order, "rows_only": o.rows_only, "singly": o.singly, "off": not o.on}
    return "".join(f" {name}={value}" for name, value in odd.items() if value)


def _shape(dims: Any) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _fields(data: Any, *hidden: str) -> str:
    shown = {k: getattr(v, "value", v) for k, v in vars(data).items() if k not in hidden}
    return ", ".join(f"{k} {v}" for k, v in shown.items() if v not in (None, False, -1, ()))


def _counted(lines: list[str]) -> list[str]:
    """Equal lines once, with their number; names of symbols that nobody gave are no facts."""
    found = Counter(_layer(re.sub(r"unk__\d+", "?", line)) for line in lines)
    return [f"{n} x {line}" if n > 1 else line for line, n in found.items()]


def _layer(line: str) -> str:
    """The line without the number of its layer, which names before and after the arrow share."""
    old, arrow, new = line.partition(" -> ")
    number = re.search(r"(?<=[._])\d+(?=[._ ]|$)", old)
    if number is None or (arrow and new != "nothing" and f"{number[0]}" not in re.findall(r"\d+", new.split()[0])):
        return line
    one = rf"(?<=[._]){number[0]}(?=[._ ,\]]|$)"
    return re.sub(one, "#", old, count=1) + arrow + re.sub(one, "#", new, count=1)


def treat(entry: Entry, verify: bool) -> tuple[str, list[str], list[str]]:
    """Key, facts or error, and verdict of one model."""
    key, make, options = entry
    signal.signal(signal.SIGALRM, _ring)
    with tempfile.TemporaryDirectory() as folder:

        def said(error: Exception) -> list[str]:
            words = re.sub(
                r"\S*/(?=[^/\s]*\.onnx)", "", str(getattr(error, "message", error)).replace(f"{folder}/", "")
            )
            return [f"{type(error).__name__}: {line}" for line in words.splitlines()[:3]] or [type(error).__name__]

        try:
            path = make(Path(folder))
            signal.alarm(SECONDS)
            imported = import_model(path, PlanOptions(**options))
            found = facts(imported.plan)
        except Exception as error:  # noqa: BLE001 - an error that is none of ours is a fact, too
            return key, said(error), []
        finally:
            signal.alarm(0)
        if not verify:
            return key, found, []
        try:
            signal.alarm(2 * SECONDS)
            verify_import(imported, VERIFY).check()
        except TrtKvCacheError as error:
            return key, found, [re.sub(r"[\d.e+-]*\d", "#", said(error)[0])[:160]]
        except Exception as error:  # noqa: BLE001
            return key, found, said(error)[:1]
        finally:
            signal.alarm(0)
    return key, found, ["equal"]


def _ring(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def load() -> dict[str, dict[str, list[str]]]:
    """Read the record: ``plans`` and ``verdicts`` by key."""
    if not RECORD.exists():
        return {"plans": {}, "verdicts": {}}
    record: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    for part in record.values():
        for key, lines in part.items():
            part[key] = part.get(lines, [lines]) if isinstance(lines, str) else lines
    return record


def dump(record: dict[str, dict[str, list[str]]]) -> None:
    """Write the record: one line by itself; a model with the facts of an earlier one names that one."""
    short: dict[str, dict[str, Any]] = {}
    for name, part in record.items():
        first: dict[tuple[str, ...], str] = {}
        short[name] = {}
        for key in sorted(part):
            same = first.setdefault(tuple(part[key]), key)
            short[name][key] = part[key][0] if len(part[key]) == 1 else part[key] if same == key else same
    RECORD.write_text(json.dumps(short, indent=0, ensure_ascii=False) + "\n")


def _difference(key: str, old: list[str] | None, new: list[str] | None) -> str:
    if old is None or new is None:
        return f"{key}: {'new' if old is None else 'gone'}\n"
    lines = list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]
    return "\n".join([f"{key}:", *(f"  {line}" for line in lines if not line.startswith("@@"))]) + "\n"


def run(corpus: list[Entry], jobs: int, verify: bool) -> Iterator[tuple[str, list[str], list[str]]]:
    """Treat all, in `jobs` processes."""
    global _corpus
    _corpus = corpus
    if jobs == 1:
        yield from (treat(entry, verify) for entry in corpus)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(_treat_one, range(len(corpus)), [verify] * len(corpus), chunksize=4)


_corpus: list[Entry] = []


def _treat_one(index: int, verify: bool) -> tuple[str, list[str], list[str]]:
    return treat(_corpus[index], verify)


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
    found: dict[str, dict[str, list[str]]] = {"plans": {}, "verdicts": {}}
    for key, lines, verdict in run(entries(pattern, families), given.j, given.verify):
        found["plans"][key] = lines
        if verdict:
            found["verdicts"][key] = verdict
        if given.show:
            sys.stdout.write("\n".join([key, *lines, *verdict]) + "\n\n")
    known = "stored/" if given.quick else ""
    parts = ("plans", "verdicts") if given.verify else ("plans",)
    differences = 0
    for name in parts:
        old = {k: v for k, v in record[name].items() if fnmatch.fnmatch(k, pattern) and k.startswith(known)}
        for key in sorted({*old, *found[name]}):
            if old.get(key) != found[name].get(key):
                differences += 1
                sys.stdout.write(_difference(f"{name} {key}", old.get(key), found[name].get(key)))
        if given.write:
            kept = {k: v for k, v in record[name].items() if k not in old}
            record[name] = kept | found[name]
    count, seconds = len(found["plans"]), time.monotonic() - started
    sys.stdout.write(f"{count} models, {differences} differ, {seconds:.0f} s\n")
    if given.write:
        dump(record)
        return 0
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
