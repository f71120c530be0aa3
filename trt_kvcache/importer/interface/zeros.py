"""Inputs that stay 0, by the model's own configuration.

transformers' models with token types (``type_vocab_size`` in ``config.json``, such as BERT's) take 0 for all tokens if
the caller gives none. No other input of ids has a value that nobody gave: positions, segments and token types look the
same in a graph.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trt_kvcache.files import read_object
from trt_kvcache.importer.plan import CachePlan, Role, TensorRole

_NAME = "token_type_ids"
_SETTING = "type_vocab_size"


def with_zeros(plan: CachePlan, folder: Path) -> CachePlan:
    """Give token types the role `Role.ZEROS` if the configuration beside the model says that it has them.

    Args:
        plan: of the model.
        folder: with ``config.json``, or without.
    """
    if not any(map(_is_unfilled, plan.tensors)):
        return plan
    try:
        kinds = read_object(folder / "config.json").get(_SETTING)
    except (OSError, ValueError):
        return plan
    if isinstance(kinds, bool) or not isinstance(kinds, int) or kinds < 1:
        return plan
    reason = f"config.json: {_SETTING} {kinds}"
    tensors = (replace(t, role=Role.ZEROS, found_by=reason) if _is_unfilled(t) else t for t in plan.tensors)
    return replace(plan, tensors=tuple(tensors))


def _is_unfilled(tensor: TensorRole) -> bool:
    is_named = tensor.name.endswith(_NAME) and tensor.dtype in ("int64", "int32")
    return is_named and tensor.io == "input" and tensor.role is Role.OTHER
