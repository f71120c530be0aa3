"""Flags are declared once, as dataclasses: none of a station's options may be without one."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trt_kvcache import BuildOptions, GenerationConfig, PlanOptions, VerifyOptions
from trt_kvcache.cli.build import BuildFlags
from trt_kvcache.cli.generate import EarlyStopping, GenerationFlags
from trt_kvcache.cli.options import PlanFlags, SessionPlanFlags, with_flags
from trt_kvcache.cli.verify import VerifyFlags

STATIONS: list[tuple[Any, Any]] = [(PlanFlags, PlanOptions), (BuildFlags, BuildOptions), (VerifyFlags, VerifyOptions)]


@pytest.mark.parametrize(("flags", "options"), STATIONS, ids=lambda kind: kind.__name__)
def test_every_option_has_a_flag_of_the_same_default(flags: Any, options: Any) -> None:
    assert {f.name for f in fields(flags)} == {f.name for f in fields(options)}
    assert flags().options() == options()


def test_zeros_are_given_and_empty_lists_are_not(tmp_path: Path) -> None:
    flags = GenerationFlags(top_k=0, temperature=1.0, seed=0, eos_token_id=[], sequence_bias=["3=-inf"])
    assert flags.config(tmp_path / "model.onnx", None) == GenerationConfig(
        do_sample=True, top_k=0, seed=0, sequence_bias={3: float("-inf")}
    )
    for given, value in ((EarlyStopping.TRUE, True), (EarlyStopping.FALSE, False), (EarlyStopping.NEVER, "never")):
        made = GenerationFlags(num_beams=2, early_stopping=given).config(tmp_path / "model.onnx", None)
        assert made.early_stopping == value


def test_a_command_takes_the_fields_of_its_dataclasses() -> None:
    seen: list[Any] = []

    def command(model: str, planning: SessionPlanFlags, json: bool = False) -> None:
        """Do it."""
        seen.extend((model, planning, json))

    made = with_flags(command)
    names = ["model", *(f.name for f in fields(SessionPlanFlags)), "json", "context"]
    assert (list(inspect.signature(made).parameters), made.__name__, made.__doc__) == (names, "command", "Do it.")
    given = {f.name: f.default for f in fields(SessionPlanFlags)} | {"capacity": 5}
    made(context=None, model="m", json=True, **given)
    assert seen == ["m", SessionPlanFlags(capacity=5), True]
