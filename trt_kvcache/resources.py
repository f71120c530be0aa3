"""The places of the files that ship beside the code: ``configs`` and ``plugins``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: Literal["configs", "plugins"]) -> Path:
    """Return the folder of shipped files with this name.

    A wheel carries it inside the package; in a source tree (and so in an editable install) it lies beside the package,
    which reaches ``plugins``, whose Python it imports, by a symbolic link.

    Raises:
        FileNotFoundError: the installation is damaged: the folder is in neither place.
    """
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder.resolve()
    raise FileNotFoundError(f"{_PACKAGE / name}: missing from this installation; reinstall trt-kvcache")
