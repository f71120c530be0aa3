"""Describes plans and manifests as parts (a title, a table, notes), which `print_parts` and HTML pages show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trt_kvcache.cli.output import group_rows, human_bytes, shape_text, table
from trt_kvcache.compare.costs import StepCost, step_cost, usual_tokens
from trt_kvcache.importer.cache_plan import AttentionPlan, CachePlan, CacheUpdate, Mask, Role, UpdateForm

if TYPE_CHECKING:
    from rich.console import Console

    from trt_kvcache.engine.manifest import Manifest
    from trt_kvcache.files import FileIdentity


Facts = Mapping[str, str]
"""Texts about a cache, tensor or attention, for tables: ``{"past": "past_k_0", "dtype": "int8", "why": "..."}``."""


class Part(NamedTuple):
    """A part of a command's output: a table with notes below it, or notes alone."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def print_parts(out: Console, parts: Iterable[Part]) -> None:
    """Print parts of a command's output: titles, tables and notes."""
    for part in parts:
        out.print()
        if part.rows:
            grid = table(*part.columns, title=part.title)
            for cells in part.rows:
                grid.add_row(*cells)
            out.print(grid)
        for note in part.notes:
            out.print(f"  {note}" if part.rows else note)


def print_plan(out: Console, model: str, plan: CachePlan, batch: int, bandwidth: float | None = None) -> None:
    """Print a plan: changes for the caller, caches, states, attention, masks, inputs, outputs, bytes.

    `batch` is the number of sequences in a step; `bandwidth` as in `cost_parts`.
    """
    out.print(f"{model}: opset {plan.opset}, target {plan.options.target.value}, {plan.in_place_text}")
    inlined = [f"inlined: {', '.join(plan.inlined)}"] if plan.inlined else []
    for note in (*inlined, *(f"note: {n}" for n in plan.notes)):
        out.print(note)
    print_parts(out, [*plan_parts(plan), *cost_parts(plan, batch, bandwidth)])
    if plan.caches:
        sequence, total = bytes_of(plan, batch)
        out.print(f"\ncache memory: {human_bytes(sequence)} per sequence, {human_bytes(total)} for a batch of {batch}")


def plan_parts(plan: CachePlan) -> Iterator[Part]:
    """Yield the parts that describe a plan, such as the tables of caches and attentions; empty parts are left out."""
    changes = [{"old": c.old or "-", "new": c.new or "-", "why": c.why, "io": c.io} for c in plan.changes]
    columns = {"": "{io}", "as exported": "{old}", "here": "{new}", "why": "{why}"}
    yield from _part("What changes for the caller", columns, changes, ("old", "new", "why"))
    columns = {
        "past\npresent": "{past}\n{present}",
        "shape\nin the engine": "{shape}\n{physical}",
        "dtype\nmode": "{dtype}\n{mode}",
        "idiom\nlayout": "{idiom}\n{layout}",
        "route": "{route}{many}",
    }
    yield from _part("Caches", columns, list(map(cache_facts, plan.caches)), ("past", "present", "why"), "{route}")
    states = [
        {"past": s.past, "present": s.present, "why": s.reason, "shape": shape_text(s.shape), "dtype": s.dtype}
        for s in plan.states
    ]
    columns = {"past": "{past}", "present": "{present}", "shape": "{shape}", "dtype": "{dtype}{many}"}
    yield from _part("States", columns, states, ("past", "present", "why"), "two buffers")
    columns = {"attention": "{node}", "dtype": "{dtype}", "heads": "{heads}", "size": "{size}",
               "kind": "{kind}{many}", "keys": "{keys}", "mask": "{mask}"}  # fmt: skip
    nodes = list(map(attention_facts, plan.attention))
    shared = shared_caches(plan)
    yield from _part("Attention", columns, nodes, ("node", "why"), "{kind}", [shared] if shared else [])
    masks = [{"mask": m.name, "holds": "float" if m.additive else "bool", "text": mask_text(m)} for m in plan.masks]
    columns = {"mask": "{mask}", "holds": "{holds}", "a key is visible where": "{text}"}
    yield from _part("Masks", columns, masks, ("mask",))
    yield from (Part("", (), (), [text]) for text in _spans(plan))
    if plan.adapters is not None:
        products = [
            {
                "modules": ", ".join(part.module for part in p.parts), "found": p.found_by, "rank": str(p.rank),
                "product": f"{p.inputs} x {p.outputs}", "dtype": p.dtype,
            }
            for p in plan.adapters.products
        ]  # fmt: skip
        columns = {"modules": "{modules}", "rank": "{rank}", "product": "{product}",
                   "dtype": "{dtype}{many}", "found by": "{found}"}  # fmt: skip
        yield from _part("Adapters", columns, products, ("modules", "found"), more=[adapters_text(plan)])
    columns = {"name": "{name}", "role": "{role}", "dtype": "{dtype}", "shape": "{shape}", "found by": "{found}"}
    for io, title in (("input", "Inputs"), ("output", "Outputs")):
        tensors = [
            {
                "name": t.name, "found": t.found_by.partition(":")[0], "dtype": t.dtype, "shape": shape_text(t.shape),
                "role": "" if t.role is Role.OTHER else "embeddings" if t.embedded else t.role.value,
            }
            for t in plan.tensors if t.io == io
        ]  # fmt: skip
        yield from _part(title, columns, tensors, ("name", "found"))


