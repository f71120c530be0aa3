"""The cache-update kernel on a GPU: bandwidth of large updates, time of one-token updates.

Bytes read and written per second are compared with a device-to-device copy of the same update (target: 85% of it), and
the time of a one-token update with a kernel that does nothing (target: 2 us more); also with torch's ``index_copy_``
and FlashInfer's append kernel. Kernels are PTX that the driver compiled, as in an engine, and beside them those of
NVRTC's own ptxas ("cubin"). Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import kernel_device
import numpy as np

from benchmarks.report import Report
from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import KernelConfig, Quantization, Shapes, launch_params

HEADS, SIZE = 8, 128
LARGE = (8, 8192, 4096)  # batch, capacity, tokens: 64 MiB for each of two float16 caches, more than any L2
ONE = (8, 8192, 1)
PACKED, CIRCULAR = UpdateForm.PACKED_NHD, UpdateMode.CIRCULAR

CUBIN = ", cubin"
OPTIONS: dict[str, Any] = {}

CONFIGS = {
    "float16": KernelConfig(16, caches=2),
    "float16 circular": KernelConfig(16, mode=CIRCULAR, caches=2),
    "float16 packed": KernelConfig(16, PACKED, caches=2, length_type="int32"),
    "float16 to int8": KernelConfig(8, caches=2, quantization=Quantization("float16", "int8")),
    "float16 to e4m3": KernelConfig(8, caches=2, quantization=Quantization("float16", "float8e4m3fn", True)),
}


@dataclass(frozen=True)
class Result:
    """Times of one kernel: microseconds of a large and a one-token update, compared with a copy and an empty kernel."""

    name: str
    large_us: float
    large_bytes: int
    copy_ratio: float
    one_token_us: float
    over_empty_us: float


def seconds(
    device: Any, config: KernelConfig, batch: int, capacity: int, tokens: int, *, cubin: bool
) -> tuple[float, int]:
    """Return the seconds of one update in place, and the bytes that it reads and writes."""
    q = config.quantization
    length = batch * tokens if config.form is PACKED else tokens
    launch = launch_params(config, Shapes(batch, HEADS, capacity, length, (SIZE,) * 2))
    elements = batch * HEADS * SIZE
    source = (q.source_bits if q else config.element_bits) // 8
    caches = [device.allocate(elements * capacity * config.element_bits // 8) for _ in range(2)]
    updates = [device.allocate(elements * tokens * source) for _ in range(2)]
    # A circular update goes across the end of the ring; a linear update ends before the capacity.
    start = capacity - tokens // 2 if config.mode is CIRCULAR else capacity // 2 - tokens // 2
    inputs = [*caches, *updates, device.upload(np.full(batch, start, np.int64))]
    if config.length_type is not None:
        inputs.append(device.upload(np.arange(batch + 1, dtype=np.int32) * tokens))
    if q is not None:
        inputs += [device.upload(np.ones(HEADS if q.per_head else 1, np.float32))] * 2
    taken = device.seconds(
        lambda: device.launch_update(config, launch.grid, launch.block, inputs, launch.scalars, caches, cubin=cubin)
    )
    device.free()
    return taken, 2 * elements * tokens * (source + config.element_bits // 8)


def compared(name: str, large: float, moved: int, one: float, copy_rate: float, nothing: float) -> Result:
    return Result(name, large * 1e6, moved, moved / large / copy_rate, one * 1e6, (one - nothing) * 1e6)


def failed(name: str, error: Exception) -> dict[str, Any]:
    return {"name": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def targets(kernels: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return if each target is met, with the kernel that is farthest from it, among kernels from PTX as in engines."""
    kernels = [k for k in kernels if not k["name"].endswith(CUBIN) and "error" not in k]
    if not kernels:
        return {}
    slow, late = min(kernels, key=lambda k: k["copy_ratio"]), max(kernels, key=lambda k: k["over_empty_us"])
    return {
        "85 % of a copy": ("met" if slow["copy_ratio"] >= 0.85 else "missed") + f" ({slow['name']})",
        "2 us over an empty kernel": ("met" if late["over_empty_us"] <= 2 else "missed") + f" ({late['name']})",
    }


Make = Callable[[Any, int, int, int], Callable[[], object]]
"""Function of torch, batch, capacity and tokens that returns one update of K and V."""


def index_copy(torch: Any, batch: int, capacity: int, tokens: int) -> Callable[[], object]:
    caches = [torch.zeros(batch, HEADS, capacity, SIZE, dtype=torch.float16, device="cuda") for _ in range(2)]
    updates = [torch.zeros(batch, HEADS, tokens, SIZE, dtype=torch.float16, device="cuda") for _ in range(2)]
    rows = torch.arange(tokens, device="cuda") + capacity // 4
    return lambda: [cache.index_copy_(2, rows, update) for cache, update in zip(caches, updates, strict=True)]


