"""The steps of `scripts/gpu_check` on the GPU at hand, in processes of their own: questions, and measurements.

    python scripts/gpu_steps.py answers --backend tensorrt-rtx --output answers.json --folder F [--engine M.engine ...]
    python scripts/gpu_steps.py measure --backend tensorrt-rtx --output measured.json --capacity 8192 [--small]

``answers`` asks one backend questions that only a GPU can answer. The file is written again after every answer::

    {"answers": {QUESTION: {...}}, "engines": [{"engine": NAME, ...}], "asking": what is being asked; "" at the end}

If it is started again, it continues with the next question. If engines for all GPUs do not run here, but an engine that
was built for this GPU does, the later questions are about engines for this GPU.

``measure`` builds a decoder of 0.1 billion float16 parameters with caches of one capacity, and measures medians: decode
latency by position, with and without CUDA graphs; prefill latency by length; tokens per second by batch; decode with
the weights of prefill against weights of its own; and bytes that a decode step must read per second, against a copy
within the GPU (its reads and writes both counted).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from decoders import DecoderConfig, weights, write_decoder

from trt_kvcache.engine import engine_build
from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.callbacks import make_recorder, native_logger
from trt_kvcache.engine.manifest import load_manifest
from trt_kvcache.errors import SessionError, TrtKvCacheError
from trt_kvcache.importer.cache_plan import cache_bytes
from trt_kvcache.runtime.encoders.constants import Constants
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt import trt_runner
from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

LARGE = DecoderConfig(
    layers=8, hidden=1024, query_heads=16, kv_heads=4, head_size=64, vocab=32_000, dtype="float16", positions=32_768
)
SMALL = DecoderConfig(layers=2, hidden=64, vocab=256, dtype="float16", positions=4096)
BUILT_FOR = "TRT_KVCACHE_GPU_BUILT_FOR"
"""Environment variable: what engines are built for, as ``trt-kvcache build --compute-capabilities`` takes it."""


def built_for() -> dict[str, Any]:
    names = os.environ.get(BUILT_FOR, "")
    return {"compute_capabilities": tuple(names.split(","))} if names else {}


def opened(engine: Path, **arguments: Any) -> closing[TensorRTRunner]:
    return closing(TensorRTRunner(engine, **arguments))


def write_json(path: Path, content: object) -> None:
    """Replace a file as a whole, so that no reader ever sees half of it. NaN, which JSON lacks, becomes a word."""
    temporary = path.with_name(path.name + ".part")
    content = json.loads(json.dumps(content), parse_constant=str)
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def measure(name: str, capacity: int, *, small: bool, output: Path) -> dict[str, Any]:
    """Measure everything at one capacity; write the results to `output` as they come."""
    repeats, settle = (5, 0.0) if small else (30, 2.0)
    result: dict[str, Any] = {"decode": [], "prefill": [], "batches": [], "weights": []}

    def keep(kind: str, row: dict[str, Any]) -> None:
        result[kind].append({"capacity": capacity} | row)
        write_json(output, result)

    config = dataclasses.replace(SMALL if small else LARGE, capacity=capacity)
    # All but the embedding, of which a step reads one row per sequence.
    read = sum(2 * prod(shape) for name, shape, *_ in weights(config) if name != "embed.weight")
    with tempfile.TemporaryDirectory() as folder:
        model = write_decoder(Path(folder) / "model.onnx", config, external_threshold=None if small else 1 << 16)
        engine = Path(folder) / "model.engine"
        chunk = min(512, capacity // 2)
        engine_build.build_engine(
            model, engine, build=BuildOptions(backend=name, max_batch=8, max_chunk=chunk, **built_for())
        )
        start = time.perf_counter()
        with opened(engine) as runner:
            took = time.perf_counter() - start
            result["copy_gb_per_s"] = _copy_speed(runner, 1 << 24 if small else 1 << 30)
            for position in sorted({16, capacity // 4, capacity // 2, capacity - repeats - 16}):
                keep("decode", {"position": position, "open_s": took} | decode(runner, 1, position, repeats, read))
            for length in sorted({1, chunk // 8, chunk // 2, chunk}):
                keep("prefill", {"length": length} | _prefill(runner, length, repeats, settle))
            for rows in (1, 2, 4, 8):
                best = decode(runner, rows, capacity // 4, repeats, read, best=True)["ms"]
                keep("batches", {"batch": rows, "ms_best": best} | decode(runner, rows, capacity // 4, repeats, read))
        with opened(engine, cuda_graphs=False) as runner:
            plain = decode(runner, 1, capacity // 2, repeats, read, settle)
            keep("decode", {"position": capacity // 2, "cuda_graphs": False} | plain)
        for kind in ("shared", "own"):
            options = BuildOptions(backend=name, max_batch=1, max_chunk=chunk, decode_weights=kind, **built_for())
            engine_build.build_engine(model, engine, build=options)
            with opened(engine) as runner:
                size = {"decode_weights": kind, "engine_bytes": engine.stat().st_size}
                keep("weights", size | decode(runner, 1, capacity // 2, repeats, read))
    return result


def decode(
    runner: TensorRTRunner, rows: int, position: int, repeats: int, read: int, settle: float = 0, *, best: bool = False
) -> dict[str, Any]:
    """Measure decode steps from `position` on; the caches' content does not matter for the time.

    `read`: bytes that a step reads besides the caches. With `best`, the host gets only the best tokens, not all logits.
    """
    ids = np.ones((rows, 1), np.int64)
    steps = iter(range(position, position + repeats + 8))

    def step() -> None:
        runner.step(StepBatch(0, ids, np.full(rows, next(steps), np.int64), highest=int(best)))

    slowest = max(_times(step, 6))
    seconds, spread = _median(step, repeats, 0, settle)
    batch = StepBatch(0, ids, np.full(rows, position, np.int64))
    sizes = runner.inputs.span_sizes(batch)
    spans = max((sizes[span.name] for span in runner.plan.spans), default=0)
    for cache in runner.plan.caches:
        read += rows * cache_bytes(cache, 1) * min(spans or cache.capacity, cache.capacity) // cache.capacity
    recorded = runner.graphs  # it is empty after a failure
    graphs = "off" if recorded is None else recorded.failure or ("on" if len(recorded) else "nothing was recorded")
    return {
        "ms": seconds * 1e3,
        "spread_ms": spread * 1e3,
        "ms_at_first": slowest * 1e3,
        "tokens_per_s": rows / seconds,
        "span": spans,
        "gb_per_s": read / seconds / 1e9,
        "graphs": graphs,
    }


def _prefill(runner: TensorRTRunner, length: int, repeats: int, settle: float) -> dict[str, Any]:
    batch = StepBatch(0, np.ones((1, length), np.int64), np.zeros(1, np.int64))
    at_once, _ = _median(lambda: runner.step(batch), 5, warm_up=1)
    seconds, spread = _median(lambda: runner.step(batch), repeats, 2, settle)
    return {
        "ms_at_once": at_once * 1e3,
        "ms": seconds * 1e3,
        "spread_ms": spread * 1e3,
        "tokens_per_s": length / seconds,
    }


def _copy_speed(runner: TensorRTRunner, most: int) -> float:
    """Return GB/s of a copy within the GPU, reads and writes counted."""
    cuda = runner._cuda  # the runner's own stream and allocations
    free, _ = cuda.free_memory()
    size = min(most, free // 4)
    source, target = cuda.allocate(size), cuda.allocate(size)

    def copy() -> None:
        cuda.copy_rows(target, source, size, size, 1)
        cuda.sync()

    seconds, _ = _median(copy, 10, warm_up=3)
    return 2 * size / seconds / 1e9


def _median(work: Callable[[], object], repeats: int, warm_up: int, settle: float = 0) -> tuple[float, float]:
    """Return median and spread (90th less 10th percentile) of the seconds that `work` takes.

    After the warm-up, wait `settle` seconds: in this time, TensorRT for RTX compiles kernels for new shapes, and runs
    other kernels until they are ready. Contexts that record graphs wait by themselves.
    """
    for _ in range(warm_up):
        work()
    if settle:
        time.sleep(settle)
        work()
    times = _times(work, repeats)
    low, *_, high = statistics.quantiles(times, n=10)
    return statistics.median(times), high - low


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


# Questions.

BATCH, HEADS, KEYS, SIZE = 2, 4, 64, 64
LENGTHS = (5, 33)
"""Valid keys of each row in the questions about IAttention."""
HERE = "here.engine"
"""Name of the engine that was built for this GPU alone."""
Answer = dict[str, Any]


ENGINE = "engine "
"""Prefix of the name of an engine, in the name of a question about this engine."""

AGAIN = 75
"""Exit code that asks for a new process for the remaining questions: after a fault of the GPU, a process cannot use
the GPU again."""


def _first_step(runner: TensorRTRunner, rows: int, length: int) -> StepBatch:
    """Return the first tokens of a text, of any decoder: zeros as embeddings, ones as an encoder's output."""
    tokens, constants = np.ones((rows, length), np.int64), ()
    if runner.inputs.constants.tensors:
        largest = runner._shapes._largest_constants().arrays
        constants = (Constants({name: np.ones(a.shape, a.dtype) for name, a in largest.items()}),) * rows
    embeds = runner.inputs.no_embeds(tokens)
    return StepBatch(0, tokens, np.zeros(rows, np.int64), constants=constants, embeds=embeds)


