"""``trt-kvcache bench``: how fast an engine or a model decodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.generate import Device
from trt_kvcache.cli.options import (
    CapacityOption,
    EmbeddingsOption,
    JsonOption,
    LatentOption,
    LogitsOption,
    SlidingOption,
    WindowChunkOption,
    runner_options,
)
from trt_kvcache.importer.plan import LatentAttention, LogitPositions, Sliding

if TYPE_CHECKING:
    from trt_kvcache.runtime.bench import BenchReport

_COMMAS = "1,2,..."


def bench(
    model: Annotated[
        Path, typer.Argument(metavar="ENGINE|MODEL", help="An engine, or a model for the CPU.", readable=False)
    ],
    lengths: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Tokens of prompts to prefill.")] = None,
    positions: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Tokens in the cache while decoding.")] = None,
    batches: Annotated[str | None, typer.Option(metavar=_COMMAS, help="Sequences decoded together.")] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that count.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Steps before them.")] = 3,
    device: Annotated[Device, typer.Option(help="auto: what the file is for.")] = Device.AUTO,
    max_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows of the caches. Default: the engine's, else 8.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of ONNX Runtime; default: one per core.")
    ] = None,
    embeddings: EmbeddingsOption = None,
    capacity: CapacityOption = None,
    sliding: SlidingOption = Sliding.LINEAR,
    window_chunk: WindowChunkOption = None,
    latent_attention: LatentOption = LatentAttention.ABSORBED,
    logits: LogitsOption = LogitPositions.LAST,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw the times; needs matplotlib.", readable=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Time prefill by length, decode by position and by batch: medians, a table, one JSON line last."""
    import msgspec

    from trt_kvcache.cli.bench_plot import draw, load_pyplot
    from trt_kvcache.cli.output import console
    from trt_kvcache.runtime.bench import bench_session, default_sizes, report
    from trt_kvcache.runtime.session import DecodeSession

    pyplot = None if plot is None else load_pyplot(plot)
    options = runner_options(model, capacity, sliding, window_chunk, latent_attention, logits)
    sizes = [_numbers(name, text) for name, text in (("lengths", lengths), ("positions", positions))]
    with DecodeSession.open(
        model, device=device.value, embeddings=embeddings, max_batch=max_batch, threads=threads, **options
    ) as session:
        room = min(session.cache.capacity or 4096, 4096)
        measured = report(
            session,
            list(
                bench_session(
                    session,
                    lengths=sizes[0] or default_sizes(max(1, min(room, 1024))),
                    positions=sizes[1] or default_sizes(max(1, room - warmup - repeats)),
                    batches=_numbers("batches", batches) or default_sizes(session.max_batch, 1, 2),
                    repeats=repeats,
                    warmup=warmup,
                )
            ),
        )
    out = console()
    if not json:
        _print(measured)
    out.print(msgspec.json.encode(measured).decode(), soft_wrap=True)
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