def flashinfer_append(torch: Any, batch: int, capacity: int, tokens: int) -> Callable[[], object]:
    """Return FlashInfer's append to a paged cache, pages of 16 tokens, K and V in one launch.

    Interface: https://docs.flashinfer.ai/generated/flashinfer.page.append_paged_kv_cache.html
    """
    import flashinfer

    page, first = 16, capacity // 4
    used = -(-(first + tokens) // page)

    def ints(values: Any) -> Any:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32, device="cuda")

    new = [torch.zeros(batch * tokens, HEADS, SIZE, dtype=torch.float16, device="cuda") for _ in range(2)]
    shape = (batch * capacity // page, page, HEADS, SIZE)
    cache = tuple(torch.zeros(*shape, dtype=torch.float16, device="cuda") for _ in range(2))
    rows = ints(np.repeat(np.arange(batch), tokens))
    positions = ints(np.tile(first + np.arange(tokens), batch))
    pages = ints((np.arange(batch)[:, None] * (capacity // page) + np.arange(used)).reshape(-1))
    starts, last = ints(np.arange(batch + 1) * used), ints([(first + tokens - 1) % page + 1] * batch)
    return lambda: flashinfer.append_paged_kv_cache(*new, rows, positions, cache, pages, starts, last, "NHD")


PEERS: dict[str, Make] = {"torch index_copy_": index_copy, "FlashInfer append": flashinfer_append}


def peer(name: str, make: Make, copy_rate: float, nothing: float) -> dict[str, Any]:
    """Time a peer beside our kernel, in the same way; or say why it is not timed."""
    try:
        import torch

        large, one = (torch_seconds(torch, make(torch, *sizes)) for sizes in (LARGE, ONE))
    except Exception as error:  # noqa: BLE001 - it is not here, or not for this GPU: one peer less
        return failed(name, error)
    moved = 4 * LARGE[0] * HEADS * LARGE[2] * SIZE * 2
    return asdict(compared(name, large, moved, one, copy_rate, nothing))


def torch_seconds(torch: Any, work: Callable[[], object], repeat: int = 50) -> float:
    """Return the median seconds of `work` on torch's stream, put there while the GPU is busy."""
    busy = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeat + 3):
        busy.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(times[3:]))


def run(given: argparse.Namespace, keep: Any) -> Report:
    device = kernel_device.KernelDevice()
    size = 2 * LARGE[0] * HEADS * LARGE[2] * SIZE * 2
    target, source, empty = device.allocate(size), device.allocate(size), device.empty_kernel()
    copy_rate = 2 * size / device.seconds(lambda: device.copy(target, source, size))
    nothing = device.seconds(lambda: device.launch(empty, 1, 32))
    device.free()
    result: dict[str, Any] = {
        "gpu": device.name, "copy_bytes_per_second": copy_rate, "empty_kernel_us": nothing * 1e6, "targets": {},
        "kernels": [], "peers": [],
    }  # fmt: skip

    def add(kind: str, row: dict[str, Any]) -> None:
        result[kind].append(row)
        result["targets"] = targets(result["kernels"])
        keep(result)

    for cubin, suffix in ((False, ""), (True, CUBIN)):
        for name, config in CONFIGS.items():
            try:
                large, moved = seconds(device, config, *LARGE, cubin=cubin)
                one, _ = seconds(device, config, *ONE, cubin=cubin)
            except Exception as error:  # noqa: BLE001 - as PTX that is too new for the driver: the others are measured
                add("kernels", failed(name + suffix, error))
                with suppress(RuntimeError):  # where the GPU is lost
                    device.free()
            else:
                add("kernels", asdict(compared(name + suffix, large, moved, one, copy_rate, nothing)))
    for name, make in PEERS.items():
        add("peers", peer(name, make, copy_rate, nothing))
    rows = [
        [x["name"], x["error"]] if "error" in x else
        [x["name"], f"{x['large_us']:.1f} us", f"{x['copy_ratio']:.0%}", f"{x['one_token_us']:.2f} us",
         f"{x['over_empty_us']:.2f} us"]
        for x in result["kernels"] + result["peers"]
    ]  # fmt: skip
    return Report(
        [f"{device.name}: copy {copy_rate / 1e9:.0f} GB/s (read and written), empty kernel {nothing * 1e6:.2f} us"],
        ["update of K and V", "4096 tokens", "of a copy", "1 token", "over empty"], rows, result,
        failed=any("error" in kernel for kernel in result["kernels"]),
    )  # fmt: skip