def builds(engine: Path, name: str) -> Answer:
    """Ask: does a build for all GPUs, or those asked for, succeed here?"""
    model = write_decoder(engine.with_suffix(".onnx"), SMALL)
    chosen = BuildOptions(backend=name, max_batch=3, max_chunk=16, **built_for())
    return {"yes": bool(engine_build.build_engine(model, engine, build=chosen))}


def runs(engine: Path, name: str) -> Answer:
    """Ask: does an engine that was built for all GPUs open and run here? A refusal is quoted."""
    start = time.perf_counter()
    with opened(engine) as runner:
        took = time.perf_counter() - start
        logits = runner.step(_first_step(runner, min(2, runner.max_batch), min(4, runner.max_chunk)))
        found: Answer = {"yes": bool(np.isfinite(logits).all()), "where": runner.name, "open_s": took}
        return found if found["yes"] else found | {"error": "its logits are not all finite", "unexpected": True}


def runs_if_built_here(engine: Path, name: str) -> Answer:
    """Ask: does an engine that was built for this GPU alone open and run here?"""
    here = engine.with_name(HERE)
    chosen = BuildOptions(backend=name, max_batch=3, max_chunk=16, compute_capabilities=("current",))
    model = shutil.copy(engine.with_suffix(".onnx"), here.with_suffix(".onnx"))
    engine_build.build_engine(model, here, build=chosen)
    return runs(here, name)


