"""Encoders built by TensorRT for RTX beside their decoders, without a GPU, and what is refused before."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import encoder, first_step, strided_encoder
from graphs import Graph
from hybrids import WIDTH, cross_model, hybrid_model, write
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache import BuildOptions, inspect_engine, plan_model
from trt_kvcache.engine import engine_build as engine_build
from trt_kvcache.engine.engine_build import EncoderJob, build_engine, find_job
from trt_kvcache.engine.manifest import Manifest, ShapeRange, encoder_path, load_manifest
from trt_kvcache.errors import BuildError, OptionError, UnsupportedModelError
from trt_kvcache.files import identify
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions, Role, Target
from trt_kvcache.importer.families.encoders.model import import_encoder

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
SIZES = {"max_chunk": 8, "max_encoder": 12}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An export as optimum writes it: the first step makes the encoder's keys and values."""
    encoder(tmp_path / "encoder_model.onnx", mask=True)
    first_step(tmp_path / "decoder_model.onnx")
    return write(tmp_path / "decoder_with_past_model.onnx", cross_model("keys", "ones"))


def build(model: Path, **options: Any) -> Manifest:
    return build_engine(model, model.with_name("model.engine"), build=BuildOptions(**SIZES, **options))


@pytest.mark.slow
def test_an_encoder_is_built_beside_its_decoder(model: Path) -> None:
    manifest = build(model)
    path = encoder_path(model.with_name("model.engine"))
    assert path.name == "model.encoder.engine"
    assert manifest.encoder == identify(path)
    assert manifest.warnings == ()
    report = inspect_engine(path)
    made = report.manifest
    assert made.is_encoder
    assert not manifest.is_encoder
    assert [f.name for f in made.model] == ["encoder_model.onnx", "decoder_model.onnx"]
    assert {t.name for t in made.plan.tensors if t.io == "output"} == {
        f"past_key_values.{layer}.encoder.{part}" for layer in "ab" for part in ("key", "value")
    }
    assert made.profiles[0].shapes == {
        "input_features": ShapeRange((1, 1, WIDTH), (1, 12, WIDTH), (1, 12, WIDTH)),
        "attention_mask": ShapeRange((1, 1), (1, 12), (1, 12)),
    }


def test_which_encoder(model: Path, tmp_path: Path) -> None:
    """That beside the model, that of a folder, or none; a decoder has none to begin with."""
    plan, _ = constants(model)

    def found(plan: CachePlan = plan, **options: Any) -> list[str]:
        job = find_job(model, plan, BuildOptions(**SIZES, **options))
        return [] if job is None else [str(source.path.relative_to(tmp_path)) for source in job.part.sources]

    assert found() == ["encoder_model.onnx", "decoder_model.onnx"]
    assert found(encoder="none") == []
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("encoder_model.onnx", "decoder_model.onnx"):
        model.with_name(name).rename(folder / name)
    assert found() == []
    assert found(encoder=str(folder)) == ["elsewhere/encoder_model.onnx", "elsewhere/decoder_model.onnx"]
    with pytest.raises(OptionError, match=r"encoder names an encoder, but there is no encoder at .*nowhere"):
        found(encoder=str(tmp_path / "nowhere"))
    alone = plan_model(write(tmp_path / "alone.onnx", hybrid_model()), PlanOptions(target=Target.TENSORRT_RTX))
    with pytest.raises(OptionError, match="takes no inputs from an encoder; leave encoder out"):
        found(alone, encoder=str(folder))


def nonzero(path: Path) -> Path:
    """An encoder that TensorRT's parser refuses."""
    g = Graph()
    g.input("input_features", FLOAT, ["batch", "length", WIDTH])
    rows = g.node(
        "Squeeze", [g.node("NonZero", [g.node("ReduceMax", ["input_features", g.constant([2])], keepdims=0)])]
    )
    places = g.node("Gather", [rows, g.constant(1)], axis=0)
    g.node("Gather", ["input_features", places], "last_hidden_state", axis=1)
    g.output("last_hidden_state", FLOAT, ["batch", "kept", WIDTH])
    onnx.save(g.model(), path)
    return path


