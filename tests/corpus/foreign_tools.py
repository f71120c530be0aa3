"""Decoders of `scripts/foreign_decoders.py`, as other tools than this package's write them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from decoders import DecoderConfig
from foreign_decoders import FORMS, make_foreign
from onnx import ModelProto

from corpus import Entry, built

CONFIG = DecoderConfig(vocab=64, capacity=32)


def foreign(form: str, **changes: Any) -> ModelProto:
    """A decoder of this form with `CONFIG`, or some of it changed."""
    return make_foreign(form, replace(CONFIG, **changes))


def entries() -> Iterator[Entry]:
    yield from built("foreign", {f: (lambda f=f: foreign(f)) for f in FORMS}, capacity=32)
