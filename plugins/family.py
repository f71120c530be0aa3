"""All kernels of the family."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

from trt_kvcache.importer.plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import IntegerType, KernelConfig, Quantization

SOURCES: tuple[Literal["float16", "bfloat16", "float"], ...] = ("float16", "bfloat16", "float")
TARGETS: tuple[Literal["int8", "float8e4m3fn"], ...] = ("int8", "float8e4m3fn")


def all_kernels() -> Iterator[KernelConfig]:
    """One configuration for each kernel of the family; what a kernel takes as an argument has one value here."""
    quantizations = [None, *(Quantization(*pair) for pair in itertools.product(SOURCES, TARGETS))]
    forms: tuple[tuple[UpdateForm, IntegerType | None], ...] = (
        (UpdateForm.PADDED, None),
        (UpdateForm.PADDED, "int32"),
        (UpdateForm.PACKED_NHD, "int32"),
    )
    flags = (False, True)
    for (form, lengths), mode, caches, errors, quantization in itertools.product(
        forms, UpdateMode, (1, 2), flags, quantizations
    ):
        yield KernelConfig(8, form, mode, caches, "int64", lengths, errors, quantization)
