"""A model as exported whose tensors hold several caches, as a session in which each cache has its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.importer.plan import CachePlan, Stack

if TYPE_CHECKING:
    from trt_kvcache.importer.extensions import Opener
    from trt_kvcache.importer.steps.engine import Engine as Session

Array = npt.NDArray[Any]


def open_original(plan: CachePlan, open_session: Opener) -> Opener:
    """A function that opens a session that takes and gives caches one by one; see `trt_kvcache.importer.extensions`."""
    return lambda feeds: _Session(open_session(_joined(feeds, plan.stacks)), plan.stacks)


class _Session:
    """Runs a model as exported on caches one by one."""

    def __init__(self, session: Session, stacks: Sequence[Stack]) -> None:
        self.engine = session.engine
        self._session, self._stacks = session, stacks

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs, caches one by one; see `Session`."""
        outputs = self._session.run(_joined(feeds, self._stacks))
        for stack in (s for s in self._stacks if s.io == "output"):
            outputs |= stack.parted(outputs.pop(stack.name))
        return outputs


def _joined(feeds: Mapping[str, Array], stacks: Sequence[Stack]) -> dict[str, Array]:
    """The inputs of the model as exported, of which `feeds` has the caches one by one."""
    made = dict(feeds)
    for stack in (s for s in stacks if s.io == "input"):
        own = iter(made[stack.parts[0].name].shape)
        places = zip(*(part.place for part in stack.parts), strict=True)
        sizes = [next(own) if at[0] is None else 1 + max(i for i in at if i is not None) for at in places]
        whole = np.empty(sizes, made[stack.parts[0].name].dtype)
        for part in stack.parts:
            whole[part.index] = made.pop(part.name)
        made[stack.name] = whole
    return made
