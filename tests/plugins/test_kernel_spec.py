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


def test_the_smallest_kernel_has_no_optional_arguments() -> None:
    args = arguments(KernelConfig(16))
    assert args.inputs == ("cache_0", "update_0", "write_indices")
    assert args.scalars == ("batch", "heads", "capacity", "length", "row_bytes_0", "index_bytes")
    assert args.outputs == ("present_0",)


def test_scalars_say_what_is_no_part_of_the_source() -> None:
    by_tensor, by_head = (Quantization("float16", "int8", per_head) for per_head in (False, True))
    one = KernelConfig(8, PACKED, length_type="int32", quantization=by_tensor)
    other = KernelConfig(8, PACKED, index_type="int32", length_type="int64", quantization=by_head)
    assert kernel_source(one) == kernel_source(other)
    shapes = Shapes(2, 4, 128, 9, (64,))
    assert launch_params(one, shapes).scalars == (2, 4, 128, 9, 64, 8, 4, 0)
    assert launch_params(other, shapes).scalars == (2, 4, 128, 9, 64, 4, 8, 1)


@pytest.mark.parametrize(("bits", "row"), [(4, 32), (8, 64), (16, 128), (32, 256), (64, 512), (128, 1024)])
def test_rows_are_counted_in_bytes(bits: int, row: int) -> None:
    assert launch_params(KernelConfig(bits), Shapes(1, 1, 1, 1, (64,))).scalars[4] == row


def test_the_grid_follows_the_update_not_the_capacity() -> None:
    config = KernelConfig(16, caches=2)
    one, long = (launch_params(config, Shapes(2, 8, s, 1, (128, 128))).grid for s in (256, 131072))
    assert one == long == 2 * 2 * 8
    many = launch_params(config, Shapes(2, 8, 131072, 1000, (128, 128))).grid
    assert many == 2 * 2 * 8 * (1000 * 256 // 8192 + 1)
    assert launch_params(config, Shapes(2, 8, 1024, 1, (128, 128)), copies=True).grid == 2 * 2 * 8 * (32 + 1)


def test_the_grid_of_packed_updates_follows_the_tokens_not_the_batch() -> None:
    config = KernelConfig(16, PACKED, length_type="int32")
    few, many = (launch_params(config, Shapes(b, 8, 256, 64, (128,))).grid for b in (1, 64))
    assert few == many == 2 * (64 * 256 // 2048 + 1)


def test_the_grid_is_never_empty() -> None:
    for config in (KernelConfig(16), KernelConfig(16, PACKED, length_type="int32")):
        assert launch_params(config, Shapes(1, 1, 16, 0, (8,))).grid >= 1


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
