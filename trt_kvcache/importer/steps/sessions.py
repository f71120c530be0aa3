"""Runs models on the CPU: in ONNX Runtime without optimizations, or, if that fails, in ONNX's reference evaluator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

import numpy as np
import onnx

from trt_kvcache.cpu import RunError, UnfusedSession, one_line
from trt_kvcache.importer.protos import Array

_REFERENCE_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip

ROUNDING = "ORT_QMOE_CPU_QNBIT_GEMM"
"""Environment variable that sets the type in which ONNX Runtime's QMoE kernel computes."""

_lock = Lock()
_before: list[str | None] = []
"""One entry for each caller inside `exact_experts`. The first entry is the original value of the variable."""


class ModelSession(Protocol):
    """A loaded model that can run on the CPU; `backend` is the name of the library that runs the model."""

    backend: str

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model; return its outputs by name. Raises `RunError` if the model does not run."""
        ...


class ReferenceSession:
    """ONNX's reference evaluator (https://onnx.ai/onnx/api/reference.html): slow, but correct by definition."""

    backend = f"ONNX reference evaluator {onnx.__version__}"

    def __init__(self, model: onnx.ModelProto) -> None:
        # Imported only here: the import loads every operator of ONNX, and few models need it.
        from onnx.reference import ReferenceEvaluator

        self._kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
        try:
            self._evaluator = ReferenceEvaluator(model)
        except _REFERENCE_ERRORS as error:
            raise RunError(one_line(error)) from None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model; return a map from output names to values."""
        dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in self._kinds.items()}
        try:
            with np.errstate(all="ignore"):  # numbers that are not finite must not cause warnings
                values = self._evaluator.run(None, {n: np.asarray(feeds[n], dtype) for n, dtype in dtypes.items()})
        except _REFERENCE_ERRORS as error:
            raise RunError(one_line(error)) from None
        return dict(zip(self._evaluator.output_names, values, strict=True))


def open_session(
    model: onnx.ModelProto, trial: Mapping[str, Array] | None, *, beside: ModelSession | None = None
) -> ModelSession:
    """Load a model in ONNX Runtime, or, if this fails, in ONNX's reference evaluator, and run `trial` if given.

    If `model` is a rewritten one, pass the original's session as `beside`. If ONNX Runtime runs the original, it must
    also run `model`, because the reference evaluator would accept mixed types, negative sizes and too many indices. If
    ONNX Runtime cannot run the original, ONNX's shape inference must accept `model`. Raises `RunError` with ONNX
    Runtime's message if no session can run the model.
    """
    session: UnfusedSession | None = None
    try:
        session = UnfusedSession(model)
        if trial:
            session.run(trial)
    except RunError as error:
        if not trial or (session is not None and isinstance(beside, UnfusedSession)):
            raise
        try:
            if beside is not None:
                onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
            evaluator = ReferenceSession(model)
            evaluator.run(trial)
        except (RunError, onnx.shape_inference.InferenceError, ValueError):  # ValueError: an unknown type
            raise error from None
        return evaluator
    return session


@contextmanager
def exact_experts() -> Iterator[None]:
    """Within the ``with`` block, open sessions in which ONNX Runtime's QMoE keeps activations in float32.

    Otherwise ONNX Runtime 1.31.1 rounds activations to 8 bits: always if blocks of weights have 8 bits; with 4 bits,
    only if the node's ``accuracy_level`` requests it. An environment variable overrides this.
    """
    with _lock:
        _before.append(os.environ.get(ROUNDING) if not _before else None)
        os.environ[ROUNDING] = "fp32"
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:  # no other caller is inside this context
                del os.environ[ROUNDING]
                if before is not None:
                    os.environ[ROUNDING] = before
