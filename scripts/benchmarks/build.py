"""Time and memory of `trt-kvcache build` against TensorRT's bare parser and builder, on one model, side by side.

The decoder has about 2 GB, and takes 7 GB of disk and 8 GB of memory. With `--small`, to try the benchmark, the ratios
mean little. All sides start a new Python, read the same model, use two optimization profiles of the same sizes, and
write the engine. `trt-kvcache build` also plans, rewrites and checks the model, hashes model and engine, and writes the
manifest; once without a proof, and once with the default proof (a recorded decode on the CPU). The engine of the bare
parser gives wrong tokens: the native parser drops the valid lengths and aligns the causal mask wrongly.

Time is from start to end of the process; memory is the largest sum of resident memory over the process tree, read every
50 ms (pages that parent and child share count twice). The table has medians and quartiles of the ratios of each turn,
and where the time goes: "planning" ends when TensorRT begins to parse; "finishing" begins when it has handed over the
engine. If the machine does other work too, processor times say more.
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
from functools import partial
from pathlib import Path
from typing import Any

from decoders import DecoderConfig, write_decoder

from benchmarks.report import Report, quartiles, spread

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
    "small": (False, "a decoder of a few megabytes"), "turns": (9, "turns, at most"),
    "minutes": (10, "no turn begins later"),
    "model": (Path, "a model of your own that the native parser takes"),
    "keep": (Path, "a folder: write the decoder there and keep it"), "max-batch": (4, "of all"),
    "max-chunk": (128, "of all"), **dict.fromkeys(("bare", "ours", "proven"), (Path, argparse.SUPPRESS)),
}  # fmt: skip
_INTERVAL = 0.05  # seconds between two looks at the memory, which cost a processor about 1 ms each
_MOST_BUSY = 0.2  # processors that other processes may use
_PAGE = os.sysconf("SC_PAGE_SIZE")
SIDES = {
    "ours": "trt-kvcache build --proof off", "proven": "trt-kvcache build", "bare": "bare parser, builder",
}  # fmt: skip
OURS = ("ours", "proven")


@dataclass(frozen=True)
class Sample:
    """One build: `seconds` of wall time; `cpu` seconds and `memory` bytes are those of the whole process tree.

    `engine` is the size of the engine in bytes. `stages` are seconds of each stage, in order; their sum is `seconds`.
    `others` is the number of processors that other processes used meanwhile.
    """

    seconds: float
    cpu: float
    memory: int
    engine: int
    stages: dict[str, float]
    others: float


class Stages:
    """The times at which each stage of a build began; printed as JSON at its end."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """Begin a stage, which ends the one before it."""
        self.begun.setdefault(name, time.time())

    def tell(self) -> None:
        """Print the stages, as the last line of the process's output."""
        sys.stdout.write("\n" + json.dumps(self.begun) + "\n")
        sys.stdout.flush()


def bare_build(model: Path, output: Path, max_batch: int, max_chunk: int) -> None:
    """Do the work of a short script: TensorRT's parser, two profiles, the builder, one file."""
    stages = Stages()
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    stages.begin("parsing")
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
    stages.begin("building")
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise SystemExit(f"the native builder refuses {model}")
    stages.begin("finishing")
    output.write_bytes(engine)
    stages.tell()


def our_build(model: Path, output: Path, max_batch: int, max_chunk: int, proof: str = "off") -> None:
    from trt_kvcache.__main__ import main
    from trt_kvcache.engine.build_process import STAGES
    from trt_kvcache.progress import listening

    stages, names = Stages(), {STAGES[1]: "parsing", STAGES[3]: "building"}

    def listen(event: Any) -> None:
        if event.phase in names and event.parent is None:
            stages.begin("finishing" if event.finished and event.phase == STAGES[3] else names[event.phase])

    sizes = ["--max-batch", str(max_batch), "--max-chunk", str(max_chunk)]
    sys.argv = ["trt-kvcache", "build", str(model), "-o", str(output), "--backend", "tensorrt-rtx", *sizes]
    sys.argv += ["--proof", proof]
    with listening(listen):
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
    stages.tell()


