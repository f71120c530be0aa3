"""An extension of griffe, which reads the code for the reference pages: shows options with help texts and types."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getdoc
from typing import Any

import griffe


class Settings(griffe.Extension):
    """Uses the docstrings that `described` has completed; shows ``Annotated[type, Setting(...)]`` as ``type``."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Show defaults as values, not as the name of a constant of the module."""
        for part in func.parameters:
            if re.fullmatch(r"_[A-Z]+", str(part.default)):
                part.default = f"{part.annotation}()"

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Drop the ``__init__`` that options declare for type checkers: griffe makes the signature from the fields."""
        if any(str(made.value) == "described" for made in cls.decorators):
            cls.members.pop("__init__", None)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Set the docstring and the types of a class of options."""
        if cls.docstring is None or all(str(made.value) != "described" for made in cls.decorators):
            return
        cls.docstring.value = getdoc(getattr(import_module(cls.module.path), cls.name)) or ""
        for part in (*cls.attributes.values(), *cls.parameters):
            kind = part.annotation
            if isinstance(kind, griffe.ExprSubscript) and str(kind.left) == "Annotated":
                assert isinstance(kind.slice, griffe.ExprTuple)
                part.annotation = kind.slice.elements[0]
