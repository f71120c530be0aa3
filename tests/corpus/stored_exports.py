"""Exports of real exporters: those in `tests/models`, and others beside the repository that have no copy in it."""

import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus import Entry

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = (TESTS / "models", TESTS.parent.parent / "shared" / "models", TESTS.parents[2] / "shared" / "models")
GROWS = ("optimum/*", "mobius/*_dynamic_*", "ort-genai/*", "transformers/*", "torch/*_dynamic_*")


def options(name: str) -> dict[str, Any]:
    return {"capacity": 40} if any(fnmatch.fnmatch(name, p) for p in GROWS) else {}


def entries() -> Iterator[Entry]:
    seen = set()
    for root in FOLDERS:
        for path in sorted(root.glob("**/*.onnx")):
            name = path.parent.relative_to(root).as_posix()
            if name not in seen:
                seen.add(name)
                yield f"stored/{name}", lambda folder, path=path: path, options(name)
