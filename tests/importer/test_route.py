"""The route of an update: every combination of facts and options."""

from __future__ import annotations

import itertools

import pytest

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import Fallback, PlanOptions, Route, Target, UpdateForm, UpdateMode
from trt_kvcache.importer.planning.routes import NATIVE_DTYPES, PLAIN_DTYPES, PLUGIN_DTYPES, UpdateFacts, decide

DTYPES = [
    "float", "float16", "bfloat16", "double", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool", "float8e4m3fn", "float8e5m2", "int4", "uint4", "float4e2m1", "string", "complex64",
]  # fmt: skip


def facts(dtype="float16", mode=UpdateMode.LINEAR, length="S", obstacle="", indices=True, form=UpdateForm.PADDED):
    return UpdateFacts("node", "past", dtype, mode, form, length, 16, indices, obstacle)


CASES = list(itertools.product(DTYPES, UpdateMode, (1, 3, 4, "S"), (True, False), Target, Fallback))


@pytest.mark.parametrize("target", Target)
def test_every_combination(target):
    for dtype, mode, length, indices, _, fallback in (c for c in CASES if c[4] is target):
        options = PlanOptions(target=target, fallback=fallback)
        given = facts(dtype, mode, length, indices=indices)
        plugin = target is Target.TENSORRT and fallback is Fallback.AUTO
        if dtype in NATIVE_DTYPES:
            got = decide(given, options)
            wraps = mode is UpdateMode.CIRCULAR and length != 1 and indices
            if not wraps:
                assert (got.route, got.contract) == (Route.NATIVE, None)
            elif plugin:
                assert got.route is Route.PLUGIN
            elif fallback is Fallback.FUNCTIONAL or length == 3:  # does not divide the 16 rows
                assert got.route is Route.FUNCTIONAL
            else:
                assert got.route is Route.NATIVE
                assert got.contract is not None
                assert got.contract.no_straddle
                assert got.contract.max_update_length == (4 if length == 4 else None)
        elif plugin and dtype in PLUGIN_DTYPES:
            assert decide(given, options).route is Route.PLUGIN
        elif dtype in PLAIN_DTYPES:
            assert decide(given, options).route is Route.FUNCTIONAL
        else:
            message = f"cache 'past' of update 'node' is {dtype}, which this target cannot hold.*export the cache as"
            with pytest.raises(UnsupportedModelError, match=message):
                decide(given, options)


@pytest.mark.parametrize("fallback", Fallback)
def test_plugins_know_neither_bool_nor_uint8(fallback):
    """NvInferRuntime.h, of the types of a plugin's outputs."""
    options = PlanOptions(target=Target.TENSORRT, fallback=fallback)
    assert decide(facts("bool"), options).route is Route.FUNCTIONAL
    for dtype, form in itertools.product(("uint8", "bool"), UpdateForm):
        if (dtype, form) != ("bool", UpdateForm.PADDED):
            with pytest.raises(UnsupportedModelError, match=f"is {dtype}, which this target cannot hold"):
                decide(facts(dtype, form=form), options)


def test_double_says_what_tensorrt_would_do():
    with pytest.raises(UnsupportedModelError, match="silently narrow it to float32"):
        decide(facts("double"), PlanOptions())


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("target", Target)
def test_packed_updates(dtype, target):
    packed = facts(dtype, form=UpdateForm.PACKED_NHD)
    assert decide(packed, PlanOptions(target=target)).route is Route.NATIVE
    old = decide(packed, PlanOptions(target=Target.TENSORRT, packed_native=False))
    assert old.route is Route.PLUGIN
    assert "before 11.0" in old.reason


def test_obstacles_win_over_everything_but_the_dtype():
    for mode, target, fallback in itertools.product(UpdateMode, Target, Fallback):
        got = decide(facts(mode=mode, obstacle="why"), PlanOptions(target=target, fallback=fallback))
        assert (got.route, got.reason) == (Route.FUNCTIONAL, "why")
    with pytest.raises(UnsupportedModelError, match="uint8"):
        decide(facts("uint8", obstacle="why"), PlanOptions())
    with pytest.raises(UnsupportedModelError, match="packed update 'node': why"):
        decide(facts(form=UpdateForm.PACKED_NHD, obstacle="why"), PlanOptions())
