"""`kernel_device.KernelDevice` without a GPU: checks what is launched, and says that everything takes as long.

It shows that the kernel's benchmark runs to its end. Its numbers are made up.
"""

from collections.abc import Callable, Sequence
from typing import Any

from trt_kvcache.plugins.spec import KernelConfig, arguments

SECONDS = 1e-4


class FakeKernelDevice:
    """A stand-in for `kernel_device`, as the benchmark uses it."""

    def __init__(self, index: int = 0) -> None:
        self.name = "NVIDIA Fake 90"
        self._sizes: list[int] = []

    def allocate(self, size: int, fill: int = 0) -> int:
        self._sizes.append(size)
        return len(self._sizes) << 40

    def upload(self, tensor: Any, shift: int = 0) -> int:
        return self.allocate(tensor.nbytes)

    def empty_kernel(self) -> object:
        return object()

    def launch(self, kernel: object, grid: int, block: int, *given: int) -> None:
        assert grid > 0
        assert block > 0

    def launch_update(
        self, config: KernelConfig, grid: int, block: int, inputs: Sequence[int], scalars: Sequence[int],
        outputs: Sequence[int], *, cubin: bool | None = None,
    ) -> None:  # fmt: skip
        expected = arguments(config)
        given = (len(inputs), len(scalars), len(outputs))
        assert given == (len(expected.inputs), len(expected.scalars), len(expected.outputs))
        buffers = [*inputs[: 2 * config.caches], inputs[2 * config.caches]]
        assert len({*buffers}) == len(buffers)  # caches, updates, write indices; scales may be shared

    def copy(self, target: int, source: int, size: int) -> None:
        assert target != source
        assert size in self._sizes

    def seconds(self, work: Callable[[], None], repeat: int = 50) -> float:
        work()
        return SECONDS

    def free(self) -> None:
        self._sizes.clear()
