"""`plan` foresees what no session can fill or read, and `--config` gives roles to the commands that run models."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import invoke
from concat_graphs import Build, Decoder, make_decoder
from greedy import greedy
from onnx import TensorProto
from typer.testing import Result

import trt_kvcache
from trt_kvcache.errors import UnsupportedModelError


def run(*arguments: object) -> Result:
    return invoke(*arguments, code=None)


def lora(g: Build, x: str) -> str:
    pair = (g.input("lora_a", TensorProto.FLOAT, [16, "rank"]), g.input("lora_b", TensorProto.FLOAT, ["rank", 16]))
    made: str = g.Add(x, g.MatMul(g.MatMul(x, pair[0]), pair[1]))
    return made


def at_index(g: Build, x: str) -> str:
    index = g.Unsqueeze(g.input("last_index", TensorProto.INT64, ["batch"]), [1, 2])
    made: str = g.GatherND(x, index, batch_dims=1)
    return made


def indices(g: Build, x: str) -> str:
    """The positions that transformers takes as `logits_to_keep`, too."""
    made: str = g.Gather(x, g.input("logits_to_keep", TensorProto.INT64, ["kept"]), axis=1)
    return made


def write(folder: Path, after: Callable[[Build, str], str], output: str = "logits") -> Path:
    model = make_decoder(Decoder(positions="past", after=after))
    if after is at_index:
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    if after is indices:
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "kept"
    if output != "logits":
        model.graph.node.append(onnx.helper.make_node("ArgMax", ["logits"], [output], "best", axis=-1, keepdims=0))
        shape = ["batch", "sequence"]
        model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(output, TensorProto.INT64, shape))
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("after", "output", "said"),
    [
        (
            lora,
            "logits",
            "none: input 'lora_a' (float [16, 'rank']) takes the weights of an adapter for all sequences",
        ),
        (indices, "logits", "none: input 'logits_to_keep' (int64 ['kept']) has no known role in decoding"),
        (at_index, "logits", "none: input 'last_index' (int64 ['batch']) has no known role in decoding"),
        (lambda _, x: x, "next_token", "none: no output has the role 'logits' (outputs: 'next_token' int64"),
    ],
)
def test_plan_says_that_no_session_runs_a_model(
    after: Callable[[Build, str], str], output: str, said: str, tmp_path: Path
) -> None:
    model = write(tmp_path, after, output)
    result = run("plan", model, "--capacity", 24)
    assert f"sessions {said}" in " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert ("name the input's role" in result.stdout) == (after is at_index)  # zeros need a size
    data = json.loads(run("plan", model, "--capacity", 24, "--json").stdout)
    assert data["no_session"].startswith(said.removeprefix("none: "))
    assert "sessions: none, " in run("plan", model, "--capacity", 24, "--all").stdout


def test_plan_says_that_no_session_reads_several_scores_for_each_position(tmp_path: Path) -> None:
    """Heads of two codebooks, ``[B, 2, S, V]``: a session ended in a trace of NumPy."""
    model = make_decoder(Decoder(positions="past"))
    graph, axes = model.graph, onnx.numpy_helper.from_array(np.array([1]), "axes")
    next(node for node in graph.node if "logits" in node.output).output[0] = "head"
    graph.initializer.append(axes)
    graph.node.append(onnx.helper.make_node("Unsqueeze", ["head", "axes"], ["heads"], "heads"))
    graph.node.append(onnx.helper.make_node("Concat", ["heads", "heads"], ["logits"], "both", axis=1))
    graph.output[0].type.tensor_type.shape.dim.insert(1, onnx.TensorShapeProto.Dimension(dim_value=2))
    onnx.save(model, tmp_path / "model.onnx")
    result = run("plan", tmp_path / "model.onnx", "--capacity", 24)
    assert "hold 2 vectors of scores for each position, as models with several codebooks" in " ".join(
        result.stdout.split()
    )
    with pytest.raises(UnsupportedModelError, match="hold 2 vectors of scores"):
        trt_kvcache.DecodeSession.open(tmp_path / "model.onnx", capacity=24)


def test_verify_names_inputs_whose_values_it_guessed(tmp_path: Path) -> None:
    model = write(tmp_path, at_index)
    refused = run("verify", model, "--capacity", 24)
    assert refused.exit_code == 1
    assert (
        "input 'last_index' (int64 ['batch']) are unknown, so it got random values of 0 and 1: give values"
        in refused.stderr
    )
    np.savez(tmp_path / "inputs.npz", last_index=np.zeros(3, np.int64))
    assert run("verify", model, "--capacity", 24, "--inputs", tmp_path / "inputs.npz").exit_code == 0


def test_generate_takes_roles(tmp_path: Path) -> None:
    def typed(g: Build, x: str) -> str:
        table = g.constant(3 * np.random.default_rng(5).standard_normal((8, 16)), np.float32)
        found = g.Gather(table, g.input("kind", TensorProto.INT64, ["batch"]))
        made: str = g.Add(x, g.Unsqueeze(found, [1]))
        return made

    model, config = write(tmp_path, typed), tmp_path / "roles.yaml"
    arguments = ("generate", model, "--tokens", "7,1", "--max-new-tokens", 4, "--capacity", 24)
    refused = run(*arguments)
    assert "'kind' (int64 ['batch']) has no known role" in refused.stderr
    config.write_text("roles: {constant: kind}")
    np.savez(tmp_path / "kind.npz", kind=np.array([3]))
    made = run(*arguments, "--config", config, "--constants", tmp_path / "kind.npz")
    assert made.stdout.split() == [str(t) for t in greedy(model, (7, 1), 4, kind=lambda done, new: np.array([3]))]
