"""A command holds if it passes, or is refused by one line; a call, if its error is one of this package."""

import re
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from trt_kvcache.cli.app import app
from trt_kvcache.errors import TrtKvCacheError

LIMITS = ["--check-seconds", "10", "--check-memory", "3"]
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


class Fell(Exception):  # noqa: N818 - no error of the attack's
    """An attempt fell; the text says how."""


def run(*arguments: str | Path, passes: bool = True) -> tuple[int, str]:
    """Run a command in this process; its exit code and output.

    Raises:
        Fell: see above; `passes`: exit code 0 is right, too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        trace = "".join(traceback.format_exception(done.exception)[-3:])
        raise Fell(f"trace: {' '.join(trace.split())[-600:]}")
    judge(done.exit_code, done.stdout, done.stderr)
    if done.exit_code == 0 and not passes:
        raise Fell("passed")
    if "the rewritten model does not give" in done.stderr:
        raise Fell(f"wrong: {done.stderr.strip()}")
    return done.exit_code, done.stdout


def judge(status: int, stdout: str, stderr: str) -> None:
    lines = [line for line in stderr.splitlines() if not line.startswith("warning: ")]
    if found := _CONTROL.search(stdout + stderr):
        raise Fell(f"a control character is printed: {found[0]!a}")
    if status not in (0, 1):
        raise Fell(f"exit code {status}: {stderr[-300:]}")
    if status == 1 and (len(lines) != 1 or not lines[0].startswith("error: ")):
        raise Fell(f"not one line: {stderr[-600:]!a}")


def refused(call: Callable[[], Any]) -> Any:
    with suppress(TrtKvCacheError):
        return call()
    return None
