"""The fakes against the real bindings: a name that the real one lacks cannot be called in a test.

``tensorrt_rtx``, ``cuda.core`` and ``cuda.bindings`` import without a GPU or a driver. The bindings of TensorRT 10.15.1
and 11.4.0, looked into once, hold the same names but for the runtime cache, the graph strategy and
``get_engine_validity``, which the runner does not ask TensorRT for.
"""

from typing import Any

import cuda.core
import pytest
import tensorrt_rtx as trt
from cuda.bindings import driver
from runtime import fake_cuda, fake_launch, fake_tensorrt

from trt_kvcache.runtime.trt import cuda as ours

PAIRS = [
    (fake_tensorrt.RtxRuntime, trt.Runtime),
    (fake_tensorrt.RtxEngine, trt.ICudaEngine),
    (fake_tensorrt.Context, trt.IExecutionContext),
    (fake_tensorrt.RuntimeConfig, trt.IRuntimeConfig),
    (fake_tensorrt.RuntimeCache, trt.IRuntimeCache),
    (fake_tensorrt.Logger, trt.Logger),
    (fake_tensorrt.IErrorRecorder, trt.IErrorRecorder),
    (fake_cuda.Driver, driver),
    (fake_cuda.Device, cuda.core.Device),
    (fake_cuda.Stream, cuda.core.Stream),
    (fake_cuda.Buffer, cuda.core.Buffer),
    (fake_cuda.StridedMemoryView, cuda.core.utils.StridedMemoryView),
    (fake_launch.ObjectCode, cuda.core.ObjectCode),
    (fake_launch.LaunchConfig, cuda.core.LaunchConfig),
]


@pytest.mark.parametrize(("fake", "real"), PAIRS, ids=lambda c: c.__name__.split(".")[-1])
def test_fakes_have_no_names_of_their_own(fake: type, real: Any) -> None:
    names = fake_tensorrt.public_names(fake)
    assert names
    assert {name for name in names if not hasattr(real, name)} == set()


@pytest.mark.parametrize(
    ("fake", "real"),
    [
        (fake_tensorrt.AllocationStrategy, trt.ExecutionContextAllocationStrategy),
        (fake_tensorrt.GraphStrategy, trt.CudaGraphStrategy),
        (fake_tensorrt.Kernels, trt.DynamicShapesKernelSpecializationStrategy),
        (fake_tensorrt.Location, trt.TensorLocation),
        (fake_tensorrt.Invalidity, trt.EngineInvalidityDiagnostics),
    ],
    ids=lambda c: c.__name__,
)
def test_enumerations_have_the_same_values(fake: Any, real: Any) -> None:
    members = real.__members__
    assert {m.name: m.value for m in fake} == {m.name: int(members[m.name]) for m in fake}


def test_a_damaged_engine_is_refused_without_a_driver(capfd: pytest.CaptureFixture[str]) -> None:
    """The real `Runtime`, with our recorder, as far as they go here."""
    from trt_kvcache.engine.callbacks import make_recorder, native_logger
    from trt_kvcache.runtime.trt.load import _reasons

    recorder = make_recorder(trt)
    runtime = trt.Runtime(native_logger(trt))
    runtime.error_recorder = recorder
    for _ in range(2):
        assert runtime.deserialize_cuda_engine(b"no engine" * 100) is None
        assert "magicTag" in recorder.take()
        assert recorder.take() == "it gives no reason"
    assert _reasons(trt, runtime, b"no engine" * 100) == ("MALFORMED_ENGINE",)
    assert "magicTag" not in "".join(capfd.readouterr())  # it is in our message, not beside it
    runtime.error_recorder = None
    assert runtime.deserialize_cuda_engine(b"no engine" * 100) is None
    assert recorder.take() == "it gives no reason"


def test_all_runtimes_have_one_logger_for_good() -> None:
    """The reason for it: the first logger stays registered when its runtime is gone, and others are ignored."""
    from trt_kvcache.engine.callbacks import native_logger

    first, second = trt.Runtime(native_logger(trt)), trt.Runtime(native_logger(trt))
    assert first.logger is second.logger is native_logger(trt)

    class Late(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.words = ""

        def log(self, severity: Any, message: str) -> None:
            self.words += message

    late = Late()
    third = trt.Runtime(late)
    assert "the current new logger is ignored" in late.words
    del third, first


def test_without_a_driver_the_real_bindings_say_so() -> None:
    from trt_kvcache.engine.diagnosis import find_gpus
    from trt_kvcache.errors import BackendError

    if not find_gpus()[2]:
        pytest.skip("there is a driver here")
    with pytest.raises(BackendError, match=r"no driver works here: .*; install the NVIDIA driver, or run the model's"):
        ours.Cuda(0, ours.cuda_bindings())
