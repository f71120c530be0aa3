"""Values that the caller gives for inputs by name, in a file; and made-up values for other inputs."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import OptionError
from trt_kvcache.files import open_regular
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.machine import free_memory

Array = npt.NDArray[Any]

_KINDS = 256  # tokens with numbers of their own; further ones share them

_DRIVEN = (Role.CACHE, Role.STATE, Role.SPAN, Role.WRITE_INDICES, Role.VALID_LENGTHS)


def load_inputs(path: str | None) -> dict[str, Array]:
    """Read values by name from an ``.npz`` file.

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
    except Exception as error:  # noqa: BLE001 - zipfile, zlib and NumPy raise many kinds of errors on damaged files
        said = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        if "pickle" in said:  # NumPy takes unknown bytes for a pickle, and advises to run it
            said = "it is none, or holds Python objects"
        raise OptionError(f"{path}: cannot be read as an .npz file of arrays by name ({said})") from None


def numbers_of(
    name: str, tokens: Array, shape: Sequence[int], axes: Sequence[str], *, whole: bool = False
) -> Array:  # fmt: skip
    """Return numbers for an input without a known role: each token has its own, equal at every station.

    So a part of a model, which takes queries, keys and values, decodes texts like a whole model.

    Args:
        name: name of the input.
        tokens: ``[R, S]``.
        shape: shape of the input in this step.
        axes: names of its axes. Without ``"sequence"``, a text gets the numbers of its last token; without ``"batch"``,
            too, all texts get the same.
        whole: give 0 and 1, for an input of integers.
    """
    axes = list(axes)
    if "batch" not in axes and len(tokens) > 1 and shape[:1] == (len(tokens),):  # a batch that is fixed
        axes[0] = "batch"
    rest = [n for n, axis in zip(shape, axes, strict=True) if axis not in ("batch", "sequence")]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    table: Array = rng.integers(0, 2, (_KINDS, *rest)) if whole else rng.normal(0, 0.5, (_KINDS, *rest))
    table = table if whole else table.astype(np.float32)
    if "sequence" not in axes:
        return np.broadcast_to(table[tokens[:, -1] % _KINDS] if "batch" in axes[:1] else table[0], shape)
    at = axes.index("sequence")
    # all texts share the numbers of the first
    values = table[tokens % _KINDS] if "batch" in axes else table[None, : tokens.shape[1]]
    if "batch" in axes:
        values = np.moveaxis(values, (0, 1), (axes.index("batch"), at))
    else:
        values = np.moveaxis(values[0], 0, at)
    return np.asarray(values.reshape(shape))


def by_position(values: Array, axes: Sequence[str], rows: int) -> Array:
    """Return an output as ``[R, S, ...]``, flat from there on: one entry for each position, or one for each text.

    Args:
        values: values of the output.
        axes: names of its axes, from the plan.
        rows: number of texts.
    """
    order = [name for name in ("batch", "sequence") if name in axes]
    if len(order) == 2 and list(axes[:2]) != order and len(axes) == values.ndim:
        values = np.moveaxis(values, [list(axes).index(name) for name in order], (0, 1))
    return values.reshape(rows, -1, values.shape[-1] if values.ndim > 1 else 1)


def guessed(plan: CachePlan, given: Collection[str]) -> str:
    """Return the end of a message about a failed step: integer inputs with random values, which may be illegal."""
    unknown = [t for t in plan.tensors if t.io == "input" and t.role in (Role.OTHER, Role.CONSTANT)]
    drawn = [t for t in unknown if t.name not in given and "float" not in t.dtype]
    if not drawn:
        return ""
    names = ", ".join(f"'{t.name}' ({t.dtype} {list(t.shape)})" for t in drawn)
    return (
        f". Nothing says which values input {names} takes, so it got random ones of 0 and 1: give values that are "
        "legal in every step in an .npz file (--inputs)"
    )


def check_values(values: Mapping[str, Array], plan: CachePlan) -> None:
    """Refuse values for inputs that do not exist, or that verification sets itself.

    Raises:
        OptionError: there are such values.
    """
    roles = {t.name: t.role for t in plan.tensors if t.io == "input"}
    for name in values:
        if name not in roles:
            raise OptionError(
                f"values are given for '{name}', which is no input of the model; inputs are {', '.join(roles)}"
            )
        if roles[name] in _DRIVEN:
            raise OptionError(f"values are given for '{name}' ({roles[name].value}), which verification sets itself")