def graphs(engine: Path, name: str) -> Answer:
    """Ask: do decode steps become CUDA graphs? TensorRT for RTX records by itself and only says whether it could."""
    with opened(engine) as runner:
        assert runner.graphs is not None
        for position in range(6):
            runner.step(StepBatch(0, np.ones((2, 1), np.int64), np.full(2, position, np.int64)))
        contexts = [step.context._context for step in runner.graphs._recorded.values()]
        could = not runner.resources.trt.rtx or all(c.is_stream_capturable(runner._cuda.stream) for c in contexts)
        return {"yes": len(runner.graphs) == 1 and could, "failure": runner.graphs.failure, "contexts": len(contexts)}


def chooses(engine: Path, name: str) -> Answer:
    """Ask: is the kernel that chooses greedy tokens available and right, so that sessions use it?"""
    with opened(engine) as runner:
        return {"yes": not runner.host_choice, "why": runner.host_choice}


def aliases(engine: Path, name: str) -> Answer:
    """Ask: does the engine report the aliases of the plan, and do past and present share an address?"""
    with opened(engine) as runner:
        runner.step(_first_step(runner, 1, 1))
        planned = load_manifest(engine).aliases
        reported = {present: runner.resources.trt.engine.get_aliased_input_tensor(present) for present in planned}
        used = [c._context for c in runner.resources.contexts if c._context.get_tensor_address(next(iter(planned)))]
        one = all(c.get_tensor_address(a) == c.get_tensor_address(b) for c in used for a, b in planned.items())
        return {"yes": reported == planned and one, "reported": reported, "contexts": len(used)}


