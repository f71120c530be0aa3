"""Attacks: hostile files, faults while commands run, and threads that share a session, at random, made of a seed.

    scripts/attack --seconds 60 --seed 0                a table of what held; exit code 1 if any fell
    scripts/attack --only models kills --seconds 600    of some kinds
    scripts/attack --only models --try 1234             one attempt again, here, with what it says

An attempt holds if it is refused by one line, or passes where passing is right. It falls if it gives something wrong,
a trace, more than a line, a control character, hangs, takes the process down, or leaves a file behind. Attempts run in
a process of their own, which is replaced when it hangs; its memory must not grow from attempt to attempt.
"""

import argparse
import ctypes
import gc
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil

TESTS = Path(__file__).resolve().parent
PATHS = (TESTS.parent, TESTS.parent / "scripts", TESTS, TESTS / "corpus")
sys.path[:0] = [str(p) for p in PATHS if str(p) not in sys.path]

from hostile.attempts import caches, configs, manifests, models  # noqa: E402
from hostile.faults import full, kills, replaced  # noqa: E402
from hostile.held import Fell  # noqa: E402
from hostile.threads import sessions  # noqa: E402

from trt_kvcache import cpu  # noqa: E402
from trt_kvcache.child import Child, ChildError, serve  # noqa: E402

os.environ["TRT_KVCACHE_VERDICTS"] = "off"  # each attempt is checked, and leaves nothing
SECONDS = 300.0
"""An attempt that takes longer hangs: limits on foreign computations are far below, and machines are busy."""
_GROWTH = 16 << 20  # bytes, over the second half of all attempts
_GLIBC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Else glibc keeps what is freed: up to 64 MiB for each thread at a time, 260 MiB after one large file."""
_FEW = 40  # attempts, before growth says anything

KINDS: dict[str, Callable[[random.Random, Path], str]] = {
    f.__name__: f for f in (models, manifests, caches, configs, kills, full, replaced, sessions)
}


@dataclass
class Answer:
    """The outcome of an attempt.

    Attributes:
        word: what it came to, for the counts.
        fell: how it fell; empty: it held.
        left: files that it left.
        memory: bytes in use in the process after it.
    """

    word: str = ""
    fell: str = ""
    left: int = 0
    memory: int = 0


@contextmanager
def _short_limits() -> Iterator[None]:
    """Limits on time that are far below `SECONDS`."""
    with patch.object(cpu, "SECONDS", 5.0):
        yield


def attempt(kind: str, seed: int, scratch: Path) -> Answer:
    temporary = scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=scratch))
    answer = Answer()
    try:
        with _short_limits(), patch.dict(os.environ, TMPDIR=str(temporary)), patch.object(tempfile, "tempdir", None):
            answer.word = KINDS[kind](random.Random(f"{kind} {seed}"), folder)
    except Fell as error:
        answer.fell = str(error)
    except Exception:  # noqa: BLE001 - this is what is looked for
        answer.fell = f"trace: {' '.join(traceback.format_exc().split())[-600:]}"
    left = [p.name for p in (*temporary.iterdir(), *folder.rglob(".*.tmp"), *folder.rglob(".*.old"))]
    if left:
        answer.left = len(left)
        answer.fell = answer.fell or f"files are left: {left}"
        shutil.rmtree(temporary)
    shutil.rmtree(folder)
    answer.memory = _memory()
    return answer


def _memory() -> int:
    """Bytes in use, see `_GLIBC`."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def work(scratch: Path) -> None:
    """Answer requests, each a kind and a seed, until stdin ends."""
    serve(lambda request, *_: attempt(*request, scratch), tuple[str, int])


@dataclass
class Report:
    """The outcome of an attack.

    Attributes:
        tried: attempts of each kind.
        words: what they came to.
        fell: a line for each that fell, by kind.
        left: files that were left.
        memory: bytes of the process after each attempt; of the process that lived longest.
    """

    tried: Counter[str] = field(default_factory=Counter)
    words: dict[str, Counter[str]] = field(default_factory=dict)
    fell: dict[str, list[str]] = field(default_factory=dict)
    left: int = 0
    memory: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Bytes by which memory grew over the second half of the attempts, by the line that fits best."""
        half = np.array(self.memory[len(self.memory) // 2 :], float)
        return float(np.polyfit(np.arange(half.size), half, 1)[0]) * half.size if len(self.memory) >= _FEW else 0.0

    @property
    def failed(self) -> bool:
        return any(self.fell.values()) or self.growth > _GROWTH

    def lines(self) -> list[str]:
        made = [f"{'kind':12}{'tried':>8}{'held':>8}{'fell':>8}   came to"]
        for kind, count in self.tried.items():
            fell = len(self.fell.get(kind, []))
            words = ", ".join(f"{word} {n}" for word, n in self.words.get(kind, Counter()).most_common())
            made.append(f"{kind:12}{count:8}{count - fell:8}{fell:8}   {words}")
        made.append(f"files left: {self.left}; memory over the second half: {self.growth / (1 << 20):+.1f} MiB")
        return made


def attack(seconds: float, seed: int, only: Sequence[str] = (), limit: int | None = None, show: bool = False) -> Report:
    """Attack until the time is over.

    Args:
        seconds: after that no attempt begins.
        seed: of the first attempt; those that follow count from it.
        only: kinds; none: all.
        limit: most attempts.
        show: print what falls at once.
    """
    report, kinds = Report(), [*(only or KINDS)]
    scratch = Path(tempfile.mkdtemp(prefix="attack-"))
    os.environ["ATTACK_SCRATCH"] = str(scratch)
    end, child, memory = time.monotonic() + seconds, None, []
    try:
        for number in range(limit or sys.maxsize):
            if time.monotonic() > end:
                break
            kind, at = kinds[number % len(kinds)], seed + number // len(kinds)
            child = child or Child("-m", "tests.attack", "--work", str(scratch))
            report.tried[kind] += 1
            try:
                answer = child.ask((kind, at), Answer, 2 * SECONDS if number < len(kinds) else SECONDS)
                memory.append(answer.memory)
            except ChildError as error:
                answer, child, memory = Answer(fell=f"the process {error}"), None, []
            if len(memory) > len(report.memory):
                report.memory = memory
            report.left += answer.left
            if answer.fell:
                report.fell.setdefault(kind, []).append(f"{kind} {at}: {answer.fell}")
                if show:
                    _say(report.fell[kind][-1])
            else:
                report.words.setdefault(kind, Counter())[answer.word] += 1
    finally:
        if child is not None:
            child.end()
        shutil.rmtree(scratch, ignore_errors=True)
    return report


def _say(*lines: object) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first attempt of each kind")
    parser.add_argument("--only", nargs="+", choices=[*KINDS], default=[], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--try", type=int, dest="one", metavar="S", help="one attempt, in this process")
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]))
    given = parser.parse_args()
    if given.one is not None:
        with tempfile.TemporaryDirectory(prefix="attack-") as scratch:
            os.environ["ATTACK_SCRATCH"] = scratch
            answers = [attempt(kind, given.one, Path(scratch)) for kind in given.only or KINDS]
        _say(*answers)
        sys.exit(any(answer.fell for answer in answers))
    os.environ |= _GLIBC
    report = attack(given.seconds, given.seed, given.only, show=True)
    _say(*report.lines())
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
