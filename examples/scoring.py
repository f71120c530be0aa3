"""Scores: how probable is each of several ways to go on? As in tests of multiple choice.

    python examples/scoring.py my-export/ "The capital of France is" " Paris" " London" " a cat"

The beginning is computed once. Each way is a fork of it: it shares the rows of the cache that are there already.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

from trt_kvcache import DecodeSession

__all__ = ["scores"]


def scores(session: DecodeSession, beginning: list[int], ways: list[list[int]]) -> list[float]:
    """Return the log-probability of each way, given the beginning: natural logarithms, all tokens together."""
    start = session.cache.acquire()
    (first,) = log_softmax(session.update({start: beginning})[start])  # after the last token of the beginning
    found = []
    for way in ways:
        total = float(first[way[0]])
        if len(way) > 1:
            fork = session.cache.fork(start)
            rows = log_softmax(session.update({fork: way[:-1]}, keep=len(way) - 1)[fork])
            total += float(sum(row[token] for row, token in zip(rows, way[1:], strict=True)))
            session.cache.release(fork)
        found.append(total)
    session.cache.release(start)
    return found


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("beginning")
    parser.add_argument("ways", nargs="+")
    given = parser.parse_args()
    with DecodeSession.open(given.model, max_batch=2) as session:
        tokenizer = session.tokenizer
        ways = [tokenizer.encode(way, special_tokens=False) for way in given.ways]
        found = scores(session, tokenizer.encode(given.beginning), ways)
    for total, way, tokens in sorted(zip(found, given.ways, ways, strict=True), reverse=True):
        print(f"{total:9.3f}  {total / len(tokens):9.3f} per token  {way!r}")


if __name__ == "__main__":
    main()
