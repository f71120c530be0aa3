"""Engines built by TensorRT for RTX, without a GPU, through the public function."""

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, make_decoder, write_decoder
from onnx import helper, numpy_helper

from trt_kvcache import BuildOptions, GenerationConfig, build_engine
from trt_kvcache.engine import build_process as process
from trt_kvcache.engine import engine_build as build_module
from trt_kvcache.engine.build_process import STAGES
from trt_kvcache.engine.manifest import check_engine, load_manifest
from trt_kvcache.errors import BuildError, InvalidModelError, OptionError, OutputError, UnsupportedModelError
from trt_kvcache.files import identify
from trt_kvcache.importer import pipeline
from trt_kvcache.importer.cache_plan import AttentionKind, Route, Target
from trt_kvcache.progress import ProgressEvent

TINY = DecoderConfig(layers=1, head_size=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", TINY)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(layers=2, dtype="float16"),
        DecoderConfig(layers=2, dtype="bfloat16", form="heads-major", kv_heads=4),
        DecoderConfig(layers=1, dtype="float32", form="seq-major"),
    ],
    ids=lambda c: f"{c.form}-{c.dtype}",
)
def test_a_decoder_becomes_an_engine_and_a_manifest(tmp_path: Path, config: DecoderConfig) -> None:
    model = write_decoder(tmp_path / "model.onnx", config, external_threshold=1024)
    output = tmp_path / "model.engine"
    events: list[ProgressEvent] = []
    manifest = build_engine(model, output, build=BuildOptions(max_batch=4, max_chunk=16), progress=events.append)

    written = {"model.engine", "model.engine.json", "model.engine.proof"}
    assert names(tmp_path) == {"model.onnx", "model.onnx.data", *written}
    assert load_manifest(output) == manifest
    check_engine(manifest, output)
    assert manifest.engine == identify(output)
    assert manifest.model == (identify(model), identify(tmp_path / "model.onnx.data"))
    caches = [f"{kind}_cache.{i}" for i in range(config.layers) for kind in ("key", "value")]
    assert manifest.aliases == {f"updated_{name}": name for name in caches}
    assert manifest.double_buffered == {}
    assert (manifest.vocab, manifest.max_positions) == (256, 4096)
    assert all(c.route is Route.NATIVE for c in manifest.plan.caches)
    assert [p.name for p in manifest.profiles] == ["prefill", "decode"]
    assert manifest.profiles[0].shapes["input_ids"].max == (4, 16)
    assert (manifest.max_batch, manifest.max_chunk) == (4, 16)
    assert manifest.backend == "tensorrt-rtx"
    assert manifest.plan.options.target is Target.TENSORRT_RTX
    assert manifest.options["max_chunk"] == 16

    stages = [e for e in events if e.phase == "building the engine"]
    assert [(e.step, e.finished) for e in stages] == [(0, False), (1, True)]
    own = [e for e in events if e.phase == "Building engine"]  # TensorRT's
    assert own[0].step == 0
    assert own[-1].finished
    assert all(e.step <= e.steps for e in events)


@pytest.mark.slow
def test_an_engine_far_from_its_export_knows_which_tokens_end_a_text(tmp_path: Path) -> None:
    """A file beside the engine counts more; a broken file beside the model stops the build."""
    (tmp_path / "export").mkdir()
    model = write_decoder(tmp_path / "export" / "model.onnx", TINY)
    settings = tmp_path / "export" / "generation_config.json"
    settings.write_text('{"eos_token_id": [2, 7], "suppress_tokens": [5], "top_k": 3}')
    output = tmp_path / "model.engine"
    manifest = build_engine(model, output)
    assert manifest.generation == {"eos_token_id": [2, 7], "suppress_tokens": [5]}
    assert load_manifest(output) == manifest
    assert GenerationConfig.for_model(output) == GenerationConfig(eos_token_id=[2, 7], suppress_tokens=[5])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    found = GenerationConfig.for_model(output, forced_bos_token_id=1)
    assert found == GenerationConfig(eos_token_id=9, suppress_tokens=[5], forced_bos_token_id=1)
    settings.write_text("{")
    with pytest.raises(OptionError, match="generation_config.json is not JSON"):
        build_engine(model, output)
    assert load_manifest(output) == manifest


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_batch_of_one_stores_weights_once(tmp_path: Path, dtype: str) -> None:
    """A fact about TensorRT for RTX: for decode steps of exactly one row, weights have a layout of their own."""
    config = DecoderConfig(layers=1, hidden=512, query_heads=8, kv_heads=2, head_size=64, vocab=8192, dtype=dtype)
    model = write_decoder(tmp_path / "model.onnx", config)
    weights = model.stat().st_size
    sizes = {}
    for kind in ("shared", "own"):
        build_engine(model, tmp_path / "model.engine", build=BuildOptions(max_chunk=16, decode_weights=kind))
        sizes[kind] = (tmp_path / "model.engine").stat().st_size
    assert sizes["own"] - sizes["shared"] > 0.4 * weights, sizes