def unused_rows(fill: float) -> Callable[[Path, str], Answer]:
    """Ask: with `fill` in every unused row, are the logits the same as with zeros there?"""

    def answer(engine: Path, name: str) -> Answer:
        with opened(engine) as clean, opened(engine) as dirty:
            for cache in dirty.plan.caches:
                row = dirty.read_row(cache.past, 0, cache.capacity)
                for i in range(dirty.max_batch):
                    dirty.write_row(cache.past, i, np.full_like(row, fill))
            rng, lengths, worst, finite, same = np.random.default_rng(0), np.zeros(2, np.int64), 0.0, True, True
            for length in (7, 1, 1, 4, 1):
                batch = StepBatch(0, rng.integers(0, clean.vocab, (2, length)), lengths.copy(), length)
                expected, actual = clean.step(batch).copy(), dirty.step(batch).copy()
                finite &= bool(np.isfinite(actual).all())
                same &= bool((actual == expected).all())
                worst = max(worst, _difference(actual, expected))
                lengths += length
        return {"yes": finite and worst <= 2e-2, "same_bits": same, "finite": finite, "difference": worst}

    return answer


def writes_out_of_range(engine: Path, name: str) -> Answer:
    """Ask: is a linear write that ends beyond the capacity dropped, with nothing else touched?"""
    with opened(engine) as runner:
        cache = runner.plan.caches[0]
        runner.step(StepBatch(0, np.full((2, 4), 3), np.zeros(2, np.int64)))
        before = [runner.read_row(cache.past, i, cache.capacity).copy() for i in range(2)]
        runner.step(StepBatch(0, np.full((2, 4), 5), np.array([0, cache.capacity - 2])))
        after = [runner.read_row(cache.past, i, cache.capacity) for i in range(2)]
        return {
            "yes": bool((before[1] == after[1]).all()),
            "other_sequence_written": bool((before[0] != after[0]).any()),
        }


def attention(how: str, dtype: str) -> Callable[[Path, str], Answer]:
    """Ask: is a single IAttention right? Its valid keys are given as a bool mask, or as ``key_value_lengths``."""

    def answer(engine: Path, name: str) -> Answer:
        import ml_dtypes

        kind = np.dtype(np.float16) if dtype == "float16" else np.dtype(ml_dtypes.bfloat16)
        trt = trt_runner.load_tensorrt(name)
        plan = _attention_engine(trt, name, how, dtype)
        rng, found = np.random.default_rng(1), {}
        q = rng.standard_normal((BATCH, HEADS, 1, SIZE)).astype(kind)
        k, v = (rng.standard_normal((BATCH, HEADS, KEYS, SIZE)).astype(kind) for _ in range(2))
        valid = np.arange(KEYS) < np.array(LENGTHS)[:, None]
        given = valid[:, None, None, :] if how == "mask" else np.array(LENGTHS, np.int32)
        expected, everything = _reference(q, k, v, valid), _reference(q, k, v, np.ones_like(valid))
        for fill in (0.0, 1e4, float("nan")):
            filled = [np.where(valid[:, None, :, None], x, np.asarray(fill, kind)) for x in (k, v)]
            y = _execute(trt, plan, {"q": q, "k": filled[0], "v": filled[1], how: given}, "y", q.shape, kind)
            finite = bool(np.isfinite(y).all())
            found[f"rows_of_{fill:g}"] = {"difference": _difference(y, expected), "finite": finite}
        y = _execute(trt, plan, {"q": q, "k": k, "v": v, how: given}, "y", q.shape, kind)
        found["rows_of_another_sequence"] = {"difference": _difference(y, expected)}
        right = [x["difference"] <= 2e-2 for x in found.values()]
        reads_all = _difference(y, everything) <= 2e-2
        return {"yes": all(right), "attends_to_unused_rows": reads_all, **found}

    return answer


