"""Verification: the original model against the rewritten one, over a multi-step decode on the CPU.

Functions load on first use: options and reports need no ONNX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trt_kvcache.verify.report import Divergence, OutputDifference, VerifyOptions, VerifyReport, VerifyStep

if TYPE_CHECKING:
    from trt_kvcache.verify.entry import verify_import, verify_quantized
    from trt_kvcache.verify.whole import verify_model

__all__ = [
    "Divergence",
    "OutputDifference",
    "VerifyOptions",
    "VerifyReport",
    "VerifyStep",
    "verify_import",
    "verify_model",
    "verify_quantized",
]


def __getattr__(name: str) -> object:
    """Load a function on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"trt_kvcache.verify.{'whole' if name == 'verify_model' else 'entry'}"), name)
