"""``trt-kvcache bench``: measures how fast an engine or a model decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.options import (
    CheckOption,
    DeviceOption,
    EmbeddingsOption,
    HtmlOption,
    JsonOption,
    RunnableArgument,
    SessionPlanFlags,
    bounded_on_cpu,
    file_flag,
    run_flag,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trt_kvcache.runtime.measure import BenchReport, Timing

    Results = Sequence[tuple[str, BenchReport]]

_COMMAS = "1,2,..."
_REPEATS, _SECONDS = 20, 5.0
_ROW = "{:<8}{:>7}{:>8}{:>12}{:>22}{:>12}"


@dataclass(frozen=True)
class MeasureFlags:
    """The flags of `bench` that choose what is measured: lengths, positions, batches and repeats."""

    lengths: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Tokens of prompts to prefill.")] = None
    positions: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Tokens in the cache while decoding.")] = None
    batches: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Sequences decoded together.")] = None
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Measured steps. Default: 20, or as many as fit into 5 seconds, at least 3."
        ),
    ] = None
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Steps before the measured ones.")] = 3


def bench(
    model: RunnableArgument,
    measure: MeasureFlags,
    planning: SessionPlanFlags,
    device: DeviceOption = "auto",
    check: CheckOption = "first",
    max_batch: Annotated[
        int | None, run_flag(min=1, metavar="N", help="Largest batch. Default: the engine's, else 8.")
    ] = None,
    threads: Annotated[
        int | None, run_flag(min=1, metavar="N", help="ONNX Runtime threads (default: one per core).")
    ] = None,
    embeddings: EmbeddingsOption = None,
    compare: Annotated[
        list[Path] | None, file_flag(metavar="RESULT.json", help="An earlier result of --json, to compare with.")
    ] = None,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Measure prefill times by length, and decode times by position and batch: medians in a table, or JSON (--json).

    If a RESULT.json is given instead of a model, its results are shown; nothing is measured.
    """
    options = {} if model.suffix == ".json" else planning.session_options(model)
    import msgspec

    from trt_kvcache.cli.output import console, human_bytes, json_text
    from trt_kvcache.files import check_output
    from trt_kvcache.runtime.measure import load_report

    if html is not None:
        check_output(html)
    ended = False
    earlier = [(path.name, load_report(path)) for path in compare or []]
    if model.suffix == ".json":
        results = [*earlier, (model.name, load_report(model))]
    else:
        opened = {"device": device, "check": check, "embeddings": embeddings, "max_batch": max_batch, **options}
        if threads is not None:
            from trt_kvcache.runtime.open import CpuOptions

            opened["cpu"] = CpuOptions(threads)
        measured, ended = _measure(model, measure, opened, rows=not (json or earlier))
        results = [*earlier, (measured.model, measured)]
    out = console()
    if not json and (earlier or model.suffix == ".json"):
        _print(results)
    if not json and len(results) == 1:
        out.print(f"\nprocess peak {human_bytes(results[0][1].peak_bytes)}")
    if json:
        out.print(json_text(msgspec.json.encode(results[-1][1]).decode()), soft_wrap=True)
    if html is not None:
        from trt_kvcache.cli.pages import bench_page, save_page

        save_page(html, bench_page(results))
    if ended:
        raise typer.Exit(130)
    if model.suffix != ".json":
        from trt_kvcache.cli.summary import tell_next

        tell_next(model, "serve", planning)


def _measure(model: Path, measure: MeasureFlags, options: dict[str, Any], *, rows: bool) -> tuple[BenchReport, bool]:
    """Measure a model; return the report, and True if Ctrl-C ended the run. `rows`: print each result at once."""
    from trt_kvcache.cli.output import console
    from trt_kvcache.cli.signals import Ended
    from trt_kvcache.progress import phase
    from trt_kvcache.runtime.measure import bench_session, default_sizes, report
    from trt_kvcache.runtime.session import DecodeSession

    lengths, positions = _numbers("lengths", measure.lengths), _numbers("positions", measure.positions)
    repeats, named = measure.repeats or _REPEATS, model.absolute().name
    timings: list[Timing] = []
    with bounded_on_cpu(model), DecodeSession.open(model, **options) as session:
        longest = min(session.cache.capacity or 4096, 4096)
        lengths = lengths or default_sizes(max(1, min(longest, 1024)))
        positions = positions or default_sizes(max(1, longest - measure.warmup - repeats))
        batches = _numbers("batches", measure.batches) or default_sizes(session.max_batch, 1, 2)
        cases = bench_session(
            session,
            lengths=lengths,
            positions=positions,
            batches=batches,
            repeats=repeats,
            warmup=measure.warmup,
            seconds=None if measure.repeats else _SECONDS,
        )
        try:
            with phase("timing: case", len(lengths) + len(positions) + sum(batch > 1 for batch in batches)) as done:
                for timing in cases:
                    if rows and not timings:
                        _print_head(report(session, named, [timing]))
                    timings.append(timing)
                    if rows:
                        console().print(_ROW.format(*timing.cells))
                    done()
        except KeyboardInterrupt as stop:
            if isinstance(stop, Ended) or not timings:
                raise
            return report(session, named, timings), True
        return report(session, named, timings), False


def _print_head(measured: BenchReport, called: str = "") -> None:
    from trt_kvcache.cli.output import console, human_bytes
    from trt_kvcache.runtime.measure import COLUMNS

    out, r = console(), measured
    out.print(f"{called}{r.title}; {r.runner}, {r.max_batch} rows, up to {r.max_chunk} tokens per step")
    if called:
        out.print(f"caches {human_bytes(r.cache_bytes)}, process peak {human_bytes(r.peak_bytes)}")
        return
    out.print(f"caches {human_bytes(r.cache_bytes)}\n")
    out.print(_ROW.format(*COLUMNS))
    out.print("─" * len(_ROW.format(*[""] * 6)))


def _print(results: Results) -> None:
    from trt_kvcache.cli.output import console, table

    if len(results) == 1:
        _print_head(results[0][1])
        for timing in results[0][1].timings:
            console().print(_ROW.format(*timing.cells))
        return
    for name, measured in results:
        _print_head(measured, f"{name}: ")
    rows = table("phase", "batch", "tokens", *(f"{name}\nmedian ms" for name, _ in results))
    times = [{(t.phase, t.batch, t.tokens): t.median_ms for t in r.timings} for _, r in results]
    for case in dict.fromkeys(case for medians in times for case in medians):
        first = times[0].get(case)
        rows.add_row(case[0], str(case[1]), str(case[2]), *(_beside(medians.get(case), first) for medians in times))
    console().print("", rows, sep="\n")


def _beside(median: float | None, first: float | None) -> str:
    if median is None:
        return "-"
    return f"{median:.2f}" if first in (None, median) else f"{median:.2f} ({median / first:.2f}x)"


def _numbers(name: str, text: str | None) -> list[int]:
    from trt_kvcache.errors import OptionError

    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise OptionError(f"--{name} is {text!r}; give numbers with commas between them, as in --{name} 16,64,256")
    return [int(part) for part in parts]
