"""``trt-kvcache plugins``: the kernels of one model, and the report on those that it compiled."""

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from cases import packed_model
from commands import invoke
from decoders import DecoderConfig, write_decoder
from graphs import Graph, scatter_model
from needs import needs_nvrtc
from onnx import TensorProto
from runtime.engines import write_engine
from runtime.fake_cuda import Machine
from runtime.fake_tensorrt import fake_module
from typer.testing import Result

from trt_kvcache.engine.backend import can_build
from trt_kvcache.importer.cache_plan import Target
from trt_kvcache.plugins import compile as compiling
from trt_kvcache.plugins.compile import CACHE_VARIABLE, nvrtc_version
from trt_kvcache.runtime.trt.trt_runner import Bindings, TensorRTRunner

PAIR = "kvcache_padded_circular_two"
NEXT = ["next"] if can_build(Target.TENSORRT) else []


def run(*arguments: object, code: int = 0) -> Result:
    return invoke("plugins", *arguments, code=code)


def listed(*arguments: object) -> list[Any]:
    return [row["kernel"] for row in json.loads(run(*arguments, "--json").stdout)]


@pytest.fixture
def circular(tmp_path: Path) -> Path:
    config = DecoderConfig(layers=2, mode="circular", lengths=False, causal=False)
    return write_decoder(tmp_path / "model.onnx", config)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def quantized_model(source: int) -> onnx.ModelProto:
    """An int8 cache whose update is quantized on write."""
    graph = Graph()
    past = graph.input("past", TensorProto.INT8, ["B", 2, 8, 4])
    update, indices = graph.input("update", source, ["B", 2, "S", 4]), graph.input("write_indices", 7, ["B"])
    graph.node("Constant", [], ["scale"], value=onnx.helper.make_tensor("s", 1, [], [0.5]))
    graph.node("Constant", [], ["zero"], value=onnx.helper.make_tensor("z", 3, [], [0]))
    graph.node("QuantizeLinear", [update, "scale", "zero"], ["quantized"])
    graph.node("TensorScatter", [past, "quantized", indices], ["present"], axis=2, mode="circular")
    graph.output("present", TensorProto.INT8, ["B", 2, 8, 4])
    return graph.model(24)


@pytest.mark.slow
def test_it_lists_the_kernels_of_a_model(circular: Path, tmp_path: Path) -> None:
    assert listed(circular) == [PAIR, "choice_float32"]
    assert listed(write_decoder(tmp_path / "linear.onnx", DecoderConfig(dtype="float16"))) == ["choice_float16"]
    text = run(circular).stdout
    assert [line.split()[0] for line in text.splitlines()[2:]] == [PAIR, "choice_float32", *NEXT]
    assert not NEXT or text.splitlines()[-1].endswith("-o model-engine/ --backend tensorrt")
    assert "choice" not in run(circular, "--kernel", "kvcache*").stdout


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (scatter_model(dtype=TensorProto.INT8), "kvcache_padded_linear_one"),
        (packed_model(mode="circular"), "kvcache_packed_circular_one"),
        (quantized_model(TensorProto.FLOAT16), "kvcache_padded_circular_float16_to_int8_one"),
        (quantized_model(TensorProto.FLOAT), "kvcache_padded_circular_float_to_int8_one"),
    ],
    ids=["int8", "packed", "float16 to int8", "float to int8"],
)
def test_forms_and_types_choose_the_kernel(model: onnx.ModelProto, kernel: str, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "model.onnx")
    assert listed(tmp_path / "model.onnx") == [kernel]


def test_options_plan_the_model(circular: Path, tmp_path: Path) -> None:
    assert listed(circular, "--fallback", "functional") == ["choice_float32"]
    onnx.save(packed_model(), tmp_path / "packed.onnx")
    assert listed(tmp_path / "packed.onnx", "--packed-native", "off") == ["kvcache_packed_linear_one"]
    assert run(tmp_path / "packed.onnx").stdout.startswith("packed.onnx needs no kernel beside TensorRT's own\n")


def test_an_engine_carries_its_updates(tmp_path: Path) -> None:
    engine = write_engine(write_decoder(tmp_path / "model.onnx", DecoderConfig(dtype="float16", capacity=16)))
    assert listed(engine) == ["choice_float16"]
    assert "only a model takes --capacity, and" in run(engine, "--capacity", "9", code=1).stderr


@pytest.mark.slow
@needs_nvrtc
def test_it_compiles_ahead_and_shows_resources(circular: Path, kernels: Path) -> None:
    made = json.loads(run(circular, "--arch", "sm_80,sm_90", "--kernel", PAIR, "--json").stdout)
    assert [(row["kernel"], row["arch"]) for row in made] == [(PAIR, "sm_80"), (PAIR, "sm_90")]
    for row in made:
        assert row["spill_bytes"] == row["stack_bytes"] == 0
        assert 16 <= row["registers"] <= 128
        assert 0 < row["occupancy"] <= 1
        assert row["cubin_bytes"] > 1000
        assert row["ptx_bytes"] > 1000
    assert len(list(kernels.iterdir())) == 4
    text = run(circular, "--arch", "sm_90", "--kernel", PAIR).stdout
    assert f"{made[1]['occupancy']:.0%}" in text
    assert f"1 kernels for sm_90, made by NVRTC {'.'.join(map(str, nvrtc_version()))}, in {kernels}" in text


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_session_finds_what_was_compiled_ahead(
    dtype: str, tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = write_engine(write_decoder(tmp_path / "model.onnx", DecoderConfig(dtype=dtype, capacity=16)))
    (row,) = json.loads(run(engine, "--arch", "sm_90", "--json").stdout)
    assert (row["kernel"], row["spill_bytes"], row["stack_bytes"], row["ptx_bytes"]) == (f"choice_{dtype}", 0, 0, None)
    assert 16 <= row["registers"] <= 64
    assert len(list(kernels.iterdir())) == 1
    assert run(engine, "--arch", "sm_90").stdout.splitlines()[2].split()[-1] == "-"

    def broken(*arguments: object, **options: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_compile", broken)
    gpu = Machine()
    TensorRTRunner(engine, bindings=Bindings(fake_module(gpu), gpu.bindings())).close()
    assert gpu.launched


@needs_nvrtc
def test_an_unknown_architecture_is_one_line(circular: Path) -> None:
    done = run(circular, "--arch", "sm_90,sm_11", code=1)
    assert re.fullmatch(r".*NVRTC .* cannot compile for architecture 'sm_11'; give one of .*sm_90.*\n", done.stderr)


def test_a_pattern_that_matches_nothing_is_one_line(circular: Path) -> None:
    done = run(circular, "--kernel", "fast", code=1)
    assert done.stderr == f"error: no kernel matches 'fast'; model.onnx needs {PAIR}, choice_float32\n"
