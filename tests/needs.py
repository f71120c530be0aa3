"""What some tests need and others do not."""

from __future__ import annotations

import onnxruntime
import pytest

from trt_kvcache.errors import BackendError
from trt_kvcache.plugins.compile import nvrtc_version


def _no_nvrtc() -> str:
    try:
        nvrtc_version()
    except BackendError as error:
        return str(error)
    return ""


ORT_VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
"""Of ONNX Runtime: major and minor."""

needs_nvrtc = pytest.mark.skipif(bool(_no_nvrtc()), reason=_no_nvrtc())
