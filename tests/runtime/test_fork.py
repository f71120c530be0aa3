"""A session belongs to the process that opened it: one that was forked is told so, and waits for nobody."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime.engines import open_engine
from runtime.fake_cuda import Machine
from runtime.hash_runner import HashRunner

from trt_kvcache.runtime.generation.config import GenerationConfig
from trt_kvcache.runtime.session import DecodeSession

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")


def in_a_child(work: Callable[[], object]) -> str:
    """What `work` brings in a process that is forked here; fails where that does not end."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, where threads run
        child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001 - the child must not go on as a test
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(read)
            return "it hangs"
        time.sleep(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read()


CALLS: dict[str, Callable[[DecodeSession], object]] = {
    "step": lambda s: s.step(),
    "add": lambda s: s.add([1]),
    "generate": lambda s: s.generate([[1]]),
    "stream": lambda s: next(iter(s.stream([[1]]))),
    "update": lambda s: s.update({0: [1]}),
    "encode": lambda s: s.encode([1]),
    "running": lambda s: s.running,
    "lengths": lambda s: s.cache.lengths,
    "acquire": lambda s: s.cache.acquire(),
}


@pytest.mark.parametrize("busy", [True, False], ids=["while another thread steps", "idle"])
@pytest.mark.parametrize("call", CALLS)
def test_a_forked_process_is_refused(call: str, busy: bool) -> None:
    session, begun, go_on = DecodeSession(HashRunner()), threading.Event(), threading.Event()

    def wait(tokens: Any, scores: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return scores

    session.add([1, 2], GenerationConfig(max_new_tokens=1, logits_processor=wait))
    other = threading.Thread(target=session.step)
    if busy:
        other.start()
        begun.wait(60)
    said = in_a_child(lambda: CALLS[call](session))
    go_on.set()
    if busy:
        other.join()
    assert said.startswith("SessionError: the session was opened in process ")
    assert f"{os.getpid()}" in said
    assert "open the model in this one" in said
    session.generate([[3]])  # nothing has changed here


def test_a_forked_process_closes_nothing_of_its_parents() -> None:
    """Nor does the end of a ``with`` block there hide what ended it."""

    def leave() -> None:
        with session:
            raise LookupError("this ended it")

    session = DecodeSession(HashRunner())
    events = session.stream([[1]])
    next(events)
    assert in_a_child(leave) == "LookupError: this ended it"
    assert in_a_child(events.close) == "None"  # type: ignore[attr-defined]
    assert in_a_child(lambda: (session.close(), session._runner.closed)) == "(None, False)"  # type: ignore[attr-defined]


def test_a_forked_process_leaves_the_gpu_alone(engine: Path) -> None:
    """At its end, too, and where garbage is collected there: the GPU's memory is its parent's."""
    machine = Machine()
    runner = open_engine(engine, machine)
    used = machine.used
    assert in_a_child(lambda: (runner._end(), machine.used)) == f"(None, {used})"
    runner.close()
    assert machine.used == 0
