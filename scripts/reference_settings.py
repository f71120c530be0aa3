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
        """Show defaults by what they are, not by the name of a constant of the module."""
        for part in func.parameters:
            if re.fullmatch(r"_[A-Z]+", str(part.default)):
                part.default = f"{part.annotation}()"

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Edit a class of options."""
        if cls.docstring is None or all(str(made.value) != "described" for made in cls.decorators):
            return
        cls.members.pop("__init__", None)  # for type checkers alone
        cls.docstring.value = getdoc(getattr(import_module(cls.module.path), cls.name)) or ""
        for part in (*cls.attributes.values(), *cls.parameters):
            kind = part.annotation
            if isinstance(kind, griffe.ExprSubscript) and str(kind.left) == "Annotated":
                assert isinstance(kind.slice, griffe.ExprTuple)
                part.annotation = kind.slice.elements[0]
