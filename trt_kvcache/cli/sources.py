"""What an encoder reads, from the command line, and the texts that its decoder starts with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache.cli.given import token_ids
from trt_kvcache.cli.output import print_warnings
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.extensions.encoders.files import decoder_start
from trt_kvcache.runtime.encoders.encoder import Source
from trt_kvcache.verify.inputs import load_inputs

if TYPE_CHECKING:
    from trt_kvcache.runtime.session import DecodeSession

__all__ = ["encode", "for_each", "read_sources", "start_of"]


def read_sources(texts: Sequence[str], ids: Sequence[str], files: Sequence[Path]) -> list[Source]:
    """All sources: texts, then ids, then arrays.

    Raises:
        OptionError: ids are none, or a file cannot be read.
    """
    arrays = [load_inputs(str(file)) for file in files]
    return [*texts, *(token_ids(text, "--source-tokens") for text in ids), *arrays]


def encode(session: DecodeSession, sources: Sequence[Source]) -> list[dict[str, Any]]:
    """What the encoder makes of each; where it runs slower than it could, stderr says so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = [session.encode(source) for source in sources]
    print_warnings(str(warning.message) for warning in said)
    return made


def start_of(model: Path, encoder: Path | None) -> int:
    """The token that every text of the decoder starts with.

    Raises:
        OptionError: nothing says which one.
    """
    for place in (model, encoder):
        if place is not None and (token := decoder_start(place)) is not None:
            return token
    raise OptionError(
        f"no config beside {model} names the decoder_start_token_id, with which texts of an encoder-decoder start; "
        "give it with --tokens"
    )


def for_each(prompts: list[list[int]], made: int, encoder: Path | None, constants: bool) -> list[list[int]]:
    """The prompts that go with so many sources: one prompt goes with all of them.

    Raises:
        OptionError: their numbers do not fit, constants are given as well, or an encoder has nothing to read.
    """
    if not made:
        if encoder is not None:
            raise OptionError(f"--encoder {encoder} has nothing to read; give --source, or leave it out")
        return prompts
    if constants:
        raise OptionError("--source makes what --constants gives; use one of them")
    if len(prompts) == 1:
        return prompts * made
    if made not in (1, len(prompts)):
        raise OptionError(f"there are {made} sources for {len(prompts)} prompts; give one, or one for each")
    return prompts
