"""An input that says of how many last positions the logits are: transformers' ``logits_to_keep``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Build, Decoder, make_decoder
from greedy import greedy
from onnx import TensorProto

from trt_kvcache import DecodeSession, plan_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import LogitPositions, PlanOptions
from trt_kvcache.verify import VerifyOptions, verify_model

PROMPT = (7, 1, 30, 2)


def cut(name: str = "logits_to_keep", shape: tuple[int, ...] = (1,), end: int = 2**62) -> Callable[[Build, str], str]:
    def last(g: Build, x: str) -> str:
        first = g.Neg(g.input(name, TensorProto.INT64, list(shape)))
        return g.Slice(x, first if shape else g.Unsqueeze(first, [0]), [end], [1])

    return last


def chosen(g: Build, x: str) -> str:
    """A tensor of indices, which transformers takes under the same name."""
    return g.Gather(x, g.input("logits_to_keep", TensorProto.INT64, ["kept"]), axis=1)


def write(folder: Path, after: Callable[[Build, str], str], **how: Any) -> Path:
    model = make_decoder(Decoder(positions="past", after=after, **how))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "kept"
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    "after", [cut(), cut("num_logits_to_keep", ()), cut("decoder.logits_to_keep", (1,), np.iinfo(np.int32).max)]
)
def test_the_rewritten_model_says_it_by_its_own_input(after: Callable[[Build, str], str], tmp_path: Path) -> None:
    model = write(tmp_path, after)
    plan = plan_model(model, PlanOptions(capacity=24))
    assert plan.logits_span is not None
    (name,) = (c.old.partition(" ")[0] for c in plan.changes if c.why == "the length of logits_span replaces it")
    assert name not in [t.name for t in plan.tensors]
    assert verify_model(model, PlanOptions(capacity=24), VerifyOptions(chunks=(4, 2), tokens=2)).passed
    shape = onnx.load(model).graph.input[-1].type.tensor_type.shape.dim
    with DecodeSession.open(model, capacity=24) as session:
        found = session.generate([PROMPT], max_new_tokens=5)[0].tokens
    assert found == greedy(
        model, PROMPT, 5, **{name: lambda done, new: np.ones([d.dim_value for d in shape], np.int64)}
    )


def test_logits_stay_of_all_positions_if_that_is_asked_for(tmp_path: Path) -> None:
    plan = plan_model(write(tmp_path, cut()), PlanOptions(capacity=24, logits=LogitPositions.ALL))
    assert plan.logits_span is None
    assert "the model returns all logits" in [c.why for c in plan.changes]


@pytest.mark.parametrize("after", [chosen, cut(end=3)])
def test_another_use_of_the_name_is_refused_by_it(after: Callable[[Build, str], str], tmp_path: Path) -> None:
    model = write(tmp_path, after)
    with pytest.raises(UnsupportedModelError, match="logits"):
        DecodeSession.open(model, capacity=24)
