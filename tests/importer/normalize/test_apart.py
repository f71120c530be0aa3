"""Attention in pieces is refused by name: scores of past and new tokens apart, heads one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from apart_graphs import FORMS
from concat_decode import rewritten

from trt_kvcache import UnsupportedModelError

WORDS = {
    "scores apart": "joins scores of the past 'past_key_values.0.key' with .* computed apart",
    "heads one by one": "attends to one head of the cache 'past_key_values.0.key', which has 4; supported is",
    "heads written one by one": "'past_key_values.0.key'",
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_refused_by_name(tmp_path: Path, form: str) -> None:
    with pytest.raises(UnsupportedModelError, match=WORDS[form]):
        rewritten(FORMS[form](), tmp_path)
