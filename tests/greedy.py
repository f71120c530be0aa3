"""Judges of generation: greedy decoding of a growing model on ONNX Runtime, and scores of generated tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

Make = Callable[[int, int], npt.NDArray[Any]]
"""Values of an input in a step, from the tokens before it and the number of new ones."""
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def greedy(model: Path | onnx.ModelProto, prompt: Sequence[int], count: int, **more: Make) -> list[int]:
    """`count` tokens after a prompt that comes in one step. `more`: values of the model's other inputs.

    The model has the inputs ``input_ids`` and pasts that start with ``past``, the presents at the same places among the
    outputs, and ``logits``.
    """
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    pasts = [value for value in session.get_inputs() if value.name.startswith("past")]
    presents = [value.name for value in session.get_outputs() if value.name.startswith("present")]
    held = {
        value.name: np.zeros([1, *(d if isinstance(d, int) else 0 for d in value.shape[1:])], _DTYPES[value.type])
        for value in pasts
    }
    ids, done, tokens = list(prompt), 0, list[int]()
    while len(tokens) < count:
        given = {name: make(done, len(ids)) for name, make in more.items()}
        outputs = session.run(None, {"input_ids": np.array([ids]), **held, **given})
        found = dict(zip([value.name for value in session.get_outputs()], outputs, strict=True))
        done += len(ids)
        ids = [int(found["logits"][0, -1].argmax())]
        tokens += ids
        held = {value.name: found[present] for value, present in zip(pasts, presents, strict=True)}
    return tokens


def check_greedy(
    prompt: Sequence[int], tokens: Sequence[int], scores: Callable[[list[int]], Any], tolerance: float
) -> None:
    """Make sure that each token has nearly the best score after the text before it.

    Args:
        prompt: what the tokens continue.
        tokens: what was generated.
        scores: float ``[V]`` after a text.
        tolerance: how far the scores of both machines may be apart, as a share of the largest.
    """
    text = list(prompt)
    for token in tokens:
        found = np.asarray(scores(text), np.float64)
        behind = (found.max() - found[token]) / np.abs(found).max()
        assert behind <= 2 * tolerance, f"{token} after {text} is {behind:.3g} behind {found.argmax()}"
        text.append(token)
