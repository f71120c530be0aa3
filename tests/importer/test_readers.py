"""What reads a cache and is no attention is refused by name."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from corpus import entries
from onnx import ModelProto, helper

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import import_model


def over_another_axis() -> ModelProto:
    model = make_decoder(Decoder())
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    del softmax.attribute[:]
    softmax.attribute.append(helper.make_attribute("axis", 2))
    return model


def built(model: Callable[[], ModelProto], folder: Path) -> Path:
    onnx.save(model(), folder / "model.onnx")
    return folder / "model.onnx"


def of_corpus(key: str, folder: Path) -> Path:
    ((_, make, _),) = entries(key)
    return make(folder)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: built(over_another_axis, folder),
            r"weights of keys in 'matmul_66' depend on more than the head and the distance",
        ),
        (
            lambda folder: of_corpus("reader/probabilities shown", folder),
            r"reads the cache 'past_key_values.0.key', but is not a recognized attention; only",
        ),
        (
            lambda folder: of_corpus("edited/mask_transposed", folder),
            r"Add 'node_Add_98' gets sizes 7 and 64, which do not fit",
        ),
        (
            lambda folder: of_corpus("update/attention_over_past", folder),
            r"Add 'node_add_36' gets sizes 4 and 11, which do not fit",
        ),
        (
            lambda folder: of_corpus("reader/past in the hidden states", folder),
            r"'present.0.key' should hold new rows of the cache 'past_key_values.0.key', but holds none",
        ),
    ],
    ids=["axis of the softmax", "probabilities are an output", "turned mask", "scores over the past", "another reader"],
)
def test_what_differs_is_named(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        import_model(path)
