"""Child processes: what passes between them and their callers, and the time that they may take."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from trt_kvcache.child import _ERROR, _ROOT, Child, ChildError, _Frame
from trt_kvcache.errors import OptionError

SECONDS = 0.1


def idle() -> float:
    return 0.0


def child_that_worked(worked: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> Child:
    """A child without a process."""
    child = Child.__new__(Child)
    child._frames = queue.Queue()
    monkeypatch.setattr(child, "_worked", worked)
    return child


def test_a_busy_machine_gives_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_that_worked(idle, monkeypatch)
    answer = threading.Timer(3 * SECONDS, child._frames.put, [None])
    answer.start()
    assert child._next(SECONDS, child.begin()) is None


def test_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_that_worked(time.monotonic, monkeypatch)
    with pytest.raises(queue.Empty):
        child._next(SECONDS, child.begin())


def test_a_child_that_does_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_that_worked(idle, monkeypatch)
    begun = child.begin()
    with pytest.raises(queue.Empty):
        child._next(SECONDS, begun)
    assert time.monotonic() - begun.at >= 4 * SECONDS


SERVE = """
import os, signal, sys, time
print("before anything is diverted", flush=True)
from trt_kvcache.child import serve
from trt_kvcache.errors import OptionError

def work(request, parts, caller):
    print("a library prints")
    caller.tell({"at": 1})
    return eval(request)

serve(work, str, lambda: open("FILE", "w").close())
"""


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child("-c", SERVE, memory=1 << 30)
    yield made
    made.end()


def test_what_passes(child: Child) -> None:
    news: list[bytes] = []
    child.send("[len(part) for part in parts] + [caller.ask('w').decode()]", [b"x" * 100_000, b"", b"\n> 3\n"])
    assert child.answer(list[int | str], 60, news.append, lambda name: name.encode() * 2) == [100_000, 0, 5, "ww"]
    assert news == [b'{"at":1}']
    with pytest.raises(TypeError):  # nothing of it is sent
        child.send(object())
    assert child.ask("1", int, 60) == 1


@pytest.mark.parametrize(
    ("request_", "kind", "message"),
    [
        ("int('x')", RuntimeError, r"(?s)Traceback .* in work\n.*ValueError"),
        ("bytearray(1 << 31)", ChildError, "^needs more than 1024 MiB of memory$"),
        ("(_ for _ in ()).throw(OptionError('no'))", OptionError, "^no$"),
    ],
)
def test_an_error_does_not_end_the_child(child: Child, request_: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        child.ask(request_, int, 60)
    assert child.ask("1", int, 60) == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("os._exit(3)", "^ended with exit code 3, probably for lack of memory$"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "^was killed by SIGSEGV, probably for lack of memory$"),
        ("time.sleep(60)", "^took more than 0.1 s$"),
    ],
)
def test_a_death_is_an_error(child: Child, request_: str, message: str) -> None:
    assert child.ask("1", int, 60) == 1
    with pytest.raises(ChildError, match=message):
        child.ask(request_, int, 0.1)
    assert not child.alive


@pytest.mark.parametrize("kept", [False, True])
def test_a_child_ends_with_its_caller(tmp_path: Path, kept: bool) -> None:
    """In the middle of its work; it is told so, unless its files are the caller's."""
    file = tmp_path / "alone"
    caller = f"""
import os
from trt_kvcache.child import Child
child = Child("-c", {SERVE.replace("FILE", str(file))!r})
print(child._process.pid, child.ask("1", int, 60), flush=True)
{"child.keep()" if kept else ""}
child.send("time.sleep(60)")
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", caller], cwd=_ROOT, capture_output=True, text=True, check=True)
    number = int(done.stdout.split()[0])
    end = time.monotonic() + 20
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert file.exists() is not kept


@pytest.mark.parametrize("kind", ["RuntimeError", "annotations", "__doc__", "none"])
def test_a_child_raises_errors_of_ours_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have taken over the process that read it."""
    child = child_that_worked(idle, monkeypatch)
    child._frames.put(_Frame(_ERROR, json.dumps({"kind": kind, "message": "x"}).encode(), []))
    with pytest.raises(ChildError, match="gave no valid answer"):
        child.answer(str)
