"""Comparing the outputs of both models, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.importer.steps.contents import CacheTensor
from trt_kvcache.verify.record import Written, chosen_rows, same_bits
from trt_kvcache.verify.report import OutputDifference

Array = npt.NDArray[Any]

_BEYOND = float("inf")  # not comparable: worse than any number

# Both sides compute in the same dtype, in a different order of operations. float16 rounds at 2**-11; a decoder's few
# dozen roundings on the way to its logits stay an order of magnitude below these, a wrong mask is far above.
# A float32 twin holds the constants of the bfloat16 model, such as attention scales, rounded at 2**-9. No cache is
# float64, so that float64 outputs are made of float32 numbers, too.
_TWIN_TOLERANCE = 1e-2
_TOLERANCES = {"float16": 2e-2, "float": 1e-4, "double": 1e-4, "int8": 2e-2, "uint8": 2e-2}

# Magnitudes of garbage, largest first: the original must hide it on ONNX Runtime, which computes masked scores too and
# adds the lowest finite value to them. Scores of the first one fit into the type, and do not outweigh that value.
_GARBAGE = {"float16": (30.0, 10.0, 1.0)}
_WIDE_GARBAGE = (1e4, 1e3, 30.0, 1.0)


@dataclass
class _Worst:
    dtype: str = "?"
    tolerance: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0
    step: int | None = None
    span: int | None = None
    stale: int = 0


class Comparison:
    """Collects the worst difference of each output.

    Args:
        roles: role of each output by name.
        override: tolerance for every output, or None: by dtype.
        twin: both sides are float32 twins of a bfloat16 model.
        half: caches are float16, and so is what outputs of float32 are made of.

    Attributes:
        clear: positions at which the original's best token is clear.
        same: those of them at which the rewritten model chooses it, too.
    """

    def __init__(
        self, roles: dict[str, str], override: float | None, *, twin: bool = False, half: bool = False
    ) -> None:
        self._half = half
        self._roles = roles
        self._twin = twin
        self._override = override
        self._worst: dict[str, _Worst] = {}
        self._steps: dict[int, float] = {}
        self.clear = self.same = 0

    def plain(self, name: str, original: Array, rewritten: Array, step: int, span: int | None) -> None:
        """Compares an output as it is."""
        self._note(name, original, *difference(original, rewritten), 0, step, span)

    def cache(
        self, cache: CacheTensor, expected: Written, past: Array, present: Array, step: int, span: int | None
    ) -> None:
        """Compares a cache: rows that the original wrote as numbers, rows that it left alone bit for bit.

        Args:
            cache: the cache.
            expected: what the original did to it.
            past: the rewritten model's array before the step, in its own layout.
            present: the same after the step.
            step: index of the step.
            span: of the rewritten model's run.
        """
        name = str(cache.output)
        alike = past.shape == present.shape and past.dtype == present.dtype
        if not alike or expected.shape != cache.logical_shape(len(past)):
            self.differ(name, expected.values, step, span)
            return
        before, after = cache.physical_rows(past), cache.physical_rows(present)
        stale = ~expected.rows & ~same_bits(before, after)
        if expected.free is not None:
            stale &= ~expected.free
        numbers = difference(expected.values, chosen_rows(after, expected.rows))
        self._note(name, expected.values, *numbers, int(stale.sum()), step, span)

    def greedy(self, original: Array, rewritten: Array) -> None:
        """Counts positions of logits ``[..., V]`` at which the best token is clear."""
        if original.shape != rewritten.shape or original.shape[-1] < 2:
            return
        second, first = (np.partition(original, (-2, -1), axis=-1)[..., at].astype(np.float64) for at in (-2, -1))
        allowed = tolerance(original.dtype, twin=self._twin) if self._override is None else self._override
        clear = first - second > allowed * _largest(original)
        self.clear += int(clear.sum())
        self.same += int(((original.argmax(-1) == rewritten.argmax(-1)) & clear).sum())

    def differ(self, name: str, like: Array, step: int, span: int | None) -> None:
        """Notes an output that cannot be compared: it has another shape."""
        self._note(name, like, _BEYOND, _BEYOND, 0, step, span)

    def _note(
        self, name: str, like: Array, absolute: float, relative: float, stale: int, step: int, span: int | None
    ) -> None:
        worst = self._worst.setdefault(name, _Worst())
        worst.dtype = like.dtype.name
        dtype = np.dtype(np.float16) if self._half and like.dtype.kind == "f" else like.dtype
        worst.tolerance = tolerance(dtype, twin=self._twin) if self._override is None else self._override
        if (relative, stale) > (worst.relative, worst.stale) or (stale > worst.stale and relative <= worst.tolerance):
            worst.step, worst.span = step, span
        worst.absolute, worst.relative = max(worst.absolute, absolute), max(worst.relative, relative)
        worst.stale = max(worst.stale, stale)
        self._steps[step] = max(self._steps.get(step, 0.0), relative)

    def results(self) -> tuple[OutputDifference, ...]:
        """One entry per output that was compared at least once."""
        return tuple(
            OutputDifference(
                name=name,
                role=self._roles[name],
                dtype=w.dtype,
                max_absolute=_number(w.absolute),
                max_relative=_number(w.relative),
                tolerance=w.tolerance,
                step=w.step,
                span=w.span,
                exact=w.absolute == 0 and w.stale == 0,
                stale_rows_changed=w.stale,
                passed=w.relative <= w.tolerance and w.stale == 0,
            )
            for name, w in self._worst.items()
        )

    def in_step(self, step: int) -> float | None:
        """The largest difference of any output in a step; None where outputs are not comparable."""
        return _number(self._steps.get(step, 0.0))


def difference(original: Array, rewritten: Array) -> tuple[float, float]:
    """The largest difference, and its share of the original's largest magnitude.

    Both are infinite where shapes or dtypes differ, or where one side is not finite and the other is not the same.
    """
    if original.shape != rewritten.shape or original.dtype != rewritten.dtype:
        return _BEYOND, _BEYOND
    if not original.size:
        return 0.0, 0.0
    if original.dtype.kind not in "fiub":
        return (0.0, 0.0) if np.array_equal(original, rewritten) else (_BEYOND, _BEYOND)
    wide = np.promote_types(original.dtype, np.float32)  # which holds all integers of 16 bits, too
    a, b = original.astype(wide, copy=False), rewritten.astype(wide, copy=False)
    finite = np.isfinite(a)
    if not finite.all():
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return _BEYOND, _BEYOND
        a, b = a[finite], b[finite]
    with np.errstate(over="ignore"):  # the difference of two that are as large as numbers get
        absolute = float(np.abs(np.subtract(a, b)).max(initial=0.0))
    if not np.isfinite(absolute):
        return _BEYOND, _BEYOND
    scale = _largest(a)
    if absolute == 0:
        return 0.0, 0.0
    return absolute, absolute / scale if scale else _BEYOND


def _largest(values: Array) -> float:
    """The largest magnitude; 0 of nothing."""
    return max(-float(values.min(initial=0)), float(values.max(initial=0)))


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if np.isfinite(value) else None


def tolerance(dtype: np.dtype[Any], *, twin: bool) -> float:
    """Largest difference allowed, as a share of the output's scale; 0 for integers other than quantized values."""
    if twin and dtype.kind == "f":
        return max(_TWIN_TOLERANCE, _TOLERANCES.get(dtype.name, 0.0))
    name = {"float32": "float", "float64": "double"}.get(dtype.name, dtype.name)
    return _TOLERANCES.get(name, 0.0)


def garbage_magnitudes(names: set[str]) -> tuple[float, ...]:
    """Magnitudes to try, largest first, for caches of these dtypes; integer caches take any value."""
    integers = [float(np.iinfo(array_dtype(name)).max) for name in names if "int" in name]
    if len(integers) == len(names):
        return (min(integers),)
    return next((_GARBAGE[name] for name in names if name in _GARBAGE), _WIDE_GARBAGE)
