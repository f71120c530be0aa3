"""Every way in which a model file can be bad is refused by name; what is written appears whole or not at all."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import onnx
import pytest
from graphs import Graph, scatter_model
from onnx import TensorProto, helper

from trt_kvcache.errors import InvalidModelError, OutputError
from trt_kvcache.files import check_output
from trt_kvcache.importer.files.save import save_model
from trt_kvcache.importer.files.source import load_source


def write(path: Path, model: onnx.ModelProto) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def refusal(path: Path) -> str:
    """The message with which a file is refused: one line that names the file first."""
    with pytest.raises(InvalidModelError) as caught:
        load_source(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def external_model(**reference: object) -> onnx.ModelProto:
    """A model with one float weight ``[4, 8]`` (128 bytes) in external data."""
    graph = Graph()
    graph.input("x", TensorProto.FLOAT, ["B", 4])
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 8], data_location=TensorProto.EXTERNAL)
    for key, value in reference.items():
        weight.external_data.add(key=key, value=str(value))
    graph.initializers.append(weight)
    graph.MatMul("x", "w", out="y")
    graph.output("y", TensorProto.FLOAT, ["B", 8])
    return graph.model()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A legal model with external data, in a folder of its own."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").mkdir()
    (folder / "weights" / "a.bin").write_bytes(bytes(range(128)))
    return write(folder / "model.onnx", external_model(location="weights/a.bin", offset=0, length=128))


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """File systems take any bytes; ONNX Runtime and JSON do not."""
    path = write(tmp_path / os.fsdecode(b"m\xff.onnx"), scatter_model())
    assert "not UTF-8" in refusal(path)
    with pytest.raises(OutputError, match="not UTF-8"):
        check_output(path)


def test_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "a directory without an .onnx file; give the path of an .onnx file"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"hello, I am a model\n", "text, not a binary ONNX model"),
        ("Grüße, ich bin ein Modell: ".encode() + b"x" * 484 + "é".encode(), "text, not a binary ONNX model"),
        (b'{"irVersion": "11", "graph": {}}', "JSON, not a binary ONNX model"),
        (b"GGUF\x03\0\0\0\0\0", "a GGUF file"),
        ((64).to_bytes(8, "little") + b'{"__metadata__": {}}' + b" " * 44, "a safetensors file"),
        (b"ftrt\0\0\0\0\x02\0\0\0", "a TensorRT engine"),
        (b"vtrt\0\0\0\0\x02\0\0\0", "a TensorRT engine"),
        (b"PK\x03\x04\0\0\0\0", "a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "a pointer of Git LFS"),
        (b"\x10\0\0\0ORTM\0\0", "ONNX Runtime's own format"),
        (b"\x0a\xff\xff\xff\xff", "not an ONNX model, or truncated (5 bytes cannot be decoded)"),
        (scatter_model().SerializeToString().replace(b"present", b"pres\xffnt"), "is not UTF-8 text: b'"),
        (b"`\xf8T", "not an ONNX model, or truncated (it has no graph and no opset import)"),
    ],
)
def test_not_onnx(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert said in refusal(path)


def test_more_than_two_gib_in_one_file_is_refused_unread(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", scatter_model())
    os.truncate(path, 3 << 30)
    assert "cannot be longer than 2 GiB; export the model with external data" in refusal(path)


def test_paths_are_absolute(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stored.parent)
    source = load_source("model.onnx")
    assert source.path == stored
    assert source.external_files == (stored.parent / "weights" / "a.bin",)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ({"location": "no.bin"}, "are in no.bin, which is missing"),
        ({}, "are external, but the model names no file"),
        ({"location": "/etc/passwd"}, "lie outside the model's folder ('/etc/passwd')"),
        ({"location": "../a.bin"}, "lie outside the model's folder ('../a.bin')"),
        ({"location": "x/../a.bin"}, "lie outside the model's folder"),
        ({"location": "out.bin"}, "lie outside the model's folder ('out.bin' is a link to "),
        ({"location": "sub"}, "are in sub, which is not a regular file"),
        ({"location": "a\0b"}, "cannot be read"),
        ({"location": "a.bin", "offset": 64, "length": 128}, "end at byte 192 of a.bin, which has only 128 bytes"),
        ({"location": "a.bin", "offset": 64}, "end at byte 192 of a.bin"),
        ({"location": "a.bin", "length": 64}, "are 64 bytes of a.bin, but the tensor's dtype and shape need 128"),
        ({"location": "a.bin", "offset": -1}, "have offset '-1'"),
        ({"location": "a.bin", "offset": "x"}, "have offset 'x'"),
    ],
)
def test_bad_external_data(tmp_path: Path, reference: dict[str, object], said: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "a.bin").write_bytes(bytes(128))
    (folder / "a.bin").write_bytes(bytes(128))
    (folder / "out.bin").symlink_to(tmp_path / "a.bin")
    assert said in refusal(write(folder / "model.onnx", external_model(**reference)))


def test_external_data_of_a_constant_in_a_body_are_checked(tmp_path: Path) -> None:
    weight = external_model(location="no.bin").graph.initializer[0]
    bodies = []
    for _ in range(2):
        body = Graph()
        body.Constant(out=f"c{len(bodies)}", value=weight)
        body.output(f"c{len(bodies)}", TensorProto.FLOAT, [4, 8])
        bodies.append(body.model().graph)
    graph = Graph()
    graph.input("c", TensorProto.BOOL, [])
    graph.If("c", out="y", then_branch=bodies[0], else_branch=bodies[1])
    graph.output("y", TensorProto.FLOAT, [4, 8])
    path = write(tmp_path / "model.onnx", graph.model())
    assert "are in no.bin, which is missing" in refusal(path)
    (tmp_path / "no.bin").write_bytes(bytes(128))
    assert load_source(path).external_files == (tmp_path / "no.bin",)


def edited(edit: Callable[[onnx.GraphProto], object], **options: object) -> onnx.ModelProto:
    model = scatter_model(**options)  # type: ignore[arg-type]
    edit(model.graph)
    return model


def dim(graph: onnx.GraphProto, value: int, axis: int) -> onnx.TensorShapeProto.Dimension:
    return graph.input[value].type.tensor_type.shape.dim[axis]


def set_type(graph: onnx.GraphProto, value: int, elem_type: int) -> None:
    graph.input[value].type.tensor_type.elem_type = elem_type


def with_axis(axis: int) -> onnx.ModelProto:
    return edited(lambda g: g.node[0].attribute.append(helper.make_attribute("axis", axis)))


BAD_SCATTERS = [
    (scatter_model(opset=23), "needs opset 24, but the model imports opset 23; export the model again with opset 24"),
    (scatter_model(axis=0), "breaks a rule of ONNX: axis 0 is out of range for rank 4"),
    (with_axis(4), "breaks a rule of ONNX: axis 4 is out of range for rank 4"),
    (with_axis(-4), "breaks a rule of ONNX: axis 0 is out of range for rank 4"),
    (scatter_model(mode="ring"), "has mode 'ring'; ONNX defines only 'linear' and 'circular'"),
    (edited(lambda g: setattr(dim(g, 1, 1), "dim_value", 3)), "Dimension mismatch in unification between 3 and 2"),
    (edited(lambda g: g.input[1].type.tensor_type.shape.dim.pop()), "past_cache and update must have the same rank"),
    (edited(lambda g: setattr(dim(g, 1, 0), "dim_value", 3), shape=(2, 2, 16, 8)), "unification between 3 and 2"),
    (edited(lambda g: set_type(g, 1, TensorProto.FLOAT)), "reads 'past' of float16 and 'update' of float"),
    (edited(lambda g: g.input[2].type.tensor_type.shape.dim.add(dim_value=1)), "Input 2 expected to have rank 1"),
    (edited(lambda g: setattr(dim(g, 2, 0), "dim_value", 3), shape=(2, 2, 16, 8)), "unification between 3 and 2"),
    (
        edited(lambda g: setattr(g.output[0].type.tensor_type.shape.dim[1], "dim_value", 3)),
        "Inferred shape and existing shape differ in dimension 1: (2) vs (3)",
    ),
]


@pytest.mark.parametrize(("model", "said"), BAD_SCATTERS, ids=[said[:30] for _, said in BAD_SCATTERS])
def test_bad_tensor_scatter(tmp_path: Path, model: onnx.ModelProto, said: str) -> None:
    message = refusal(write(tmp_path / "model.onnx", model))
    assert message.startswith("TensorScatter 'node_present' ")
    assert said in message


def short_weight(width: int) -> onnx.ModelProto:
    model = external_model()
    weight = model.graph.initializer[0]
    weight.ClearField("data_location")
    weight.dims[1] = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = width
    weight.raw_data = bytes(100)
    return model


def two_of_one_name() -> onnx.ModelProto:
    model = short_weight(8)
    model.graph.initializer[0].raw_data = bytes(128)
    model.graph.initializer.append(model.graph.initializer[0])
    return model


def older_function() -> onnx.ModelProto:
    node = helper.make_node("TensorScatter", ["p", "u", "w"], ["y"], axis=1)
    model = scatter_model()
    opset = [helper.make_opsetid("", 23)]
    model.functions.append(helper.make_function("own", "Update", ["p", "u", "w"], ["y"], [node], opset))
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def cast(to: int) -> onnx.ModelProto:
    return edited(lambda g: g.node.append(helper.make_node("Cast", ["update"], ["other"], "cast", to=to)))


BAD_GRAPHS: list[tuple[onnx.ModelProto, str]] = [
    (edited(lambda g: g.node[0].input.__delitem__(slice(1, None))), "not valid ONNX: Node"),
    (edited(lambda g: set_type(g, 1, 99)), "'update' has element type 99, which ONNX does not define"),
    (short_weight(8), "100 bytes of data, but its dtype and shape need 128"),
    (short_weight(1000), "100 bytes of data, but its dtype and shape need 16000"),
    (two_of_one_name(), "two initializers have the name 'w'"),
    (older_function(), "imports opset 23"),
    *((cast(to), f"Cast 'cast' casts to element type {to}, which ONNX does not define; export the model again")
      for to in (TensorProto.UNDEFINED, 99, -1)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "said"), BAD_GRAPHS, ids=[said[:30] for _, said in BAD_GRAPHS])
def test_bad_graphs(tmp_path: Path, model: onnx.ModelProto, said: str) -> None:
    assert said in refusal(write(tmp_path / "model.onnx", model))


def test_cast_to_the_type_that_the_caller_of_a_function_names(tmp_path: Path) -> None:
    model = scatter_model()
    cast = helper.make_node("Cast", ["x"], ["y"])
    cast.attribute.add(name="to", ref_attr_name="to", type=onnx.AttributeProto.INT)
    opset = [onnx.helper.make_opsetid("", 24)]
    model.functions.append(onnx.helper.make_function("own", "Convert", ["x"], ["y"], [cast], opset, ["to"]))
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    model.graph.node.append(helper.make_node("Convert", ["update"], ["other"], domain="own", to=TensorProto.FLOAT16))
    assert load_source(write(tmp_path / "model.onnx", model)).proto.functions


@pytest.mark.parametrize(("elem_type", "dims"), [(99, [4, 8]), (TensorProto.UNDEFINED, [4, 8]), (1, [-4, 8])])
def test_illegal_weight(tmp_path: Path, elem_type: int, dims: list[int]) -> None:
    model = external_model(location="w.bin")
    (tmp_path / "w.bin").write_bytes(bytes(4096))
    model.graph.initializer[0].data_type = elem_type
    model.graph.initializer[0].dims[:] = dims
    assert refusal(write(tmp_path / "model.onnx", model))


@pytest.mark.parametrize(
    ("elem_type", "field", "values"),
    [
        (TensorProto.STRING, "raw_data", bytes(16)),
        (TensorProto.STRING, "string_data", [b"x"] * 5),
        (TensorProto.FLOAT, "float_data", [1.0] * 5),
        (TensorProto.INT4, "int32_data", [1]),
    ],
)
@pytest.mark.parametrize("size", [4, 4096])
def test_data_that_do_not_fill_their_shape(
    tmp_path: Path, elem_type: int, field: str, values: Sequence[object], size: int
) -> None:
    """ONNX's checker looks at a model without its large tensors, and takes too many values and packed ones."""
    tensor = TensorProto(name="odd", data_type=elem_type, dims=[size])
    if isinstance(values, bytes):
        tensor.raw_data = values
    else:
        getattr(tensor, field).extend(values)
    model = scatter_model()
    model.graph.initializer.append(tensor)
    assert "tensor 'odd' is invalid" in refusal(write(tmp_path / "model.onnx", model))


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_save_beside_the_source_copies_nothing(stored: Path) -> None:
    source = load_source(stored)
    before = listing(stored.parent)
    save_model(source.proto, stored.parent / "out.onnx", source)
    assert listing(stored.parent) == {**before, "out.onnx": before["model.onnx"]}
    assert load_source(stored.parent / "out.onnx").external_files == source.external_files


