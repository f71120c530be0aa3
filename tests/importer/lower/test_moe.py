"""Mixtures of experts against their lowered form, ONNX Runtime's kernels, and numpy."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from builder import build_in_child
from lowering import close, lowered
from lowering import run as run_all
from mixtures import Array, Mixture
from needs import ORT_VERSION
from onnx import TensorProto

from trt_kvcache.importer.files.signed_weights import for_tensorrt as sign_weights
from trt_kvcache.importer.steps.sessions import exact_experts

LENGTHS = (1, 2, 3, 7, 40)
SHARES = {np.float32: 3e-6, np.float16: 6e-3}


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    return run_all(model, feeds)[0]


ACTIVATIONS = ("relu", "gelu", "silu", "identity", "swiglu")
FLOATS = [
    *(Mixture(activation=a, normalized=n) for a in ACTIVATIONS for n in (False, True)),
    *(Mixture(k=k, normalized=n) for k in (1, 6) for n in (False, True)),
    *(Mixture(limit=limit, alpha=1, beta=0) for limit in (None, np.inf, 0.3)),
    *(Mixture(limit=limit) for limit in (None, 0)),
    *(Mixture(experts=e, k=k) for e, k in ((1, 1), (2, 1), (2, 2), (3, 2), (5, 3), (16, 4), (33, 8))),
    Mixture(bias=False), Mixture(rank=3), Mixture(rank=3, tokens=7), Mixture(hidden=32, inner=32, activation="silu"),
]  # fmt: skip
QUANTIZED = [
    *(Mixture(bits=bits, block=block, zeros=z) for bits in (4, 8) for block in (0, 16, 32) for z in (False, True)),
    *(Mixture(bits=bits, hidden=96, inner=96, zeros=True) for bits in (4, 8)),  # three zero points: half a byte is left
    *(Mixture(bits=bits, block=64, hidden=96, zeros=z) for bits in (4, 8) for z in (False, True)),  # half a block
    *(Mixture(bits=bits, block=64, hidden=64, inner=64, zeros=True) for bits in (4, 8)),
    *(Mixture(bits=4, activation=a, normalized=n) for a in ACTIVATIONS for n in (False, True)),
    Mixture(bits=4, bias=False), Mixture(bits=4, rank=3), Mixture(bits=4, experts=16, k=4, zeros=True),
]  # fmt: skip


@pytest.mark.few(14)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", [*FLOATS, *QUANTIZED], ids=str)
def test_mixture(case: Mixture, dtype: Any) -> None:
    case = replace(case, dtype=dtype)
    model = case.model()
    result = lowered(model)
    for tokens in (case.tokens,) if case.tokens else LENGTHS:
        feeds = case.feeds(tokens)
        expected = case.expected(feeds)
        close(run(result, feeds), expected, SHARES[dtype])
        with exact_experts():
            if dtype == np.float16 and not case.bits and not case.normalized and ORT_VERSION < (1, 32):
                continue  # it multiplies with zeros there
            close(run(model, feeds), expected, SHARES[dtype])  # it understands the operator as this test does


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_signed_weights(case: Mixture) -> None:
    """As TensorRT gets them: the middle at 0. Scales of 8 bits may be negative, as onnxruntime-genai's are."""
    model = lowered(case.model())
    copy = deepcopy(model)
    assert sign_weights(copy, Path()) == ()
    assert not {t.data_type for t in copy.graph.initializer} & {TensorProto.UINT4, TensorProto.UINT8}
    feeds = case.feeds(7)
    np.testing.assert_array_equal(run(copy, feeds), run(model, feeds))


@pytest.mark.few(20)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 31, 64, 200])
@pytest.mark.parametrize(("experts", "k"), [(4, 1), (5, 2), (8, 8), (32, 4)])
def test_however_unevenly_tokens_choose(experts: int, k: int, tokens: int) -> None:
    """All of them the same experts, all but one, each others: the blocks suffice."""
    case = Mixture(experts=experts, k=k, hidden=8, inner=8)
    model = lowered(case.model())
    for choose in ("same", "one", "turns", "few"):
        feeds = case.feeds(tokens, spread=0.1)
        boost = np.zeros((tokens, experts))
        favourite = np.arange(experts)[::-1] * 1.0
        for t in range(tokens):
            own = {"same": 0, "one": t == tokens - 1, "turns": t, "few": t % 3 == 0}[choose]
            boost[t] = np.roll(favourite, int(own))
        feeds["logits"] = (feeds["logits"] + boost).astype(np.float32)
        close(run(model, feeds), case.expected(feeds), 3e-6)


def test_nothing_of_other_tokens_and_experts_is_read() -> None:
    """Tokens that are not numbers, and experts that nobody chose, leave the others' bits as they are."""
    case = Mixture(experts=8, k=2)
    model = lowered(case.model())
    for tokens in (4, 40):
        feeds = case.feeds(tokens)
        feeds["logits"][:, 5:] = -30
        clean = run(model, feeds)
        poisoned = deepcopy(model)
        for tensor in poisoned.graph.initializer:
            if len(tensor.dims) > 1 and tensor.dims[0] == 8:
                values = np.array(onnx.numpy_helper.to_array(tensor))
                values[5:] = np.nan
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        np.testing.assert_array_equal(run(poisoned, feeds), clean)
        feeds["x"][1], feeds["logits"][2] = np.inf, np.nan
        others = [t for t in range(tokens) if t not in (1, 2)]
        np.testing.assert_array_equal(run(model, feeds)[others], clean[others])


@pytest.mark.parametrize("attrs", [{"weights_prepacked": 0}, {"quant_type": "int"}, {"accuracy_level": 4}], ids=str)
def test_attributes_that_change_nothing(attrs: dict[str, Any]) -> None:
    case = Mixture(bits=4)
    feeds = case.feeds(3)
    close(run(lowered(case.model(**attrs)), feeds), case.expected(feeds), 3e-6)


BUILT = [
    Mixture(dtype=np.float16), Mixture(activation="gelu", normalized=False, rank=3), Mixture(bits=4, dtype=np.float16),
    Mixture(bits=4, zeros=True), Mixture(bits=4, block=0, zeros=True, dtype=np.float16), Mixture(bits=8, rank=3),
    Mixture(bits=8, block=0, dtype=np.float16), Mixture(bits=4, block=64, hidden=96, dtype=np.float16),
    Mixture(experts=1, k=1), Mixture(experts=5, k=3, activation="relu"),
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("case", BUILT, ids=str)
def test_tensorrt_builds(case: Mixture) -> None:
    model = lowered(case.model())
    sign_weights(model, Path())
    outcome = build_in_child(model.SerializeToString(), [{"T": (1, 64, 128)}, {"T": (1, 1, 1)}])
    assert outcome.stage == "built", outcome.words
