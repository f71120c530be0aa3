"""The stage as a whole: the model as exported stays as it is, and the result is the same every time."""

from __future__ import annotations

import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from decoders import DecoderConfig
from decoders import make_decoder as make_canonical

from trt_kvcache.importer.normalize import normalize
from trt_kvcache.importer.plan import PlanOptions


@pytest.mark.parametrize(
    "config", [DecoderConfig(), DecoderConfig(mode="circular"), DecoderConfig(layers=2, dtype="float16")], ids=str
)
def test_a_canonical_model_is_the_same_object(config: DecoderConfig) -> None:
    model = make_canonical(config)
    before = model.SerializeToString()
    result = normalize(model, {}, PlanOptions(capacity=16))
    assert result.model is model
    assert result.findings is None
    assert model.SerializeToString() == before


def test_the_model_as_exported_is_not_changed_and_the_result_is_the_same() -> None:
    model = make_decoder(Decoder(layers=2, mask="padding", window=5))
    before = model.SerializeToString()

    def result() -> onnx.ModelProto:
        return normalize(model, {}, PlanOptions(capacity=24)).model

    assert result().SerializeToString(deterministic=True) == result().SerializeToString(deterministic=True)
    assert model.SerializeToString() == before
