"""A refusal is of one kind at every station, and leaves nothing."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import net
import pytest
from corpus import Entry, entries

from trt_kvcache import build_engine, errors
from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.importer import plan_model, rewrite_model
from trt_kvcache.importer.plan import PlanOptions, Target

RECORD = net.load()
REFUSED = [entry for entry in entries() if net.is_error(RECORD[entry[0]][0])]


def _takes(options: dict[str, Any]) -> bool:
    """`PlanOptions` refuses some itself."""
    with suppress(OptionError):
        return bool(PlanOptions(**options))
    return False


KINDS = {re.sub(r"'[^']*'|\d+", "", RECORD[e[0]][0]): e for e in REFUSED if _takes(e[2])}


@pytest.mark.few(5)
@pytest.mark.parametrize("entry", KINDS.values(), ids=lambda entry: entry[0])
def test_what_is_not_planned_is_neither_rewritten_nor_built(entry: Entry, tmp_path: Path) -> None:
    _, make, options = entry
    (tmp_path / "model").mkdir()
    path, plan_options = make(tmp_path / "model"), PlanOptions(**{**options, "target": Target.TENSORRT_RTX})
    with pytest.raises(TrtKvCacheError) as planned:
        plan_model(path, plan_options)
    with pytest.raises(type(planned.value), match=re.escape(str(planned.value))):
        rewrite_model(path, tmp_path / "out.onnx", plan_options)
    with pytest.raises(type(planned.value), match=re.escape(str(planned.value))):
        build_engine(path, tmp_path / "out.engine", options=plan_options)
    assert [found.name for found in tmp_path.iterdir()] == ["model"]


def test_every_refusal_is_one_of_ours_and_one_line() -> None:
    for entry in REFUSED:
        name, _, words = RECORD[entry[0]][0].partition(": ")
        assert issubclass(getattr(errors, name), errors.TrtKvCacheError), entry[0]
        assert len(words) > 30, entry[0]
        assert " / " not in words, entry[0]
