"""Bad input from end to end: one line that says what was found and what to do, exit code 1, no file made or changed."""

import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import pytest
from cases import decoder_attention
from commands import invoke
from decoders import DecoderConfig, write_decoder
from graphs import scatter_model
from onnx import TensorProto

from trt_kvcache import plan_model, rewrite_model
from trt_kvcache.errors import ModelError, OutputError
from trt_kvcache.importer.cache_plan import PlanOptions, Role

SMALL = DecoderConfig(layers=1, hidden=16, vocab=32, query_heads=2, kv_heads=1, head_size=8, capacity=16, positions=32)


def decoder(folder: Path) -> Path:
    """A legal decoder with external data."""
    return write_decoder(folder / "model.onnx", SMALL, external_threshold=64)


def damaged(edit: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = decoder(folder)
        edit(path)
        return path

    return make


def of(model: onnx.ModelProto) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return make


def scores_of_no_stage() -> onnx.ModelProto:
    """A decoder whose attention gives its scores too, after a stage that ONNX does not know."""
    model = decoder_attention(qk_matmul_output_mode=4)
    (attention,) = (node for node in model.graph.node if node.op_type == "Attention")
    attention.output.extend(["", "", "scores"])
    model.graph.output.append(onnx.helper.make_tensor_value_info("scores", TensorProto.FLOAT16, ["B", 4, "S", 16]))
    return model


def data_file(path: Path) -> Path:
    return path.with_name(path.name + ".data")


BAD_MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "no.onnx", "no such file; give the path of an .onnx file"),
    "data missing": (damaged(lambda p: data_file(p).unlink()), "model.onnx.data, which is missing; put this file into"),
    "dtype": (of(scatter_model(dtype=TensorProto.COMPLEX64)), "complex64"),
    "scores": (of(scores_of_no_stage()), "qk_matmul_output_mode 4; ONNX allows 0 to 3"),
}


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(params=BAD_MODELS)
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    make, said = BAD_MODELS[request.param]
    folder = tmp_path / "source"
    folder.mkdir()
    return make(folder), said


@pytest.mark.few(8)
def test_commands_refuse(bad: tuple[Path, str], tmp_path: Path) -> None:
    path, said = bad
    made = ["out.onnx", "out.engine", "out.engine.json"]
    for name in made:
        (tmp_path / name).write_bytes(b"precious")
    before = listing(tmp_path)
    commands = [
        ["plan", path],
        ["plan", path, "--json"],
        ["rewrite", path, "-o", tmp_path / "out.onnx"],
        ["build", path, "-o", tmp_path / "out.engine"],
        ["verify", path],
    ]
    for command in commands:
        check_refusal(command, said)
        assert listing(tmp_path) == before, command


def check_refusal(command: Sequence[object], said: str) -> None:
    """Run a command: exit code 1, nothing on stdout, one line on stderr with these words."""
    result = invoke(*command, code=None)
    assert isinstance(result.exception, SystemExit), (command, result.exception)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--max-chunk", 17],
            "--max-chunk is 17, but cache 'key_cache.0' holds 16 tokens; give --max-chunk 16 or less",
        ),
        (["--capacity", 8], "leave the option out, or export with a symbolic length"),
        (["--capacity", 10**30], "it must be at most 16777216 tokens"),
        (["--config", "no.yaml"], "no.yaml: the role config cannot be read (No such file"),
        (["--config", "."], "the role config cannot be read"),
    ],
)
def test_options_against_the_model(tmp_path: Path, options: list[object], said: str) -> None:
    path = decoder(tmp_path)
    before = listing(tmp_path)
    check_refusal(["build", path, "-o", tmp_path / "out.engine", *options], said)
    assert listing(tmp_path) == before


def test_ambiguous_role_names_the_way_out(tmp_path: Path) -> None:
    """An input that is the write index and the valid length at once: the graph cannot say which of them it holds."""
    path = decoder(tmp_path)
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        node.input[:] = ["x" if name in ("write_indices", "nonpad_kv_seqlen") else name for name in node.input]
    kept = [info for info in model.graph.input if info.name != "nonpad_kv_seqlen"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    next(info for info in model.graph.input if info.name == "write_indices").name = "x"
    path.write_bytes(model.SerializeToString())
    check_refusal(["plan", path], "input 'x' could be write_indices (")
    check_refusal(["plan", path], "give its role with --config, a YAML file such as: roles: {write_indices: x}")
    config = tmp_path / "roles.yaml"
    config.write_text("roles: {write_indices: x}")
    role = plan_model(path, PlanOptions(config=str(config))).tensor(Role.WRITE_INDICES)
    assert role is not None
    assert (role.name, role.found_by) == ("x", "config: roles.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_a_disk_that_fills_up_leaves_the_old_model(folder: Path) -> None:
    path, output = decoder(folder), folder / "out.onnx"
    output.write_bytes(b"old")
    before, limits = listing(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"out\.onnx: cannot be written: File too large$"):
            rewrite_model(path, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert listing(folder) == before


def test_every_truncation_is_refused(folder: Path) -> None:
    """Also where the rest happens to decode: something that the graph needs is then missing."""
    content = write_decoder(folder / "whole.onnx", SMALL, external_threshold=64).read_bytes()
    path = folder / "cut.onnx"
    for length in sorted(random.Random(0).sample(range(len(content)), 300)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError):
            plan_model(path, PlanOptions())
