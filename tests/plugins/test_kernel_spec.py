"""Which kernels there are, the order of their arguments, and the size of their grids."""

from __future__ import annotations

from typing import Any

import pytest

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.source import kernel_source
from trt_kvcache.plugins.spec import KernelConfig, Quantization, Shapes, arguments, launch_params

PACKED = UpdateForm.PACKED_NHD


def test_arguments_come_in_tensorrts_order() -> None:
    config = KernelConfig(8, PACKED, UpdateMode.CIRCULAR, 2, "int64", "int32", Quantization("float", "int8"))
    args = arguments(config)
    assert args.inputs == (
        "cache_0", "cache_1", "update_0", "update_1", "write_indices", "lengths", "scale_0", "scale_1",
    )  # fmt: skip
    assert args.scalars == (
        "batch", "heads", "capacity", "length", "row_bytes_0", "row_bytes_1", "index_bytes", "length_bytes",
        "scale_step",
    )  # fmt: skip
    assert args.outputs == ("present_0", "present_1")
    signature = kernel_source(config).rpartition(f" {config.name}(")[2].partition(")")[0]
    assert [part.split()[-1] for part in signature.split(", ")] == [*args.inputs, *args.scalars, *args.outputs]


def test_the_grid_follows_the_update_not_the_capacity() -> None:
    config = KernelConfig(16, caches=2)
    one, long = (launch_params(config, Shapes(2, 8, s, 1, (128, 128))).grid for s in (256, 131072))
    assert one == long == 2 * 2 * 8
    many = launch_params(config, Shapes(2, 8, 131072, 1000, (128, 128))).grid
    assert many == 2 * 2 * 8 * (1000 * 256 // 8192 + 1)
    assert launch_params(config, Shapes(2, 8, 1024, 1, (128, 128)), copies=True).grid == 2 * 2 * 8 * (32 + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"element_bits": 24}, "cache elements of 24 bits"),
        ({"caches": 3}, "3 caches in one launch"),
        ({"index_type": "uint8"}, "write indices of type 'uint8'"),
        ({"form": PACKED, "length_type": "float"}, "lengths of type 'float'"),
        ({"form": PACKED}, r"needs the type of its cumulative lengths \[B \+ 1\]"),
        ({"length_type": "int64"}, "a padded one has none"),
        ({"element_bits": 16, "quantization": Quantization("float", "int8")}, "elements of 16 bits: expected 8"),
    ],
)
def test_bad_configurations_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        KernelConfig(**{"element_bits": 8, **options})


@pytest.mark.parametrize(("source", "target"), [("double", "int8"), ("float", "uint8")])
def test_bad_quantizations_are_refused_by_name(source: Any, target: Any) -> None:
    with pytest.raises(OptionError, match=r"quantization (from 'double'|to 'uint8'): expected"):
        Quantization(source, target)


@pytest.mark.parametrize(
    ("config", "shapes", "message"),
    [
        (KernelConfig(4), Shapes(1, 1, 8, 1, (7,)), "rows of 7 elements of 4 bits"),
        (KernelConfig(8, caches=2), Shapes(1, 1, 8, 1, (8,)), "1 head sizes for 2 caches"),
        (KernelConfig(8), Shapes(2**31, 1, 8, 1, (8,)), r"below 2\^31"),
        (KernelConfig(8), Shapes(2**16, 2**16, 8, 1, (8,)), r"below 2\^31"),
    ],
)
def test_launches_that_cannot_be_are_refused(config: KernelConfig, shapes: Shapes, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        launch_params(config, shapes)
