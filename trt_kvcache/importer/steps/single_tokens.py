"""Run the tokens of a step one by one, through the interface of a rewritten model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.importer.steps.contents import find_caches, find_states

Array = npt.NDArray[Any]
Feeds = dict[str, Array]


class SingleTokens:
    """Splits a step into steps of one token each."""

    def __init__(self, plan: CachePlan) -> None:
        starts, lengths, tokens = map(plan.tensor, (Role.WRITE_INDICES, Role.VALID_LENGTHS, Role.TOKENS))
        self._starts = starts.name if starts is not None else ""
        self._lengths = lengths.name if lengths is not None else ""
        self._axes = {t.name: t.axes for t in plan.tensors if t.io == "input"}
        self._past_of = {c.output: c.role.name for c in find_caches(plan)}
        self._carried = {**self._past_of, **{c.output: c.role.name for c in find_states(plan)}}
        has_axis = tokens is not None and "sequence" in tokens.axes
        self._counted = (tokens.name, tokens.axes.index("sequence")) if tokens is not None and has_axis else None

    def single(self, feeds: Mapping[str, Array], place: int) -> Feeds:
        """The inputs for one token of a step, without caches."""
        inputs, length = {}, self._length(feeds)
        for name, values in feeds.items():
            axes = self._axes.get(name, ())
            if "sequence" in axes:
                values = np.take(values, [place], axes.index("sequence"))
            if name in (self._starts, self._lengths):
                values = values + np.asarray(place if name == self._starts else place + 1 - length, values.dtype)
            inputs[name] = values
        return {name: values for name, values in inputs.items() if name not in self._carried.values()}

    def one_by_one(self, feeds: Mapping[str, Array], run: Callable[[int, Feeds], Feeds]) -> list[Feeds]:
        """Run each token of a step alone, after the tokens before it; returns the outputs for each.

        `run` gets the index of a token and its inputs: caches, and the inputs from `single`.
        """
        inputs, outputs = dict(feeds), list[Feeds]()
        for place in range(self._length(feeds)):
            inputs |= self.single(feeds, place)
            outputs.append(run(place, inputs))
            inputs |= self.carried(outputs[-1])
        return outputs

    def carried(self, outputs: Feeds) -> Feeds:
        """Caches and states after a step, as inputs of the next."""
        return {past: outputs[present] for present, past in self._carried.items() if present in outputs}

    def _length(self, feeds: Mapping[str, Array]) -> int:
        """Number of tokens in a step; 0 if the axis of tokens is unknown."""
        return int(feeds[self._counted[0]].shape[self._counted[1]]) if self._counted is not None else 0