def test_what_the_parser_refuses_is_named(tmp_path: Path) -> None:
    model = make_decoder(TINY)
    model.graph.node.append(helper.make_node("Bernoulli", ["logits"], ["draw"], name="draw_node"))
    model.graph.output.add().CopyFrom(model.graph.output[0])
    model.graph.output[-1].name = "draw"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(BuildError, match=r"^TensorRT for RTX .* cannot parse .*: node 'draw_node' \(Bernoulli\): .*\w"):
        build_engine(tmp_path / "model.onnx", tmp_path / "model.engine")
    assert names(tmp_path) == {"model.onnx"}


def test_a_model_that_kills_the_parser_is_an_error(tmp_path: Path) -> None:
    """Measured on TensorRT for RTX 1.7.1: it divides by the number of heads."""
    model = make_decoder(TINY)
    for name in ("cos", "sin"):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 32), np.float32), name))
    node = helper.make_node(
        "RotaryEmbedding", ["logits", "cos", "sin", "position_ids"], ["turned"], name="rope_node", num_heads=0
    )  # fmt: skip
    model.graph.node.append(node)
    model.graph.output.add().CopyFrom(model.graph.output[0])
    model.graph.output[-1].name = "turned"
    onnx.save(model, tmp_path / "model.onnx")
    message = r"killed by SIGFPE while parsing the model, at node rope_node \[RotaryEmbedding\]; that is a crash inside"
    with pytest.raises(BuildError, match=message):
        build_engine(tmp_path / "model.onnx", tmp_path / "model.engine")
    assert names(tmp_path) == {"model.onnx"}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "this folder holds the model model.onnx; give another folder, or the name"),
        ("model.onnx", "is a file of the model"),
        ("model.onnx.data", "is a file of the model"),
        ("engine.json", "ends in .json is for manifests"),
        ("engine.onnx", "ends in .onnx is for models"),
        ("taken", "taken.json: a directory"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path, output: str, message: str) -> None:
    model = write_decoder(tmp_path / "model.onnx", TINY, external_threshold=1024)
    (tmp_path / "taken.json").mkdir()
    before = names(tmp_path)
    content = [identify(model), identify(tmp_path / "model.onnx.data")]
    with pytest.raises(OutputError, match=message):
        build_engine(model, tmp_path / output)
    assert names(tmp_path) == before
    assert content == [identify(model), identify(tmp_path / "model.onnx.data")]


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from trt_kvcache.engine.builder import main
main()
"""


@pytest.mark.slow
def test_a_full_disk_is_an_output_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT itself does not notice that a write came back short."""
    monkeypatch.setattr(process, "WORKER", ("-c", LIMITED))
    with pytest.raises(OutputError, match=r"/model\.engine: cannot be written: File too large"):
        build_engine(model, tmp_path / "model.engine")
    assert not names(tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("when", ["at once", "meanwhile", "at the end", "of a build that fails"])
def test_a_model_that_the_check_refuses_becomes_no_engine(
    when: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while TensorRT works, and its words come before what TensorRT says."""
    parsed, built = threading.Event(), threading.Event()
    begin = {"meanwhile": parsed, "at the end": built}.get(when)

    def refuse(*args: Any, **limits: Any) -> None:
        if begin is not None:
            assert begin.wait(60)
        raise UnsupportedModelError("it does not compute the same")

    def listen(event: ProgressEvent) -> None:
        if event.phase == STAGES[1]:
            parsed.set()
        if event.phase == STAGES[3] and event.finished:
            built.set()

    monkeypatch.setattr(pipeline, "check_rewrite", refuse)
    if when == "of a build that fails":
        monkeypatch.setattr(process, "WORKER", ("-c", "raise SystemExit(3)"))
    with pytest.raises(UnsupportedModelError, match="it does not compute the same"):
        build_engine(model, tmp_path / "model.engine", progress=listen)
    assert not names(tmp_path)


def test_tensorrts_own_log_goes_to_a_file_or_to_stderr(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build = BuildOptions(log="build.log", proof="off")
    build_engine(model, "model.engine", build=build)
    assert capsys.readouterr().err == ""
    build_engine(model, "model.engine", build=dataclasses.replace(build, log="-"))
    for log in ((tmp_path / "build.log").read_text(encoding="utf-8"), capsys.readouterr().err):
        assert "[VERBOSE] Parsing node" in log
        assert "[INFO] " in log
    with pytest.raises(OutputError, match="no such folder"):
        build_engine(model, "model.engine", build=dataclasses.replace(build, log="none/build.log"))


def test_what_is_not_worth_a_line_is_the_reason_where_there_is_no_other() -> None:
    """With a driver that is too old, a build for the GPU at hand fails with words that every build says in passing."""
    import tensorrt_rtx as trt

    from trt_kvcache.engine.callbacks import make_listeners

    sent: list[Any] = []
    logger, _ = make_listeners(trt, sent.append)
    old = "Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient for CUDA runtime version)"
    logger.log(trt.ILogger.WARNING, "Input x has Int64 binding.")
    assert logger.words() == "it gives no reason"
    logger.log(trt.ILogger.ERROR, old)
    assert (logger.words(), sent) == (old, [])
    logger.log(trt.ILogger.ERROR, "no such layer")
    assert logger.words() == "no such layer"


@pytest.mark.slow
def test_the_working_folder_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx.py").write_text("raise RuntimeError('a file of the user was imported')")
    write_decoder(tmp_path / "model.onnx", TINY, external_threshold=1024)
    monkeypatch.chdir(tmp_path)
    manifest = build_engine("model.onnx", "model.engine")
    assert Path("model.engine").stat().st_size == manifest.engine.size
    assert [f.name for f in manifest.model] == ["model.onnx", "model.onnx.data"]


# A model whose files change while TensorRT builds is refused: weights of two files would be in one engine.


def swapped(file: Path, aside: Path) -> None:
    shutil.copy(file, aside)
    aside.replace(file)


def link_out(file: Path, aside: Path) -> None:
    shutil.move(file, aside)
    file.symlink_to(aside)


def write(file: Path, aside: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"\x01")


def move_and_return(file: Path, aside: Path) -> None:
    shutil.move(file, aside)
    shutil.move(aside, file)


def remove(file: Path, aside: Path) -> None:
    file.unlink()


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["loading", "parsing", "building"])
@pytest.mark.parametrize("change", [swapped, link_out, write, move_and_return, remove], ids=lambda f: f.__name__)
@pytest.mark.parametrize("changed", ["model.onnx.data", "model.onnx"])
def test_a_change_while_tensorrt_builds_is_an_error(
    tmp_path: Path, changed: str, change: Callable[[Path, Path], None], stage: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = write_decoder(folder / "model.onnx", DecoderConfig(layers=1, head_size=16), external_threshold=256)
    left: list[str] = []

    def meanwhile(event: ProgressEvent) -> None:
        if event.phase.startswith(stage) and not left:
            change(folder / changed, tmp_path / "aside")
            left.extend(p.name for p in folder.iterdir() if not p.name.startswith("."))

    with pytest.raises(InvalidModelError, match=rf"{changed}: (was changed or replaced after|cannot be read)"):
        build_engine(model, folder / "model.engine", progress=meanwhile)
    assert left
    assert {p.name for p in folder.iterdir()} == set(left)


# A plan that counts on a fused kernel which TensorRT lacks: built all the same, with a warning.


@pytest.mark.slow
def test_attention_is_decomposed_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.import_unchecked

    def optimistic(*args, **kwargs):
        """float32 attention has no fused kernel; this plan says it has."""
        imported, verdict = real(*args, **kwargs)
        fused = tuple(dataclasses.replace(a, kind=AttentionKind.FUSED) for a in imported.plan.attention)
        assert imported.plan.attention != fused
        return dataclasses.replace(imported, plan=dataclasses.replace(imported.plan, attention=fused)), verdict

    monkeypatch.setattr(pipeline, "import_unchecked", optimistic)
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, dtype="float32"))
    manifest = build_module.build_engine(model, tmp_path / "model.engine", build=BuildOptions(max_chunk=8))
    assert (tmp_path / "model.engine").stat().st_size == manifest.engine.size > 0
    assert any("has no fused kernel" in warning for warning in manifest.warnings)
    assert not (tmp_path / "model.engine").read_bytes().startswith(bytes(64))
