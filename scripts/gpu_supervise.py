"""Asks questions in a process that may die of one, or hang: then that is its answer, and the next one is asked.

The process writes a JSON file, again after every answer (`gpu_answers`)::

    {"answers": {QUESTION: {...}}, "engines": [{"engine": NAME, ...}], "asking": what is being asked; "" at the end}

Started again, it goes on behind what has an answer there. It ends with `AGAIN` where it should be: a fault of the GPU
stays with the process that it happened in, and every later answer would be that fault.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_measure import write_json

__all__ = ["AGAIN", "ENGINE", "runs_only_if_built_here", "supervise", "without_modules"]

ENGINE = "engine "
"""Before the name of an engine that is being asked about."""

AGAIN = 75
"""Exit code of a process that wants to be started again for what is left."""

_GRACE = 4.0  # seconds, to say where it hangs
_WORDS = 1500  # of its output that are kept


def runs_only_if_built_here(answers: Mapping[str, Any]) -> bool:
    """Whether engines for all GPUs are refused here, and one for this GPU alone is not."""
    return "error" in answers.get("runs", {}) and bool(answers.get("runs_if_built_here", {}).get("yes"))


def supervise(command: Sequence[str], output: Path, limit: Callable[[str], float]) -> bool:
    """Run a process until everything has an answer.

    Args:
        command: the process.
        output: the file that it writes.
        limit: seconds for a question, by its name; for what comes before the first one, which has none.

    Returns:
        Whether no question ended it.
    """
    write_json(output, {"answers": {}, "engines": [], "asking": ""})
    well = True
    while True:
        with tempfile.TemporaryFile() as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                how = _wait(child, output, limit)
            finally:
                child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_GRACE)  # no longer: one that waits for a GPU that is lost cannot be killed
                log.seek(0)
                text = without_modules(log.read().decode(errors="replace"))
                sys.stderr.write(text)
        result = json.loads(output.read_text())
        asked = result.pop("asking")
        if not asked and how == "exit 0":
            return well
        if not asked and how == f"exit {AGAIN}":
            continue
        well = False
        if not asked:
            raise SystemExit(f"{how} before it asked anything")
        answer = {"yes": False, "error": f"{how}: {text[-_WORDS:].strip()}", "unexpected": True}
        if asked.startswith(ENGINE):
            result["engines"].append({"engine": asked.removeprefix(ENGINE)} | answer)
        else:
            result["answers"][asked] = answer
        write_json(output, result | {"asking": ""})


def _wait(child: subprocess.Popen[bytes], output: Path, limit: Callable[[str], float]) -> str:
    """How the process ended."""
    last, since, most = output.stat().st_mtime_ns, time.monotonic(), limit("")
    while child.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.1)
        if (now := output.stat().st_mtime_ns) != last:
            last, since, most = now, time.monotonic(), limit(json.loads(output.read_text())["asking"])
        if time.monotonic() - since > most and child.poll() is None:
            child.send_signal(signal.SIGABRT)  # Python shows where it is
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE)
            return f"it took more than {most:g} seconds"
    status = child.returncode
    return f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"exit {status}"


def without_modules(text: str) -> str:
    """What a process printed, without the list of all its modules that Python puts behind the place of a crash."""
    return re.sub(r"^Extension modules: .*\n?", "", text, flags=re.MULTILINE)
