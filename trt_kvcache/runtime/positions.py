"""Positions that a caller gives: whether a model takes them, and in which shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.errors import PromptError
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.runtime.axes import axes_with_planes, fixed_length, named_axes
from trt_kvcache.runtime.token_inputs import Indices

__all__ = ["PositionInput"]


class PositionInput:
    """The model's input of positions.

    Args:
        plan: plan of the model.

    Attributes:
        planes: positions of each token: 3 for time, height and width (M-RoPE); 0 if the model takes no positions.
    """

    def __init__(self, plan: CachePlan) -> None:
        inputs = [named_axes(t, plan) for t in plan.tensors if t.io == "input" and t.role is Role.POSITIONS]
        self._names = ", ".join(f"'{t.name}' {list(t.shape)}" for t in inputs)
        self.planes = 0
        if not inputs:
            self._why = "the model has no input of positions"
        elif len(inputs) > 1:
            self._why = f"the model has several inputs of positions ({self._names}), which may count different things"
        elif not {"sequence", "tokens"} & set(inputs[0].axes) and fixed_length(plan) != 1:
            self._why = f"the model is told where a whole step stands ({self._names}), not each of its tokens"
        else:
            (tensor,) = inputs
            planar = len(tensor.shape) == 3
            self.planes = int(tensor.shape[axes_with_planes(tensor).index("planes")]) if planar else 1

    def read(self, values: Any, count: int) -> Indices:
        """Check the positions of a prompt; return int64 ``[planes, count]``.

        Args:
            values: ``[count]``, the same in all planes, or ``[planes, count]``; or ``[planes, 1, count]``, as models
                take them.
            count: tokens of the prompt.

        Raises:
            PromptError: the model takes no positions, or they have another shape, or are negative.
        """
        if not self.planes:
            raise PromptError(f"positions are given, and {self._why}; leave them out")
        try:
            array = np.asarray(values)
        except ValueError:
            raise PromptError("positions are a list of lists of different lengths") from None
        array = array[:, 0] if array.ndim == 3 and array.shape[1] == 1 else array
        array = array[np.newaxis] if array.ndim == 1 else array
        shapes = (1, count), (self.planes, count)
        if array.shape not in shapes or array.dtype.kind not in "iu":
            wanted = f"[{count}]" + (f" or [{self.planes}, {count}]" if self.planes > 1 else "")
            raise PromptError(
                f"positions are {array.dtype} {list(np.shape(values))}; for a prompt of {count} tokens the model takes "
                f"integers {wanted} ({self._names})"
            )
        if count and int(array.min()) < 0:
            raise PromptError(f"position {int(array.min())} is negative; positions count from 0")
        return np.array(np.broadcast_to(array, (self.planes, count)), np.int64)
