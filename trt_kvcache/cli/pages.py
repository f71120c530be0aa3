"""Makes HTML pages with the results of `plan`, `verify`, `bench` and `inspect`, with pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from trt_kvcache.cli.output import group_rows, human_bytes, shape_text
from trt_kvcache.cli.plan_view import Part, cache_facts, dtype_text, mask_text, plan_parts, profile_parts
from trt_kvcache.cli.summary import plan_lines
from trt_kvcache.cli.verify import station_rows
from trt_kvcache.importer.cache_plan import (
    AttentionPlan,
    CachePlan,
    CacheUpdate,
    OriginalRole,
    OriginalTensor,
    UpdateMode,
)
from trt_kvcache.page import Html, Point, chart, page, table, tag

if TYPE_CHECKING:
    from trt_kvcache.cli.summary import Lines
    from trt_kvcache.compare.verify_report import VerifyReport
    from trt_kvcache.engine.inspection import EngineReport
    from trt_kvcache.runtime.measure import BenchReport, Timing


_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_GPUS = tuple((f"a GPU of {size} GiB", float(size << 30)) for size in (8, 24, 80))


def save_page(path: Path, page: Html) -> None:
    """Write a page to a file, completely or not at all; raise `OutputError` on failure."""
    from trt_kvcache.files import atomic_file

    with atomic_file(path) as file:
        file.write(page.encode("utf-8", "backslashreplace"))


def plan_page(model: str, plan: CachePlan, batch: int, command: str, chosen: str = "") -> Html:
    """Return the HTML page of a plan, with the memory estimate for `batch` sequences and the next command.

    `chosen` is a text about a default capacity, from `chosen_capacity`.
    """
    lines = [*plan_lines(plan, batch, chosen=chosen), ("next", command)]
    about = f"(opset {plan.opset}, target {plan.options.target.value})"
    return page(f"{model}: plan", _placed(model, plan, about), _listed(lines), *_plan(plan))


def inspect_page(report: EngineReport, lines: Lines) -> Html:
    """Return the HTML page of an engine, with labeled lines about the engine and its plan."""
    manifest, name = report.manifest, Path(report.engine).name
    about = f"(built by {manifest.created_by})"
    return page(
        f"{name}: engine",
        _placed(name, manifest.plan, about),
        _listed(lines),
        *(html for part in profile_parts(manifest) for html in shown(part)),
        *_plan(manifest.plan),
    )


def verify_page(model: str, report: VerifyReport) -> Html:
    """Return the page of a verification, with the largest difference for each form of the model (station)."""
    verdict = f"{'gives' if report.passed else 'does not give'} the original's numbers"
    said = [(s.name, text) for s in report.stations for text in (s.failure, s.note) if text]
    notes = [*said, *(("note", note) for note in report.notes)]
    if report.quality is not None:
        notes.append(("quality", str(report.quality)))
    rows = [(*row[:6], _bar(row), row[6]) for row in station_rows(report)]
    about = f"({report.texts} texts of {report.positions} tokens in all, decoded by {report.reference})"
    return page(
        f"{model}: verification",
        _head(model, verdict, about, report.passed),
        _listed(notes),
        _titled("Stations", "The largest difference of a logit, as a share of the largest logit at its position."),
        table(("station", "ran on", "against", "steps", "difference", "allowed", "share of that", ""), rows),
    )


def bench_page(results: Sequence[tuple[str, BenchReport]]) -> Html:
    """Return the page with charts and tables of these measurements, each under its name."""
    from trt_kvcache.runtime.measure import COLUMNS

    rows = [
        (name, r.model, r.dtype, r.capacity or "circular", r.runner, r.max_batch, r.max_chunk,
         human_bytes(r.cache_bytes), human_bytes(r.peak_bytes))
        for name, r in results
    ]  # fmt: skip
    title, about = results[-1][1].title, results[-1][1].runner
    if len(results) > 1:
        title, about = ", ".join(name for name, _ in results), "compared"
    return page(
        f"{title}: times",
        _head(title, "", about),
        table(("", "model", "type", "capacity", "runs on", "rows", "tokens per step", "caches", "process peak"), rows),
        tag("h2", "Times"),
        tag("div", *_bench_charts(results), class_="charts"),
        tag("h2", "All measurements"),
        table(("", *COLUMNS), [(name, *t.cells) for name, r in results for t in r.timings]),
    )


# --- parts of a plan


def _plan(plan: CachePlan) -> Iterable[Html]:
    if plan.warnings:
        yield from (tag("h2", "Warnings"), *(tag("p", warning, class_="bad") for warning in plan.warnings))
    if plan.caches:
        yield _titled("Memory of the caches", "Without the weights.")
        yield tag("div", *_memory(plan), class_="charts")
        yield _titled("The graph around each cache", "As exported, and as it is in the engine.")
        yield from _around(plan)
    for part in plan_parts(plan):
        yield from shown(part)


def shown(part: Part) -> Iterable[Html]:
    """Return a part of a command's output (title, table, notes) as HTML; `print_parts` prints it as text."""
    if part.rows:
        yield tag("h2", part.title)
        yield table(part.columns, part.rows)
    yield from (tag("p", note, class_="dim") for note in part.notes)


