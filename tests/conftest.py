"""Shared by all tests: the choice of those that run here, and an environment that changes nothing."""

import os
import signal
from collections import defaultdict
from functools import wraps
from typing import Any

import onnxruntime as ort
import pytest
from hypothesis import settings

from trt_kvcache.engine.diagnosis import find_gpus


def pytest_configure() -> None:
    """Settle what depends on the surroundings.

    Children receive Ctrl-C: a shell starts what it runs in the background with SIGINT ignored, for good. In CI,
    generated cases are the same in every run and slow machines are no failures; elsewhere every run looks for new ones.
    Every test checks for itself: no verdict is kept from one to another.
    """
    os.environ["TRT_KVCACHE_VERDICTS"] = "off"
    settings.register_profile("ci", derandomize=True, deadline=None)
    if os.environ.get("CI"):
        settings.load_profile("ci")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ort.InferenceSession.__init__ = _with_one_thread(ort.InferenceSession.__init__)


def _with_one_thread(opened: Any) -> Any:
    """Opens a model in ONNX Runtime, with one thread unless a number is asked for.

    Threads spin while they wait: those of several processes that test side by side took twice the processor time, and
    up to ten times the time, of one each.
    """

    @wraps(opened)
    def wrapped(self: Any, model: Any, options: ort.SessionOptions | None = None, *rest: Any, **named: Any) -> None:
        options = options or named.pop("sess_options", None) or ort.SessionOptions()
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        opened(self, model, options, *rest, **named)

    return wrapped


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as COLUMNS says, which pytest-xdist sets for its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `few` leaves out as slow; skip tests marked `gpu`, with the reason, where no GPU is."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        if few := cases[0].get_closest_marker("few"):
            (count,) = few.args
            kept = {i * (len(cases) - 1) // max(1, count - 1) for i in range(count)}
            for i, item in enumerate(cases):
                if i not in kept:
                    item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    _, _, problem = find_gpus()
    if problem:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))
