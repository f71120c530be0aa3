"""The judge of generation: greedy decoding with a growing model as exported, on ONNX Runtime."""

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
    """The tokens after a prompt that comes in one step.

    Args:
        model: with the inputs ``input_ids`` and pasts that start with ``past``, the presents at the same places among
            the outputs, and ``logits``.
        prompt: token ids.
        count: of new tokens.
        more: values of the other inputs.
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
