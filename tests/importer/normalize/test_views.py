"""Axes of a cache behind operators that rearrange it."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache.importer.normalize.views import axis_order, flat, own_layout, regroup, shape_of


@given(data=st.data())
def test_regroup_follows_reshape(data):
    """Unique numbers in a permuted cache, reshaped to merged axes, lie where the layout says."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    axes = data.draw(st.permutations(range(len(sizes))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(axes)), max_size=4)))
    bounds = [0, *cuts, len(axes)]
    shape = tuple(prod(sizes[a] for a in axes[i:j]) for i, j in itertools.pairwise(bounds))
    layout = regroup(axes, sizes, shape)
    assert layout is not None
    assert shape_of(layout, sizes) == shape
    cache = np.arange(prod(sizes)).reshape(sizes)
    assert np.array_equal(cache.transpose(axes).reshape(-1), cache.transpose(flat(layout)).reshape(-1))


def test_a_split_axis_has_no_layout():
    assert regroup((0, 1), (2, 6), (2, 2, 3)) is None
    assert regroup((0, 1), (2, 6), (3, 4)) is None
    assert regroup((0, 1), (2, 6), (2,)) is None


def test_axes_of_size_one_may_lie_anywhere():
    assert axis_order(((0,), (2,), (1,)), (2, 3, 4)) == (0, 2, 1)
    assert axis_order(((), (2,), (0, 1)), (1, 3, 4)) == (0, 2, 1)
    assert axis_order(((0, 1), (2,)), (2, 3, 4)) is None
    assert axis_order(((), (0, 1), (2,)), (2, 3, 4)) is None
    assert axis_order(own_layout(4), (1, 1, 1, 1)) == (0, 1, 2, 3)