@pytest.mark.slow
def test_what_tensorrt_refuses_runs_on_the_cpu(tmp_path: Path) -> None:
    """The decoder is built all the same, and nothing of the encoder is left."""
    model = write(tmp_path / "decoder_with_past_model.onnx", cross_model("hidden", "none"))
    nonzero(tmp_path / "encoder_model.onnx")
    shapes = {"max_shapes": {"input_features": (1, 12, WIDTH)}}
    (warning,) = build(model, **shapes).warnings
    assert warning.startswith("no engine could be built from the encoder, so it runs on the CPU: ")
    assert "NonZero" in warning
    assert not any("encoder.engine" in p.name for p in tmp_path.iterdir())
    with pytest.raises(BuildError, match='NonZero.*; with encoder="none" the encoder runs on the CPU'):
        build(model, encoder=str(tmp_path / "encoder_model.onnx"), **shapes)


@pytest.mark.few(2)
@pytest.mark.parametrize("error", [BuildError("enough"), ValueError("enough"), KeyboardInterrupt()])
def test_what_ends_a_build_is_no_fault_of_the_encoder(error: BaseException, model: Path) -> None:
    """An error that the caller's progress raises ends the build, also while the encoder is built; nothing is left."""

    def enough(_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        build_engine(model, model.with_name("model.engine"), build=BuildOptions(**SIZES), progress=enough)
    assert not list(model.parent.glob("*engine*"))


def constants(model: Path) -> tuple[Any, list[Any]]:
    plan = plan_model(model, PlanOptions(target=Target.TENSORRT_RTX))
    return plan, [t for t in plan.tensors if t.io == "input" and t.role is Role.CONSTANT]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("mask", "Attention 'att' has a padding mask .* and no past"),
        ("do_rotary", "Attention 'att' rotates queries and keys"),
        ("present", "Attention 'att' holds the keys and values of its cache in one tensor"),
    ],
)
def test_attention_that_is_more_is_refused(odd: str, words: str, tmp_path: Path) -> None:
    model = write(tmp_path / "decoder.onnx", cross_model("hidden", "none"))
    g = Graph()
    g.input("audio_features", FLOAT, ["batch", "length", WIDTH])
    weight, bias = g.constant(np.zeros((WIDTH, 3 * WIDTH)), np.float32), g.constant(np.zeros(3 * WIDTH), np.float32)
    inputs = ["audio_features", weight, bias]
    if odd == "mask":
        g.input("attention_mask", TensorProto.INT32, ["batch", "length"])
        inputs.append("attention_mask")
    outputs = ["hidden_states", "present"] if odd == "present" else ["hidden_states"]
    attrs = {"do_rotary": 1} if odd == "do_rotary" else {}
    g.nodes.append(helper.make_node("Attention", inputs, outputs, "att", domain="com.microsoft", num_heads=4, **attrs))
    for name in outputs:
        g.output(name, FLOAT, ["batch", "length", WIDTH] if name == "hidden_states" else [2, "batch", 4, "length", 8])
    exported = g.model()
    exported.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(exported, tmp_path / "encoder.onnx")
    plan, taken = constants(model)
    with pytest.raises(UnsupportedModelError, match=words):
        import_encoder(tmp_path / "encoder.onnx", None, taken, plan.options)


def table_encoder(path: Path, rows: int, *, counted: bool = False) -> Path:
    """Token ids and positions, which are counted in the graph: by the shape, or by what is no padding (1)."""
    g = Graph()
    g.input("input_ids", INT, ["batch", "length"])
    x = g.node("Gather", [g.constant(np.ones((50, WIDTH)), np.float32), "input_ids"])
    if counted:
        real = g.node("Cast", [g.node("Not", [g.node("Equal", ["input_ids", g.constant(1)])])], to=INT)
        places = g.node("Mul", [g.node("CumSum", [real, g.constant(1)]), real])
    else:
        length = g.node("Squeeze", [g.node("Shape", ["input_ids"], start=1, end=2)])
        places = g.node("Add", [g.node("Range", [g.constant(0), length, g.constant(1)]), g.constant(2)])
    table = numpy_helper.from_array(np.ones((rows, WIDTH), np.float32), "positions.weight")
    g.initializers.append(table)
    g.node("Add", [x, g.node("Gather", ["positions.weight", places])], "last_hidden_state")
    g.output("last_hidden_state", FLOAT, ["batch", "length", WIDTH])
    onnx.save(g.model(), path)
    return path


