"""A `CachePlan` as tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from trt_kvcache.cli.grouping import group_rows
from trt_kvcache.cli.output import human_bytes, shape_text, table
from trt_kvcache.importer.plan import (
    AttentionPlan,
    CachePlan,
    CacheUpdate,
    MaskGeometry,
    Role,
    TensorRole,
    UpdateForm,
)

if TYPE_CHECKING:
    from rich.console import Console


def print_plan(out: Console, model: str, plan: CachePlan, batch: int) -> None:
    """Print a plan: changes for the caller, caches, states, attention, masks, spans, inputs, outputs and bytes.

    Args:
        out: the console.
        model: the model's name, for the first line.
        plan: the plan.
        batch: batch size for the memory estimate.
    """
    out.print(f"{model}: opset {plan.opset}, target {plan.options.target.value}, {plan.in_place_text}")
    if plan.inlined:
        out.print(f"inlined: {', '.join(plan.inlined)}")
    for note in plan.notes:
        out.print(f"note: {note}")
    _print_changes(out, plan)
    _print_caches(out, plan)
    _print_states(out, plan)
    _print_attention(out, plan)
    _print_masks(out, plan)
    _print_spans(out, plan)
    _print_logits_span(out, plan)
    _print_adapters(out, plan)
    _print_tensors(out, plan)
    if plan.caches:
        sequence, total = bytes_of(plan, batch)
        out.print(f"\ncache memory: {human_bytes(sequence)} per sequence, {human_bytes(total)} for a batch of {batch}")


def plan_data(plan: CachePlan, batch: int) -> dict[str, Any]:
    """Return the plan as plain data (it decodes as `CachePlan`), with the cache bytes beside its fields."""
    import msgspec

    sequence, total = bytes_of(plan, batch)
    return {
        **msgspec.to_builtins(plan),
        "cache_bytes": {"per_sequence": sequence, "batch": batch, "total": total},
        "adapter_bytes": plan.adapter_bytes(),
    }


def batch_of(plan: CachePlan, asked: int) -> int:
    """Return the batch size that the model fixes, otherwise `asked`."""
    fixed = [c.logical_shape[0] for c in plan.caches if isinstance(c.logical_shape[0], int)]
    return fixed[0] if fixed and len(fixed) == len(plan.caches) else asked


def bytes_of(plan: CachePlan, batch: int) -> tuple[int, int]:
    """Return the bytes of all cache buffers per sequence, and for `batch` sequences."""
    total = plan.cache_bytes(batch)
    return total // batch, total


def shared_caches(plan: CachePlan) -> str | None:
    """Return the caches that several layers read, and how many; None: there are none."""
    counts = Counter(node.caches for node in plan.attention if node.caches)
    shared = [f"{caches[0]} by {count}" for caches, count in counts.items() if count > 1]
    if not shared:
        return None
    more = f", and {len(shared) - 3} more" if len(shared) > 3 else ""
    return f"caches that several layers read: {', '.join(shared[:3])}{more}"


def _print_changes(out: Console, plan: CachePlan) -> None:
    if not plan.changes:
        return
    grid = table("", "as exported", "here", "why", title="What changes for the caller")
    for (old, new, why, io), _ in group_rows([(c.old, c.new, c.why, c.io) for c in plan.changes], 3):
        grid.add_row(io, old or "-", new or "-", why)
    out.print()
    out.print(grid)


def _print_states(out: Console, plan: CachePlan) -> None:
    if not plan.states:
        return
    rows = group_rows([(s.past, s.present, s.reason, shape_text(s.shape), s.dtype) for s in plan.states], 3)
    grid = table("past", "present", "shape", "dtype", title="States")
    for (past, present, _, shape, dtype), layers in rows:
        many = f" x{len(layers)}" if len(layers) > 1 else ""
        grid.add_row(past, present, shape, dtype + many)
    out.print()
    out.print(grid)
    _print_notes(out, [("two buffers", row[0], row[2]) for row, _ in rows])


def _print_caches(out: Console, plan: CachePlan) -> None:
    if not plan.caches:
        return
    rows = group_rows([cache_row(cache) for cache in plan.caches], 3)
    columns = ("past\npresent", "shape\nin the engine", "dtype\nmode", "idiom\nlayout", "route")
    grid = table(*columns, title="Caches")
    for (past, present, _, logical, physical, dtype, mode, idiom, layout, route), layers in rows:
        many = f" x{len(layers)}" if len(layers) > 1 else ""
        cells = (f"{past}\n{present}", f"{logical}\n{physical}", f"{dtype}\n{mode}", f"{idiom}\n{layout}")
        grid.add_row(*cells, f"{route}{many}")
    out.print()
    out.print(grid)
    _print_notes(out, [(row[9], row[0], row[2]) for row, _ in rows])


def cache_row(cache: CacheUpdate) -> tuple[str, ...]:
    """Return past, present, reason; shape, shape in the engine, dtype, mode, idiom, layout and route."""
    longest = cache.contract.max_update_length if cache.contract else None
    bound = f", at most {longest} tokens per update" if longest else ""
    mode = cache.mode.value + (", packed" if cache.form is UpdateForm.PACKED_NHD else "")
    return (
        cache.past,
        cache.present,
        cache.reason + bound,
        shape_text(cache.logical_shape),
        shape_text(cache.physical_shape),
        cache.dtype,
        mode,
        cache.idiom,
        cache.layout.value,
        cache.route.value,
    )


def _print_attention(out: Console, plan: CachePlan) -> None:
    if not plan.attention:
        return
    rows = group_rows([attention_row(node) for node in plan.attention], 2)
    grid = table("attention", "dtype", "heads", "size", "kind", "keys", "mask", title="Attention")
    for (node, _, dtype, heads, size, keys, mask, kind), layers in rows:
        many = f" x{len(layers)}" if len(layers) > 1 else ""
        grid.add_row(node, dtype, heads, size, kind + many, keys, mask)
    out.print()
    out.print(grid)
    _print_notes(out, [(row[7], row[0], row[1]) for row, _ in rows])
    if (shared := shared_caches(plan)) is not None:
        out.print(f"  {shared}")


def attention_row(node: AttentionPlan) -> tuple[str, ...]:
    """Return node, reason; dtype, heads, head size, keys, mask and kind."""
    heads = str(node.query_heads) if node.query_heads == node.kv_heads else f"{node.query_heads}/{node.kv_heads}"
    same = node.head_size == node.value_head_size
    size = str(node.head_size) if same else f"{node.head_size}, values {node.value_head_size}"
    return node.node, node.reason, node.dtype, heads, size, node.keys, node.mask or "none", node.kind.value


def _print_notes(out: Console, notes: list[tuple[str, str, str]]) -> None:
    """Print each distinct reason once, with its names."""
    names_of: dict[tuple[str, str], list[str]] = {}
    for kind, name, reason in notes:
        names_of.setdefault((kind, reason), []).append(name)
    for (kind, reason), names in names_of.items():
        whose = "" if len(names_of) == 1 else f" ({', '.join(names)})"
        out.print(f"  {kind}{whose}: {reason}")


def _print_masks(out: Console, plan: CachePlan) -> None:
    if not plan.masks:
        return
    grid = table("mask", "holds", "a key is visible where", title="Masks")
    for mask in plan.masks:
        grid.add_row(mask.name, "float" if mask.additive else "bool", mask_text(mask))
    out.print()
    out.print(grid)


def mask_text(mask: MaskGeometry) -> str:
    """Return the conditions of a mask in words, over key j and query i."""
    offset = f" + {mask.lengths} - S_q" if mask.lengths else ""
    terms = [f"j < {mask.lengths}"] if mask.lengths else []
    terms += [f"j <= i{offset}"] if mask.causal else []
    terms += [f"j >= i{offset} - {mask.left_window}"] if mask.left_window >= 0 else []
    terms += [f"j <= i{offset} + {mask.right_window}"] if mask.right_window >= 0 else []
    terms += [f"{mask.mask} allows it" if not mask.additive else f"{mask.mask} is added"] if mask.mask else []
    terms += [f"a slope per head times j - (i{offset}) is added"] if mask.slopes else []
    text = ", and ".join(terms) or "always"
    text += f"; over the rows of {mask.span}" if mask.span else ""
    return text + ("; rows that see no key give zero" if mask.guarded else "")


def _print_spans(out: Console, plan: CachePlan) -> None:
    for span in plan.spans:
        out.print(
            f"\nspan: the added input {span.name} [{span.symbol}] holds 0, 1, 2, ...; its shape says how many of the "
            f"{span.capacity} cache rows a step reads: at least the largest of {span.lengths}"
        )


def _print_logits_span(out: Console, plan: CachePlan) -> None:
    span = plan.logits_span
    if span is not None:
        out.print(
            f"\nlogits: of the last positions of a step, computed from those of '{span.tensor}'; the shape of the "
            f"added input {span.name} [{span.symbol}] says of how many, from 1 (the next token) to all; its contents "
            "do not matter"
        )


def adapters_text(plan: CachePlan) -> str:
    """Return slots, rank, modules and bytes of the adapters that a model takes."""
    adapters = plan.adapters
    if adapters is None:
        return "none"
    names = {part.module.rpartition(".")[2]: None for product in adapters.products for part in product.parts}
    one = plan.adapter_bytes()
    return (
        f"{adapters.slots} slots of rank {adapters.rank} beside the model itself, in {len(adapters.products)} products "
        f"({', '.join(names)}): {human_bytes(one)} for each, {human_bytes(one * (adapters.slots + 1))} in all"
    )


def _print_adapters(out: Console, plan: CachePlan) -> None:
    if plan.adapters is None:
        return
    products = [
        (", ".join(part.module for part in p.parts), p.found_by, str(p.rank), f"{p.inputs} x {p.outputs}", p.dtype)
        for p in plan.adapters.products
    ]
    grid = table("modules", "rank", "product", "dtype", "found by", title="Adapters")
    for (modules, found_by, *cells), layers in group_rows(products, 2):
        grid.add_row(modules, *cells[:2], cells[2] + (f" x{len(layers)}" if len(layers) > 1 else ""), found_by)
    out.print()
    out.print(grid)
    out.print(f"  {adapters_text(plan)}")


def _print_tensors(out: Console, plan: CachePlan) -> None:
    for io, title in (("input", "Inputs"), ("output", "Outputs")):
        rows = group_rows([tensor_row(tensor) for tensor in plan.tensors if tensor.io == io], 2)
        grid = table("name", "role", "dtype", "shape", "found by", title=title)
        for (name, found_by, role, dtype, shape), _ in rows:
            grid.add_row(name, role, dtype, shape, found_by)
        out.print()
        out.print(grid)


def tensor_row(tensor: TensorRole) -> tuple[str, ...]:
    """Return name, source of the role; role, dtype and shape."""
    role = "" if tensor.role is Role.OTHER else "embeddings" if tensor.embedded else tensor.role.value
    return tensor.name, tensor.found_by.partition(":")[0], role, tensor.dtype, shape_text(tensor.shape)
