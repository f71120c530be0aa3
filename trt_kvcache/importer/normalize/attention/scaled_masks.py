"""Scores that are scaled behind their mask, as CodeGen and GPT-J have it.

    (Q K^T + mask) / sqrt(D)      =      Q K^T / sqrt(D) + mask / sqrt(D)

It is the same attention with the scale before the mask, as long as what hides a key hides it still when it is scaled:
half precision's lowest number does over 16, as does anything lower; -1e4 over 8 may not. Nor may -1e4 beside scores
that are scaled by 100: what hides has to be lower by as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import BOOL, elem_type, is_op, producer
from trt_kvcache.importer.normalize.attention.mask_values import HIDDEN, is_biased
from trt_kvcache.importer.normalize.evidence.samples import Sample, Samples
from trt_kvcache.importer.normalize.findings import Visibility
from trt_kvcache.importer.normalize.views import is_float_cast

_MOVES = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze")

_LOWEST = -4e3  # scores of half precision are above it when scaled by 1 / sqrt(256)


@dataclass
class Hider:
    """What hides scores.

    Attributes:
        tensor: numbers.
        added: 0 or low, and added to the scores; else low, and in place of scores.
        factor: what the scores are multiplied with behind it.
    """

    tensor: gs.Tensor
    added: bool
    factor: float = 1.0


def hold_hidden(node: str, hiders: Iterable[Hider], samples: Samples) -> None:
    """See to it that what is hidden stays so behind the factors.

    Args:
        node: name of the attention, for messages.
        hiders: of its scores, with the factors behind them.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: something may be seen.
    """
    for hider in hiders:
        if hider.factor == 1:
            continue

        def hides(sample: Sample, hider: Hider = hider) -> None:
            value = sample.probe.value(hider.tensor.name)
            if value is not None:
                seen = value[value.astype(np.float64) * hider.factor > _LOWEST]
                if hider.added:
                    seen = seen[seen != 0]
                if not seen.size:
                    return
            shown = "unknown" if value is None else f"{float(np.max(seen)):g}"
            if hider.added and value is not None and is_biased(value):
                raise UnsupportedModelError(
                    f"'{node}' scales its scores by {hider.factor:g} behind a bias, '{hider.tensor.name}', with "
                    f"numbers such as {shown}; supported are slopes that grow by one number for each head with each "
                    "key, at every length (ALiBi), and these do not with so many tokens, as when they are rounded to "
                    "bfloat16: export the bias in the type of the scores, or take a smaller capacity"
                )
            raise UnsupportedModelError(
                f"'{node}' scales scores that are masked already, by {hider.factor:g}, and '{hider.tensor.name}', "
                f"which masks them, is {shown}; supported are factors before the mask, or behind one that is 0 or at "
                f"most {_LOWEST:g} when it is scaled: export the mask with the lowest number of its type"
            )

        for padded in (False, True):
            samples.hold(hides, padded=padded)


def hold_below(node: str, hiders: Iterable[Hider], scale: float, samples: Samples) -> None:
    """See to it that what hides is low enough for scores that are made larger.

    Args:
        node: name of the attention, for messages.
        hiders: of its scores, with the factors behind them.
        scale: of the scores, with these factors, and of what is known of their queries.
        samples: of the model as exported.

    Raises:
        UnsupportedModelError: something may be seen.
    """
    limit = HIDDEN * abs(scale)
    for hider in hiders if limit < HIDDEN else ():

        def hides(sample: Sample, hider: Hider = hider) -> None:
            value = sample.probe.value(hider.tensor.name)
            if value is None or value.dtype == np.bool_:
                return
            behind = value.astype(np.float64) * hider.factor
            if np.any(seen := (behind <= HIDDEN) & (behind > limit)):
                raise UnsupportedModelError(
                    f"'{node}' scales its scores by {scale:g}, and '{hider.tensor.name}', which masks them, is "
                    f"{float(np.max(value[seen])):g}; supported beside such a factor are masks that are 0 or at most "
                    f"{limit:g}: export the mask with the lowest number of its type"
                )

        for padded in (False, True):
            samples.hold(hides, padded=padded)


def scaled_by(tensor: gs.Tensor, sample: Sample) -> float:
    """The product of the numbers that a tensor is scaled by on its way, as far back as nothing else is done to it."""
    product = 1.0
    while (node := producer(tensor)) is not None:
        if is_op(node, *_MOVES) or is_float_cast(node):
            tensor = node.inputs[0]
            continue
        numbers = [sample.probe.value(t.name) for t in node.inputs] if is_op(node, "Mul", "Div") else []
        known = [i for i, n in enumerate(numbers) if n is not None and n.size == 1 and n.any()]
        if len(known) != 1 or (is_op(node, "Div") and known != [1]):
            break
        number = float(np.asarray(numbers[known[0]]).reshape(()))
        product *= 1 / number if is_op(node, "Div") else number
        tensor = node.inputs[1 - known[0]]
    return product


def check_own(node: str, hiders: Iterable[Hider], visibility: Visibility) -> None:
    """Refuse numbers of the caller's own that are scaled: here they are added as they are.

    Raises:
        UnsupportedModelError: naming the attention.
    """
    factors = [hider.factor for hider in hiders if hider.factor != 1]
    if factors and visibility.own is not None and elem_type(visibility.own) != BOOL:
        raise UnsupportedModelError(
            f"'{node}' adds numbers of the caller's own mask '{visibility.own.name}', and scales it by {factors[0]:g}; "
            "supported are such masks behind the scale, or of bool"
        )
