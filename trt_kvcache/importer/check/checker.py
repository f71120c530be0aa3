"""The child process of the check: it runs parts of a foreign model, with limits on memory and time.

Run as ``python -m trt_kvcache.importer.check.checker``. Two models follow each request. The process sends progress
events as news. It asks the caller for weights that are stored inside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import onnx

from trt_kvcache.child import Caller, serve
from trt_kvcache.importer.check.models import check_models
from trt_kvcache.importer.check.process import Request, Verdict
from trt_kvcache.importer.check.verdicts import keeping, open_verdicts
from trt_kvcache.importer.planning.experts import exact_experts
from trt_kvcache.progress import listening


def check(request: Request, parts: list[bytes], caller: Caller) -> tuple[Verdict, ...]:
    """Compare two models."""
    original, rewritten = (onnx.ModelProto.FromString(parts.pop(0)) for _ in range(2))
    verdicts = open_verdicts(again=request.plan.options.recheck)
    with exact_experts(), listening(caller.tell), keeping(verdicts):
        weights, folder = _Asked(caller), Path(request.folder)
        return tuple(check_models(original, rewritten, request.plan, weights, folder, thorough=request.thorough))


class _Asked(Mapping[str, onnx.TensorProto]):
    """The weights inside the model. The caller has them, and each read asks the caller again."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __getitem__(self, name: str) -> onnx.TensorProto:
        tensor = onnx.TensorProto()
        tensor.ParseFromString(self._caller.ask(name))
        return tensor

    def __iter__(self) -> NoReturn:
        raise TypeError("only the caller knows their names")

    __len__ = __iter__


if __name__ == "__main__":
    serve(check, Request)
