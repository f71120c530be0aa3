"""Merges rows of a table that differ only in a layer's number: ``key.0`` and ``key.1`` become ``key.0..1``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

_NUMBER = re.compile(r"(\d+)")


def group_rows(rows: Iterable[Sequence[str]], names: int) -> list[tuple[tuple[str, ...], list[int]]]:
    """Merge rows that differ only in one number of their names.

    Args:
        rows: cells, all rows of one length.
        names: number of leading cells that are names; the cells after them must be equal for rows to merge.

    Returns:
        Rows in the order of their first appearance, each with the positions of the merged rows.
    """
    alike: dict[object, list[tuple[int, tuple[str, ...], list[int]]]] = {}
    for at, row in enumerate(rows):
        split = [_NUMBER.split(cell) for cell in row[:names]]
        words = tuple(tuple(parts[::2]) for parts in split)
        numbers = [int(number) for parts in split for number in parts[1::2]]
        alike.setdefault((words, tuple(row[names:])), []).append((at, tuple(row), numbers))
    grouped = []
    for members in alike.values():
        merged = _merge([(row, numbers) for _, row, numbers in members], names)
        positions = [at for at, _, _ in members]
        grouped += [(merged, positions)] if merged else [(row, [at]) for at, row, _ in members]
    return grouped


def _merge(members: list[tuple[tuple[str, ...], list[int]]], names: int) -> tuple[str, ...] | None:
    """Return one row for all members, or None if the first number in which they differ is not unique."""
    first, first_numbers = members[0]
    if len(members) == 1:
        return first
    running = [at for at, number in enumerate(first_numbers) if any(m[at] != number for _, m in members)]
    layers = [numbers[running[0]] for _, numbers in members] if running else []
    if len(set(layers)) < len(members):
        return None
    # Numbers that equal the layer's number become a range, too; others (an exporter's count of nodes) become a star.
    texts = {at: ranges(layers) if all(m[at] == m[running[0]] for _, m in members) else "*" for at in running}
    position = iter(range(len(first_numbers)))
    cells = [_NUMBER.sub(lambda m: texts.get(next(position), m[0]), cell) for cell in first[:names]]
    return (*cells, *first[names:])


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ``0..3,8,10..11``; an even step of 2 or more over at least three is ``0..30 step 2``."""
    ordered = sorted(set(numbers))
    step = ordered[1] - ordered[0] if len(ordered) > 2 else 1
    if step > 1 and all(b - a == step for a, b in pairwise(ordered)):
        return f"{ordered[0]}..{ordered[-1]} step {step}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
