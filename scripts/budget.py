"""Compare the size of the code with `budget.toml`: a folder may grow only if another shrinks by as much.

    python scripts/budget.py            exit code 1 if a folder, or the sum, has more statements than its budget
    python scripts/budget.py --lower    write the present numbers where they are lower than the budget

Statements are those of Python's `ast`: comments, docstrings and line breaks do not count. If a change moves code to
another folder, edit two lines of `budget.toml` by hand: raise one, lower the other. The sum does not rise.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "budget.toml"
PACKAGE, SUM = "trt_kvcache", "sum"
COUNTED = (PACKAGE, "plugins", "tests", "scripts")


def statements(text: str) -> int:
    """Return the number of statements in a module, including those in functions and classes, without docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in nodes)


def measure(root: Path = ROOT) -> dict[str, int]:
    """Return statements by folder: each top folder of the package, its root files, the other folders, and the sum."""
    found: Counter[str] = Counter()
    for folder in COUNTED:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).parts
            if folder == PACKAGE and (root / PACKAGE / parts[1]).is_symlink():
                continue  # an editable install links the plugins, which are counted in their own folder
            name = "/".join(parts[: 2 if folder == PACKAGE and len(parts) > 2 else 1])
            found[name] += statements(path.read_text(encoding="utf-8"))
    return {**dict(sorted(found.items())), SUM: sum(found.values())}


def faults(found: dict[str, int], budget: dict[str, int]) -> list[str]:
    grown = [
        f"{name}: {n} statements, {n - budget.get(name, 0)} more than budget.toml allows"
        for name, n in found.items()
        if n > budget.get(name, 0)
    ]
    allowed = sum(n for name, n in budget.items() if name != SUM)
    raised = [f"budget.toml: its folders have {allowed} statements, more than its sum, {budget.get(SUM, 0)}"]
    return [*grown, *(raised if allowed > budget.get(SUM, 0) else [])]


def read() -> dict[str, int]:
    return dict(tomllib.loads(BUDGET.read_text(encoding="utf-8"))["statements"])


def write(found: dict[str, int]) -> None:
    lines = "".join(f'"{name}" = {n}\n' for name, n in found.items())
    head = (
        "# The most statements of Python by folder. After a change that shrinks one: python scripts/budget.py --lower\n"
    )
    BUDGET.write_text(f"{head}[statements]\n{lines}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write what is there now, where it is less")
    given = parser.parse_args()
    found, budget = measure(), read()
    if given.lower:
        less = {name: min(n, budget.get(name, 0)) for name, n in found.items()}
        write({**less, SUM: sum(n for name, n in less.items() if name != SUM)})
        budget = read()
    said = faults(found, budget)
    sys.stdout.writelines(f"{line}\n" for line in said)
    slack = budget[SUM] - found[SUM]
    if not said and slack:
        sys.stdout.write(f"{slack} statements below budget.toml: python scripts/budget.py --lower\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
