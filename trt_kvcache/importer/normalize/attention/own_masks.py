"""Find the caller's own mask among the masks of one attention, and prove that it reaches the scores as it is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.normalize.attention.mask_values import MaskKind, Masks, MaskUse
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.interface import Interface
from trt_kvcache.importer.plan import OriginalRole

Array = npt.NDArray[Any]

_SEED = 1


def find_own_mask(masks: Masks, graph: gs.Graph, interface: Interface, samples: Samples) -> gs.Tensor | None:
    """The input with the caller's own mask, if the values of one reach the attention.

    Raises:
        UnsupportedModelError: those of several do.
    """
    sample = samples.plain[0]
    found: list[str] = []
    for tensor in interface.of(OriginalRole.MASK):
        changed = sample.probe.given({tensor.name: _flipped(sample, tensor.name)})
        for name in masks.names:
            before, after = sample.probe.value(name), changed.value(name)
            if before is not None and after is not None and not np.array_equal(before, after):
                found.append(tensor.name)
                break
    if len(set(found)) > 1:
        raise UnsupportedModelError(
            f"the mask of '{masks.node}' is made of several inputs ({', '.join(found)}); supported is one mask of the "
            "caller's own"
        )
    return next((t for t in graph.inputs if t.name == found[0]), None) if found else None


def check_own_mask(masks: Masks, own: gs.Tensor, samples: Samples) -> None:
    """Prove that what the queries see is what the caller's own mask says, and nothing else.

    Raises:
        UnsupportedModelError: something else takes part, or the mask does not come to the scores as it is given.
    """

    def stands(sample: Sample) -> None:
        visible = masks.visible(sample)
        given = sample.own[own.name]
        fits = all(n in (1, m) for n, m in zip(given.shape[::-1], visible.shape[::-1], strict=False))
        fits = fits and all(_arrives(use, own, sample) for use in added)
        if not fits or not np.all(visible == np.broadcast_to(masks.in_order(given, sample), visible.shape)):
            raise UnsupportedModelError(
                f"the mask of '{masks.node}' is made of the input '{own.name}' and of something else; supported is the "
                "caller's own mask as it stands, or a causal, padding or window mask"
            )

    added = [use for use in masks.uses if use.kind is MaskKind.ADDED and _arrives(use, own, samples.plain[0])]
    for sample in samples.plain:
        stands(sample)
    value = samples.plain[0].probe.value(own.name)
    assert value is not None
    if value.dtype.kind not in "bf":
        raise UnsupportedModelError(
            f"the mask '{own.name}' of '{masks.node}' is {value.dtype}; supported is the caller's own mask as bool, or "
            "as numbers to add to the scores"
        )
    if value.dtype.kind == "f":
        _check_added(masks, own, samples.plain[0])


def _flipped(sample: Sample, name: str) -> Array:
    """Another mask of the caller's own."""
    value = sample.probe.value(name)
    assert value is not None
    flipped = np.random.default_rng(_SEED).permuted(sample.own[name], axis=-1)
    if value.dtype.kind == "f":
        return np.where(flipped, 0, np.finfo(np.float16).min).astype(value.dtype)
    return flipped.astype(value.dtype)


def _arrives(use: MaskUse, own: gs.Tensor, sample: Sample) -> bool:
    """Whether the very numbers of the caller's own mask are added to the scores."""
    given, added = sample.probe.value(own.name), sample.probe.value(use.tensor.name)
    if given is None or added is None or given.dtype.kind != "f" or given.ndim > added.ndim:
        return False
    fits = all(n in (1, m) for n, m in zip(given.shape[::-1], added.shape[::-1], strict=False))
    return fits and bool(np.all(added == given))


def _check_added(masks: Masks, own: gs.Tensor, sample: Sample) -> None:
    """Show that whatever numbers the caller's own mask holds are added to the scores."""
    given = sample.probe.value(own.name)
    assert given is not None
    numbers = -np.random.default_rng(_SEED).integers(1, 100, given.shape).astype(given.dtype)
    probe = sample.probe.given({own.name: numbers})
    for use in masks.uses:
        before, after = sample.probe.value(use.tensor.name), probe.value(use.tensor.name)
        if use.kind is not MaskKind.ADDED or before is None or after is None or np.array_equal(before, after):
            continue
        if not np.array_equal(after, np.broadcast_to(numbers, after.shape)):
            raise UnsupportedModelError(
                f"the mask '{own.name}' does not come to the scores of '{masks.node}' as it is given; supported is the "
                "caller's own mask, added to the scores"
            )
