"""What is planned is verified: the original and the rewritten model give the same numbers over a decode."""

from __future__ import annotations

import net
import pytest
from corpus import Entry, entries

RECORD = net.load()["verdicts"]
ENTRIES = [entry for entry in entries() if entry[0] in RECORD and not entry[0].startswith(("node/", "case/"))]


@pytest.mark.few(24)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry[0])
def test_the_verdict_is_the_recorded_one(entry: Entry) -> None:
    assert net.treat(entry, verify=True)[2] == RECORD[entry[0]]


def test_nearly_all_verdicts_are_equal() -> None:
    assert sum(RECORD[entry[0]] == ["equal"] for entry in ENTRIES) > 0.98 * len(ENTRIES)