def cost_parts(plan: CachePlan, batch: int, bandwidth: float | None = None) -> Iterator[Part]:
    """Yield a table of the bytes that a decode step of `batch` sequences reads and writes, if they were counted.

    `bandwidth` of a GPU's memory is in GB/s. If it is given, a column has the highest possible speed.
    """
    if not (costs := _costs(plan, batch)):
        return
    columns = ["tokens each", "weights", "caches", "in all", "weights' share"]
    rows = [
        [f"{c.tokens:,}", human_bytes(c.weights), human_bytes(c.total - c.weights), human_bytes(c.total),
         f"{c.share:.1%}"] for c in costs
    ]  # fmt: skip
    notes = ["bytes read and written, without tensors between layers"]
    if bandwidth is not None:
        columns.append("limit, tokens/s")
        rows = [[*row, f"{cost.limit(bandwidth):,.0f}"] for row, cost in zip(rows, costs, strict=True)]
        notes.append(
            f"limit: what a memory of {bandwidth:,.0f} GB/s allows; an engine is slower, unless it fits into the GPU's "
            "L2"
        )
    yield Part(f"A decode step, batch {costs[0].batch}", columns, rows, notes)


def _costs(plan: CachePlan, batch: int) -> list[StepCost]:
    return [cost for tokens in usual_tokens(plan) if (cost := step_cost(plan, tokens, batch)) is not None]


def cost_line(plan: CachePlan, batch: int, bandwidth: float | None = None) -> str:
    """Return a line with the bytes that a decode step with full caches reads and writes; empty if not counted."""
    cost = step_cost(plan, usual_tokens(plan)[-1], batch)
    if cost is None:
        return ""
    limit = "" if bandwidth is None else f"; limit at {bandwidth:,.0f} GB/s: {cost.limit(bandwidth):,.0f} tokens/s"
    each = "" if cost.batch == 1 else f" for {cost.batch} sequences"
    return f"{human_bytes(cost.total)} a step{each} at {cost.tokens} tokens, {cost.share:.1%} of it weights{limit}"


def _part(
    title: str,
    columns: Mapping[str, str],
    facts: Sequence[Facts],
    names: Sequence[str],
    kind: str = "",
    more: Sequence[str] = (),
) -> Iterator[Part]:
    """Yield a table of items, such as caches. Items that differ only in a layer's number share a row.

    `columns` maps a column's title to the template of its cells, such as ``"{shape}{many}"``; ``{many}`` is the number
    of layers. `facts` has the texts about each item. `names` are the keys of texts that may contain a layer's number.
    If `kind` is given, each text ``why`` becomes a note that begins with `kind`. `more` are further notes.
    """
    if not facts:
        return
    keys = [*names, *(key for key in facts[0] if key not in names)]
    rows, reasons = [], dict[tuple[str, str], list[str]]()
    for row, layers in group_rows([[fact[key] for key in keys] for fact in facts], len(names)):
        said = {**dict(zip(keys, row, strict=True)), "many": f" x{len(layers)}" if len(layers) > 1 else ""}
        rows.append([cell.format_map(said) for cell in columns.values()])
        if kind:
            reasons.setdefault((kind.format_map(said), said["why"]), []).append(row[0])
    notes = []
    for (about, why), of in reasons.items():
        whose = f" ({', '.join(of)})" if len(reasons) > 1 else ""
        notes.append(f"{about}{whose}: {why}")
    yield Part(title, list(columns), rows, [*notes, *more])


