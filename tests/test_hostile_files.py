"""Files from anywhere: pipes, devices, files without end and templates that never end are one line, at once."""

import os
import random
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from decoders import DecoderConfig, write_decoder
from foreign_decoders import make_foreign
from hostile.files import NO_FILES
from hostile.models import SMALL, before_logits, endless, terabytes
from hostile.texts import PATTERNS
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions, cpu, plan_model, rewrite_model, verify_model
from trt_kvcache.cli.prompts import read_prompts
from trt_kvcache.compare import text_inputs as verify_inputs
from trt_kvcache.compare.text_inputs import load_inputs
from trt_kvcache.engine.engine_folder import settings_beside
from trt_kvcache.engine.manifest import load_manifest
from trt_kvcache.errors import (
    InvalidModelError,
    ManifestError,
    ModelError,
    OptionError,
    TrtKvCacheError,
    UnsupportedModelError,
)
from trt_kvcache.files import is_inside, read_file
from trt_kvcache.importer import pipeline
from trt_kvcache.importer.cache_plan import Role, TensorRole
from trt_kvcache.importer.check import Checked
from trt_kvcache.importer.files import save, stripped
from trt_kvcache.importer.files.stripped import unpacked
from trt_kvcache.importer.interface import load_patterns
from trt_kvcache.importer.plan_options import recorded_options
from trt_kvcache.importer.simplify import take_branches
from trt_kvcache.machine import bounded_memory, free_memory
from trt_kvcache.runtime import embeddings

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes with names")

from runtime.tokenizers_in_code import byte_level  # noqa: E402

from trt_kvcache.runtime.text.tokenizer import Tokenizer  # noqa: E402

SECONDS = 60
"""The limit of one test: anything that waits for ever is ended."""


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _saved_tokenizer(where: Path) -> Path:
    byte_level().save(str(where / "tokenizer.json"))
    return where


def _cache(path: Path) -> None:
    model = write_decoder(path.parent / "model.onnx", DecoderConfig(layers=1, head_size=16, capacity=16))
    with DecodeSession.open(model) as session:
        session.cache.load(path)


TABLE = TensorRole("embeds", "input", Role.TOKENS, "float32", ("batch", "sequence", 8), "graph", ())
READERS: dict[str, Callable[[Path], object]] = {
    "tokenizer.json": Tokenizer.load,
    "tokenizer_config.json": lambda path: Tokenizer.load(_saved_tokenizer(path.parent)),
    "chat_template.jinja": lambda path: Tokenizer.load(_saved_tokenizer(path.parent)),
    "generation_config.json": GenerationConfig.from_file,
    "genai_config.json": lambda path: settings_beside(path.parent),
    "model.engine.json": load_manifest,
    "roles.yaml": load_patterns,
    "arrays.npz": lambda path: load_inputs(str(path)),
    "saved.cache": _cache,
    "table.npy": embeddings._read_npy,
    "table.safetensors": lambda path: embeddings._read_safetensors(path, "", TABLE),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("make", NO_FILES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_none_or_has_no_end(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(
        TrtKvCacheError, match=r"not a regular file|larger than|[Ii]s a directory|a folder|cannot be read|not a saved"
    ):
        READERS[name](tmp_path / name)


def test_a_file_within_its_limit_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * 100)
    assert read_file(tmp_path / "x", 100) == b"a" * 100
    with pytest.raises(OSError, match="larger than"):
        read_file(tmp_path / "x", 99)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("a.onnx", True),
        ("sub/a.onnx", True),
        ("../a.onnx", False),
        ("/etc/a", False),
        ("a/../../b", False),
        ("a\0b", False),
    ],
)
def test_names_in_configs_stay_in_the_folder(name: str, inside: bool) -> None:
    assert is_inside(name) is inside


def test_onnx_runtime_writes_and_tells_nothing_on_its_own(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1, head_size=16, capacity=16))
    home = tmp_path / "home"
    home.mkdir()
    code = f"from trt_kvcache import DecodeSession; DecodeSession.open({str(model)!r}).close()"
    given = {
        name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=given | {"HOME": str(home), "TMPDIR": str(home)})
    assert not list(home.rglob("*"))


def _hostile(folder: Path, edit: Callable[[onnx.ModelProto, random.Random], None]) -> Path:
    path = write_decoder(folder / "model.onnx", SMALL)
    proto = onnx.load(path)
    edit(proto, random.Random(0))
    onnx.save(proto, path)
    return path


def test_the_memory_of_a_process_is_its_own() -> None:
    """Not that of the process that started it."""
    large = np.ones(1 << 26)
    code = "from trt_kvcache.machine import peak_memory; print(peak_memory())"
    peak = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 0 < int(peak) < large.nbytes


