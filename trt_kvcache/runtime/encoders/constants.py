"""Constants: inputs that stay the same in all steps of a sequence, such as an encoder's output, keys, values or mask.

Each sequence has other constants. Sequences that share a step must have constants of equal shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trt_kvcache.arguments import shown
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import PromptError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, Role, TensorRole
from trt_kvcache.runtime.trt.cuda import DeviceArray

Array = np.ndarray[Any, np.dtype[Any]]

_SHOWN = 4  # names in a message; deep models have a hundred


@dataclass(frozen=True, eq=False)
class Constants:
    """The constants of one sequence. Two such objects are equal only if they are the same object.

    Attributes:
        arrays: ``[1, ...]`` by input name, C-contiguous, in the model's dtype; on the host, or on the runner's GPU.
    """

    arrays: Mapping[str, Array | DeviceArray] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all axes of all arrays, except the batch axes. Sequences with equal sizes can share a step."""
        return tuple(size for array in self.arrays.values() for size in array.shape[1:])


NO_CONSTANTS = Constants()
"""The `Constants` of a sequence whose model has no inputs that stay the same in all steps."""


class ConstantInputs:
    """Checks the values of a model's constants: inputs that stay the same in all steps of a sequence.

    `home` is the GPU on which the values may lie (see `Runner.home`); None: the values must lie in host memory.
    """

    def __init__(self, plan: CachePlan, home: object = None) -> None:
        self._home = home
        self.tensors = tuple(t for t in plan.tensors if t.io == "input" and t.role is Role.CONSTANT)
        for tensor in self.tensors:
            if not tensor.shape or tensor.axes[0] not in ("batch", "") or not {*tensor.axes[1:]} <= {"encoder", ""}:
                raise UnsupportedModelError(
                    f"input '{tensor.name}' ({tensor.dtype} {list(tensor.shape)}) is given once per sequence, but "
                    f"has the axes {', '.join(a or 'fixed' for a in tensor.axes)}; it must be [batch, ...] with "
                    "sizes that do not depend on the text"
                )

    def read(self, values: Mapping[str, Any] | Constants | None) -> Constants:
        """Check the constants of one sequence, and return them as `Constants`. `Constants` are returned unchecked.

        `values` has an array ``[1, ...]`` for every input. Raises `PromptError` if an input is missing or unknown, or
        an array has the wrong dtype or shape.
        """
        if isinstance(values, Constants):
            return values
        if values is not None and not isinstance(values, Mapping):
            raise PromptError(f"constants are {shown(values)}; give a mapping {{name: array}}, as session.encode makes")
        values = dict(values or {})
        names = [t.name for t in self.tensors]
        if missing := [f"'{t.name}' ({t.dtype} {_shape(t)})" for t in self.tensors if t.name not in values]:
            listed = ", ".join(missing[:_SHOWN])
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise PromptError(
                f"the model takes inputs that are given once per sequence, and {listed}{more} "
                f"{'are' if len(missing) > 1 else 'is'} missing; let the encoder make them "
                "(session.encode, on the command line --source), or give --constants"
            )
        if unknown := [name for name in values if name not in names]:
            takes = f"it takes {', '.join(names)}" if names else "it takes no such input"
            raise PromptError(f"{unknown[0]!r} is not an input that the model takes once per sequence; {takes}")
        return Constants({t.name: self._checked(t, values[t.name]) for t in self.tensors}) if names else NO_CONSTANTS

    def _checked(self, tensor: TensorRole, value: Any) -> Array | DeviceArray:
        array: Array | DeviceArray = value if isinstance(value, DeviceArray) else np.asarray(value)
        dtype = array_dtype(tensor.dtype)
        fits = array.ndim == len(tensor.shape) and all(
            size == want if isinstance(want, int) else size >= 1
            for size, want in zip(array.shape, (1, *tensor.shape[1:]), strict=True)
        )
        if array.dtype != dtype or not fits:
            raise PromptError(
                f"'{tensor.name}' is {array.dtype} {list(array.shape)}, but the model takes {dtype} "
                f"{_shape(tensor)} for each sequence"
            )
        if isinstance(array, DeviceArray):
            if array.home is not self._home:
                raise PromptError(
                    f"'{tensor.name}' lies on the GPU of another session; give numpy.asarray of it, or let this "
                    "session's encoder make it"
                )
            return array
        return np.array(array, order="C")  # a copy: the caller may change the array


def _shape(tensor: TensorRole) -> str:
    return f"[{', '.join(map(str, (1, *tensor.shape[1:])))}]"