def measure(command: Sequence[str], output: Path) -> Sample:
    """Run one build in a new process, and remove what it has written."""
    os.sync()  # the pages of the last engine must not be written out during this build
    began, busy, start, start_cpu = time.time(), _busy(), time.perf_counter(), _cpu_of_children()
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
        said.seek(0)
        words = said.read().decode(errors="replace")
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{words}")
    size = output.stat().st_size
    for path in output.parent.glob(f"{output.name}*"):
        path.unlink()
    cpu = _cpu_of_children() - start_cpu
    begun = {"planning": began, **json.loads(words.splitlines()[-1]), "": began + seconds}
    stages = {name: end - at for (name, at), end in zip(begun.items(), [*begun.values()][1:], strict=False)}
    return Sample(seconds, cpu, peak, size, stages, max(0.0, _busy() - busy - cpu) / seconds)


def _busy() -> float:
    """Return the seconds that all processors were busy since the machine started; NaN if this is unknown."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return float("nan")
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from _tree(int(child))


def _resident(pid: int) -> int:
    """Return bytes of resident memory; 0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0


def compare(model: Path, most: int, minutes: float, sizes: Sequence[str]) -> list[dict[str, Sample]]:
    """Run turns for as long as there is time: one build of each side, each turn in the other order."""
    ends = time.perf_counter() + 60 * minutes
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        output = Path(folder) / "model.engine"
        bench = str(Path(__file__).resolve().parents[1] / "bench.py")
        common = ["--model", str(model), *sizes]
        commands = {side: [sys.executable, bench, "build", f"--{side}", str(output), *common] for side in SIDES}
        turns: list[dict[str, Sample]] = []
        longest = 0.0
        while len(turns) < most and (not turns or time.perf_counter() + longest < ends):
            began = time.perf_counter()
            order = [*SIDES][:: 1 if len(turns) % 2 else -1]
            turns.append({side: measure(commands[side], output) for side in order})
            longest = max(longest, time.perf_counter() - began)
        return turns


def run(given: argparse.Namespace, keep: Any) -> Report:
    builds = (given.bare, bare_build), (given.ours, our_build), (given.proven, partial(our_build, proof="auto"))
    for output, build in builds:
        if output is not None:
            build(given.model, output, given.max_batch, given.max_chunk)
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
        turns = compare(model, given.turns, given.minutes, sizes)
        weights = sum(p.stat().st_size for p in model.parent.glob(f"{model.name}*") if p.is_file())
    finally:
        if folder is not None and folder != given.keep:
            shutil.rmtree(folder)
    return report(turns, weights)


def report(turns: Sequence[dict[str, Sample]], weights: int) -> Report:
    kinds = {"seconds": "seconds", "cpu_seconds": "cpu", "peak_bytes": "memory"}
    numbers = {side: {kind: [getattr(t[side], name) for t in turns] for kind, name in kinds.items()} for side in SIDES}
    ratios = {
        side: {k: [a / b for a, b in zip(numbers[side][k], numbers["bare"][k], strict=True)] for k in kinds}
        for side in OURS
    }
    stages = {
        side: {name: statistics.median(t[side].stages[name] for t in turns) for name in turns[0][side].stages}
        for side in SIDES
    }
    rows = [
        [title, spread(numbers[side]["seconds"]), spread(numbers[side]["cpu_seconds"]),
         spread([b / 1e6 for b in numbers[side]["peak_bytes"]], 0), f"{turns[0][side].engine / 1e6:,.0f}"]
        for side, title in SIDES.items()
    ]  # fmt: skip
    for side in OURS:
        each = ratios[side].values()
        rows.append([f"{SIDES[side]}, over bare", *(spread(ratio, 3) for ratio in each), ""])
        rows.append(["  least and most", *(f"{min(ratio):.3f} to {max(ratio):.3f}" for ratio in each), ""])
    others = statistics.median(t[side].others for t in turns for side in SIDES)
    notes = [
        f"{title}: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages[side].items())
        for side, title in SIDES.items()
    ]
    if others > _MOST_BUSY:
        notes.append(f"others used {others:.1f} processors meanwhile: these times are no benchmark")
    return Report(
        [f"{weights / 1e9:.2f} GB of model, {len(turns)} turns: median (quartiles)"],
        ["", "seconds", "CPU s", "peak MB", "engine MB"], rows,
        {"model_bytes": weights,
         "ratios": {s: {k: statistics.median(v) for k, v in r.items()} for s, r in ratios.items()},
         "quartiles": {s: {k: quartiles(v) for k, v in r.items()} for s, r in ratios.items()}, "turn_ratios": ratios,
         **numbers, "stages": stages, "others": others},
        notes=notes,
    )  # fmt: skip
