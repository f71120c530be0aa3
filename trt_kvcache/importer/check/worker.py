"""The child process of the check: it runs parts of a foreign model, with limits on memory and time.

Run as ``python -m trt_kvcache.importer.check.worker BYTES``. Requests come from stdin and answers go to stdout, each as
a line of JSON; a request is followed by its models. Lines of news say how far it is. It ends with its stdin.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec
import onnx

from trt_kvcache.child import NEWS, limit_memory
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer.check.process import Answer, Request
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.progress import ProgressEvent, listening


def main() -> None:
    """Answers requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the caller ends this process
    limit_memory(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print there
    # Loaded while the caller still plans.
    from trt_kvcache.importer.check.models import check_models
    from trt_kvcache.importer.check.verdicts import keeping, open_verdicts

    def told(event: ProgressEvent) -> None:
        answers.write(NEWS + msgspec.json.encode(event) + b"\n")

    stdin = sys.stdin.buffer
    while line := stdin.readline():
        request = msgspec.json.decode(line, type=Request)
        original, rewritten, held = (_model(stdin, size) for size in request.sizes)
        weights = {t.name: t for t in held.graph.initializer}
        try:
            folder = Path(request.folder)
            verdicts_kept = open_verdicts(again=request.plan.options.recheck)
            with exact_experts(), listening(told), keeping(verdicts_kept):
                verdicts = check_models(original, rewritten, request.plan, weights, folder, thorough=request.thorough)
            answer = Answer(tuple(verdicts))
        except TrtKvCacheError as error:
            answer = Answer((), str(error))
        except MemoryError:
            answer = Answer((), exhausted=True)
        except Exception:  # noqa: BLE001 - the caller raises it again, with this trace
            answer = Answer((), bug=traceback.format_exc())
        answers.write(msgspec.json.encode(answer) + b"\n")


def _model(stdin: BinaryIO, size: int) -> onnx.ModelProto:
    data = stdin.read(size)
    if len(data) < size:
        os._exit(1)  # the caller has ended
    model = onnx.ModelProto()
    model.ParseFromString(data)
    return model


if __name__ == "__main__":
    main()
