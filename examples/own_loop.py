"""Runs an engine that ``trt-kvcache build`` made, without this package: greedy, one sequence.

    python examples/own_loop.py model.engine 1 2 3 --max-new-tokens 16

It is here to be read, by those who write such a loop in C++ or into a server: TensorRT's calls have the same names
there. All that it needs to know is in the manifest beside the engine. It takes decoders of text whose caches are linear
and updated in place, and nothing that `DecodeSession` does beyond that.
"""

from __future__ import annotations

import argparse
import importlib
import json
from math import prod
from pathlib import Path
from typing import Any

import cuda.core
import ml_dtypes  # noqa: F401  (bfloat16 for numpy.dtype)
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

__all__ = ["Engine", "generate"]

MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
KNOWN = {"tokens", "positions", "write_indices", "valid_lengths", "span", "cache", "logits"}
BUCKET = 256  # rows by which the span grows: the fewer shapes, the less TensorRT prepares


class Engine:
    """An engine, its buffers on the GPU, and how many tokens its caches hold."""

    def __init__(self, path: Path) -> None:
        self.manifest = json.loads(Path(f"{path}.json").read_text())
        plan = self.manifest["plan"]
        self.tensors = {t["name"]: t for t in plan["tensors"]}
        self.capacity = min(cache["capacity"] for cache in plan["caches"])
        self.length = 0
        unknown = sorted({t["role"] for t in self.tensors.values()} - KNOWN)
        if unknown or self.manifest["double_buffered"] or any(c["mode"] != "linear" for c in plan["caches"]):
            raise SystemExit(f"{path}: this loop knows linear caches, in place, and no inputs of {unknown}")

        try:
            device = cuda.core.Device(0)
            device.set_current()
            self.stream = device.create_stream()
        except RuntimeError as error:
            raise SystemExit(f"no GPU: {error}") from error
        trt = importlib.import_module(MODULES[self.manifest["backend"]])
        self.runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise SystemExit(f"{path}: TensorRT {trt.__version__} does not open it; what it says is above")
        # Engines for TensorRT for RTX are built to allocate nothing by themselves, and take no other strategy.
        self.context = self.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        told(self.context is not None, "a context")
        size = max(self.engine.device_memory_size_v2, 1)
        self.context.set_device_memory(int(check(driver.cuMemAlloc(size))), size)
        self.profile = ""
        self._bind()

    def _bind(self) -> None:
        """Give every tensor an address, once: they stay when shapes and profiles change. Spans hold 0, 1, 2, ..."""
        aliases = self.manifest["aliases"]  # present -> past: one buffer
        chunk, kept = self.manifest["max_chunk"], self.manifest["max_logits"]
        largest = {"batch": 1, "sequence": chunk, "tokens": chunk, "kept": kept, "span": self.capacity}
        stream = int(self.stream.handle)
        self.addresses: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            if name not in aliases:
                dtype = numpy_dtype(tensor)
                size = prod(shape_of(tensor, largest)) * dtype.itemsize
                self.addresses[name] = int(check(driver.cuMemAlloc(size)))
                # Attention multiplies masked rows with 0: rows without tokens must not be NaN.
                check(driver.cuMemsetD8Async(self.addresses[name], 0, size, stream))
                if tensor["role"] == "span":
                    rows = np.arange(size // dtype.itemsize, dtype=dtype)
                    check(driver.cuMemcpyHtoDAsync(self.addresses[name], rows.ctypes.data, size, stream))
                    self.stream.sync()
        self.addresses |= {present: self.addresses[past] for present, past in aliases.items()}
        for name, address in self.addresses.items():
            told(self.context.set_tensor_address(name, address), name)

    def step(self, tokens: list[int]) -> int:
        """Put tokens after those in the caches; return the likeliest next one."""
        past, self.length = self.length, self.length + len(tokens)
        if self.length > self.capacity:  # TensorRT would drop the write, and say nothing
            raise SystemExit(f"{self.length} tokens do not fit into caches of {self.capacity}")
        stream = int(self.stream.handle)
        name = "decode" if len(tokens) == 1 else "prefill"
        if name != self.profile:
            index = [profile["name"] for profile in self.manifest["profiles"]].index(name)
            told(self.context.set_optimization_profile_async(index, stream), f"profile {name}")
            self.profile = name
        # The shape of a span says how many cache rows attention reads, or of how many positions logits come.
        rows = min(self.capacity, -(-self.length // BUCKET) * BUCKET)
        sizes = {"batch": 1, "sequence": len(tokens), "tokens": len(tokens), "kept": 1, "span": rows}
        values = {
            "tokens": tokens,
            "positions": range(past, self.length),
            "write_indices": [past],
            "valid_lengths": [self.length],
        }
        kept = []  # host memory must stay until the copies are done
        for name, tensor in self.tensors.items():
            if tensor["io"] == "input":
                shape = shape_of(tensor, sizes)
                told(self.context.set_input_shape(name, shape), f"{name} {shape}")
                if tensor["role"] in values:
                    kept.append(np.array(values[tensor["role"]], numpy_dtype(tensor)).reshape(shape))
                    check(driver.cuMemcpyHtoDAsync(self.addresses[name], kept[-1].ctypes.data, kept[-1].nbytes, stream))
        told(self.context.execute_async_v3(stream), "the step")
        return int(self._logits(stream).argmax())

    def _logits(self, stream: int) -> npt.NDArray[Any]:
        """Of the last position, once the step is done."""
        (tensor,) = (t for t in self.tensors.values() if t["role"] == "logits")
        shape = tuple(self.context.get_tensor_shape(tensor["name"]))
        logits = np.empty(shape, numpy_dtype(tensor))
        check(driver.cuMemcpyDtoHAsync(logits.ctypes.data, self.addresses[tensor["name"]], logits.nbytes, stream))
        self.stream.sync()
        last: npt.NDArray[Any] = logits.reshape(-1, shape[-1])[-1]
        return last


def generate(path: Path, prompt: list[int], count: int) -> list[int]:
    """Continue a prompt by `count` tokens: the prompt in chunks, then token by token."""
    engine = Engine(path)
    chunk = engine.manifest["max_chunk"]
    for start in range(0, len(prompt), chunk):
        token = engine.step(prompt[start : start + chunk])
    tokens = [token]
    while len(tokens) < count:
        tokens.append(engine.step(tokens[-1:]))
    return tokens


def shape_of(tensor: dict[str, Any], sizes: dict[str, int]) -> tuple[int, ...]:
    """Sizes that the engine leaves open have a meaning, which the manifest calls an axis."""
    axes = zip(tensor["shape"], tensor["axes"], strict=True)
    return tuple(size if isinstance(size, int) else sizes[axis] for size, axis in axes)


def numpy_dtype(tensor: dict[str, Any]) -> np.dtype[Any]:
    """The manifest has ONNX' names, in which float is float32 and double float64."""
    return np.dtype({"float": "float32", "double": "float64"}.get(tensor["dtype"], tensor["dtype"]))


def check(result: tuple[Any, ...]) -> Any:
    """The result of a call of the driver, once its status is known to be success."""
    status, *values = result
    if int(status):
        raise SystemExit(f"CUDA says {status.name}")
    return values[0] if values else None


def told(well: bool, what: str) -> None:
    """TensorRT says no by returning False; why is in its log."""
    if not well:
        raise SystemExit(f"TensorRT refuses {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run an engine without trt_kvcache: greedy, one sequence.")
    parser.add_argument("engine", type=Path)
    parser.add_argument("prompt", type=int, nargs="+", help="token ids")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    print(*generate(arguments.engine, arguments.prompt, arguments.max_new_tokens))


if __name__ == "__main__":
    main()
