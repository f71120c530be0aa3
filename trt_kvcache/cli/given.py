"""Prompts as token ids from the command line, and as embeddings from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.errors import OptionError
from trt_kvcache.verify.inputs import load_inputs

__all__ = ["GivenPrompt", "read_prompt", "token_ids"]

_NEEDED = ("input_ids", "inputs_embeds")
_KNOWN = (*_NEEDED, "position_ids")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class GivenPrompt:
    """One prompt.

    Attributes:
        ids: of its tokens, and placeholders for those of images.
        embeds: ``[S, H]``.
        positions: ``[S]`` or ``[planes, S]``, or None.
    """

    ids: list[int]
    embeds: Array
    positions: Array | None


def read_prompt(file: Path) -> GivenPrompt:
    """Read the arrays of a prompt; a batch axis of 1, as models have it, is left out of the ids.

    Raises:
        OptionError: the file cannot be read, lacks one or has others, or its ids are no integers ``[S]``.
    """
    arrays = load_inputs(str(file))
    missing, unknown = [n for n in _NEEDED if n not in arrays], [n for n in arrays if n not in _KNOWN]
    if missing or unknown:
        found = f"lacks {' and '.join(missing)}" if missing else f"has {', '.join(unknown)}"
        raise OptionError(f"--inputs-embeds {file} {found}; it holds {', '.join(_NEEDED)} and maybe position_ids")
    ids = arrays["input_ids"]
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise OptionError(f"--inputs-embeds {file}: input_ids are {ids.dtype} {list(ids.shape)}; give integers [S]")
    return GivenPrompt(ids.tolist(), arrays["inputs_embeds"], arrays.get("position_ids"))


def token_ids(text: str, option: str) -> list[int]:
    """Token ids as they are written for an option, which messages name.

    Raises:
        OptionError: they are none.
    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise OptionError(f"{option} {text!r} is not a list of token ids such as 1,15,7") from None
