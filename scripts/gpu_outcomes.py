"""What became of the tests of a step of `scripts/gpu_check`: from pytest's report, or from its output without one."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

__all__ = ["counted", "counts", "unfinished"]

MOST_FAILURES = 40
MOST_TRACES = 10


def counts(report: Path) -> dict[str, Any]:
    """What pytest counted, why tests were skipped, and which failed where."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    found = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    bad = found["failures"] + found["errors"]
    problems = [
        (str(case.get("name")), problem)
        for case in suite.iter("testcase")
        for problem in (*case.iter("failure"), *case.iter("error"))
    ]
    return {
        "passed": found["tests"] - bad - found["skipped"],
        "failed": bad,
        "skipped": found["skipped"],
        "reasons": sorted({s.get("message", "") for s in suite.iter("skipped")}),
        "failures": {name: str(problem.get("message", ""))[:500] for name, problem in problems[:MOST_FAILURES]},
        "traces": {name: (problem.text or "")[-1500:] for name, problem in problems[:MOST_TRACES]},
    }


def counted(text: str) -> dict[str, Any]:
    """The same from pytest's output, where it was ended before its report: as far as it came."""
    outcomes = re.findall(r"^\S+::(\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    found = {kind: sum(outcome == kind for _, outcome in outcomes) for kind in ("PASSED", "SKIPPED")}
    bad = [name for name, kind in outcomes if kind in ("FAILED", "ERROR")]
    return {
        "passed": found["PASSED"],
        "failed": len(bad),
        "skipped": found["SKIPPED"],
        "reasons": [],
        "failures": dict.fromkeys(bad[:MOST_FAILURES], "see the output"),
    }


def unfinished(text: str) -> str:
    """The test that pytest was at."""
    lines = re.findall(r"^\S+::(\S.*)", text, re.MULTILINE)
    open_ = [line for line in lines if not re.search(r" (PASSED|FAILED|ERROR|SKIPPED)\b", line)]
    return open_[-1].partition(" Fatal Python error")[0].strip() if open_ else ""
