"""Runs one benchmark: prints a table, then one JSON line.

    python scripts/bench.py NAME [OPTIONS]
    python scripts/bench.py NAME --help

CPU:  build    `trt-kvcache build` against TensorRT's bare parser and builder: time and memory
      decode   tokens per second against bare loops and other programs: onnxruntime-genai, CTranslate2, ...
      draft    a model with a draft model (which guesses tokens) against the model alone
      host     the time that the host adds to a decode step
      idioms   models as exported against the same models rewritten
      logits   prefill with logits of the last position against logits of all positions
      lora     the cost of adapters: step time with and without
      quality  a trained model on a text: types, quantized caches and weights against transformers in float32
      serve    `trt-kvcache serve` against a bare session, by number of clients
      span     step time against capacity, with and without the attention span
      stall    time between tokens while the long prompt of another client comes in
GPU:  choice   tokens chosen on the GPU against the same on the host
      kernel   the cache-update kernel against a copy within the GPU

The compared programs take turns, so a machine that becomes slow slows all of them. Numbers are medians. The table or
the JSON line also has quartiles.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import onnxruntime as ort
from benchmarks.report import Report
from gpu_steps import write_json

NAMES = ("build", "decode", "draft", "host", "idioms", "logits", "lora", "quality", "serve", "span", "stall",
         "choice", "kernel")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name not in NAMES:
        raise SystemExit(__doc__)
    benchmark = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        f"bench.py {name}", description=benchmark.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for argument, words in getattr(benchmark, "ARGUMENTS", {}).items():
        parser.add_argument(argument, type=Path, help=words)
    for option, (default, words) in benchmark.OPTIONS.items():
        _add(parser, f"--{option}", default, words)
    parser.add_argument("--output", type=Path, help="write the JSON to this file, too, after every measurement")
    given = vars(parser.parse_args(rest))
    output = given.pop("output")

    def keep(data: dict[str, Any]) -> None:
        if output is not None:
            write_json(output, data)

    report: Report = benchmark.run(argparse.Namespace(**given), keep)
    settings = {key: value for key, value in given.items() if isinstance(value, int | list)}
    data = {"benchmark": name, "onnxruntime": ort.__version__, **settings, **report.data}
    keep(data)
    print(report.table())
    print(json.dumps(data))
    if report.failed:
        raise SystemExit(1)


def _add(parser: argparse.ArgumentParser, option: str, default: Any, words: str) -> None:
    """Add an option with the type of its default. If `default` is a class, it is the type; there is no default."""
    if isinstance(default, bool):
        parser.add_argument(option, action="store_true", help=words)
    elif isinstance(default, type):
        parser.add_argument(option, type=default, help=words)
    elif isinstance(default, list):
        parser.add_argument(option, type=int, nargs="+", default=default, help=f"{words} (default: {default})")
    else:
        parser.add_argument(option, type=type(default), default=default, help=f"{words} (default: {default})")


if __name__ == "__main__":
    main()