def plan_data(plan: CachePlan, batch: int, bandwidth: float | None = None) -> dict[str, Any]:
    """Return a plan as data for JSON that can be decoded as `CachePlan`, with the bytes of caches and steps added."""
    import msgspec

    steps = [
        {"tokens": cost.tokens, "batch": cost.batch, "weights": cost.weights, "bytes": cost.total}
        | ({} if bandwidth is None else {"tokens_per_second_limit": cost.limit(bandwidth)})
        for cost in _costs(plan, batch)
    ]
    sequence, total = bytes_of(plan, batch)
    return {
        **msgspec.to_builtins(plan),
        "cache_bytes": {"per_sequence": sequence, "batch": batch, "total": total},
        "adapter_bytes": plan.adapter_bytes(),
        "steps": steps,
    }


def batch_of(plan: CachePlan, asked: int) -> int:
    """Return the batch size that the model fixes; if it fixes none, return `asked`."""
    fixed = [c.logical_shape[0] for c in plan.caches if isinstance(c.logical_shape[0], int)]
    return fixed[0] if fixed and len(fixed) == len(plan.caches) else asked


def bytes_of(plan: CachePlan, batch: int) -> tuple[int, int]:
    """Return the bytes of all cache buffers per sequence, and for `batch` sequences."""
    total = plan.cache_bytes(batch)
    return total // batch, total


def shared_caches(plan: CachePlan) -> str | None:
    """Return a line about caches that several layers read; None if each cache has one reader."""
    counts = Counter(node.caches for node in plan.attention if node.caches)
    shared = [f"{caches[0]} by {count}" for caches, count in counts.items() if count > 1]
    if not shared:
        return None
    more = f", and {len(shared) - 3} more" if len(shared) > 3 else ""
    return f"caches that several layers read: {', '.join(shared[:3])}{more}"


def cache_facts(cache: CacheUpdate) -> dict[str, str]:
    """Return texts about a cache for tables, such as its names, shape, dtype and route; see `Facts`."""
    longest = cache.contract.max_update_length if cache.contract else None
    bound = f", at most {longest} tokens per update" if longest else ""
    return {
        "past": cache.past,
        "present": cache.present,
        "why": cache.reason + bound,
        "shape": shape_text(cache.logical_shape),
        "physical": shape_text(cache.physical_shape),
        "dtype": cache.dtype,
        "mode": cache.mode.value + (", packed" if cache.form is UpdateForm.PACKED_NHD else ""),
        "idiom": cache.idiom,
        "layout": cache.layout.value,
        "route": cache.route.value,
    }


def dtype_text(cache: CacheUpdate) -> str:
    """Return the name of a cache's dtype for users: ``float32`` where ONNX says ``float``."""
    return "float32" if cache.dtype == "float" else cache.dtype


def attention_facts(node: AttentionPlan) -> dict[str, str]:
    """Return texts about an attention for tables, such as its node, heads, keys and mask; see `Facts`."""
    same = node.head_size == node.value_head_size
    return {
        "node": node.node,
        "why": node.reason,
        "dtype": node.dtype,
        "heads": str(node.query_heads) + (f"/{node.kv_heads}" if node.query_heads != node.kv_heads else ""),
        "size": str(node.head_size) if same else f"{node.head_size}, values {node.value_head_size}",
        "keys": node.keys,
        "mask": node.mask or "none",
        "kind": node.kind.value,
    }


def mask_text(mask: Mask) -> str:
    """Return a text that says which keys j a query i sees under this mask."""
    offset = f" + {mask.lengths} - S_q" if mask.lengths else ""
    terms = [f"j < {mask.lengths}"] if mask.lengths else []
    terms += [f"j <= i{offset}"] if mask.causal else []
    terms += [f"j >= i{offset} - {mask.left_window}"] if mask.left_window >= 0 else []
    terms += [f"j <= i{offset} + {mask.right_window}"] if mask.right_window >= 0 else []
    terms += [f"{mask.mask} allows it" if not mask.additive else f"{mask.mask} is added"] if mask.mask else []
    over = f"; over the rows of {mask.span}" if mask.span else ""
    return (", and ".join(terms) or "always") + over + ("; rows that see no key give zero" if mask.guarded else "")


