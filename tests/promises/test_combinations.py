"""Decoders whose caches grow, of any combination of choices, are planned and keep their numbers."""

from typing import Any

import net
import pytest
from concat_graphs import decoders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    how=st.fixed_dictionaries(
        {
            "kv_heads": st.sampled_from([1, 2, 4]),
            "layers": st.sampled_from([1, 2]),
            "scale": st.sampled_from(["scores", "q", "k", "both", "none"]),
            "by": st.sampled_from(["Mul", "Div"]),
            "softcap": st.sampled_from([0.0, 3.0]),
            "mask": st.sampled_from(["past", "padding", "positions", "buffer", "own"]),
            "apply": st.sampled_from(["add", "where", "hide"]),
            "window": st.sampled_from([0, 1, 5]),
            "sinks": st.sampled_from(["", "weight", "zero"]),
            "upcast": st.booleans(),
            "repeat": st.sampled_from(["expand", "tile", "gather"]),
            "layout": st.sampled_from(["bnsd", "bsnd", "flat"]),
            "positions": st.sampled_from(["input", "past", "padding", "present", "none"]),
            "embedded": st.booleans(),
            "last": st.booleans(),
        }
    )
)
def test_any_combination_of_choices(how: dict[str, Any]) -> None:
    (entry,) = decoders("any", {"one": how})
    assert net.treat(entry, verify=True).word in (net.EQUAL, net.REFUSED)
