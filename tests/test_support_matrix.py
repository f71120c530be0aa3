"""The documentation shows the support matrix as the tests know it."""

from support_matrix import PAGE, replaced


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replaced(text), "python scripts/support_matrix.py --write"
