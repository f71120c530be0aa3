"""Engines with quantized caches have a proof of the model with these caches, on both backends' forms of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder
from proof.test_check import Gpu, one_row_late, wrong_scale
from proof_engines import recorded, write_proved

from trt_kvcache import DecodeSession
from trt_kvcache.compare.decode import DRAWN
from trt_kvcache.errors import VerificationError
from trt_kvcache.importer.cache_plan import CacheDtype, PlanOptions

CONFIG = DecoderConfig(form="heads-major", layers=2, head_size=32)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", [CacheDtype.INT8, CacheDtype.INT4])
def test_the_right_engine_passes_and_wrong_ones_are_refused(tmp_path: Path, dtype: str, kind: CacheDtype) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, dtype=dtype))
    options = PlanOptions(cache_dtype=kind)
    own, coded = recorded(model).facts, recorded(model, options).facts
    # Random contents are no codes.
    assert [p.part for p in own.pieces if p.part != DRAWN] == [p.part for p in coded.pieces]
    first = sorted(coded.allowed["start"])[-1]
    assert first != "logits"
    assert coded.allowed["start"][first].largest > own.allowed["start"][first].largest, "a code may be the next"
    with Gpu().open(write_proved(model, options=options), check="always") as session:
        assert isinstance(session, DecodeSession)
    for fault in (wrong_scale, one_row_late):
        with pytest.raises(VerificationError, match=r"output '\S+' at step \d+ \('[\w ]+'\), row \d: "):
            Gpu().open(write_proved(model, options=options, fault=fault))