def _spans(plan: CachePlan) -> Iterator[str]:
    for span in plan.spans:
        yield (
            f"span: the added input {span.name} [{span.symbol}] holds 0, 1, 2, ...; its shape says how many of the "
            f"{span.capacity} cache rows a step reads: at least the largest of {span.lengths}"
        )
    if (last := plan.logits_span) is not None:
        yield (
            f"logits: a step computes them from '{last.tensor}' for its last positions only; the shape of the added "
            f"input {last.name} [{last.symbol}] says for how many, from 1 (the next token) to all; its contents do not "
            "matter"
        )


def adapters_text(plan: CachePlan) -> str:
    """Return a line about the adapters (LoRA) that a model takes: slots, rank, modules and bytes."""
    adapters = plan.adapters
    if adapters is None:
        return "none"
    names = {part.module.rpartition(".")[2]: None for product in adapters.products for part in product.parts}
    one = plan.adapter_bytes()
    return (
        f"{adapters.slots} slots of rank {adapters.rank} beside the model itself, in {len(adapters.products)} products "
        f"({', '.join(names)}): {human_bytes(one)} for each, {human_bytes(one * (adapters.slots + 1))} in all"
    )


_FEW = 8  # tokens of a setting that are shown


def print_manifest(out: Console, manifest: Manifest) -> None:
    """Print the files, the backend, the options and the profiles of an engine, without the plan."""
    for label, text in (("created by", manifest.created_by), *manifest_lines(manifest)):
        out.print(f"{label:12}{text}")
    options = {name: value for name, value in manifest.options.items() if value not in (None, "", False)}
    if options:
        out.print(f"options     {', '.join(f'{name}={value}' for name, value in options.items())}")
    print_parts(out, profile_parts(manifest))


def manifest_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the files, the backend and the limits of an engine, each with a label."""
    built_for = ", ".join(manifest.compute_capabilities) or "the backend's default"
    lines = [("backend", f"{manifest.backend} {manifest.backend_version}, compute capabilities: {built_for}")]
    files = {"engine": manifest.engine, "encoder": manifest.encoder, "proof": manifest.proof}
    lines += [(label, file_text(file)) for label, file in files.items() if file is not None]
    if manifest.no_proof:
        lines.append(("proof", f"none: {manifest.no_proof}"))
    if len(manifest.model) == 1:
        lines.append(("model", file_text(manifest.model[0])))
    elif manifest.model:
        size = human_bytes(sum(file.size for file in manifest.model))
        lines.append(("model", f"{manifest.model[0].name} and {len(manifest.model) - 1} more files, {size}"))
    if manifest.is_encoder:
        lines.append(("encoder", "of one source at a time"))
    else:
        lines.append(("limits", f"{manifest.max_batch} sequences, {manifest.max_chunk} tokens per update"))
    if manifest.generation:
        tokens = ", ".join(f"{name}={_few(tokens)}" for name, tokens in manifest.generation.items())
        lines.append(("tokens", tokens))
    return lines


def _few(tokens: object) -> str:
    if not isinstance(tokens, list) or len(tokens) <= _FEW:
        return str(tokens)
    return f"{str(tokens[:_FEW])[:-1]}, ...] ({len(tokens)})"


def profile_parts(manifest: Manifest) -> Iterator[Part]:
    """Yield a table for all profiles with the shapes of each input that has a dynamic dimension."""
    profiles_of: dict[tuple[str, ...], list[str]] = {}
    for profile in manifest.profiles:
        for name, shapes in profile.shapes.items():
            sizes = ("x".join(map(str, shape)) or "scalar" for shape in (shapes.min, shapes.opt, shapes.max))
            profiles_of.setdefault((name, *sizes), []).append(profile.name)
    rows = [cells for cells, _ in group_rows([(*row, ", ".join(names)) for row, names in profiles_of.items()], 1)]
    if rows:
        yield Part("Profiles", ("input", "smallest", "typical", "largest", "profile"), rows, ())


def file_text(file: FileIdentity) -> str:
    """Return a file's name, size and the start of its digest."""
    return f"{file.name}  {human_bytes(file.size)}  blake3 {file.blake3[:16]}"