def test_a_run_may_take_the_memory_that_is_free() -> None:
    with bounded_memory(), pytest.raises(MemoryError):
        held = [np.empty(free_memory(swap=True) // 4, np.uint8) for _ in range(6)]
    held = [np.empty(free_memory(swap=True) // 4, np.uint8) for _ in range(6)]
    assert len(held) == 6


@pytest.mark.few(1)
@pytest.mark.parametrize("command", [["verify"], ["generate", "--tokens", "1,2"]], ids=lambda c: c[0])
def test_tensors_of_any_size_are_one_line(tmp_path: Path, command: list[str]) -> None:
    path = _hostile(tmp_path, terabytes)
    done = subprocess.run(
        [sys.executable, "-m", "trt_kvcache", command[0], str(path), *command[1:]], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*(more memory than is free|allocate memory|overflowed).*\n", done.stderr)


def test_verify_gives_up_a_step_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _hostile(tmp_path, endless)
    monkeypatch.setattr(cpu, "SECONDS", 1.0)
    with pytest.raises(UnsupportedModelError, match="took more than 2 s; the comparison may use at most 2 s"):
        verify_model(path, PlanOptions(check_seconds=2))
    monkeypatch.setattr(pipeline, "check_rewrite", lambda *_, **__: Checked())
    with pytest.raises(UnsupportedModelError, match="more than 1 s to open or for one step: it never ends"):
        verify_model(path)


@pytest.mark.few(6)
@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("digits", ["0_0", "\u0660", " 0", "+0", "-0", "9" * 5000])
def test_only_digits_are_numbers(tmp_path: Path, key: str, digits: str) -> None:
    path = write_decoder(tmp_path / "model.onnx", SMALL, external_threshold=256)
    proto = onnx.load(path, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.external_data)
    next(entry for entry in tensor.external_data if entry.key == key).value = digits
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidModelError, match="both must be integers from 0 on"):
        plan_model(path)


def _table(dims: list[int], *, external: bool) -> TensorProto:
    table = TensorProto(name="table", data_type=TensorProto.INT64, dims=dims)
    if external:
        table.data_location = TensorProto.EXTERNAL
        table.external_data.add(key="location", value="data")
    return table


def _reads_table(graph: onnx.GraphProto) -> None:
    """Of a tensor of rank 1 that is gathered from, shape inference makes an object for each number."""
    graph.node.append(helper.make_node("Gather", ["table", "input_ids"], ["read"], "read"))
    graph.output.append(helper.make_tensor_value_info("read", TensorProto.INT64, ["b", "s"]))


def _declared(dims: list[int], *, external: bool) -> Callable[[onnx.GraphProto], None]:
    return lambda graph: graph.initializer.append(_table(dims, external=external))


def _made(op: str, **attributes: Any) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        graph.initializer.append(numpy_helper.from_array(np.array([1 << 33]), "count"))
        inputs = {"ConstantOfShape": ["count"], "Expand": ["one", "count"]}[op]
        graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
        graph.node.insert(0, helper.make_node(op, inputs, ["table"], "make", **attributes))

    return edit


def _stated(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("table", TensorProto.INT64, [1 << 30]))


def _listed(graph: onnx.GraphProto) -> None:
    list_of = onnx.AttributeProto(name="value_ints", type=onnx.AttributeProto.INTS, ints=range(2 << 20))
    graph.node.insert(0, helper.make_node("Constant", [], ["table"], "make"))
    graph.node[0].attribute.append(list_of)


ENORMOUS = {
    "external": (_declared([1 << 33], external=True), "end at byte 68719476736 of data, which has only 65536 bytes"),
    "beyond 64 bits": (_declared([1 << 62], external=True), "end at byte 36893488147419103232 of data"),
    "inside": (_declared([1 << 33], external=False), "tensor 'table' is invalid"),
    "constant": (_made("ConstantOfShape", value=helper.make_tensor("v", 7, [1], [1])), "list of 8589934592 numbers"),
    "expanded": (_made("Expand"), "list of 8589934592 numbers"),
    "input": (_stated, "'table' is a list of 1073741824 numbers that are not in the file"),
    "list": (_listed, "the attribute 'value_ints' of Constant 'make' lists 2097152 values"),
}


def test_nothing_is_made_of_a_size_that_is_only_declared(tmp_path: Path) -> None:
    """All in one process of little memory."""
    (tmp_path / "data").write_bytes(bytes(1 << 16))
    for name, (edit, _) in ENORMOUS.items():
        proto = make_foreign("past-attention", SMALL)
        edit(proto.graph)
        _reads_table(proto.graph)
        onnx.save(proto, tmp_path / f"{name}.onnx")
    code = """if True:
        import resource, sys
        from trt_kvcache.errors import ModelError
        from trt_kvcache.importer.files.source import load_source
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
        for path in sys.argv[1:]:
            try:
                load_source(path)
                print("taken")
            except ModelError as error:
                print(error)
    """
    paths = [str(tmp_path / f"{name}.onnx") for name in ENORMOUS]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=60, check=True)
    said = dict(zip(ENORMOUS, done.stdout.splitlines(), strict=True))
    assert not [name for name, (_, words) in ENORMOUS.items() if words not in said[name]], said


@pytest.mark.parametrize("axis", [0, 1])
def test_steps_of_any_fixed_size_are_one_line(tmp_path: Path, axis: int) -> None:
    proto = make_foreign("past-attention", SMALL)
    for info in (*proto.graph.input, *proto.graph.output):
        dims = info.type.tensor_type.shape.dim
        if axis == 0 or info.name == "input_ids":
            dims[axis].dim_value = 1 << 30
    onnx.save(proto, tmp_path / "model.onnx")
    with (
        bounded_memory(),
        pytest.raises(UnsupportedModelError, match=r"memory than this machine has|numbers in one step|axis"),
    ):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=16))


def test_a_report_that_unpacks_to_all_memory_is_not_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "report.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("report.json", "{}")
        with archive.open("model.onnx", "w") as member:
            for _ in range(257):
                member.write(bytes(1 << 20))
    with (
        pytest.raises(InvalidModelError, match="model.onnx has 269484032 bytes, but may have at most"),
        unpacked(tmp_path / "report.zip"),
    ):
        pass


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2**62, "has an axis of size 4611686018427387904"),
        (-1, "has an axis of size -1"),
        (2**31 - 1, "has 6442450941 numbers in one step; the importer supports"),
    ],
)
def test_a_batch_of_any_size_is_one_line(tmp_path: Path, size: int, words: str) -> None:
    proto = make_foreign("past-attention", SMALL)
    for info in (*proto.graph.input, *proto.graph.output):
        if len(info.type.tensor_type.shape.dim):
            info.type.tensor_type.shape.dim[0].dim_value = size
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=16))


