"""A model as exported whose tensors hold several caches, behind an interface in which each cache has its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.plan import Stack, StackPart
from trt_kvcache.verify.sessions import Session

Array = npt.NDArray[Any]


class StackedSession:
    """Runs the original on caches one by one.

    Attributes:
        engine: name and version of what runs the original.

    Args:
        session: of the original.
        stacks: which of its inputs and outputs hold what.
    """

    def __init__(self, session: Session, stacks: Sequence[Stack]) -> None:
        self.engine = session.engine
        self._session = session
        self._stacks = stacks

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs, caches one by one.

        Raises:
            EngineError: the engine cannot run the step.
        """
        return parted(self._session.run(joined(feeds, self._stacks)), self._stacks)


def joined(feeds: Mapping[str, Array], stacks: Sequence[Stack]) -> dict[str, Array]:
    """The inputs of the model as exported, of which `feeds` has the caches one by one."""
    made = dict(feeds)
    for stack in (s for s in stacks if s.io == "input"):
        first = stack.parts[0]
        own = iter(_as_exported(made[first.name], first).shape)
        places = zip(*(part.place for part in stack.parts), strict=True)
        sizes = [next(own) if at[0] is None else 1 + max(i for i in at if i is not None) for at in places]
        whole = np.empty(sizes, made[first.name].dtype)
        for part in stack.parts:
            whole[part.index] = _as_exported(made.pop(part.name), part)
        made[stack.name] = whole
    return made


def parted(outputs: Mapping[str, Array], stacks: Sequence[Stack]) -> dict[str, Array]:
    """What the model as exported gives, its caches one by one."""
    made = dict(outputs)
    for stack in (s for s in stacks if s.io == "output"):
        made |= stack.parted(made.pop(stack.name))
    return made


def _as_exported(cache: Array, part: StackPart) -> Array:
    return cache if part.order is None else cache.transpose(np.argsort(part.order))
