"""Time and memory of `trt-kvcache build` against TensorRT's bare parser and builder, on one model, side by side.

    python scripts/bench_build.py                 # a decoder of about 2 GB; needs 7 GB of disk and 8 GB of memory
    python scripts/bench_build.py --small         # seconds, to try it out; the ratios mean little
    python scripts/bench_build.py --model m.onnx --max-batch 4 --max-chunk 128

Both sides start a new Python, read the same model with its weights in external data, use two optimization profiles
(prefill and decode) of the same sizes, and write the engine to a file. Ours also plans, rewrites and checks the model,
hashes it and the engine, waits until the engine is on disk, and writes the manifest. The bare side does none of that,
and its engine gives wrong tokens: the native parser drops the valid lengths and aligns the causal mask wrongly.

Runs alternate. Time is from start to end of the process; memory is the largest sum of resident memory over the whole
process tree, looked at every 10 ms (pages that parent and child share count twice). Medians are compared; where the
machine does other work too, look at the processor time. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
from pathlib import Path

from decoders import DecoderConfig, write_decoder

# 16 layers of width 2048 are 1.3 GB in fp16; the vocabulary brings the rest.
LARGE = DecoderConfig(
    layers=16, hidden=2048, query_heads=16, kv_heads=16, head_size=128, vocab=102_400, capacity=2048,
    dtype="float16", form="heads-major",
)  # fmt: skip
SMALL = DecoderConfig(
    layers=4, hidden=512, query_heads=8, kv_heads=8, head_size=64, vocab=1024, capacity=512,
    dtype="float16", form="heads-major",
)  # fmt: skip

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


def compare(model: Path, runs: int, max_batch: int, max_chunk: int) -> dict[str, list[Sample]]:
    """Alternate builds of both sides."""
    sizes = ["--max-batch", str(max_batch), "--max-chunk", str(max_chunk)]
    samples: dict[str, list[Sample]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        output = Path(folder) / "model.engine"
        commands = {
            "ours": ["-m", "trt_kvcache", "build", str(model), "-o", str(output), "--backend", "tensorrt-rtx", *sizes],
            "bare": [str(Path(__file__).resolve()), "--bare", str(output), "--model", str(model), *sizes],
        }
        for i in range(runs):
            # Who comes first changes, so that neither always finds what the other has left in the page cache.
            for side in ("ours", "bare") if i % 2 else ("bare", "ours"):
                samples[side].append(measure([sys.executable, *commands[side]], output))
                last = samples[side][-1]
                print(
                    f"  run {i + 1}: {side} {last.seconds:6.2f} s  {last.cpu:6.2f} CPU s  {last.memory / 1e6:8,.0f} MB",
                    file=sys.stderr,
                )
    return samples


def report(model: Path, samples: dict[str, list[Sample]]) -> None:
    """Print the table and the JSON line."""
    medians = {
        side: tuple(
            statistics.median(values) for values in zip(*((s.seconds, s.cpu, s.memory) for s in found), strict=True)
        )
        for side, found in samples.items()
    }
    time_ratio, cpu_ratio, memory_ratio = (a / b for a, b in zip(medians["ours"], medians["bare"], strict=True))
    ratios = {"time_ratio": time_ratio, "memory_ratio": memory_ratio, "cpu_ratio": cpu_ratio}
    weights = sum(p.stat().st_size for p in model.parent.glob(f"{model.name}*") if p.is_file())
    print(f"{weights / 1e9:.2f} GB of model, median of {len(samples['ours'])} runs each")
    print(f"{'':22}{'seconds':>9}{'CPU s':>9}{'peak MB':>10}{'engine MB':>11}")
    for side, title in (("ours", "trt-kvcache build"), ("bare", "bare parser, builder")):
        seconds, cpu, memory = medians[side]
        print(f"{title:22}{seconds:9.2f}{cpu:9.2f}{memory / 1e6:10,.0f}{samples[side][0].engine / 1e6:11,.0f}")
    print(f"{'ratio':22}{time_ratio:9.3f}{cpu_ratio:9.3f}{memory_ratio:10.3f}")
    print(
        json.dumps(
            {
                "benchmark": "build",
                "model_bytes": weights,
                **{name: round(value, 4) for name, value in ratios.items()},
                **{f"{side}_seconds": [round(s.seconds, 3) for s in found] for side, found in samples.items()},
                **{f"{side}_cpu_seconds": [round(s.cpu, 3) for s in found] for side, found in samples.items()},
                **{f"{side}_peak_bytes": [s.memory for s in found] for side, found in samples.items()},
            }
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a decoder of a few megabytes")
    parser.add_argument("--runs", type=int, default=3, help="builds of each side (default: 3)")
    parser.add_argument("--model", type=Path, help="a model of your own that the native parser takes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the decoder here and keep it")
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--max-chunk", type=int, default=128)
    parser.add_argument("--bare", type=Path, metavar="ENGINE", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.bare is not None:
        bare_build(given.model, given.bare, given.max_batch, given.max_chunk)
        return
    if given.runs < 1:
        parser.error("--runs must be at least 1")
    folder = None if given.model else given.keep or Path(tempfile.mkdtemp(prefix="bench-build-"))
    try:
        model = given.model
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            model = folder / "decoder.onnx"
            if not model.exists():
                write_decoder(model, SMALL if given.small else LARGE, 1024)
        report(model, compare(model, given.runs, given.max_batch, given.max_chunk))
    finally:
        if folder is not None and folder != given.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
