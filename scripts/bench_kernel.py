"""The cache-update kernel on a GPU: bandwidth of large updates, time of one-token updates.

    python scripts/bench_kernel.py [--output FILE.json]

Side by side in one run: bytes read and written per second against a device-to-device copy of the same update (target:
85% of it), and the time of a one-token update against a kernel that does nothing (target: 2 us more); where torch is
installed also its ``index_copy_``. Prints a table, then one JSON line. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from kernel_device import KernelDevice

from trt_kvcache.importer.plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import KernelConfig, Quantization, Shapes, launch_params

HEADS, SIZE = 8, 128
LARGE = (8, 8192, 4096)  # batch, capacity, tokens: 64 MiB for each of two float16 caches, more than any L2
ONE = (8, 8192, 1)
PACKED, CIRCULAR = UpdateForm.PACKED_NHD, UpdateMode.CIRCULAR

CONFIGS = {
    "float16": KernelConfig(16, caches=2),
    "float16 circular": KernelConfig(16, mode=CIRCULAR, caches=2),
    "float16 packed": KernelConfig(16, PACKED, caches=2, length_type="int32"),
    "float16 to int8": KernelConfig(8, caches=2, quantization=Quantization("float16", "int8")),
    "float16 to e4m3": KernelConfig(8, caches=2, quantization=Quantization("float16", "float8e4m3fn", True)),
}


@dataclass(frozen=True)
class Result:
    """One kernel: microseconds for each update, and what a target compares them with."""

    name: str
    large_us: float
    large_bytes: int
    copy_ratio: float
    one_token_us: float
    over_empty_us: float


def seconds(device: KernelDevice, config: KernelConfig, batch: int, capacity: int, tokens: int) -> tuple[float, int]:
    """Time of one update in place, and the bytes that it reads and writes."""
    q = config.quantization
    length = batch * tokens if config.form is PACKED else tokens
    launch = launch_params(config, Shapes(batch, HEADS, capacity, length, (SIZE,) * 2))
    elements = batch * HEADS * SIZE
    source = (q.source_bits if q else config.element_bits) // 8
    caches = [device.allocate(elements * capacity * config.element_bits // 8) for _ in range(2)]
    updates = [device.allocate(elements * tokens * source) for _ in range(2)]
    # A circular update that wraps, a linear one that ends inside.
    start = capacity - tokens // 2 if config.mode is CIRCULAR else capacity // 2 - tokens // 2
    inputs = [*caches, *updates, device.upload(np.full(batch, start, np.int64))]
    if config.length_type is not None:
        inputs.append(device.upload(np.arange(batch + 1, dtype=np.int32) * tokens))
    if q is not None:
        inputs += [device.upload(np.ones(HEADS if q.per_head else 1, np.float32))] * 2
    taken = device.seconds(
        lambda: device.launch_update(config, launch.grid, launch.block, inputs, launch.scalars, caches)
    )
    device.free()
    return taken, 2 * elements * tokens * (source + config.element_bits // 8)


def measure(device: KernelDevice) -> tuple[float, float, list[Result]]:
    """Bytes per second of a copy, seconds of an empty kernel, and every kernel's result."""
    size = 2 * LARGE[0] * HEADS * LARGE[2] * SIZE * 2
    target, source, empty = device.allocate(size), device.allocate(size), device.empty_kernel()
    copy_rate = 2 * size / device.seconds(lambda: device.copy(target, source, size))
    nothing = device.seconds(lambda: device.launch(empty, 1, 32))
    device.free()
    results = []
    for name, config in CONFIGS.items():
        large, moved = seconds(device, config, *LARGE)
        one, _ = seconds(device, config, *ONE)
        ratio = moved / large / copy_rate
        results.append(Result(name, large * 1e6, moved, ratio, one * 1e6, (one - nothing) * 1e6))
    return copy_rate, nothing, results


def index_copy() -> float | None:
    """Microseconds of torch's ``index_copy_`` for the same large float16 updates, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    batch, capacity, tokens = LARGE
    caches = [torch.zeros(batch, HEADS, capacity, SIZE, dtype=torch.float16, device="cuda") for _ in range(2)]
    updates = [torch.zeros(batch, HEADS, tokens, SIZE, dtype=torch.float16, device="cuda") for _ in range(2)]
    rows = torch.arange(tokens, device="cuda") + capacity // 4
    times = []
    for _ in range(53):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for cache, update in zip(caches, updates, strict=True):
            cache.index_copy_(2, rows, update)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return float(np.median(times[3:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    device = KernelDevice()
    copy_rate, nothing, results = measure(device)
    torch_us = index_copy()
    print(f"{device.name}: copy {copy_rate / 1e9:.0f} GB/s (read and written), empty kernel {nothing * 1e6:.2f} us")
    print(f"{'update of K and V':20} {'4096 tokens':>12} {'of a copy':>10} {'1 token':>10} {'over empty':>11}")
    for x in results:
        print(
            f"{x.name:20} {x.large_us:9.1f} us {x.copy_ratio:10.0%} {x.one_token_us:7.2f} us {x.over_empty_us:8.2f} us"
        )
    if torch_us is not None:
        print(f"{'torch index_copy_':20} {torch_us:9.1f} us")
    line = json.dumps(
        {
            "gpu": device.name,
            "copy_bytes_per_second": copy_rate,
            "empty_kernel_us": nothing * 1e6,
            "torch_index_copy_us": torch_us,
            "kernels": [asdict(x) for x in results],
        }
    )
    if arguments.output is not None:
        arguments.output.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
