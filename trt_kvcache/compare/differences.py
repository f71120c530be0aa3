"""Measures how far the outputs of two models are apart, and finds the first layer at which they differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto

from trt_kvcache.compare.numpy_network import Node
from trt_kvcache.importer.protos import Array, copied

GARBAGE = 1e4
"""The value in cache rows without a token: finite, as in a session, and far above the values in caches."""


@dataclass(frozen=True)
class Share:
    """The difference of two outputs in one row, relative to the size of the output.

    `largest` is the largest difference, divided by the largest number. `typical` is the norm of the difference, divided
    by the norm of the centered output (its mean is subtracted).
    """

    largest: float
    typical: float

    def most(self, other: Share) -> Share:
        """Return the larger value of each field."""
        return Share(max(self.largest, other.largest), max(self.typical, other.typical))

    def times(self, other: Share, factor: float = 1.0) -> Share:
        """Return the product of both fields with those of `other` and with `factor`."""
        return Share(factor * self.largest * other.largest, factor * self.typical * other.typical)

    def within(self, other: Share) -> bool:
        """Return True if neither field is larger than in `other`."""
        return self.largest <= other.largest and self.typical <= other.typical


def share_of(wanted: Array, had: Array) -> Share:
    """Return the relative difference of two arrays of equal size; all numbers count as logits of one position."""
    one, other = wanted.reshape(-1).astype(np.float64), had.reshape(-1).astype(np.float64)
    known = np.isfinite(one)
    if not np.array_equal(known, np.isfinite(other)):
        return Share(math.inf, math.inf)
    with np.errstate(all="ignore"):  # values that are not finite are compared, without warnings
        finite = np.where(known, one, 0)
        error = np.where(known, other - finite, 0)
        far = np.abs(error).max()
        largest = 0.0 if far == 0 else far / np.abs(finite).max()
        centered = np.where(known, one - finite.mean(), 0)
        typical = np.nan_to_num(np.linalg.norm(error) / np.linalg.norm(centered), posinf=np.inf)
    return Share(float(largest), float(typical))


def share_of_logits(wanted: Array, had: Array) -> Array:
    """Compare logits ``[..., V]``; return the largest and typical relative difference by position, ``[2, ...]``."""
    shares = np.full((2, *wanted.shape[:-1]), math.inf)
    if wanted.shape == had.shape:
        for place in np.ndindex(*wanted.shape[:-1]):  # one position at a time: whole steps would take much memory
            shares[(slice(None), *place)] = astuple(share_of(wanted[place], had[place]))
    return shares


def share_between(expected: Array, actual: Array, garbage: float = GARBAGE) -> float:
    """Return the largest difference of two tensors, as a share of the largest number in `expected`.

    Numbers near `garbage` (cache rows without a token) do not count as largest number. Rounding may change a few 8-bit
    integers by one. If integers differ more, shapes differ, or only one of two numbers is finite, return infinity.
    """
    if expected.shape != actual.shape:
        return math.inf
    differs = expected != actual  # few rows of caches differ: equal numbers need no further work
    one, other = expected[differs].astype(np.float64), actual[differs].astype(np.float64)
    known = np.isfinite(one)
    if not np.array_equal(known, np.isfinite(other)) or not np.array_equal(one[~known], other[~known], equal_nan=True):
        return math.inf
    difference = np.abs(one[known] - other[known])
    if not difference.size:
        return 0.0
    if expected.dtype.kind in "iub":
        few = 1e-3 * expected.size if expected.dtype.itemsize == 1 else 0
        return math.inf if difference.max() > 1 or difference.size > few else 0.0
    sizes = np.abs(expected)
    counts = np.isfinite(sizes) & (np.abs(sizes - garbage) > 0.01 * garbage)
    scale = float(sizes.max(initial=0, where=counts))
    return float(difference.max() / scale) if scale else math.inf


def first_layer(layers: Iterable[NodeProto | Node], differs: Mapping[str, bool], outputs: Collection[str]) -> str:
    """Describe, for a message, the first layer that makes an output wrong; return "" if there is none.

    From this layer to the output, all compared tensors differ. A tensor that differs is no fault if later tensors agree
    again: two correct models may use one name for different contents, such as masks of different types. `differs` is
    True for each compared tensor that differs.
    """
    leads = {name for name in outputs if differs.get(name) is not False}
    found = ""
    for layer in reversed([*layers]):
        for name in leads.intersection(layer.output):
            if differs.get(name):
                found = f"the first layer that differs is '{layer.name}' ({layer.op_type}), whose output is '{name}'"
        if not leads.isdisjoint(layer.output):
            leads.update(name for name in layer.input if name and differs.get(name) is not False)
    return found


def with_inner_outputs(model: ModelProto, names: Collection[str]) -> ModelProto:
    """Return a copy of a model that also returns its inner tensors with these names."""
    copy, outputs = copied(model), {o.name for o in model.graph.output}
    inner = [n for node in model.graph.node for n in node.output if n and n not in outputs and n in names]
    copy.graph.output.extend(ValueInfoProto(name=name) for name in inner)
    return copy
