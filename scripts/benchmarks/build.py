"""Time and memory of `trt-kvcache build` against TensorRT's bare parser and builder, on one model, side by side.

The decoder has about 2 GB, and takes 7 GB of disk and 8 GB of memory. With `--small` it is built in seconds, to try
the benchmark; the ratios mean little then.

Both sides start a new Python, read the same model with its weights in external data, use two optimization profiles
(prefill and decode) of the same sizes, and write the engine to a file. Ours also plans, rewrites and checks the model,
hashes it and the engine, waits until the engine is on disk, and writes the manifest. The bare side does none of that,
and its engine gives wrong tokens: the native parser drops the valid lengths and aligns the causal mask wrongly.

Time is from start to end of the process; memory is the largest sum of resident memory over the whole
process tree, looked at every 10 ms (pages that parent and child share count twice). Where the
machine does other work too, look at the processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from decoders import DecoderConfig, write_decoder

from benchmarks.report import Report, spread
from benchmarks.turns import interleave

# 16 layers of width 2048 are 1.3 GB in fp16; the vocabulary brings the rest.
LARGE = DecoderConfig(
    layers=16, hidden=2048, query_heads=16, kv_heads=16, head_size=128, vocab=102_400, capacity=2048,
    dtype="float16", form="heads-major",
)  # fmt: skip
SMALL = DecoderConfig(
    layers=4, hidden=512, query_heads=8, kv_heads=8, head_size=64, vocab=1024, capacity=512,
    dtype="float16", form="heads-major",
)  # fmt: skip

OPTIONS = {
    "small": (False, "a decoder of a few megabytes"), "turns": (3, "builds of each side"),
    "model": (Path, "a model of your own that the native parser takes"),
    "keep": (Path, "a folder: write the decoder there and keep it"), "max-batch": (4, "of both"),
    "max-chunk": (128, "of both"), "bare": (Path, argparse.SUPPRESS),
}  # fmt: skip
_INTERVAL = 0.01  # seconds between two looks at the memory
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """One build of one side.

    Attributes:
        seconds: wall time.
        cpu: processor time of the whole process tree, in seconds.
        memory: largest resident memory of the whole process tree, in bytes.
        engine: size of the engine in bytes.
    """

    seconds: float
    cpu: float
    memory: int
    engine: int


def bare_build(model: Path, output: Path, max_batch: int, max_chunk: int) -> None:
    """What a short script does: TensorRT's parser, two profiles, the builder, one file."""
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        raise SystemExit(f"the native parser refuses {model}: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    for chunk in (max_chunk, 1):
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            if -1 not in tuple(tensor.shape):
                continue
            largest = [
                size if size != -1 else max_batch if axis == 0 else chunk for axis, size in enumerate(tensor.shape)
            ]
            smallest = [1 if size == -1 else size for size in tensor.shape]
            profile.set_shape(tensor.name, smallest, largest, largest)
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise SystemExit(f"the native builder refuses {model}")
    output.write_bytes(engine)


def measure(command: Sequence[str], output: Path) -> Sample:
    """Run one build in a new process, and remove what it has written."""
    os.sync()  # the pages of the last engine must not be written out during this build
    start, start_cpu = time.perf_counter(), _cpu_of_children()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, sum(map(_resident, _tree(process.pid))))
                time.sleep(_INTERVAL)
            seconds = time.perf_counter() - start
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{said.read().decode(errors='replace')}")
    size = output.stat().st_size
    for path in output.parent.glob(f"{output.name}*"):
        path.unlink()
    return Sample(seconds, _cpu_of_children() - start_cpu, peak, size)


def _cpu_of_children() -> float:
    """Seconds of processor time of all finished children and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _tree(pid: int) -> Iterator[int]:
    """This process and all its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from _tree(int(child))


def _resident(pid: int) -> int:
    """Bytes of resident memory; 0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0


def compare(model: Path, turns: int, sizes: Sequence[str]) -> dict[str, list[Sample]]:
    """Builds of both sides, in turns."""
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        output = Path(folder) / "model.engine"
        bench = str(Path(__file__).resolve().parents[1] / "bench.py")
        commands = {
            "ours": ["-m", "trt_kvcache", "build", str(model), "-o", str(output), "--backend", "tensorrt-rtx", *sizes],
            "bare": [bench, "build", "--bare", str(output), "--model", str(model), *sizes],
        }
        ways = {side: partial(measure, [sys.executable, *command], output) for side, command in commands.items()}
        return interleave({side: lambda way=way: [way()] for side, way in ways.items()}, turns)


def run(given: argparse.Namespace, keep: Any) -> Report:
    """See the module."""
    if given.bare is not None:
        bare_build(given.model, given.bare, given.max_batch, given.max_chunk)
        raise SystemExit(0)
    folder = None if given.model else given.keep or Path(tempfile.mkdtemp(prefix="bench-build-"))
    try:
        model = given.model
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            model = folder / "decoder.onnx"
            if not model.exists():
                write_decoder(model, SMALL if given.small else LARGE, 1024)
        sizes = ["--max-batch", str(given.max_batch), "--max-chunk", str(given.max_chunk)]
        samples = compare(model, given.turns, sizes)
        weights = sum(p.stat().st_size for p in model.parent.glob(f"{model.name}*") if p.is_file())
    finally:
        if folder is not None and folder != given.keep:
            shutil.rmtree(folder)
    numbers = {
        side: {"seconds": [s.seconds for s in found], "cpu_seconds": [s.cpu for s in found],
               "peak_bytes": [s.memory for s in found]}
        for side, found in samples.items()
    }  # fmt: skip
    ratios = {
        kind: statistics.median(numbers["ours"][kind]) / statistics.median(numbers["bare"][kind])
        for kind in numbers["ours"]
    }
    rows = [
        [title, spread(numbers[side]["seconds"]), spread(numbers[side]["cpu_seconds"]),
         spread([b / 1e6 for b in numbers[side]["peak_bytes"]], 0), f"{samples[side][0].engine / 1e6:,.0f}"]
        for side, title in (("ours", "trt-kvcache build"), ("bare", "bare parser, builder"))
    ]  # fmt: skip
    rows.append(["ratio", *(f"{ratio:.3f}" for ratio in ratios.values()), ""])
    return Report(
        [f"{weights / 1e9:.2f} GB of model, {given.turns} builds of each: median (quartiles)"],
        ["", "seconds", "CPU s", "peak MB", "engine MB"], rows,
        {"model_bytes": weights, "ratios": ratios, **numbers},
    )  # fmt: skip
