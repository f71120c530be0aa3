"""The README and `docs/` show what happens: their examples are run, and the output compared but for numbers."""

import re
from pathlib import Path

import pytest
from readme import PAGES, ROOT, differences, run_examples


@pytest.mark.slow
def test_the_examples_give_what_is_shown(tmp_path: Path) -> None:
    outdated = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        outdated += differences(page, text, run_examples(text, tmp_path))
    assert not outdated, "python scripts/readme.py --update:\n" + "\n".join(outdated)
    assert (tmp_path / "model.engine").stat().st_size > 0


_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        found = (page.parent / target).resolve() if target else page
        assert found.is_relative_to(ROOT)
        assert found.exists(), target
        if found.suffix != ".md":  # an image, which has no anchors
            assert not anchor
            continue
        headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor[1:] in anchors, anchor
