"""The work of normalization on a model, for the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from trt_kvcache.importer.plan import InterfaceChange, OriginalTensor, StateUpdate, TensorRole


@dataclass(frozen=True)
class Findings:
    """The work of normalization on a model, for the plan.

    Attributes:
        idioms: by name of the cache input.
        original: inputs and outputs as exported; empty: the model was canonical already.
        roles: the same, and those of the inputs that normalization added, for the canonical model.
        states: state that is no cache.
        longest: the most tokens of one update, of caches that became circular.
        capacity: tokens per sequence, where the model leaves them open.
    """

    idioms: dict[str, str]
    changes: tuple[InterfaceChange, ...] = ()
    original: tuple[OriginalTensor, ...] = ()
    roles: tuple[TensorRole, ...] = ()
    states: tuple[StateUpdate, ...] = ()
    notes: tuple[str, ...] = ()
    longest: dict[str, int] = field(default_factory=dict)
    capacity: int | None = None
