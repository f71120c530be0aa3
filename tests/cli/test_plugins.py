"""``trt-kvcache plugins``: what it lists, and what it says of kernels that it compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder
from needs import needs_nvrtc
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import fake_module
from typer.testing import CliRunner, Result

from trt_kvcache.cli.app import app
from trt_kvcache.plugins import compile as compiling
from trt_kvcache.plugins.compile import CACHE_VARIABLE, nvrtc_version
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner

PLAIN = "kvcache_padded_linear_one"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plugins", *arguments])


def test_it_lists_the_family() -> None:
    listed = json.loads(run("--json").stdout)
    assert len({row["kernel"] for row in listed}) == 168 + 3
    assert listed[-1] == {
        "kernel": "choice_float32", "logits": "float32", "functions": ["best_token", "set_maxima", "candidates"],
    }  # fmt: skip
    text = run("--kernel", "*packed_circular_float16_to_int8_two_errors").stdout
    (row,) = [line.split() for line in text.splitlines() if line.startswith("kvcache")]
    assert row[1:] == ["packed", "circular", "2", "float16", "to", "int8", "cumulative", "yes"]
    assert "choice" not in text
    text = run("--kernel", "choice_bfloat16").stdout
    assert "error flags" not in text
    assert text.splitlines()[-1].split() == ["choice_bfloat16", "bfloat16", "best_token,", "set_maxima,", "candidates"]


@needs_nvrtc
def test_it_compiles_ahead_and_shows_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    made = json.loads(run("--arch", "sm_80,sm_90", "--kernel", PLAIN, "--json").stdout)
    assert [(row["kernel"], row["arch"]) for row in made] == [(PLAIN, "sm_80"), (PLAIN, "sm_90")]
    for row in made:
        assert row["spill_bytes"] == row["stack_bytes"] == 0
        assert 16 <= row["registers"] <= 128
        assert 0 < row["occupancy"] <= 1
        assert row["cubin_bytes"] > 1000
        assert row["ptx_bytes"] > 1000
    assert len(list((tmp_path / "kernels").iterdir())) == 4
    text = run("--arch", "sm_90", "--kernel", PLAIN).stdout
    assert f"{made[1]['occupancy']:.0%}" in text
    assert f"1 kernels of NVRTC {'.'.join(map(str, nvrtc_version()))} in {tmp_path / 'kernels'}" in text


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_session_finds_what_was_compiled_ahead(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    (row,) = json.loads(run("--arch", "sm_90", "--kernel", f"choice_{dtype}", "--json").stdout)
    assert (row["spill_bytes"], row["stack_bytes"], row["ptx_bytes"]) == (0, 0, None)
    assert 16 <= row["registers"] <= 64
    assert len(list((tmp_path / "kernels").iterdir())) == 1
    assert run("--arch", "sm_90", "--kernel", f"choice_{dtype}").stdout.splitlines()[2].endswith("none")

    def broken(*arguments: object, **options: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_compile", broken)
    engine = write_engine(write_decoder(tmp_path / "model.onnx", DecoderConfig(dtype=dtype, capacity=16)))
    gpu = Machine()
    TensorRTRunner(engine, bindings=Bindings(fake_module(gpu), gpu.bindings())).close()
    assert gpu.launched


@needs_nvrtc
def test_an_unknown_architecture_is_one_line() -> None:
    done = run("--arch", "sm_90,sm_11")
    assert done.exit_code == 1
    assert "architecture 'sm_11': NVRTC" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_pattern_that_matches_nothing_is_one_line() -> None:
    done = run("--kernel", "fast")
    assert done.exit_code == 1
    assert done.stderr.startswith(
        "error: no kernel matches 'fast'; the 171 are named like kvcache_padded_linear_one and choice_fl"
    )
