"""A refusal is of one kind at every station, and leaves nothing."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import net
import pytest
from corpus import Entry, entries

from trt_kvcache import build_engine, plan_model, rewrite_model
from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.importer.cache_plan import PlanOptions, Target

OTHERS = [e for e in entries() if e[0] not in net.promises().models]
REFUSED = ("odd/counts at 7", "case/in-op-cache", "stored/plain-torch/narrow_copy_legacy_op17")
"""Keys of models that are refused at different stations."""


def _takes(options: dict[str, Any]) -> bool:
    """`PlanOptions` refuses some itself."""
    with suppress(OptionError):
        return bool(PlanOptions(**options))
    return False


@pytest.mark.parametrize("entry", [e for e in OTHERS if e[0] in REFUSED], ids=lambda entry: entry[0])
def test_what_is_not_planned_is_neither_rewritten_nor_built(entry: Entry, tmp_path: Path) -> None:
    _check_refused(entry, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in OTHERS if _takes(e[2])], ids=lambda entry: entry[0])
def test_any_other_model_that_is_not_planned(entry: Entry, tmp_path: Path) -> None:
    if net.treat(entry, verify=False).word == net.REFUSED and entry[2].get("target") != Target.TENSORRT:
        _check_refused(entry, tmp_path)


def _check_refused(entry: Entry, tmp_path: Path) -> None:
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