@pytest.mark.parametrize(("counted", "offset"), [(False, 2), (True, 1)])
def test_sources_longer_than_the_table_of_positions(counted: bool, offset: int, tmp_path: Path) -> None:
    """TensorRT would read anything, and say nothing."""
    model = write(tmp_path / "decoder_with_past_model.onnx", cross_model("hidden", "none"))
    plan, _ = constants(model)

    def job(rows: int) -> EncoderJob | None:
        table_encoder(tmp_path / "encoder_model.onnx", rows, counted=counted)
        return find_job(model, plan, BuildOptions(**SIZES))

    found = job(12 + offset)
    assert found is not None
    assert found.vocab == 50
    with pytest.raises(OptionError, match=r"input_ids \[1, 12\] reads row \d+ of 'positions.weight', which has \d+"):
        job(12 + offset - 1)


@pytest.mark.slow
def test_lengths_that_nobody_says(model: Path, tmp_path: Path) -> None:
    """An encoder's output has another length than what it reads; shapes of the decoder are not looked at."""
    g = Graph()
    g.input("pixels", FLOAT, ["batch", "size", WIDTH])
    half = g.node("Slice", ["pixels", g.constant([0]), g.constant([2**62]), g.constant([1]), g.constant([2])])
    g.node("Identity", [half], "last_hidden_state")
    g.output("last_hidden_state", FLOAT, ["batch", "length", WIDTH])
    onnx.save(g.model(), tmp_path / "encoder_model.onnx")
    plan, _ = constants(model)
    with pytest.raises(OptionError, match="input 'pixels' .1, size, 32.: the largest size is unknown; .*max_shapes"):
        find_job(model, plan, BuildOptions(**SIZES))
    with pytest.raises(OptionError, match="names 'pixel', which is not an input .*the largest size is unknown"):
        build(model, max_shapes={"pixel": (1, 24, WIDTH)})
    manifest = build(model, max_shapes={"pixels": (1, 24, WIDTH), "input_ids": (1, 8)})
    assert manifest.warnings == ()
    made = load_manifest(encoder_path(model.with_name("model.engine")))
    assert made.profiles[0].shapes["pixels"].max == (1, 24, WIDTH)


@pytest.mark.slow
def test_an_encoder_says_how_much_it_makes_of_the_longest_source(tmp_path: Path) -> None:
    model = write(tmp_path / "decoder_with_past_model.onnx", cross_model("hidden", "none"))
    strided_encoder(tmp_path / "encoder_model.onnx")
    shapes = {"input_features": (1, WIDTH, 15)}

    def largest(**options: Any) -> int:
        options = {"max_chunk": 8, "max_shapes": shapes, **options}
        made = build_engine(model, tmp_path / "model.engine", build=BuildOptions(**options))
        return made.profiles[0].shapes["encoder_hidden_states"].max[1]

    assert largest() == 8
    assert largest(max_shapes={**shapes, "encoder_hidden_states": (1, 20, WIDTH)}) == 20
    with pytest.raises(OptionError, match=r"8 positions from the longest source \(input_features \[1, 32, 15\]\);"):
        largest(max_encoder=7)


def test_weights_in_two_folders(model: Path, tmp_path: Path) -> None:
    step = onnx.load(model.with_name("decoder_model.onnx"))
    model.with_name("decoder_model.onnx").unlink()
    folder = tmp_path / "encoder"
    folder.mkdir()
    model.with_name("encoder_model.onnx").rename(folder / "model.onnx")
    onnx.save(step, tmp_path / "decoder_model.onnx", save_as_external_data=True, location="step.data", size_threshold=0)
    plan, _ = constants(model)
    with pytest.raises(UnsupportedModelError, match="are in different folders.*put all files of the export into"):
        find_job(model, plan, BuildOptions(**SIZES))


# Engines of decoders that attend to what an encoder gives once.


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mask"), [(k, m) for k in ("keys", "hidden") for m in ("none", "ones", "bool")])
def test_axes_and_engine(tmp_path: Path, kind: str, mask: str) -> None:
    model = write(tmp_path / "m.onnx", cross_model(kind, mask))
    with pytest.raises(OptionError, match=r"give the most positions with max_encoder, such as max_encoder=1500"):
        build_engine(model, tmp_path / "m.engine", build=BuildOptions(max_batch=4))
    build = BuildOptions(max_batch=4, max_chunk=8, max_encoder=24)
    manifest = build_engine(model, tmp_path / "m.engine", build=build)
    constants = {t.name: t.axes for t in plan_model(model).tensors if t.role is Role.CONSTANT}
    for profile in manifest.profiles:
        for name, axes in constants.items():
            axis, range_ = axes.index("encoder"), profile.shapes[name]
            assert (range_.min[axis], range_.opt[axis], range_.max[axis], range_.max[0]) == (1, 24, 24, 4)
