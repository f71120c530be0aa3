"""Decoders whose masks overflow, of `overflow_graphs`: each is refused, or equal.

By hand: ``PYTHONPATH=tests:tests/corpus:. python tests/mutation_masks.py --seeds 0:500``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import onnx
from concat_graphs import make_decoder
from mutation_trials import judge
from overflow_graphs import overflowing

from trt_kvcache.importer.plan import PlanOptions

CAPACITY = 24


def trial(seed: int) -> tuple[str, str]:
    """A word for what becomes of a seed's decoder, and its reason; see `mutation_trials.judge`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(make_decoder(overflowing(seed)), path)
        return judge(path, PlanOptions(capacity=CAPACITY))


def main() -> None:
    """Draws decoders and prints one line for each, and the number of each word."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0:20", help="FIRST:LAST")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    words: Counter[str] = Counter()
    for seed in range(first, last):
        word, reason = trial(seed)
        words[word] += 1
        sys.stdout.write("\t".join((word, str(seed), " | ".join(reason.splitlines()[-4:]))) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(words)}\n")


if __name__ == "__main__":
    main()
