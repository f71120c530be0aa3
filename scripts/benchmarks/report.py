"""The results of a benchmark, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """The results of a benchmark.

    Attributes:
        title: lines above the table.
        head, rows: the cells of the table; names are in the first `labels` columns.
        data: for the JSON line.
        notes: lines below the table.
        failed: a measurement failed, or two sides disagree: the exit status is 1.
    """

    title: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    data: dict[str, Any]
    labels: int = 1
    notes: Sequence[str] = field(default=())
    failed: bool = False

    def table(self) -> str:
        """Return the lines to print. A row that is shorter than the head, as one with an error, is not aligned."""
        full = [row for row in (self.head, *self.rows) if len(row) == len(self.head)]
        widths = [max(map(len, column)) for column in zip(*full, strict=True)]
        lines = [*self.title]
        for row in (self.head, *self.rows):
            cells = [
                cell.ljust(width) if i < self.labels else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=False))
            ]
            lines.append("  ".join(cells if len(row) == len(widths) else row).rstrip())
        return "\n".join([*lines, *self.notes])


def spread(times: Sequence[float], digits: int = 2) -> str:
    """Return the median, and the quartiles in brackets."""
    low, middle, high = quartiles(times)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return low, middle, high
