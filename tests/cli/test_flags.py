"""Flags are declared once, as dataclasses: none of a station's options may be without one."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trt_kvcache import BuildOptions, GenerationConfig, OptionError, PlanOptions, Target, VerifyOptions
from trt_kvcache.cli.build import BackendChoice, BuildFlags, DecodeWeights
from trt_kvcache.cli.generate import EarlyStopping, GenerationFlags
from trt_kvcache.cli.options import PlanFlags, SessionPlanFlags, Switch, with_flags
from trt_kvcache.cli.verify import VerifyFlags
from trt_kvcache.importer.plan import Sliding

STATIONS: list[tuple[Any, Any]] = [(PlanFlags, PlanOptions), (BuildFlags, BuildOptions), (VerifyFlags, VerifyOptions)]


@pytest.mark.parametrize(("flags", "options"), STATIONS, ids=lambda kind: kind.__name__)
def test_every_option_has_a_flag_of_the_same_default(flags: Any, options: Any) -> None:
    assert {f.name for f in fields(flags)} == {f.name for f in fields(options)}
    assert flags().options() == options()


def test_flags_become_options() -> None:
    plan = PlanFlags(capacity=64, sliding=Sliding.CIRCULAR, window_chunk=7, target=Target.TENSORRT,
                     attention_span=Switch.OFF, packed_native=Switch.OFF, config=Path("names.yaml"))  # fmt: skip
    assert plan.options() == PlanOptions(
        target=Target.TENSORRT, capacity=64, sliding=Sliding.CIRCULAR, window_chunk=7, attention_span=False,
        packed_native=False, config="names.yaml",
    )  # fmt: skip
    build = BuildFlags(
        backend=BackendChoice.TENSORRT,
        decode_weights=DecodeWeights.OWN,
        min_shapes="",
        workspace="1MiB",
        max_shapes="a:1x2,b:3",
        compute_capabilities="80,8.9",
        memory_check=False,
    )
    assert build.options() == BuildOptions(
        backend="tensorrt", decode_weights="own", workspace=2**20, max_shapes={"a": (1, 2), "b": (3,)},
        compute_capabilities=("sm80", "sm89"), memory_check=False,
    )  # fmt: skip
    assert VerifyFlags(chunks="4,", tokens=0, tolerance=0.0).options() == VerifyOptions(
        chunks=(4,), tokens=0, tolerance=0.0
    )
    with pytest.raises(OptionError, match=r"--chunks '5;3' is not a list of token counts such as 5,3"):
        VerifyFlags(chunks="5;3").options()


def test_zeros_are_given_and_empty_lists_are_not(tmp_path: Path) -> None:
    flags = GenerationFlags(top_k=0, temperature=1.0, seed=0, eos_token_id=[], sequence_bias=["3=-inf"])
    assert flags.config(tmp_path / "model.onnx", None) == GenerationConfig(
        do_sample=True, top_k=0, seed=0, sequence_bias={3: float("-inf")}
    )
    for given, value in ((EarlyStopping.TRUE, True), (EarlyStopping.FALSE, False), (EarlyStopping.NEVER, "never")):
        made = GenerationFlags(num_beams=2, early_stopping=given).config(tmp_path / "model.onnx", None)
        assert made.early_stopping == value


def test_every_generation_flag_is_a_setting() -> None:
    own = {"ignore_eos", "generation_config"}
    assert {f.name for f in fields(GenerationFlags)} - own <= {f.name for f in fields(GenerationConfig)}


def test_a_command_takes_the_fields_of_its_dataclasses() -> None:
    seen: list[Any] = []

    def command(model: str, planning: SessionPlanFlags, json: bool = False) -> None:
        """Do it."""
        seen.extend((model, planning, json))

    made = with_flags(command)
    names = ["model", *(f.name for f in fields(SessionPlanFlags)), "json"]
    assert (list(inspect.signature(made).parameters), made.__name__, made.__doc__) == (names, "command", "Do it.")
    given = {f.name: f.default for f in fields(SessionPlanFlags)} | {"capacity": 5}
    made(model="m", json=True, **given)
    assert seen == ["m", SessionPlanFlags(capacity=5), True]
