"""Every name of TensorRT's that the project uses exists, with as many arguments, in the oldest and newest version."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx
from real_bindings import NEWEST, OLDEST, ask

_SPEC = importlib.util.spec_from_file_location("api_names", Path(__file__).with_name("api_names.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
api_names: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["api_names"] = api_names
_SPEC.loader.exec_module(api_names)

USES = api_names.uses()


def relevant(excluded: set[str]) -> list[Any]:
    return [use for use in USES if use.name not in excluded and not any(use.name.startswith(f"{e}.") for e in excluded)]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_names_and_arguments_of_tensorrt(version: str, tmp_path: Path) -> None:
    absent = api_names.RTX_ONLY | (api_names.SINCE_11 if version == OLDEST else set())
    question = [dataclasses.astuple(use) for use in relevant(absent)]
    answer = ask(version, Path(__file__).with_name("check_api_names.py"), question, tmp_path, registry=False)
    assert answer["version"] == version
    assert len(answer["answers"]) == len(question) > 60
    assert [a for a in answer["answers"] if a[1]] == []


def test_names_and_arguments_of_tensorrt_for_rtx() -> None:
    uses = [u for u in relevant(api_names.FULL_ONLY) if not u.name.startswith("plugin.")]
    assert [(u, p) for u in uses if (p := api_names.problem(tensorrt_rtx, u))] == []
