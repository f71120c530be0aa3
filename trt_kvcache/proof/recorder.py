"""The process that records a proof: apart from the build, so that it ends in time, and its memory goes with it.

Run as ``python -m trt_kvcache.proof.recorder`` by `trt_kvcache.engine.recording`, whose caller pickles the model.
"""

from __future__ import annotations

import os
import pickle
import signal

from trt_kvcache.child import Caller, serve
from trt_kvcache.engine.recording import UNBOUND, Answer, Request


def record(request: Request, parts: list[bytes], _: Caller) -> Answer:
    """Record a proof."""
    from trt_kvcache.proof.file import encode_proof
    from trt_kvcache.proof.record import record_proof
    from trt_kvcache.proof.schedule import Most

    signal.signal(signal.SIGINT, signal.default_int_handler)
    imported = pickle.loads(parts.pop())
    proof = record_proof(imported, Most(*request.most), rows=request.rows, steps=request.steps)
    return Answer(encode_proof(proof, UNBOUND.decode()), proof.facts.note)


if __name__ == "__main__":
    # When the caller ends: as Ctrl-C does, so that temporary files are removed.
    serve(record, Request, lambda: os.kill(os.getpid(), signal.SIGINT))
