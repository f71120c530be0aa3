"""The decoder makers: valid ONNX, runnable, and the same decoder in every form."""

import dataclasses

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from decoders import DTYPES, FORMS, DecoderConfig, make_decoder


def run(model: onnx.ModelProto | str, config: DecoderConfig, tokens: int = 5) -> np.ndarray:
    """Logits of one chunk, written at row 0 of caches full of garbage."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # TensorScatter logs a copy per node where past and present are not one buffer
    source = model if isinstance(model, str) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    sizes = {config.batch: 2, config.sequence: tokens}
    feeds: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, config.vocab, (2, tokens)),
        "position_ids": np.tile(np.arange(tokens), (2, 1)),
        "write_indices": np.zeros(2, np.int64),
        "nonpad_kv_seqlen": np.full(2, tokens),
        "attn_mask": np.arange(config.capacity) <= np.arange(tokens)[None, None, :, None].repeat(2, 0),
    }
    for value in session.get_inputs():
        if value.name not in feeds:
            shape = [sizes.get(d, d) for d in value.shape]
            feeds[value.name] = (rng.choice([-1e4, 1e4], shape)).astype(DTYPES[config.dtype][1])
    return session.run(["logits"], {v.name: feeds[v.name] for v in session.get_inputs()})[0]


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_all_forms_are_the_same_decoder(kv_heads: int, mode: str) -> None:
    config = DecoderConfig(kv_heads=kv_heads, mode=mode)
    logits = [run(make_decoder(dataclasses.replace(config, form=form)), config) for form in FORMS]
    for form, other in zip(FORMS, logits, strict=True):
        np.testing.assert_allclose(other, logits[0], rtol=0, atol=1e-4, err_msg=form)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"form": "paged"}, "form is 'paged'; it must be one of mobius"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"head_size": 15}, "even size"),
        ({"form": "five-d", "value_head_size": 8}, "one tensor"),
    ],
)
def test_wrong_configs_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**wrong)
