"""The process that records a proof: apart from the build, so that it ends in time, and its memory goes with it.

Run as ``python -m trt_kvcache.proof.worker`` by `trt_kvcache.engine.recording`: a pickled request on stdin, a pickled
answer on the original stdout.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from trt_kvcache.engine.recording import UNBOUND, Answer, Request
from trt_kvcache.errors import TrtKvCacheError


def main() -> None:
    """Answer one request, and end the process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    if sys.platform != "win32":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, not the build
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pickle.dump(_answer(request), answers)
    answers.flush()
    os._exit(0)


def _answer(request: Request) -> Answer:
    from trt_kvcache.proof.file import encode_proof
    from trt_kvcache.proof.record import record_proof
    from trt_kvcache.proof.schedule import Most

    try:
        most = Most(*request.most)
        proof = record_proof(request.imported, most, rows=request.rows, steps=request.steps)
        return Answer(encode_proof(proof, UNBOUND.decode()), proof.facts.note)
    except TrtKvCacheError as error:
        return Answer(b"", error.message, type(error).__name__)
    except Exception:  # noqa: BLE001 - the caller says it, with this trace
        return Answer(b"", traceback.format_exc(), "bug")


def _end_with_parent() -> None:
    """End when stdin closes, however the caller ends: as Ctrl-C does, so that temporary files are removed."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
