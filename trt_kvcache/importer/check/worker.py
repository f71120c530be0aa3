"""The child process of the check: it runs parts of a foreign model, with limits on memory and time.

Run as ``python -m trt_kvcache.importer.check.worker BYTES``. Requests come from stdin and answers go to stdout, each as
a line of JSON; a request is followed by its models. Lines of news say how far it is, and an answer may be that a weight
is wanted, which is the next request. It ends with its stdin.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import msgspec
import onnx
from google.protobuf.message import Message

from trt_kvcache.child import NEWS, limit_memory
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer.check.process import Answer, Request
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.progress import ProgressEvent, listening

_Proto = TypeVar("_Proto", bound=Message)


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
        original, rewritten = (_parsed(stdin, size, onnx.ModelProto()) for size in request.sizes)
        weights = _Asked(stdin, answers)
        try:
            folder = Path(request.folder)
            verdicts_kept = open_verdicts(again=request.plan.options.recheck)
            with exact_experts(), listening(told), keeping(verdicts_kept):
                verdicts = check_models(original, rewritten, request.plan, weights, folder, thorough=request.thorough)
            answer = Answer(tuple(verdicts))
        except TrtKvCacheError as error:
            answer = Answer(refused=str(error))
        except MemoryError:
            answer = Answer(exhausted=True)
        except Exception:  # noqa: BLE001 - the caller raises it again, with this trace
            answer = Answer(bug=traceback.format_exc())
        answers.write(msgspec.json.encode(answer) + b"\n")


class _Asked(Mapping[str, onnx.TensorProto]):
    """The weights inside of the model, which the caller has: each is asked for when it is read, and not kept."""

    def __init__(self, stdin: BinaryIO, answers: BinaryIO) -> None:
        self._stdin, self._answers = stdin, answers

    def __getitem__(self, name: str) -> onnx.TensorProto:
        self._answers.write(msgspec.json.encode(Answer(wanted=name)) + b"\n")
        return _parsed(self._stdin, int(self._stdin.readline() or 0), onnx.TensorProto())

    def __iter__(self) -> NoReturn:
        raise TypeError("only the caller knows their names")

    __len__ = __iter__


def _parsed(stdin: BinaryIO, size: int, into: _Proto) -> _Proto:
    data = stdin.read(size)
    if len(data) < size:
        os._exit(1)  # the caller has ended
    into.ParseFromString(data)
    return into


if __name__ == "__main__":
    main()
