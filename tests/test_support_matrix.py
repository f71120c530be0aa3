"""The documentation shows the support matrix as the tests know it."""

import pytest
from cases import ALL_CASES, GROUPS
from support_matrix import BEGIN, END, PAGE, matrix, replaced


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replaced(text), "python scripts/support_matrix.py --write"


def test_every_case_is_a_row() -> None:
    rows = [line for line in matrix().splitlines() if line.startswith("| ")]
    assert len(rows) == len(ALL_CASES) + 2 * len(GROUPS)
    assert all(row.count(" | ") == 2 for row in rows)


def test_markers_are_needed() -> None:
    assert replaced(f"a{BEGIN}old{END}b") == f"a{BEGIN}\n{matrix()}\n{END}b"
    with pytest.raises(ValueError, match="matrix:end"):
        replaced(f"a{BEGIN}old")