FIRST: dict[str, Callable[[Path, str], Answer]] = {"builds": builds, "runs": runs}
"""The first questions. If one is answered with no, the other answers say little."""

HERE_ONLY: dict[str, Callable[[Path, str], Answer]] = {"runs_if_built_here": runs_if_built_here}
"""Asked next if engines for all GPUs do not run, otherwise last: it needs another build. Only for TensorRT for RTX."""

QUESTIONS: dict[str, Callable[[Path, str], Answer]] = {
    "aliases": aliases,
    "garbage_in_unused_rows_is_not_seen": unused_rows(1e4),
    "nan_in_unused_rows_is_not_seen": unused_rows(float("nan")),
    "writes_out_of_range_are_dropped": writes_out_of_range,
    "decode_steps_become_cuda_graphs": graphs,
    "attention_mask_float16": attention("mask", "float16"),
    "attention_mask_bfloat16": attention("mask", "bfloat16"),
    "attention_lengths_float16": attention("lengths", "float16"),
    "attention_lengths_bfloat16": attention("lengths", "bfloat16"),
    "greedy_tokens_are_chosen_on_the_gpu": chooses,
}
"""The most telling questions first, because time may end before all are asked."""


def foreign(path: Path, name: str) -> Answer | None:
    """Ask: does an engine that was built elsewhere open here, with the aliases of its manifest, and run?"""
    manifest = load_manifest(path)
    if manifest.backend != name:
        return None
    said = {"built_for": list(manifest.compute_capabilities), "built_with": manifest.backend_version}
    return said | _asked(_runs_in_place, path, name)


def _runs_in_place(engine: Path, name: str) -> Answer:
    return runs(engine, name) | {"aliases": aliases(engine, name)["yes"]}


def limit(question: str) -> float:
    """Return the seconds for a question: more if TensorRT is loaded, times kernels, or compiles a whole engine."""
    return 100.0 if question in (FIRST | HERE_ONLY) or question.startswith(ENGINE) else 45.0


def runs_only_if_built_here(answers: Mapping[str, Any]) -> bool:
    """Return True if engines for all GPUs are refused here, and one for this GPU alone is not."""
    return "error" in answers.get("runs", {}) and bool(answers.get("runs_if_built_here", {}).get("yes"))


def ask_all(folder: Path, name: str, output: Path, engines: Sequence[Path]) -> None:
    result: Answer = json.loads(output.read_text())
    answers: Answer = result["answers"]

    def keep(asking: str) -> None:
        write_json(output, result | {"asking": asking})

    def end_where_lost(answer: Answer) -> None:
        if answer.get("unexpected") and "cuda" in answer["error"].lower():
            keep("")
            raise SystemExit(AGAIN)

    def put(questions: dict[str, Callable[[Path, str], Answer]], engine: Path) -> None:
        for question, ask in questions.items():
            if question not in answers:
                keep(question)
                answers[question] = _asked(ask, engine, name)
                end_where_lost(answers[question])

    engine, here_only = folder / "model.engine", HERE_ONLY if name == "tensorrt-rtx" else {}
    put(FIRST, engine)
    if "error" in answers["runs"]:
        put(here_only, engine)
        if runs_only_if_built_here(answers):
            engine = engine.with_name(HERE)
            os.environ[BUILT_FOR] = "current"
    asked = {found["engine"] for found in result["engines"]}
    for path in engines:
        if path.name not in asked:
            keep(f"{ENGINE}{path.name}")
            answer = _asked(foreign, path, name)
            if answer:
                result["engines"].append({"engine": path.name} | answer)
                end_where_lost(answer)
    put(QUESTIONS, engine)
    put(here_only, engine)
    keep("")


def _asked(ask: Callable[[Path, str], Answer | None], engine: Path, name: str) -> Answer:
    try:
        return ask(engine, name) or {}
    except TrtKvCacheError as error:
        answer: Answer = {"yes": False, "error": str(error)}
        # The engine opens, but a step or CUDA fails: the backend does not refuse this GPU.
        failed = isinstance(error, SessionError) or answer["error"].startswith("CUDA:")
        return answer | ({"unexpected": True} if failed else {})
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer, and the next question is asked
        return {"yes": False, "error": f"{type(error).__name__}: {error}", "unexpected": True}


