"""Finds the folders that ship beside the code: ``configs`` and ``plugins``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: Literal["configs", "plugins"]) -> Path:
    """Return the path of a folder that ships with the package, ``configs`` or ``plugins``.

    In a wheel the folder lies inside the package. In a source tree (and so in an editable install) it lies next to the
    package, and a symbolic link in the package leads to ``plugins``, so that its Python modules can be imported.

    Raises:
        FileNotFoundError: the installation is damaged: the folder is in neither place.
    """
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder.resolve()
    raise FileNotFoundError(f"{_PACKAGE / name}: missing from this installation; reinstall trt-kvcache")
