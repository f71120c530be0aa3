"""The stored decoders of real exporters, beside their plans, verdicts and engines (`tests/promises`)."""

from pathlib import Path

import net
import numpy as np
import pytest

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions, plan_model
from trt_kvcache.errors import OptionError

MODELS = Path(__file__).parents[1] / "models"
CAPACITY = 64
TAKEN = [
    name
    for name in sorted(path.parent.relative_to(MODELS).as_posix() for path in MODELS.glob("*/*/model.onnx"))
    if f"stored/{name}" in net.promises().models
]
# The others are attention blocks, and a decoder that reads what an encoder has made.
DECODERS = [name for name in TAKEN if not name.startswith("plain-torch/") and name != "optimum/t5"]
# Attention of others reads what an encoder has made, latent rows, or the cache of another layer.
_OTHERS = ("optimum/t5", "torch/deepseek_v3_dynamic_eager")


def _path(name: str) -> Path:
    return MODELS / name / "model.onnx"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DECODERS)
def test_a_session_generates_from_the_model_as_exported(name):
    """Ragged prompts, chunked prefill: the same tokens as each prompt alone."""
    prompts = [list(range(3, 20)), [5, 9, 200], list(range(40, 51))]
    config = GenerationConfig(max_new_tokens=12)
    chunk = 1 if "rolled" in name else 4  # rolled windows are exported for a token at a time
    with DecodeSession.open(str(_path(name)), capacity=CAPACITY, max_chunk=chunk) as session:
        alone = [session.generate([p], config)[0].tokens for p in prompts]
        together = [r.tokens for r in session.generate(prompts, config)]
    assert together == alone
    assert all(len(t) == 12 and np.all(np.asarray(t) < 256) for t in alone)


def test_rotary_tables_bound_the_capacity():
    """ONNX Runtime's operator refuses positions after their end."""
    path = _path("ort-genai/llama_cpu_fp32")
    plan_model(path, PlanOptions(capacity=256))
    with pytest.raises(OptionError, match="257, but the model supports at most 256 tokens"):
        plan_model(path, PlanOptions(capacity=257, beyond_length=True))