def _reference(q: Any, k: Any, v: Any, valid: Any) -> Any:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.where(valid[:, None, None, :], q @ k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def _difference(actual: Any, expected: Any) -> float:
    """Return the difference as a share of the largest expected value; infinite instead of NaN, which JSON lacks."""
    difference = np.abs(actual.astype(np.float64) - expected).max() / max(np.abs(expected).max(), 1e-9)
    return float(difference) if np.isfinite(difference) else 1e30


def _attention_engine(trt: Any, name: str, how: str, dtype: str) -> Any:
    """Return an engine with one IAttention on static shapes, Q unscaled."""
    recorder = make_recorder(trt)
    builder = trt.Builder(native_logger(trt))
    builder.error_recorder = recorder
    flags = 0 if name == "tensorrt-rtx" else 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    kind = trt.float16 if dtype == "float16" else trt.bfloat16
    q = network.add_input("q", kind, (BATCH, HEADS, 1, SIZE))
    k, v = (network.add_input(n, kind, (BATCH, HEADS, KEYS, SIZE)) for n in ("k", "v"))
    softmax = trt.AttentionNormalizationOp.SOFTMAX
    if hasattr(network, "add_attention_v2"):
        layer = network.add_attention_v2(q, k, v, softmax, trt.CausalMaskKind.NONE)
    else:  # TensorRT before 11.0, which knows no lengths either
        layer = network.add_attention(q, k, v, softmax, False)
    if how == "mask":
        layer.mask = network.add_input("mask", trt.bool, (BATCH, 1, 1, KEYS))
    else:
        layer.key_value_lengths = network.add_input("lengths", trt.int32, (BATCH,))
    output = layer.get_output(0)
    output.name = "y"
    network.mark_output(output)
    config = builder.create_builder_config()
    if name == "tensorrt-rtx" and built_for():
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.CURRENT, 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError(f"TensorRT does not build it: {recorder.take()}")
    return plan


def _execute(trt: Any, plan: Any, feeds: dict[str, Any], output: str, shape: Sequence[int], kind: Any) -> Any:
    cuda = trt_runner.Cuda(0, trt_runner.cuda_bindings())
    engine = context = None
    try:
        recorder = make_recorder(trt)
        runtime = trt.Runtime(native_logger(trt))
        runtime.error_recorder = recorder
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise RuntimeError(f"TensorRT does not open it: {recorder.take()}")
        context = engine.create_execution_context()
        staged: dict[str, Any] = {}
        for name, array in {**feeds, output: np.zeros(shape, kind)}.items():
            array = np.ascontiguousarray(array)
            pinned = cuda.allocate_pinned(array.nbytes)
            pinned.data[:] = array.reshape(-1).view(np.uint8)
            address = cuda.allocate(array.nbytes)
            cuda.upload(address, pinned.address, array.nbytes)
            if not context.set_tensor_address(name, address):
                raise RuntimeError(f"TensorRT takes no address for {name}: {recorder.take()}")
            staged[name] = pinned, address, array.nbytes
        if not context.execute_async_v3(cuda.stream):
            raise RuntimeError(f"TensorRT does not run it: {recorder.take()}")
        pinned, address, size = staged[output]
        cuda.download_rows(pinned.address, address, size, size, 1)
        cuda.sync()
        return pinned.data.view(kind).reshape(shape).copy()
    finally:
        del context, engine  # they must be freed before the memory that they use
        cuda.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["answers", "measure"])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="of the engines that are asked about")
    parser.add_argument("--engine", type=Path, action="append", default=[], help="an engine built elsewhere")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--small", action="store_true", help="a tiny decoder; the numbers mean little")
    options = parser.parse_args(arguments)
    if options.what == "answers":
        ask_all(options.folder, options.backend, options.output, options.engine)
        return
    try:
        measure(options.backend, options.capacity, small=options.small, output=options.output)
    except TrtKvCacheError as error:
        raise SystemExit(f"{error}") from error  # one line: the words of the backend


if __name__ == "__main__":
    main()
