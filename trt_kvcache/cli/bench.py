"""``trt-kvcache bench``: how fast an engine or a model decodes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.options import (
    Check,
    CheckOption,
    Device,
    DeviceOption,
    EmbeddingsOption,
    JsonOption,
    RunnableArgument,
    SessionPlanFlags,
    bounded_on_cpu,
    run_flag,
)

if TYPE_CHECKING:
    from trt_kvcache.runtime.bench import BenchReport, Timing

_COMMAS = "1,2,..."


@dataclass(frozen=True)
class MeasureFlags:
    """Flags that choose the measurements."""

    lengths: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Tokens of prompts to prefill.")] = None
    positions: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Tokens in the cache while decoding.")] = None
    batches: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Sequences decoded together.")] = None
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Measured steps.")] = 20
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Steps before the measured ones.")] = 3


def bench(
    model: RunnableArgument,
    measure: MeasureFlags,
    planning: SessionPlanFlags,
    device: DeviceOption = Device.AUTO,
    check: CheckOption = Check.FIRST,
    max_batch: Annotated[
        int | None, run_flag(min=1, metavar="N", help="Rows of the caches. Default: the engine's, else 8.")
    ] = None,
    threads: Annotated[
        int | None, run_flag(min=1, metavar="N", help="ONNX Runtime threads (default: one per core).")
    ] = None,
    embeddings: EmbeddingsOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw the times; needs matplotlib.", readable=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Time prefill by length, decode by position and by batch: medians, a table, one JSON line last."""
    options = planning.session_options(model)
    import msgspec

    from trt_kvcache.cli.output import console, json_text
    from trt_kvcache.runtime.bench import bench_session, default_sizes, report
    from trt_kvcache.runtime.session import DecodeSession

    pyplot = None if plot is None else load_pyplot(plot)
    lengths, positions = _numbers("lengths", measure.lengths), _numbers("positions", measure.positions)
    with (
        bounded_on_cpu(model),
        DecodeSession.open(
            model,
            device=device.value,
            check=check.value,
            embeddings=embeddings,
            max_batch=max_batch,
            threads=threads,
            **options,
        ) as session,
    ):
        room = min(session.cache.capacity or 4096, 4096)
        timings = bench_session(
            session,
            lengths=lengths or default_sizes(max(1, min(room, 1024))),
            positions=positions or default_sizes(max(1, room - measure.warmup - measure.repeats)),
            batches=_numbers("batches", measure.batches) or default_sizes(session.max_batch, 1, 2),
            repeats=measure.repeats,
            warmup=measure.warmup,
        )
        measured = report(session, list(timings))
    out = console()
    if not json:
        _print(measured)
    out.print(json_text(msgspec.json.encode(measured).decode()), soft_wrap=True)
    if plot is not None:
        draw(pyplot, measured, plot)


def _print(measured: BenchReport) -> None:
    from trt_kvcache.cli.output import console, human_bytes, table

    out = console()
    capacity = "circular" if measured.capacity is None else f"capacity {measured.capacity}"
    out.print(f"{measured.runner}, {capacity}, {measured.max_batch} rows, up to {measured.max_chunk} tokens per step")
    out.print(f"caches {human_bytes(measured.cache_bytes)}, process peak {human_bytes(measured.peak_bytes)}\n")
    rows = table("phase", "batch", "tokens", "median ms", "quartiles", "tokens/s")
    for t in measured.timings:
        spread = f"{t.low_ms:.2f} to {t.high_ms:.2f}"
        cells = (t.phase, str(t.batch), str(t.tokens), f"{t.median_ms:.2f}", spread, f"{t.tokens_per_second:.1f}")
        rows.add_row(*cells)
    out.print(rows)


def _numbers(name: str, text: str | None) -> list[int]:
    from trt_kvcache.errors import OptionError

    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise OptionError(f"--{name} is {text!r}; give numbers with commas between them, as in --{name} 16,64,256")
    return [int(part) for part in parts]


def load_pyplot(path: Path) -> Any:
    """Return Matplotlib's pyplot for a picture at `path`, before anything is measured.

    Raises:
        OptionError: Matplotlib is not installed, or does not write files with this ending.
        OutputError: no file can be written there.
    """
    from trt_kvcache.errors import OptionError
    from trt_kvcache.files import check_output

    try:
        import_module("matplotlib").use("agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        raise OptionError("--plot needs matplotlib: pip install matplotlib; or leave --plot out") from None
    check_output(path)
    kinds = import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise OptionError(f"--plot {path}: no picture has this ending; supported are {', '.join(kinds)}")
    return pyplot


def draw(pyplot: Any, measured: BenchReport, path: Path) -> None:
    """Three panels: prefill by length, decode by position, tokens per second by batch.

    Raises:
        OutputError: the file cannot be written.
    """
    from trt_kvcache.errors import OutputError

    prefill = [t for t in measured.timings if t.phase == "prefill"]
    decode = [t for t in measured.timings if t.phase == "decode"]
    alone = [t for t in decode if t.batch == 1]
    together = [t for t in decode if t.tokens == decode[0].tokens]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    _panel(axes[0], "prefill", "tokens of the prompt", prefill, [t.tokens for t in prefill])
    _panel(axes[1], "decode", "tokens in the cache", alone, [t.tokens for t in alone])
    axes[2].plot([t.batch for t in together], [t.tokens_per_second for t in together], marker="o")
    axes[2].set(title="decode", xlabel="sequences per step", ylabel="tokens/s", ylim=(0, None))
    figure.suptitle(measured.runner)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _panel(axis: Any, title: str, label: str, timings: list[Timing], sizes: list[int]) -> None:
    """Medians, with quartiles as bars."""
    medians = [t.median_ms for t in timings]
    bars = [[t.median_ms - t.low_ms for t in timings], [t.high_ms - t.median_ms for t in timings]]
    axis.errorbar(sizes, medians, bars, marker="o", capsize=3)
    axis.set(title=title, xlabel=label, ylabel="ms", ylim=(0, None))