def _memory(plan: CachePlan) -> Iterable[Html]:
    """Yield charts of bytes: by batch size for several capacities, and by capacity for several batch sizes."""
    linear = [cache.capacity for cache in plan.caches if cache.mode is UpdateMode.LINEAR]
    most = max(linear, default=0)
    capacities = sorted({most * 2**n // 4 for n in range(5)} - {0}) if most else [0]
    fixed = [c.physical_shape[0] for c in plan.caches if isinstance(c.physical_shape[0], int)]
    batches = fixed[:1] or _BATCHES
    totals = {c: {b: float(_at(plan, most, c).cache_bytes(b)) for b in batches} for c in capacities}
    drawn = partial(chart, y_text=lambda size: human_bytes(int(size)), binary=True, marks=_GPUS)
    yield drawn(
        "Bytes by sequences",
        "sequences",
        [
            (f"{c} tokens each" if most else "a window each", [Point(b, size) for b, size in sizes.items()])
            for c, sizes in totals.items()
        ],
    )
    if most:
        yield drawn(
            "Bytes by capacity",
            "tokens per sequence",
            [
                (f"{b} sequence{'s' if b > 1 else ''}", [Point(c, totals[c][b]) for c in capacities])
                for b in batches[::2]
            ],
        )


def _at(plan: CachePlan, most: int, capacity: int) -> CachePlan:
    def changed(cache: CacheUpdate) -> CacheUpdate:
        axis = cache.physical_sequence_axis
        shape = tuple(capacity if at == axis else dim for at, dim in enumerate(cache.physical_shape))
        return replace(cache, physical_shape=shape)

    linear = UpdateMode.LINEAR
    caches = tuple(changed(c) if c.mode is linear and c.capacity == most else c for c in plan.caches)
    return replace(plan, caches=caches)


def _around(plan: CachePlan) -> Iterable[Html]:
    """Draw the graph around the caches, before and after the rewrite. Layers with equal graphs share a drawing."""
    before = {tensor.name: tensor for tensor in plan.original}
    masks = {mask.name: mask_text(mask) for mask in plan.masks}
    readers: dict[str, list[AttentionPlan]] = {}
    for node in plan.attention:
        for past in node.caches:
            readers.setdefault(past, []).append(node)
    rows = []
    for cache in plan.caches:
        read = (f"{n.kind.value}, {n.keys}, {n.mask}" for n in readers.get(cache.past, []))
        facts = list(cache_facts(cache).values())[2:]
        rows.append((cache.past, cache.present, cache.write_indices or "", *facts, *read))
    # Groups of the same form, such as keys and values, share a drawing.
    alike: dict[tuple[str, ...], list[tuple[tuple[str, ...], CacheUpdate]]] = {}
    for row, members in group_rows(rows, 2):
        alike.setdefault(row[2:], []).append((row, plan.caches[members[0]]))
    for pairs in alike.values():
        cache = pairs[0][1]
        past, present = (", ".join(dict.fromkeys(row[at] for row, _ in pairs)) for at in range(2))
        nodes = readers.get(cache.past, [])
        yield tag(
            "div",
            tag("span", "as exported", class_="dim"),
            _exported(past, present, cache, before),
            tag("span", "in the engine", class_="dim"),
            _in_engine(past, present, cache, nodes, masks),
            class_="part",
        )


def _exported(past: str, present: str, cache: CacheUpdate, before: dict[str, OriginalTensor]) -> Html:
    was, now = before.get(cache.past), before.get(cache.present)
    same = cache.logical_shape
    grows = was is not None and was.role is OriginalRole.GROWING_CACHE
    cost = "grows in each step, and is copied" if grows else "of fixed capacity"
    read = "reads all rows" if grows else "reads the whole capacity"
    both = "Attention" in cache.idiom
    return _flow(
        _box(past, f"{dtype_text(cache)} {shape_text(was.shape if was else same)}", cost),
        _box(cache.idiom, "writes the new rows", read if both else ""),
        _box(present, shape_text(now.shape if now else same)),
        *([] if both else [_box("attention", read)]),
    )


def _in_engine(
    past: str, present: str, cache: CacheUpdate, nodes: Sequence[AttentionPlan], masks: dict[str, str]
) -> Html:
    place = f"at {cache.write_indices}" if cache.write_indices else "at the start"
    names = {"native": "TensorRT's cache update", "plugin": "cache update by the plugin"}
    write = _box(names.get(cache.route.value, "plain operators"), "writes the new rows", f"{place}, {cache.mode.value}")
    shape = f"{dtype_text(cache)} {shape_text(cache.physical_shape)}"
    if cache.in_place:
        inner = _flow(_box(past), write, _box(present))
        buffers = tag("div", tag("small", f"one buffer: {shape}"), inner, class_="box buffer")
    else:
        inner = _flow(_box(past, shape), write, _box(present, shape))
        buffers = tag("div", tag("small", "two buffers: all rows are copied in each step"), inner, class_="box copied")
    readers = dict.fromkeys((n.kind.value, n.keys, n.mask) for n in nodes)
    read = {"span": "reads the rows in use", "mask": "reads as many rows as its mask has"}
    boxes = [
        _box(f"attention, {kind}", read.get(keys, "reads the whole capacity"), masks.get(mask or "", ""))
        for kind, keys, mask in readers
    ]
    return _flow(buffers, *boxes)


def _box(title: str, *texts: str) -> Html:
    return tag("div", title, *(tag("small", text) for text in texts if text), class_="box")


def _flow(*boxes: Html) -> Html:
    steps = [tag("div", tag("span", "→"), box, class_="step") for box in boxes[1:]]
    return tag("div", boxes[0], *steps, class_="flow")


# --- parts of all pages


def _head(title: str, verdict: str, about: str, good: bool = True) -> Html:
    return tag(
        "header", tag("h1", title), tag("p", tag("strong", verdict, class_="good" if good else "bad"), " ", about)
    )


def _placed(title: str, plan: CachePlan, about: str) -> Html:
    return _head(title, plan.in_place_text, about, all(cache.in_place for cache in plan.caches))


def _titled(title: str, about: str) -> Html:
    return tag("div", tag("h2", title), tag("p", about, class_="dim"))


def _listed(lines: Iterable[tuple[str, str]]) -> Html:
    pairs = ((tag("dt", label), tag("dd", text.replace(" (--all)", ""))) for label, text in lines)
    return tag("dl", *chain.from_iterable(pairs))


def _bench_charts(results: Sequence[tuple[str, BenchReport]]) -> Iterable[Html]:
    charts = (
        ("prefill, ms", "tokens of the prompt"),
        ("decode, ms per step", "tokens in the cache"),
        ("decode, tokens/s", "sequences per step"),
    )
    names, points = [name for name, _ in results], [_points(measured) for _, measured in results]
    for (title, label), of_chart in zip(charts, zip(*points, strict=True), strict=True):
        if lines := [(name, line) for name, line in zip(names, of_chart, strict=True) if line]:
            yield chart(title, label, lines)


def _points(measured: BenchReport) -> tuple[list[Point], ...]:
    decode = [t for t in measured.timings if t.phase == "decode"]
    return (
        [_point(t) for t in measured.timings if t.phase == "prefill"],
        [_point(t) for t in decode if t.batch == 1],
        [Point(t.batch, t.tokens_per_second) for t in decode if t.tokens == decode[0].tokens],
    )


def _point(timing: Timing) -> Point:
    return Point(timing.tokens, timing.median_ms, timing.low_ms, timing.high_ms)


def _bar(row: Sequence[str]) -> Html:
    """Draw a bar for a row of the table: the difference as a share of the allowed difference."""
    if "-" in row[4:6]:
        return tag("span")
    share = float(row[4]) / float(row[5]) if row[4] != "not comparable" else 1.0
    width = f"width:{8 * min(1.0, share):.2f}em"
    return tag("span", class_="bar bad" if row[6] == "FAILED" else "bar", style=width)
