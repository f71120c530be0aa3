"""Where caches lie in a stacked tensor before a step, and behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.plan import Stack

__all__ = ["check_slots"]


def check_slots(stacks: Sequence[Stack], pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> None:
    """Refuse a model that gives a cache back in another place than that in which it takes it.

    Args:
        stacks: what holds several caches.
        pairs: names of caches before and after a step.
        names: of inputs and outputs, in their order.

    Raises:
        UnsupportedModelError: naming both.
    """
    slots = {part.name: (stack, part.place) for stack in stacks for part in stack.parts}
    order = {name: i for i, name in enumerate(names)}
    moved: dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[int, ...], str, str]]] = {}
    for past, present in pairs:
        if past in slots or present in slots:
            before, after = (slots.get(name, (None, (order.get(name, 0),))) for name in (past, present))
            key = (before[0].name if before[0] else "", after[0].name if after[0] else "")
            moved.setdefault(key, []).append((_place(before[1]), _place(after[1]), past, present))
    shapes = {s.name: s.shape for s in stacks}
    for (before_name, after_name), found in moved.items():
        same = before_name and after_name and _fits(shapes[before_name], shapes[after_name])
        wrong = [f for f in found if f[0] != f[1]] if same else [] if _keeps_order(found) else found
        if wrong:
            _, _, past, present = min(wrong)
            raise UnsupportedModelError(
                f"the model takes a cache as '{past}' and gives it back as '{present}': what it writes for one layer, "
                "another one would read in the next step. Supported are models that write every cache to the place "
                "that they read it from: stack the caches in the order of the layers, both in the model's inputs and "
                "in its outputs"
            )


def _place(place: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(i for i in place if i is not None)


def _fits(before: Sequence[int | str], after: Sequence[int | str]) -> bool:
    """Whether an output can be the input of the next step as it is."""
    return len(before) == len(after) and all(
        a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(before, after, strict=True)
    )


def _keeps_order(found: Sequence[tuple[tuple[int, ...], tuple[int, ...], str, str]]) -> bool:
    """Whether places only count along other axes than before."""
    rank = len(found[0][0])
    for perm in permutations(range(rank)):
        ordered = sorted(found, key=lambda f: [f[0][p] for p in perm])
        if [f[1] for f in ordered] == sorted(f[1] for f in ordered):
            return True
    return False