def test_save_elsewhere_takes_the_data_along(stored: Path, tmp_path: Path) -> None:
    source = load_source(stored)
    target = tmp_path / "target"
    target.mkdir()
    save_model(source.proto, target / "out.onnx", source)
    assert listing(target) == {"out.onnx": stored.read_bytes(), "weights/a.bin": bytes(range(128))}
    save_model(source.proto, target / "out.onnx", source)  # equal files that are there already are fine
    onnx.checker.check_model(str(target / "out.onnx"))
    assert (target / "out.onnx").stat().st_mode == stored.stat().st_mode


def test_save_refuses_to_replace_a_different_data_file(stored: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "weights").mkdir(parents=True)
    (target / "weights" / "a.bin").write_bytes(bytes(128))
    source = load_source(stored)
    with pytest.raises(OutputError, match="this file exists and differs from the data file that must be copied"):
        save_model(source.proto, target / "out.onnx", source)
    assert listing(target) == {"weights/a.bin": bytes(128)}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("source/model.onnx", "belongs to the source model"),
        ("source/weights/a.bin", "belongs to the source model"),
        ("link.onnx", "belongs to the source model"),
        ("source", "a directory; give"),
        ("/", "a directory; give"),
        ("pipe", "not a regular file"),
        ("/dev/stdout", "not a regular file"),
        ("to_pipe", "not a regular file"),
        ("no/out.onnx", "no such folder: .*no; create it first"),
    ],
)
def test_save_refuses_the_target(stored: Path, tmp_path: Path, output: str, said: str) -> None:
    (tmp_path / "link.onnx").symlink_to(stored)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    before = listing(tmp_path)
    source = load_source(stored)
    with pytest.raises(OutputError, match=said):
        save_model(source.proto, tmp_path / output, source)
    assert listing(tmp_path) == before
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "to_pipe").is_symlink()


