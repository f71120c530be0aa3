"""The output of commands: results on stdout; progress, warnings and errors on stderr.

Texts may come from untrusted files. `visible` makes control characters visible, so that no text can move the cursor, or
hide or fake a line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

from trt_kvcache.messages import CONTROL
from trt_kvcache.messages import human_bytes as human_bytes
from trt_kvcache.messages import shape_text as shape_text
from trt_kvcache.messages import visible as visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table


_PIPED_WIDTH = 1000
"""Columns of output to a file or pipe: wide enough that no name is folded."""


uncovered: list[Callable[[], AbstractContextManager[None]]] = [nullcontext]
"""The last of these functions removes progress bars from the terminal while text is printed on the same lines."""


def console(stream: IO[str] | None = None) -> Console:
    """Return a Rich console for `stream` (default: stdout) that prints text as it is: no markup, no guessed colors.

    The console is as wide as the window, or as the variable COLUMNS says. Piped output is never folded.
    """
    from rich.console import Console

    stream = stream or sys.stdout
    covered = stream is sys.stdout and stream.isatty()

    class Escaping(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            with uncovered[-1]() if covered else nullcontext():
                super().print(*(visible(o, "\n") if isinstance(o, str) else o for o in objects), **how)

    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH
    return Escaping(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def table(*columns: str, title: str = "") -> Table:
    """Return an empty table with a line under its header. Long cells are folded, not cut."""
    from rich import box
    from rich.containers import Lines
    from rich.table import Table
    from rich.text import Text

    class Cell(Text):
        def wrap(self, console: Console, width: int, *args: Any, **how: Any) -> Lines:
            return Lines(Text(line) for part in self.plain.split("\n") for line in wrapped(part, width))

    class Escaping(Table):
        def add_row(self, *cells: Any, **how: Any) -> None:
            super().add_row(*(Cell(visible(cell, "\n")) if isinstance(cell, str) else cell for cell in cells), **how)

    grid = Escaping(
        box=box.SIMPLE_HEAD,
        title=Text(visible(title), style="bold") if title else None,
        title_justify="left",
        header_style="bold",
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        grid.add_column(column, overflow="fold")
    return grid


def wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` columns; a longer name breaks at a dot, slash or underscore."""
    words = []
    for word in text.split():
        while len(word) > width:
            end = max((match.end() for match in re.finditer(r"(?<!\.)\.(?!\.)|[/_,]", word[:width])), default=width)
            words.append(word[:end])
            word = word[end:]
        words.append(word)
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def print_json(data: Any) -> None:
    """Write `data` (dataclasses, enums and plain values) to stdout as indented JSON."""
    import msgspec

    sys.stdout.write(json_text(msgspec.json.format(msgspec.json.encode(data), indent=2).decode()) + "\n")


def json_text(encoded: str) -> str:
    """Return JSON with escapes for all control characters; JSON encoders do not escape those from U+007F on."""
    return CONTROL.sub(lambda f: f[0] if f[0] == "\n" else f"\\u{ord(f[0]):04x}", encoded)


def print_error(message: str) -> None:
    """Write one line, ``error: ...``, to stderr."""
    print(f"error: {one_line(message)}", file=sys.stderr)  # noqa: T201


def print_warnings(messages: Iterable[str]) -> None:
    """Write a line ``warning: ...`` to stderr for each message; merge messages that differ only in a layer."""
    for (message,), _ in group_rows(((one_line(message),) for message in messages), 1):
        print(f"warning: {message}", file=sys.stderr)  # noqa: T201


def one_line(message: str) -> str:
    """Return a message on one line, without control characters."""
    return visible(" ".join(message.split()))


_NUMBER = re.compile(r"(\d+)")


def group_rows(rows: Iterable[Sequence[str]], names: int) -> list[tuple[tuple[str, ...], list[int]]]:
    """Merge table rows whose names differ only in one number, such as the number of the layer.

    The first `names` cells of a row are names; the other cells of merged rows are equal. Returns the rows in the order
    of their first appearance, each with the positions of the merged rows.
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
    """Merge table rows that differ only in numbers; None if the first number that varies is equal in two rows."""
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
    """Return numbers as text: ``0..3,8,10..11``, or ``0..30 step 2`` for three or more with an equal step above 1."""
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
