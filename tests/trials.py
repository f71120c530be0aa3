"""Models at random, by hand and at any scale: what becomes of each, and how many there are of each outcome.

PYTHONPATH=.:tests:tests/corpus python tests/trials.py KIND --seeds 0:500 [--capacity 40] [MODEL.onnx ...]
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mutation_cuts
import mutation_trials
import onnx
import plain_judge
import spelling_judge
from concat_graphs import Decoder, make_decoder
from overflow_graphs import overflowing
from plain_graphs import plain_model
from scatter_graphs import scatter_plain
from spellings import spelled

from trt_kvcache.importer.cache_plan import PlanOptions

Trial = Callable[[int, Path, PlanOptions], tuple[str, str]]
pair = cache(mutation_cuts.Pair)


def masks(seed: int, source: Path, options: PlanOptions) -> tuple[str, str]:
    """Decoders whose masks overflow."""
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(make_decoder(overflowing(seed)), Path(folder) / "model.onnx")
        return mutation_trials.judge(Path(folder) / "model.onnx", options)


def mutants(seed: int, source: Path, options: PlanOptions) -> tuple[str, str]:
    """Models with a number, an operator or an attribute changed."""
    with tempfile.TemporaryDirectory() as folder:
        path, done = mutation_trials.mutant(source, Path(folder), seed)
        word, reason = mutation_trials.judge(path, options)
    return word, f"{done} | {reason}"


def _outcome(outcome: plain_judge.Outcome | spelling_judge.Outcome) -> tuple[str, str]:
    return outcome.kind, outcome.detail


KINDS: dict[str, Trial] = {
    "plain": lambda seed, *_: _outcome(plain_judge.judge(plain_model(seed))),
    "built": lambda seed, *_: _outcome(plain_judge.judge(plain_model(seed), build_too=True)),
    "scatter": lambda seed, *_: _outcome(plain_judge.judge(scatter_plain(seed))),
    "spellings": lambda seed, *_: _outcome(spelling_judge.judge(spelled(seed))),
    "masks": masks,
    "mutants": mutants,
    "cuts": lambda seed, source, options: mutation_cuts.trial(pair(source, options), seed),
    "miscuts": lambda seed, source, options: mutation_cuts.exposed(pair(source, options), seed),
}


def pattern(detail: str) -> str:
    """A message without names and numbers: for counting."""
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", re.sub(r"'[^']*'", "'..'", detail))[:110]


def main() -> None:
    """Prints a line for each outcome but "equal" and "refused", then the number of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("models", nargs="*", type=Path, help="to change; default: a small decoder")
    parser.add_argument("--seeds", default="0:20", help="FIRST:LAST")
    parser.add_argument("--capacity", type=int, default=mutation_cuts.CAPACITY, help="of caches that grow")
    given = parser.parse_intermixed_args()  # models after options, too
    table: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(make_decoder(Decoder(layers=2)), path)
        for source in given.models or [path]:
            for seed in range(*map(int, given.seeds.split(":"))):
                word, detail = KINDS[given.kind](seed, source, PlanOptions(capacity=given.capacity))
                table[f"{word:24} {pattern(detail) if word == 'refused' else ''}"] += 1
                if word not in ("equal", "refused"):
                    sys.stdout.write(f"{word}\t{source}\t{seed}\t{' '.join(detail.split())[:300]}\n")
                    sys.stdout.flush()
    sys.stdout.writelines(f"{count:5} {what}\n" for what, count in table.most_common())


if __name__ == "__main__":
    main()
