"""Mixtures of experts: what to do where tokens decide sizes, and how ONNX Runtime's own operator computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

EXPERTS = (
    "export a mixture of experts with mobius-onnx, or with torch.onnx (dynamo) from transformers 5 after "
    'model.set_experts_implementation("batched_mm")'
)
"""Both compute all sizes from the number of tokens alone."""

ROUNDING = "ORT_QMOE_CPU_QNBIT_GEMM"
"""From the environment, how ONNX Runtime's kernel of QMoE computes."""

_lock = Lock()
_before: list[str | None] = []
"""The value in the environment before the first caller in `exact_experts`, and an entry for each other one."""


@contextmanager
def exact_experts() -> Iterator[None]:
    """Lets ONNX Runtime's kernel of QMoE compute with activations of float32, in sessions that open meanwhile.

    With 8 bits in blocks, ONNX Runtime 1.31.1 rounds activations to 8 bits whatever the node says, and with 4 where its
    ``accuracy_level`` says so; what it reads from the environment decides over both.
    """
    with _lock:
        _before.append(os.environ.get(ROUNDING) if not _before else None)
        os.environ[ROUNDING] = "fp32"
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:  # others still open theirs
                del os.environ[ROUNDING]
                if before is not None:
                    os.environ[ROUNDING] = before
