"""One attention for each head, as exports for NPUs have it: keys and values of one head of a cache are cut out.

    K[:, n:n+1] ──────────────── MatMul ── Add(mask) ── Softmax ── MatMul with V[:, n:n+1] ── output n
    Q of the heads that read n ──┘

Together they are one attention over the whole cache, Concat in front of it and Split behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.graph import producer
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.findings import Core


def join_parts(cores: Iterable[Core]) -> tuple[Core, ...]:
    """Bring attentions over single heads of the same caches together.

    Args:
        cores: all attentions of a model, in the order of the graph.

    Returns:
        The same, with one for those over single heads.

    Raises:
        UnsupportedModelError: they are not over all heads of it, or differ in more than heads.
    """
    joined: list[Core] = []
    open_groups: dict[tuple[str, str], _Group] = {}
    for core in cores:
        if core.part is None:
            joined.append(core)
            continue
        caches = core.key.past.name, core.value.past.name
        group = open_groups.get(caches)
        if group is None or group.is_behind(core):  # of another layer, which reads the same caches
            joined += [] if group is None else [group.join()]
            group = open_groups[caches] = _Group()
            group.is_behind(core)
        group.parts.append(core)
    return (*joined, *(group.join() for group in open_groups.values()))


class _Group:
    """Attentions over single heads of the same caches, none of which needs what another one gives."""

    def __init__(self) -> None:
        self.parts: list[Core] = []
        self._seen: set[str] = set()  # what their queries are made of

    def is_behind(self, core: Core) -> bool:
        """Whether the query of an attention is made of what those of the group give, which stand before it."""
        outputs = {part.output.name for part in self.parts}
        pending = [core.query]
        while pending:
            tensor = pending.pop()
            if tensor.name in outputs:
                return True
            node = producer(tensor)
            if tensor.name not in self._seen and node is not None:
                self._seen.add(tensor.name)
                pending += [t for t in node.inputs if not t.is_empty()]
        return False

    def join(self) -> Core:
        """One attention for all of them, whose query heads are put in the order of the heads that they attend to."""
        first, counts = self.parts[0], _counts(self.parts)
        where = f"one head of the cache '{first.key.past.name}'"
        if min(counts) != max(counts):
            shown = ", ".join(f"{count} to head {head}" for head, count in enumerate(counts[:8]))
            raise UnsupportedModelError(
                f"'{first.node}' attends to {where}, which has {len(counts)}; of all query heads that do, "
                f"{shown}{', ...' if len(counts) > 8 else ''}; supported are attentions over single heads of a cache "
                "where as many query heads attend to each, or attention over all heads"
            )
        for other in self.parts[1:]:
            if (difference := _difference(first, other)) is not None:
                raise UnsupportedModelError(
                    f"'{first.node}' and '{other.node}' attend to {where} each, with other {difference}; supported are "
                    "attentions over single heads that are alike, or attention over all heads"
                )
        if first.visibility.bias is not None or first.visibility.slopes is not None or first.sinks is not None:
            raise UnsupportedModelError(
                f"'{first.node}' attends to {where}, with sinks or a position bias; supported are these in attention "
                "over all heads"
            )
        ordered = sorted(self.parts, key=lambda core: core.part or (0, 0))
        return replace(first, heads=sum(counts), part=None, parts=tuple(ordered))


def _counts(parts: Sequence[Core]) -> list[int]:
    """Query heads that attend to each head of a cache."""
    assert parts[0].part is not None
    counts = [0] * parts[0].part[1]
    for part in parts:
        assert part.part is not None
        counts[part.part[0]] += part.heads
    return counts


def _difference(one: Core, other: Core) -> str | None:
    """What two attentions have that is not the same."""
    alike = {
        "scales": (one.scale, one.softcap) == (other.scale, other.softcap),
        "sizes": (one.head_size, one.value_size) == (other.head_size, other.value_size),
        "types": (one.query_type, one.output_type) == (other.query_type, other.output_type),
        "masks": _mask(one) == _mask(other),
        "rounding": (one.rounded_scores, one.rounded_weights) == (other.rounded_scores, other.rounded_weights),
    }
    return next((what for what, same in alike.items() if not same), None)


def _mask(core: Core) -> tuple[object, ...]:
    seen = core.visibility
    return seen.causal, seen.window, seen.bounded, None if seen.own is None else seen.own.name


def whole(core: Core, canonical: Canonical) -> Core:
    """The attention over all heads, with what brings parts together, and takes them apart, around it.

    Args:
        core: of `join_parts`.
        canonical: of the graph.
    """
    if not core.parts:
        return core
    emit, parts = canonical.emit, core.parts
    query = emit.op("Concat", [part.query for part in parts], "heads_together", core.query_type, axis=1)
    made = gs.Variable(emit.name("heads_together"), dtype=core.output_type)
    for part in parts:
        part.output.inputs.clear()
    sizes = emit.ints([part.heads for part in parts])
    name, outputs = emit.name("heads_apart"), [part.output for part in parts]
    canonical.graph.nodes.append(gs.Node("Split", name, {"axis": 1}, [made, sizes], outputs))
    return replace(core, query=query, output=made, parts=())
