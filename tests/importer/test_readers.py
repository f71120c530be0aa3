"""What reads a cache and is no attention is refused by name."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from concat_graphs import Build, Decoder, joined, make_decoder
from onnx import ModelProto, TensorProto, helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model


def over_another_axis() -> ModelProto:
    model = make_decoder(Decoder())
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    del softmax.attribute[:]
    softmax.attribute.append(helper.make_attribute("axis", 2))
    return model


def probabilities(g: Build, x: str) -> str:
    softmax = next(n for n in g.nodes if n.op_type == "Softmax")
    g.output(softmax.output[0], TensorProto.FLOAT, ["a", "b", "c", "d"])
    return x


def mixed_past(g: Build, x: str) -> str:
    return g.Add(x, g.ReduceMean(g.pasts[0], keepdims=0))


def before(g: Build, past: str, new: str, present: str) -> str:
    """Attention reads the keys as they were before this step."""
    whole = joined(g, past, new, present)
    return whole if g.part else past


def built(model: Callable[[], ModelProto], folder: Path) -> Path:
    onnx.save(model(), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: built(over_another_axis, folder),
            r"weights of keys in 'matmul_66' depend on more than the head and the distance",
        ),
        (
            lambda folder: built(lambda: make_decoder(Decoder(after=probabilities)), folder),
            r"reads the cache 'past_key_values.0.key', but is not a recognized attention; only",
        ),
        (
            lambda folder: built(lambda: make_decoder(Decoder(repeat="tile", mask="positions", write=before)), folder),
            r"Add 'node_add_36' gets sizes 4 and 11, which do not fit",
        ),
        (
            lambda folder: built(lambda: make_decoder(Decoder(after=mixed_past)), folder),
            r"'present.0.key' should hold new rows of the cache 'past_key_values.0.key', but holds none",
        ),
    ],
    ids=["axis of the softmax", "probabilities are an output", "scores over the past", "another reader"],
)
def test_what_differs_is_named(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        import_model(path)
