"""The cache-update kernel on a GPU against numpy, byte for byte: the cases that the host build passes, too.

Loaded as engines carry it: PTX, compiled by the driver; as a cubin where the driver is older than NVRTC. Nobody has run
these tests on a GPU yet. For memory errors:
``compute-sanitizer python -m pytest -m gpu tests/gpu/test_kernel.py``.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from kernel_cases import GARBAGE, Case, all_kernels, make_case, varied
from kernel_device import KernelDevice

from trt_kvcache.plugins.spec import KernelConfig

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    opened = KernelDevice()
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    opened.load(call.params["config"] for call in calls if call and "config" in call.params)  # of what runs
    yield opened
    opened.free()


def run(device: KernelDevice, case: Case) -> list[bytes]:
    launch = case.launch
    inputs = [device.upload(x, shift) for x, shift in zip(launch.inputs, launch.shifts, strict=True)]
    outputs = [
        inputs[alias] if alias >= 0 else device.allocate(size + launch.output_shift, GARBAGE) + launch.output_shift
        for size, alias in zip(launch.output_sizes, launch.aliases, strict=True)
    ]
    device.launch_update(launch.config, launch.grid, launch.block, inputs, launch.scalars, outputs)
    written = [device.download(x, size).tobytes() for x, size in zip(outputs, launch.output_sizes, strict=True)]
    device.free()
    return written


@pytest.mark.parametrize("config", list(all_kernels()), ids=lambda config: config.name)
def test_the_kernel_equals_the_reference(device: KernelDevice, config: KernelConfig) -> None:
    assert device.kernel(config).attributes.local_size_bytes == 0, "the driver's compiler spills"
    rng = np.random.default_rng(3)
    for _ in range(15):
        case = make_case(rng, varied(rng, config))
        for i, (output, expected) in enumerate(zip(run(device, case), case.expected, strict=True)):
            assert output == expected, f"output {i}: {case.about}"
