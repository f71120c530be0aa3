"""Gives advice on mixtures of experts that TensorRT cannot build, and makes ONNX Runtime compute them exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

EXPERTS = (
    "export a mixture of experts with mobius-onnx, or with torch.onnx (dynamo) from transformers 5 after "
    'model.set_experts_implementation("batched_mm")'
)
"""Advice for messages. In exports of both, all sizes depend only on the number of tokens."""

ROUNDING = "ORT_QMOE_CPU_QNBIT_GEMM"
"""Environment variable that sets the type in which ONNX Runtime's QMoE kernel computes."""

_lock = Lock()
_before: list[str | None] = []
"""One entry for each caller inside `exact_experts`. The first entry is the original value of the variable."""


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
