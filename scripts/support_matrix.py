"""The support matrix, from the cases that the tests check.

    python scripts/support_matrix.py            print it
    python scripts/support_matrix.py --write    put it into docs/support.md, between the markers

The cells are the expectations in ``tests/corpus/cases.py``. ``tests/facts/test_outcomes.py`` tests the second column
(native parser and builder), ``tests/conformance/test_matrix.py`` the third column (this package).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from readme_block import replace_block

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"


def matrix() -> str:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "corpus")]
    from cases import GROUPS

    lines: list[str] = []
    for title, cases in GROUPS:
        lines += ["", f"| {title} | native parser and builder | `trt-kvcache` |", "| --- | --- | --- |"]
        lines += [f"| {case.situation} | {case.native} | {case.ours.text} |" for case in cases]
    return "\n".join([*lines, ""])


def replaced(text: str) -> str:
    """Return `text` with the matrix between the markers; raise `ValueError` if a marker is missing."""
    return replace_block(text, BEGIN, END, matrix())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update docs/support.md")
    if parser.parse_args().write:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(matrix())


if __name__ == "__main__":
    main()
