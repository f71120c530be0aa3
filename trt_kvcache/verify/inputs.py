"""Inputs that verification alone has: values that the caller gives."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError
from trt_kvcache.files import open_regular
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.machine import free_memory

Array = npt.NDArray[Any]

_DRIVEN = (Role.CACHE, Role.STATE, Role.SPAN, Role.WRITE_INDICES, Role.VALID_LENGTHS)


def load_inputs(path: str | None) -> dict[str, Array]:
    """Values by name from an ``.npz`` file.

    Raises:
        OptionError: the file cannot be read as one.
    """
    if path is None:
        return {}
    try:
        with open_regular(Path(path)) as opened:
            packed = zipfile.ZipFile(opened).infolist() if zipfile.is_zipfile(opened) else []
        size, free = sum(part.file_size for part in packed), free_memory()
        if 2 * size > free:
            raise ValueError(f"its arrays take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free")
        file = np.load(path, allow_pickle=False, mmap_mode="r")
        if isinstance(file, np.ndarray):
            raise TypeError("one array without a name, as in an .npy file; np.savez writes names")
        with file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # noqa: BLE001 - whatever zipfile, zlib and NumPy make of bytes that are none
        said = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        if "pickle" in said:  # NumPy takes whatever it does not know for one, and says how to run it
            said = "it is none, or holds Python objects"
        raise OptionError(f"{path}: cannot be read as an .npz file of arrays by name ({said})") from None


def check_values(values: Mapping[str, Array], plan: CachePlan) -> None:
    """Refuses values for what is no input, or what verification sets itself.

    Raises:
        OptionError: see above.
    """
    roles = {t.name: t.role for t in plan.tensors if t.io == "input"}
    for name in values:
        if name not in roles:
            raise OptionError(
                f"values are given for '{name}', which is no input of the model; inputs are {', '.join(roles)}"
            )
        if roles[name] in _DRIVEN:
            raise OptionError(f"values are given for '{name}' ({roles[name].value}), which verification sets itself")


def guessed(plan: CachePlan, values: Mapping[str, Array]) -> str:
    """The end of a message on a step that did not run: inputs of integers with random values, which may be illegal."""
    unknown = [t for t in plan.tensors if t.io == "input" and t.role in (Role.OTHER, Role.CONSTANT)]
    drawn = [t for t in unknown if t.name not in values and "float" not in t.dtype]
    if not drawn:
        return ""
    names = ", ".join(f"'{t.name}' ({t.dtype} {list(t.shape)})" for t in drawn)
    return (
        f". Nothing says which values input {names} takes, so it got random ones of 0 and 1: give values that are "
        "legal in every step in an .npz file (--inputs)"
    )


def rows_read(plan: CachePlan, spans: Mapping[str, Array]) -> int | None:
    """The most cache rows that attention reads with these spans; None where no input says."""
    return max((len(spans[s.name]) for s in plan.spans), default=None)


def logit_positions(plan: CachePlan, spans: Mapping[str, Array]) -> int | None:
    """The number of last positions whose logits these spans ask for; None where no input says."""
    return None if plan.logits_span is None else len(spans[plan.logits_span.name])
