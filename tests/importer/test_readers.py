"""What reads a cache and is no attention is refused for the first operator on its way that is not as expected."""

from __future__ import annotations

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
        (lambda folder: built(over_another_axis, folder), r"Softmax '.*' is over axis 2 of scores .*; supported is"),
        (
            lambda folder: of_corpus("reader/probabilities shown", folder),
            r"Softmax '.*' gives 'softmax_65' as an output, which has a column for each key .*: leave that output out",
        ),
        (
            lambda folder: of_corpus("edited/mask_transposed", folder),
            r"Add '.*' combines 'val_97' \[2, 4, 3, 64\] and 'val_96' \[2, 1, 64, 3\], which do not fit each other",
        ),
        (
            lambda folder: of_corpus("update/attention_over_past", folder),
            r"Add '.*' combines '.*' \[2, 4, 3, 4\] and '.*' \[2, 1, 3, 7\], which do not fit each other",
        ),
        (
            lambda folder: of_corpus("reader/past in the hidden states", folder),
            r"ReduceMean '.*' reads the cache '.*'.*\(as it is before the new rows are written\); supported",
        ),
    ],
    ids=["axis of the softmax", "probabilities are an output", "turned mask", "scores over the past", "another reader"],
)
def test_the_operator_that_differs_is_named(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        import_model(path)
