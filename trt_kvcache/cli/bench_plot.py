"""The picture of ``trt-kvcache bench``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from trt_kvcache.errors import OptionError, OutputError
from trt_kvcache.files import check_output
from trt_kvcache.runtime.bench import BenchReport, Timing


def load_pyplot(path: Path) -> Any:
    """Matplotlib, which only this needs, for a picture at `path`; asked for before anything is measured.

    Raises:
        OptionError: it is not installed, or knows no such pictures.
        OutputError: nothing can be written there.
    """
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
