"""An extension of griffe, which reads the code for the reference: what settings say, and types without settings."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getdoc
from typing import Any

import griffe


class Settings(griffe.Extension):
    """Takes docstrings that `described` has completed, and of ``Annotated[type, Setting(...)]`` the type."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Show defaults as values, not as the name of a constant of the module."""
        for part in func.parameters:
            if re.fullmatch(r"_[A-Z]+", str(part.default)):
                part.default = f"{part.annotation}()"

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Drop what options declare for type checkers, before griffe makes their signature from their fields."""
        if any(str(made.value) == "described" for made in cls.decorators):
            cls.members.pop("__init__", None)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Edit a class of options."""
        if cls.docstring is None or all(str(made.value) != "described" for made in cls.decorators):
            return
        cls.docstring.value = getdoc(getattr(import_module(cls.module.path), cls.name)) or ""
        for part in (*cls.attributes.values(), *cls.parameters):
            kind = part.annotation
            if isinstance(kind, griffe.ExprSubscript) and str(kind.left) == "Annotated":
                assert isinstance(kind.slice, griffe.ExprTuple)
                part.annotation = kind.slice.elements[0]
