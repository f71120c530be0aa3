"""A report has the graph without weights and names, and gives the same plan or refusal again."""

import json
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import invoke
from decoders import DecoderConfig, make_decoder
from foreign_decoders import make_foreign
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.importer.files.source import load_source
from trt_kvcache.importer.files.stripped import strip


def run(*arguments: str, code: int = 0) -> str:
    result = invoke(*arguments, code=code)
    return result.stdout if code == 0 else result.stderr


def content(path: Path) -> tuple[onnx.ModelProto, dict[str, object], str]:
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json").decode() if "config.json" in archive.namelist() else ""
        return onnx.ModelProto.FromString(archive.read("model.onnx")), json.loads(archive.read("report.json")), config


def secret_model(folder: Path) -> Path:
    """With names, texts and weights that nobody else may see."""
    model = make_foreign("concat", DecoderConfig(vocab=512))
    model.graph.name = model.doc_string = model.producer_name = "secret graph"
    model.producer_name = "an exporter"
    helper.set_model_props(model, {"trained at": "secret place"})
    weights = {tensor.name: f"secret.{tensor.name}" for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        tensor.name = weights[tensor.name]
    for node in model.graph.node:
        node.name = f"secret/{node.name}"
        node.input[:] = [weights.get(name, name) for name in node.input]
        node.metadata_props.add(key="stack", value="secret.py")
    (folder / "config.json").write_text(
        '{"model_type": "llama", "_name_or_path": "secret", "text": {"vocab_size": 512}}'
    )
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_a_report_plans_again_and_holds_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = secret_model(tmp_path)
    given = {numpy_helper.to_array(t).tobytes() for t in onnx.load(model).graph.initializer if len(t.raw_data) > 64}
    shown = run("report", "model.onnx", "--capacity", "64", "-o", "report.zip")
    assert "planned: 4 of 4 caches in place\nagain      the graph without weights gives the same\n" in shown
    graph, said, config = content(tmp_path / "report.zip")
    assert "secret" not in f"{graph}{said}{config}"
    assert json.loads(config) == {"model_type": "llama", "text": {"vocab_size": 512}}
    assert (said["producer"], said["again"], said["doctor"]["version"]) == (
        "an exporter",
        True,
        said["doctor"]["version"],
    )  # type: ignore[index]
    content_ = graph.SerializeToString()
    assert given
    assert not [data for data in given if data in content_]
    wanted = json.loads(run("plan", "model.onnx", "--json", "--capacity", "64"))
    again = json.loads(run("plan", "report.zip", "--json"))
    for of_plan in (lambda p: [(c["past"], c["physical_shape"], c["route"], c["reason"]) for c in p["caches"]],
                    lambda p: [(a["kind"], a["reason"]) for a in p["attention"]], lambda p: p["changes"]):  # fmt: skip
        assert of_plan(again) == of_plan(wanted)
    assert "next" not in run("plan", "report.zip")


def test_a_refusal_comes_again(tmp_path: Path) -> None:
    model = make_decoder(DecoderConfig(layers=1, capacity=16, vocab=64))
    inner = next(node.output[0] for node in model.graph.node if node.op_type == "MatMul")
    model.graph.node.append(helper.make_node("Cast", [inner], ["twice"], to=TensorProto.DOUBLE))
    model.graph.output.append(helper.make_tensor_value_info("twice", TensorProto.DOUBLE, ["a", "b", "c"]))
    onnx.save(model, tmp_path / "model.onnx")
    refused = run("plan", str(tmp_path / "model.onnx"), code=1)
    run("report", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "report.zip"))
    _, said, _ = content(tmp_path / "report.zip")
    outcome = said["outcome"]
    assert (said["again"], outcome["kind"]) == (True, "UnsupportedModelError")  # type: ignore[index]
    assert outcome["message"] in refused.replace(str(tmp_path / "model.onnx"), "MODEL")  # type: ignore[index]
    assert run("plan", str(tmp_path / "report.zip"), code=1).startswith("error: ")


def test_a_refusal_that_needs_what_is_left_out_says_so(tmp_path: Path) -> None:
    """The record of a rewritten file is a text of its own, and goes."""
    onnx.save(make_decoder(DecoderConfig(layers=1, capacity=16, vocab=64)), tmp_path / "model.onnx")
    run("rewrite", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.onnx"))
    shown = run("report", str(tmp_path / "out.onnx"), "-o", str(tmp_path / "report.zip"))
    _, said, _ = content(tmp_path / "report.zip")
    assert said["again"] is False
    assert said["outcome"]["message"].startswith("MODEL: was rewritten by trt_kvcache already")  # type: ignore[index]
    assert "the graph without weights gives another one" in shown


def test_tables_keep_their_contents_where_the_plan_needs_them(tmp_path: Path) -> None:
    table = np.linspace(0, 1, 2000, dtype=np.float32)
    model = make_foreign("concat", DecoderConfig(vocab=512))
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    onnx.save(model, tmp_path / "model.onnx")
    source = load_source(tmp_path / "model.onnx")
    for keep_tables in (False, True):
        stripped, names, kept = strip(source, keep_tables=keep_tables)
        (found,) = (t for t in stripped.graph.initializer if t.name == names["table"])
        assert (kept > 0, found.data_location == TensorProto.DEFAULT) == (keep_tables, keep_tables)
        assert not keep_tables or (numpy_helper.to_array(found) == table).all()


@pytest.mark.parametrize("location", ["../outside", "/etc/passwd", "weights.float/../../x"])
def test_a_report_from_elsewhere_writes_no_other_file(location: str, tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "length": "16"}.items():
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph([], "g", [], [], [tensor])
    with zipfile.ZipFile(tmp_path / "report.zip", "w") as archive:
        archive.writestr("model.onnx", helper.make_model(graph).SerializeToString())
        archive.writestr("report.json", '{"options": {}}')
    said = run("plan", str(tmp_path / "report.zip"), code=1)
    assert "report.zip: not a report of trt-kvcache: its model refers to the file" in said
    assert [file.name for file in tmp_path.iterdir()] == ["report.zip"]
