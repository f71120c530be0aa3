"""Prefill with logits of the last position, and with those of all, on ONNX Runtime: processor time and peak memory.

    python scripts/bench_logits.py

A decoder with a vocabulary of real size is run by the session's own runner, one chunk over empty caches, for logits of
the last position. Each side is a process of its own, so that its peak memory is its own. The share of the product with
the vocabulary in the arithmetic of a prefill depends on the geometry; it is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime as ort
from decoders import DecoderConfig, write_decoder

from trt_kvcache.importer.plan import LogitPositions, PlanOptions
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.runner import StepBatch

SIDES = tuple(side.value for side in LogitPositions)


def run_side(model: Path, side: str, tokens: int, turns: int) -> dict[str, Any]:
    """Processor seconds of each prefill, the peak memory of this process in them, and logits."""
    runner = OnnxRuntimeRunner(
        model, PlanOptions(logits=LogitPositions(side)), max_batch=1, max_chunk=tokens, threads=1
    )
    batch = StepBatch(0, np.arange(tokens)[None] % 97, np.zeros(1, np.int64))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of opening: forget it
    seconds = []
    for _ in range(turns):
        begin = time.process_time()
        logits = runner.step(batch)
        seconds.append(time.process_time() - begin)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) << 10
    return {"seconds": seconds, "peak": peak, "logits": logits[0, -1, :1000].tolist()}


def head_share(config: DecoderConfig) -> float:
    """The product with the vocabulary, as a share of all products with weights."""
    heads = config.hidden * config.head_size * 2 * (config.query_heads + config.kv_heads)
    layer = heads + 3 * 2 * config.hidden * config.hidden
    head = config.hidden * config.vocab
    return head / (head + config.layers * layer)


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="of the prefill")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(run_side(given.model, given.side, given.tokens, given.turns)))
        return
    config = DecoderConfig(
        layers=given.layers, hidden=given.hidden, query_heads=given.hidden // 64, kv_heads=given.hidden // 256 or 1,
        head_size=64, vocab=given.vocab, capacity=2 * given.tokens, form="heads-major",
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        model = write_decoder(Path(folder) / "model.onnx", config, external_threshold=1 << 20)
        asked = [sys.executable, __file__, "--model", str(model)]
        asked += ["--tokens", str(given.tokens), "--turns", str(given.turns)]
        sides = {
            side: json.loads(subprocess.run([*asked, "--side", side], check=True, stdout=subprocess.PIPE).stdout)
            for side in SIDES
        }
    medians = {side: statistics.median(found["seconds"]) for side, found in sides.items()}
    values = [np.array(found["logits"]) for found in sides.values()]
    difference = float(np.abs(values[0] - values[1]).max() / np.abs(values[1]).max())
    share = head_share(config)

    print(f"{given.layers} layers, hidden {given.hidden}, vocabulary {given.vocab}, prefill of {given.tokens} tokens")
    print(f"ONNX Runtime {ort.__version__}, 1 thread; the vocabulary has {share:.0%} of the arithmetic")
    print(f"{'logits':8}{'s (processor)':>16}{'peak MB':>10}")
    for side, found in sides.items():
        print(f"{side:8}{medians[side]:16.2f}{found['peak'] / 1e6:10.0f}")
    print(f"largest difference of the logits: {difference:.2g} of their scale")
    print(
        json.dumps(
            {
                "benchmark": "logits", "layers": given.layers, "hidden": given.hidden, "vocab": given.vocab,
                "tokens": given.tokens, "head_share": share, "seconds": medians,
                "peak_bytes": {side: found["peak"] for side, found in sides.items()},
                "difference": difference,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
