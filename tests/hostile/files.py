"""Pipes, devices, folders and huge files in the place of a file, and random damage to the contents of files."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES: tuple[Callable[[Path], None], ...] = (pipe, endless, folder, huge)
"""Each makes something at a path that no reader may wait for, or take whole."""

CONTROL = "a\x1b[2Jb\nerror: made up\x9b31m\u202ec"
"""A name that would clear a screen, make up a line, and turn the direction of text."""

NUMBERS = (0, -1, 1, 2**31, 2**31 - 1, 2**62, -(2**63), 2**70, 0.5, 1e308, float("nan"), float("inf"))
VALUES = (
    *NUMBERS,
    "",
    "evil",
    CONTROL,
    "../../etc/passwd",
    "\0",
    "x" * 10_000,
    None,
    True,
    [],
    {},
    [[]],
    {"a": {"b": 1}},
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, added or cut off."""
    changed = bytearray(data)
    way = rng.randrange(4)
    if way == 0:
        return data[: rng.randrange(len(data) + 1)]
    if way == 1:
        at = rng.randrange(len(data) + 1)
        changed[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
    else:
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(len(changed))
            changed[at] = rng.choice([0, 0xFF, changed[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
    return bytes(changed)


def edited(rng: random.Random, tree: Any) -> Any:
    """JSON with one or two of its values replaced, doubled or taken away, in place."""
    for _ in range(rng.choice([1, 1, 2])):
        places = list(_places(tree))
        if places:
            holder, key = rng.choice(places)
            way = rng.randrange(8)
            if way == 0:
                del holder[key]
            elif way == 1 and isinstance(holder, list):
                holder.append(holder[key])
            elif way == 2:
                deep: Any = holder[key]
                for _ in range(rng.choice([3, 200])):
                    deep = [deep]
                holder[key] = deep
            else:
                holder[key] = rng.choice(VALUES)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(value)