def _chain(depth: int) -> onnx.ModelProto:
    """Functions that call each other, one in the other."""
    proto = make_foreign("past-attention", SMALL)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("own", 1)]
    for place in range(depth):
        call = helper.make_node(f"f{place + 1}", ["x"], ["y"], domain="own")
        inner = call if place + 1 < depth else helper.make_node("Identity", ["x"], ["y"])
        proto.functions.append(helper.make_function("own", f"f{place}", ["x"], ["y"], [inner], opsets))
    proto.opset_import.append(opsets[1])
    last = next(n for n in proto.graph.node if n.output[0] == "logits")
    last.output[0] = "before"
    proto.graph.node.append(helper.make_node("f0", ["before"], ["logits"], domain="own"))
    return proto


def test_functions_in_a_chain(tmp_path: Path) -> None:
    onnx.save(_chain(100), tmp_path / "model.onnx")
    assert plan_model(tmp_path / "model.onnx", PlanOptions(capacity=16)).caches
    onnx.save(_chain(1000), tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedModelError, match="its functions call each other more than 100 levels deep, starting at 'f0'"
    ):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=16))


def test_records_of_any_depth_are_one_line(tmp_path: Path) -> None:
    """Of a rewritten model, of a report, and of an engine."""
    deep = '{"capacity": 1, "other": ' + "[" * 100_000 + "]" * 100_000 + "}"
    model = make_foreign("past-attention", SMALL)
    model.metadata_props.add(key="trt_kvcache.options", value=deep)
    with pytest.raises(InvalidModelError, match="its record of options cannot be read"):
        recorded_options(model, PlanOptions(), tmp_path)
    with zipfile.ZipFile(tmp_path / "report.zip", "w") as archive:
        archive.writestr("report.json", deep)
    with pytest.raises(InvalidModelError, match="not a readable report"):
        stripped.recorded_options(tmp_path / "report.zip")
    (tmp_path / "model.engine.json").write_text(deep)
    with pytest.raises(ManifestError, match="not JSON"):
        load_manifest(tmp_path / "model.engine.json")
    (tmp_path / "prompts.jsonl").write_text(f"{deep}\n")
    with pytest.raises(OptionError, match=r"prompts.jsonl, line 1: .*depth"):
        read_prompts(tmp_path / "prompts.jsonl", "--prompt-file")


