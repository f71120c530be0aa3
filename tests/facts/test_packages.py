"""Contents of the package `tensorrt_rtx`, and its parser outside caches and attention."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorrt_rtx
import trt
from cases import HALF, INT64
from graphs import Graph, scatter_model
from onnx import TensorProto


def test_external_data_is_looked_up_beside_a_path_that_need_not_exist(tmp_path: Path) -> None:
    """A rewritten model is parsed from memory, its weights stay in the source's folder."""
    weights = np.arange(12, dtype=np.float16)
    (tmp_path / "weights.bin").write_bytes(weights.tobytes())
    graph = Graph()
    graph.input("x", HALF, ["B", 12])
    graph.Mul("x", "weights", out="y")
    graph.output("y", HALF, ["B", 12])
    tensor = TensorProto(name="weights", data_type=HALF, dims=[12], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    graph.initializers.append(tensor)
    model = graph.model()
    assert trt.build(model, path=str(tmp_path / "does_not_exist.onnx")).stage == "built"
    elsewhere = trt.build(model, path=str(tmp_path / "other" / "does_not_exist.onnx"))
    assert elsewhere.stage == "parse"


def test_compute_capabilities() -> None:
    expected = ["NONE", "CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120", "SM121"]
    assert list(tensorrt_rtx.ComputeCapability.__members__) == expected


def rotary(domain: str, num_heads: int) -> bytes:
    """A 3-D RotaryEmbedding; with zero heads, the default of the contrib operator, the parser divides by zero."""
    graph = Graph()
    data = graph.input("x", HALF, [2, 3, 64])
    positions = graph.input("positions", INT64, [2, 3])
    tables = [graph.input(name, HALF, [32, 8]) for name in ("cos", "sin")]
    inputs = [data, positions, *tables] if domain else [data, *tables, positions]
    graph.node("RotaryEmbedding", inputs, "y", domain=domain, num_heads=num_heads)
    graph.output("y", HALF, [2, 3, 64])
    return graph.model(domains=[domain] if domain else []).SerializeToString()


@pytest.mark.parametrize("domain", ["com.microsoft", ""])
def test_a_model_that_kills_the_process(domain: str, tmp_path: Path) -> None:
    """Why parsing runs in a child process."""
    assert trt.build(rotary(domain, num_heads=4)).stage == "built"
    model = tmp_path / "model.onnx"
    model.write_bytes(rotary(domain, num_heads=0))
    code = (
        "import sys, pathlib, tensorrt_rtx as trt\n"
        "log = trt.Logger(); network = trt.Builder(log).create_network(0)\n"
        "trt.OnnxParser(network, log).parse(pathlib.Path(sys.argv[1]).read_bytes())\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, timeout=120)
    assert child.returncode == -signal.SIGFPE


@pytest.mark.gpu
def test_engine_reports_the_alias() -> None:
    """Deserializing needs a driver; the layer's alias is then known to the engine."""
    parsed = trt.parse(scatter_model((1, 2, 16, 8), length=1))
    config = parsed.builder.create_builder_config()
    plan = parsed.builder.build_serialized_network(parsed.network, config)
    engine = tensorrt_rtx.Runtime(parsed.log).deserialize_cuda_engine(plan)
    assert engine is not None, parsed.log.errors
    assert engine.get_aliased_input_tensor("present") == "past"