def test_save_refuses_names_that_are_no_text(stored: Path, tmp_path: Path) -> None:
    """In another folder, too: ONNX Runtime opens neither."""
    source, before = load_source(stored), listing(tmp_path)
    for output in (os.fsdecode(b"m\xff.onnx"), os.fsdecode(b"f\xff/m.onnx")):
        with pytest.raises(OutputError, match="this name is not UTF-8, which models and manifests need"):
            save_model(source.proto, tmp_path / output, source)
    assert listing(tmp_path) == before


def test_save_refuses_the_name_of_a_data_file(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(128))
    source = load_source(write(tmp_path / "model.onnx", external_model(location="w.bin")))
    (tmp_path / "target").mkdir()
    with pytest.raises(OutputError, match="a data file of the model already has this name"):
        save_model(source.proto, tmp_path / "target" / "w.bin", source)


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "failure", "error"),
    [
        ("shutil.copyfile", no_space, OutputError),
        ("shutil.copyfile", interrupt, KeyboardInterrupt),
        ("os.fsync", no_space, OutputError),
        ("os.fsync", interrupt, KeyboardInterrupt),
    ],
)
def test_failed_save_leaves_nothing(
    stored: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    failure: Callable[..., NoReturn],
    error: type[BaseException],
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "out.onnx").write_bytes(b"precious")
    source = load_source(stored)
    monkeypatch.setattr(name, failure)
    with pytest.raises(error):
        save_model(source.proto, target / "out.onnx", source)
    assert [str(p.relative_to(target)) for p in target.rglob("*")] == ["out.onnx"]
    assert (target / "out.onnx").read_bytes() == b"precious"


def test_failed_rename_takes_back_the_earlier_ones(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    source = load_source(stored)
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda a, b: no_space() if b.name == "out.onnx" else replace(a, b))
    with pytest.raises(OutputError, match="No space left"):
        save_model(source.proto, target / "out.onnx", source)
    assert list(target.rglob("*")) == []