@pytest.mark.parametrize(
    ("depth", "words"),
    [(0, "the function 'f0' calls itself"), (40, "inlining its functions gives 2199023255659 nodes")],
)
def test_functions_that_call_each_other_ever_more_often(tmp_path: Path, depth: int, words: str) -> None:
    proto = make_foreign("concat", SMALL)
    opset = [helper.make_opsetid("", 24), helper.make_opsetid("evil", 1)]
    proto.opset_import.append(opset[1])
    for level in range(depth + 1):
        below = f"f{max(0, level - 1)}" if level or not depth else ""
        calls = [
            helper.make_node(below or "Identity", [one], [two], domain="evil" if below else "")
            for one, two in (("x", "m"), ("m", "y"))
        ]
        proto.functions.append(helper.make_function("evil", f"f{level}", ["x"], ["y"], calls, opset))
    proto.graph.initializer.append(helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]))
    before_logits(proto, f"f{depth}", ["zero"], domain="evil")
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=words):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=16))


@pytest.mark.parametrize("depth", [2, 10])
def test_branches_in_branches_get_names_of_bounded_length(depth: int) -> None:
    """Each is named after its If, which is named after the one around it: twice the length each time."""
    name = "x"
    body = helper.make_graph(
        [helper.make_node("Identity", ["outside"], [name])], "body", [], [helper.make_empty_tensor_value_info(name)]
    )
    for level in range(depth):
        name = f"{'made_' * 20}{level}"
        twice = [
            helper.make_node("If", ["go"], [f"{name}_{i}"], name=f"{name}_{i}", then_branch=body, else_branch=body)
            for i in range(2 if level < 3 else 1)
        ]
        sum_ = helper.make_node("Sum", [n.output[0] for n in twice], [name])
        body = helper.make_graph([*twice, sum_], name, [], [helper.make_empty_tensor_value_info(name)])
    value = helper.make_tensor_value_info
    graph = helper.make_graph(body.node, "g", [value("outside", 1, [1])], [value(name, 1, [1])])
    graph.initializer.append(helper.make_tensor("go", TensorProto.BOOL, [], [True]))
    take_branches(graph, {"go": np.array(True)})
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    assert max(len(n) for node in graph.node for n in (node.name, *node.output)) < 400 * depth
    made = ort.InferenceSession(model.SerializeToString()).run(None, {"outside": np.ones(1, np.float32)})[0]
    assert made == 2 ** min(depth, 3)


def test_data_that_change_while_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_decoder(tmp_path / "model.onnx", SMALL, external_threshold=256)
    copy = save._copy

    def cut_in_between(data: Any, file: Any) -> None:
        os.truncate(path.with_name("model.onnx.data"), 100)
        copy(data, file)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(save, "_copy", cut_in_between)
    with pytest.raises(InvalidModelError, match=r"model.onnx.data: was changed or replaced after it was read"):
        rewrite_model(path, tmp_path / "out" / "model.onnx")
    assert not [*tmp_path.glob("out/*")]


@pytest.mark.parametrize(("form", "op"), [("concat", "Add"), ("gqa", "Mul")])
def test_optional_values_are_one_line(tmp_path: Path, form: str, op: str) -> None:
    """ONNX infers no type after operators of other domains."""
    proto = make_foreign(form, SMALL)
    node = [n for n in proto.graph.node if n.op_type == op][-1]
    made = [
        helper.make_node("Optional", [node.input[0]], ["optional"]),
        helper.make_node("OptionalGetElement", ["optional"], ["element"]),
    ]
    at = [*proto.graph.node].index(node)
    node.input[0] = "element"
    for new in reversed(made):
        proto.graph.node.insert(at, new)
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedModelError, match="'optional' is of type optional; the importer supports only tensors"
    ):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=16))


def test_arrays_that_unpack_to_more_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 20))
    monkeypatch.setattr(verify_inputs, "free_memory", lambda: 1 << 20)
    with pytest.raises(OptionError, match=r"its arrays take 0.0 GB, but only 0.0 GB of memory are free"):
        load_inputs(str(tmp_path / "a.npz"))


@pytest.mark.few(1)
@pytest.mark.parametrize("command", [["plan"], ["inspect"], ["generate", "--tokens", "1"]], ids=lambda c: c[0])
def test_a_path_in_a_folder_that_is_gone_is_one_line(tmp_path: Path, command: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, shutil; os.chdir({str(gone)!r}); shutil.rmtree({str(gone)!r}); import runpy; "
    code += "runpy.run_module('trt_kvcache', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", code, *command, "a.onnx"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: [^\n]*\n", done.stderr)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_names_match_in_linear_time(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "roles.yaml").write_text(f"roles: {{tokens: '{pattern}'}}")
    try:
        found = load_patterns(tmp_path / "roles.yaml")
    except TrtKvCacheError as error:
        assert "not a regular expression of RE2" in str(error)  # noqa: PT017
    else:
        assert not found[0].matches("a" * 10_000 + "b", "input")
