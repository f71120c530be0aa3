"""From a plan with the plugin to TensorRT: registered before the parser runs, refused by name, found in the network."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from cases import packed_model
from decoders import DecoderConfig, write_decoder
from graphs import scatter_model
from harness import imported
from real_bindings import NEWEST, ask

from trt_kvcache.engine.builder import check_network
from trt_kvcache.engine.diagnosis import find_gpus
from trt_kvcache.errors import BuildError
from trt_kvcache.importer.cache_plan import CachePlan, Fallback, PlanOptions, Route, Target
from trt_kvcache.messages import as_arguments
from trt_kvcache.plugins.compile import nvrtc_version

SCRIPT = Path(__file__).with_name("build_for_tensorrt.py")


def circular_decoder(folder: Path) -> Path:
    return write_decoder(folder / "model.onnx", DecoderConfig(layers=1, mode="circular", lengths=False, causal=False))


def stubs(folder: Path) -> Path:
    (folder / "stubs").mkdir()
    return folder / "stubs"


@pytest.mark.slow
def test_a_build_needs_a_gpu_to_compile_the_kernel_for(tmp_path: Path) -> None:
    """All the way through `build_engine` and its child process, with TensorRT's bindings, before anything is parsed."""
    if find_gpus()[2] == "":
        pytest.skip("there is a driver here; the builder behind the bindings is none")
    model = circular_decoder(tmp_path)
    question = {"version": NEWEST, "model": str(model), "engine": str(tmp_path / "model.engine")}
    answer = ask(NEWEST, SCRIPT, question, stubs(tmp_path))
    assert answer["kind"] == "BackendError"
    assert "the cache-update plugin is compiled for the GPU of this machine" in answer["error"]
    assert not (tmp_path / "model.engine").exists()


def text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


MAJOR, MINOR = NVRTC = nvrtc_version()
OLD = (MAJOR - 1, 8)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (("sm_90", NVRTC), ""),
        (("sm_120", (MAJOR, MINOR + 1)), ""),
        (("sm_999", NVRTC), f"NVRTC {text(NVRTC)} cannot compile for architecture 'sm_999'; give one of sm_"),
        (("sm_90", OLD), f"PTX from NVRTC {text(NVRTC)} needs a driver for CUDA"),
        # A cubin would do for this driver, but not for TensorRT.
        (
            ("sm_90", (MAJOR, MINOR - 1)),
            f"install an older nvidia-cuda-nvrtc ({text((MAJOR, MINOR - 1))}.*), or a newer",
        ),
    ],
    ids=str,
)
def test_the_worker_registers_or_refuses(gpu: tuple[str, tuple[int, int]], words: str, tmp_path: Path) -> None:
    model = circular_decoder(tmp_path)
    answer = ask(NEWEST, SCRIPT, {"model": str(model), "gpu": gpu}, stubs(tmp_path))
    assert answer["registered"] == (not words)
    assert words in answer.get("error", "")
    assert answer.get("kind") == ("OptionError" if words else None)


@pytest.mark.slow
def test_plans_without_the_plugin_do_not_register_it(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    assert not ask(NEWEST, SCRIPT, {"model": str(model), "gpu": ("none", (0, 0))}, stubs(tmp_path))["registered"]


CONTRACT = "--fallback contract (in place, but no update may cross the end of the ring) or "
FUNCTIONAL = "--fallback functional (plain operators, which copy the cache in each step)"
WAYS_OUT = {
    "circular": (scatter_model(mode="circular"), f"plan without the plugin: {CONTRACT}{FUNCTIONAL}"),
    "int8": (scatter_model(dtype=3), f"plan without the plugin: {FUNCTIONAL}"),
    "circular int8": (scatter_model(dtype=3, mode="circular"), f"plan without the plugin: {FUNCTIONAL}"),
    "fp8": (
        scatter_model(dtype=17),
        "the float8e4m3fn caches of this model need the plugin: export them as float16, bfloat16 or float32",
    ),
    "packed": (
        packed_model(),
        "the packed updates of this model need the plugin on TensorRT before 11.0; .*: export with",
    ),
    "packed circular": (
        packed_model(mode="circular"),
        "the packed updates of this model need the plugin: export with padded updates",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", WAYS_OUT)
def test_without_a_compiler_the_error_names_the_way_out(kind: str, tmp_path: Path) -> None:
    model, way_out = WAYS_OUT[kind]
    onnx.save(model, tmp_path / "model.onnx")
    question = {"model": str(tmp_path / "model.onnx"), "gpu": ("sm_90", NVRTC), "lacks": True}
    answer = ask(NEWEST, SCRIPT, question, stubs(tmp_path))
    assert answer["kind"] == "BackendError"
    assert not answer["registered"]
    assert "NVRTC, which compiles kernels, is not installed: pip install" in answer["error"]
    assert re.search(as_arguments(way_out).replace("(", r"\(").replace(")", r"\)"), answer["error"])


@pytest.mark.parametrize("fallback", ["contract", "functional"])
def test_the_ways_out_that_are_named_need_no_plugin(fallback: str, tmp_path: Path) -> None:
    for kind, (model, words) in WAYS_OUT.items():
        if f"--fallback {fallback}" in words:
            options = PlanOptions(target=Target.TENSORRT, fallback=Fallback(fallback))
            (cache,) = imported(model, tmp_path, options).plan.caches
            assert cache.route is (Route.NATIVE if fallback == "contract" else Route.FUNCTIONAL), kind


class Layer:
    def __init__(self, kind: str, inputs: list[str], outputs: list[str]) -> None:
        self.type, self.name, self.num_outputs = kind, "layer", len(outputs)
        self.get_input = lambda i: SimpleNamespace(name=inputs[i])
        self.get_output = lambda i: SimpleNamespace(name=outputs[i])


class Network:
    """A network of layers, with the inputs and outputs of a plan."""

    def __init__(self, plan: CachePlan, layers: list[Layer]) -> None:
        self.num_layers, self.get_layer = len(layers), layers.__getitem__
        tensors = {io: [self.tensor(t) for t in plan.tensors if t.io == io] for io in ("input", "output")}
        self.num_inputs, self.get_input = len(tensors["input"]), tensors["input"].__getitem__
        self.num_outputs, self.get_output = len(tensors["output"]), tensors["output"].__getitem__

    @staticmethod
    def tensor(role: Any) -> Any:
        shape = [d if isinstance(d, int) else -1 for d in role.shape]
        dtype = {"float16": "HALF", "int64": "INT64", "float": "FLOAT", "bool": "BOOL"}[role.dtype]
        return SimpleNamespace(name=role.name, dtype=SimpleNamespace(name=dtype), shape=shape, is_shape_tensor=False)


TRT = SimpleNamespace(LayerType=SimpleNamespace(KV_CACHE_UPDATE="kv", PLUGIN_V3="plugin"))


def test_plugin_layers_are_found_in_the_network(tmp_path: Path) -> None:
    plan = imported(scatter_model(mode="circular"), tmp_path, PlanOptions(target=Target.TENSORRT)).plan
    layer = Layer("plugin", ["past", "update", "write_indices"], ["present"])
    check_network(Network(plan, [layer]), plan, TRT)
    copies = [Layer("scatter", ["past"], ["present"])]
    other = [Layer("plugin", ["other", "update"], ["present"])]
    for layers in ([], copies, other):
        with pytest.raises(
            BuildError, match="no layer of the cache-update plugin for past -> present.*not update them in"
        ):
            check_network(Network(plan, layers), plan, TRT)
