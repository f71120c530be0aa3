"""The encoder's keys and values, computed by the model of the first step.

optimum's decoders with a past take keys and values for every layer, and only the first step's model computes them,
beside other outputs. `FirstStep` keeps only the part of this model that computes them. Most exports take a shape from
the token ids there: so it runs on one token, and a second run with another token checks that the token does not matter.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.families.encoders.outputs import HIDDEN, IDS, MASK, keep_outputs, take_first_branch
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.runtime.ort.calls import input_dtype, open_on_cpu

__all__ = ["BY_HAND", "FirstStep"]

BY_HAND = "run it yourself, and give what the decoder takes as constants"
"""Advice if a model that runs before a decoder cannot be run."""
Array = np.ndarray[Any, np.dtype[Any]]


class FirstStep:
    """The part of a first step that computes the encoder's keys and values.

    Args:
        path: path of the first step's model, or of one with both steps.
        wanted: names of outputs; names that the model lacks are left out.

    Attributes:
        path: as the argument.
        outputs: names of the outputs, in order.

    Raises:
        InvalidModelError, UnsupportedModelError: the file cannot be read or run, or has inputs other than token ids,
            the encoder's output and a mask.
    """

    def __init__(self, path: Path, wanted: Collection[str]) -> None:
        self.path = path
        model = load_source(path, first_step=True).proto
        take_first_branch(model.graph)
        self.outputs = keep_outputs(model.graph, wanted)
        unknown = [v.name for v in model.graph.input if v.name not in (IDS, HIDDEN, MASK)]
        if unknown:
            raise UnsupportedModelError(
                f"{path}: the encoder's keys and values depend on '{unknown[0]}'; supported are those made of {IDS}, "
                f"{HIDDEN} and {MASK}: compute them yourself, and give them as constants"
            )
        self._session = open_on_cpu(model, path, BY_HAND, spinning=False)
        self._inputs = {v.name: input_dtype(v) for v in self._session.inputs}
        self._tried = False

    def run(self, hidden: Array) -> list[Array]:
        """Return keys and values for the encoder's output, float ``[1, S_enc, H]``.

        Raises:
            UnsupportedModelError: they depend on the text.
            SessionError: the model failed.
        """
        outputs = self._run(hidden, 0)
        if not self._tried:
            if not all(map(np.array_equal, outputs, self._run(hidden, 1))):
                raise UnsupportedModelError(
                    f"{self.path}: the encoder's keys and values depend on the text; supported are those of the "
                    "encoder's output alone: compute them yourself, and give them as constants"
                )
            self._tried = True
        return outputs

    def _run(self, hidden: Array, token: int) -> list[Array]:
        values = {IDS: np.array([[token]]), HIDDEN: hidden, MASK: np.ones(hidden.shape[:2])}
        feed = {name: np.ascontiguousarray(values[name], dtype) for name, dtype in self._inputs.items()}
        return self._session.run(self.outputs, feed)
