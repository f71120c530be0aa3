"""Runs only TensorRT's parser, in a child process, and compares the parsed network with the model.

The parser has its own process, because some models crash it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from trt_kvcache.child import Caller, Child, ChildError, serve
from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.differences import GARBAGE
from trt_kvcache.compare.network_comparison import NetworkComparison, compare_as_exported, compare_network
from trt_kvcache.engine.backend import PACKAGES, Backend, installed_version
from trt_kvcache.engine.builder import flipped_weights, import_tensorrt, parsed
from trt_kvcache.errors import BackendError, BuildError
from trt_kvcache.importer.cache_plan import CachePlan, Target
from trt_kvcache.importer.files.flipped import Flipped

if TYPE_CHECKING:
    from trt_kvcache.importer import ImportedModel


Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Request:
    """The request to parse a model and compare the network. The model's bytes and the steps' tokens follow.

    Attributes:
        model: absolute path of the source model.
        pieces: steps to decode; empty: a few default steps.
        garbage: the value of cache rows without a token.
        seed: seed of garbage, and of embeddings.
        copy: folder with the data of the model's float32 copy, which follows as bytes; empty: there is no copy yet.
    """

    target: Target
    title: str
    model: str
    plan: CachePlan
    flipped: tuple[Flipped, ...] = ()
    pieces: tuple[Piece, ...] = ()
    garbage: float = GARBAGE
    seed: int = 0
    as_exported: bool = False
    copy: str = ""


class Answer(msgspec.Struct):
    """The child's answer to a `Request`: the fields of a `NetworkComparison`."""

    steps: int
    difference: float | None
    finding: str
    note: str


def compare_parsed(
    imported: ImportedModel, pieces: Sequence[Piece] = (), tokens: Sequence[Array] = (), garbage: float = GARBAGE,
    seed: int = 0, copy: tuple[ModelProto, Path] | None = None,
) -> tuple[str, NetworkComparison]:  # fmt: skip
    """Parse a rewritten model with TensorRT, and compare the network with the model on a few steps.

    The plan names the target. `tokens` are those of each step, int64 ``[R, length]``, and `copy` is the float32 copy
    with its folder; for the other arguments, see `Request`. Returns the parser's name and version, and the result.
    Raises `BackendError` if the target's package is not installed, and `BuildError` with the parser's words if it
    refuses the model or crashes.
    """
    from trt_kvcache.importer.files.signed_weights import for_tensorrt
    from trt_kvcache.importer.protos import copied
    from trt_kvcache.importer.serialize import serialize_model

    model, path = copied(imported.model), imported.source.path
    backend = _backend(imported.plan.options.target)
    flipped = for_tensorrt(model, path.parent)
    wide, place = (serialize_model(copy[0]), str(copy[1])) if copy is not None and not flipped else (b"", "")
    request = Request(
        backend.target, backend.title, str(path), imported.plan, tuple(flipped), tuple(pieces), garbage, seed,
        copy=place,
    )  # fmt: skip
    flat = b"".join(np.ascontiguousarray(t, np.int64).tobytes() for t in tokens)
    return backend.title, _ask(request, [serialize_model(model), flat, wide])


def parse_as_exported(imported: ImportedModel) -> tuple[str, NetworkComparison]:
    """Let TensorRT parse a model as it was exported, and compare the network with the model."""
    backend = _backend(imported.plan.options.target)
    request = Request(backend.target, backend.title, str(imported.source.path), imported.plan, as_exported=True)
    return backend.title, _ask(request, [imported.source.path.read_bytes()])


def _backend(target: Target) -> Backend:
    version = installed_version(target)
    if version is None:
        package = PACKAGES[target]
        raise BackendError(f"{package.title} is not installed; run: pip install '{package.install}'")
    return Backend(target, version)


def _ask(request: Request, parts: list[bytes]) -> NetworkComparison:
    with tempfile.TemporaryFile() as stderr:
        child = Child("-m", "trt_kvcache.engine.parsing", stderr=stderr)
        try:
            child.send(request, parts)
            answer = child.answer(Answer)
        except ChildError as error:
            raise BuildError(f"the parser of {request.title} {error}") from None
        finally:
            child.end()
    difference = float("inf") if answer.difference is None else answer.difference
    return NetworkComparison(answer.steps, difference, answer.finding, answer.note)


def _parse(request: Request, parts: list[bytes], _: Caller) -> Answer:
    trt, folder = import_tensorrt(request.target), Path(request.model).parent
    weights = flipped_weights(folder, request.flipped)
    _builder, network, _parser = parsed(trt, trt.Logger(trt.Logger.INTERNAL_ERROR), request, parts[0], weights)
    if request.as_exported:
        result = compare_as_exported(network, trt, Path(request.model), request.plan)
    else:
        ends = np.cumsum([len(piece.rows) * piece.length for piece in request.pieces])[:-1]
        texts = np.split(np.frombuffer(parts[1], np.int64), ends) if parts[1] else ()
        texts = [ids.reshape(len(piece.rows), -1) for piece, ids in zip(request.pieces, texts, strict=False)]
        copy = (ModelProto.FromString(parts[2]), Path(request.copy)) if request.copy else None
        result = compare_network(
            network, trt, parts[0], folder, request.plan, weights, request.pieces, texts, request.garbage, request.seed,
            copy,
        )  # fmt: skip
    finite = result.difference if np.isfinite(result.difference) else None
    return Answer(result.steps, finite, result.finding, result.note)


if __name__ == "__main__":
    serve(_parse, Request)
