"""What one backend does on the GPU at hand: answers to questions that no machine without a GPU can answer.

    python scripts/gpu_answers.py --backend tensorrt-rtx --output answers.json [--engine model.engine ...]

A step of `scripts/gpu_check`. The questions are asked in a process of their own; one that kills it, or that takes too
long, has that as its answer, and another process asks the rest (`gpu_supervise`). An answer that is an exception holds
its words under ``error``. Where engines for all GPUs do not run here, and one that was built for this one does, the
questions behind that are asked about such engines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decoders import DecoderConfig, write_decoder
from gpu_measure import BUILT_FOR, Opened, built_for, write_json
from gpu_supervise import AGAIN, ENGINE, runs_only_if_built_here, supervise

from trt_kvcache.engine import build
from trt_kvcache.engine.callbacks import make_recorder, native_logger
from trt_kvcache.engine.manifest import load_manifest
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.errors import SessionError, TrtKvCacheError
from trt_kvcache.runtime.encoders.constants import Constants
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.trt import runner as trt_runner
from trt_kvcache.runtime.trt.runner import TensorRTRunner

CONFIG = DecoderConfig(layers=2, hidden=64, vocab=256, dtype="float16", positions=4096)
BATCH, HEADS, KEYS, SIZE = 2, 4, 64, 64
LENGTHS = (5, 33)
"""Valid keys of each row in the questions about IAttention."""
HERE = "here.engine"
"""Name of the engine that was built for this GPU alone."""
Answer = dict[str, Any]


def _first_step(runner: TensorRTRunner, rows: int, length: int) -> StepBatch:
    """The first tokens of a text, of any decoder: zeros for embeddings, ones for what an encoder gives."""
    tokens, constants = np.ones((rows, length), np.int64), ()
    if runner.inputs.constants.tensors:
        largest = runner._shapes._largest_constants().arrays
        constants = (Constants({name: np.ones(a.shape, a.dtype) for name, a in largest.items()}),) * rows
    embeds = runner.inputs.no_embeds(tokens)
    return StepBatch(0, tokens, np.zeros(rows, np.int64), constants=constants, embeds=embeds)


def builds(engine: Path, name: str) -> Answer:
    """Does a build for all GPUs, or those asked for, succeed here?"""
    model = write_decoder(engine.with_suffix(".onnx"), CONFIG)
    chosen = BuildOptions(backend=name, max_batch=3, max_chunk=16, **built_for())
    return {"yes": bool(build.build_engine(model, engine, build=chosen))}


def runs(engine: Path, name: str) -> Answer:
    """Does an engine that was built without looking at this GPU open and run here at all? In the backend's words."""
    start = time.perf_counter()
    with Opened(engine) as runner:
        opened = time.perf_counter() - start
        logits = runner.step(_first_step(runner, min(2, runner.max_batch), min(4, runner.max_chunk)))
        found: Answer = {"yes": bool(np.isfinite(logits).all()), "where": runner.name, "open_s": opened}
        return found if found["yes"] else found | {"error": "its logits are not all finite", "unexpected": True}


def runs_if_built_here(engine: Path, name: str) -> Answer:
    """The same for an engine that was built for this GPU alone."""
    here = engine.with_name(HERE)
    chosen = BuildOptions(backend=name, max_batch=3, max_chunk=16, compute_capabilities=("current",))
    model = shutil.copy(engine.with_suffix(".onnx"), here.with_suffix(".onnx"))
    build.build_engine(model, here, build=chosen)
    return runs(here, name)


def graphs(engine: Path, name: str) -> Answer:
    """Do decode steps become CUDA graphs? TensorRT for RTX records by itself and only says whether it could."""
    with Opened(engine) as runner:
        assert runner.graphs is not None
        for position in range(6):
            runner.step(StepBatch(0, np.ones((2, 1), np.int64), np.full(2, position, np.int64)))
        contexts = [step.context._context for step in runner.graphs._recorded.values()]
        could = all(c.is_stream_capturable(runner._cuda.stream) for c in contexts) if runner._held.trt.rtx else True
        return {"yes": len(runner.graphs) == 1 and could, "failure": runner.graphs.failure, "contexts": len(contexts)}


def chooses(engine: Path, name: str) -> Answer:
    """Is the kernel that chooses greedy tokens there, and right, so that sessions use it?"""
    with Opened(engine) as runner:
        return {"yes": not runner.host_choice, "why": runner.host_choice}


def aliases(engine: Path, name: str) -> Answer:
    """Does the engine report the aliases of the plan, and are past and present one address in every context?"""
    with Opened(engine) as runner:
        runner.step(_first_step(runner, 1, 1))
        planned = load_manifest(engine).aliases
        reported = {present: runner._held.trt.engine.get_aliased_input_tensor(present) for present in planned}
        used = [c._context for c in runner._contexts if c._context.get_tensor_address(next(iter(planned)))]
        one = all(c.get_tensor_address(a) == c.get_tensor_address(b) for c in used for a, b in planned.items())
        return {"yes": reported == planned and one, "reported": reported, "contexts": len(used)}


def unused_rows(fill: float) -> Callable[[Path, str], Answer]:
    """Decoding with `fill` in every row that is not in use: are the logits those over zeros?"""

    def answer(engine: Path, name: str) -> Answer:
        with Opened(engine) as clean, Opened(engine) as dirty:
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
    """Is a linear write that ends beyond the capacity dropped, with nothing else touched?"""
    with Opened(engine) as runner:
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
    """IAttention by itself, its valid keys given as an explicit bool mask or as ``key_value_lengths``."""

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
"""Without which nothing else says much."""

HERE_ONLY: dict[str, Callable[[Path, str], Answer]] = {"runs_if_built_here": runs_if_built_here}
"""Next where engines for all GPUs do not run, else last: another build. TensorRT builds no others."""

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
"""The most telling first: time may end before all are asked."""


def foreign(path: Path, name: str) -> Answer | None:
    """An engine that was built elsewhere: does it open here, with the aliases of its manifest, and run?"""
    manifest = load_manifest(path)
    if manifest.backend != name:
        return None
    said = {"built_for": list(manifest.compute_capabilities), "built_with": manifest.backend_version}
    return said | _asked(_runs_in_place, path, name)


def _runs_in_place(engine: Path, name: str) -> Answer:
    return runs(engine, name) | {"aliases": aliases(engine, name)["yes"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engine", type=Path, action="append", default=[], help="an engine built elsewhere")
    parser.add_argument("--folder", type=Path, help="ask, in this process, about the engines in this folder")
    options = parser.parse_args(arguments)
    if options.folder is not None:
        ask_all(options.folder, options.backend, options.output, options.engine)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, f"--backend={options.backend}", f"--output={options.output}"]
        command += [f"--folder={folder}", *(f"--engine={path}" for path in options.engine)]
        if not supervise(command, options.output, limit):
            raise SystemExit("questions ended the process that asked them: see their answers")


def limit(question: str) -> float:
    """Seconds for a question. More where TensorRT is loaded, times kernels, or compiles all that an engine has."""
    return 100.0 if question in (FIRST | HERE_ONLY) or question.startswith(ENGINE) else 45.0


def ask_all(folder: Path, name: str, output: Path, engines: Sequence[Path]) -> None:
    """Ask what has no answer in `output` yet."""
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
        # It opens, and a step fails, or CUDA does: not the backend's word on this GPU.
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
    """Of the largest expected value; infinite where it is no number (JSON has none)."""
    difference = np.abs(actual.astype(np.float64) - expected).max() / max(np.abs(expected).max(), 1e-9)
    return float(difference) if np.isfinite(difference) else 1e30


def _attention_engine(trt: Any, name: str, how: str, dtype: str) -> Any:
    """One IAttention on static shapes, Q unscaled."""
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
    """Run an engine of static shapes once."""
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
        del context, engine  # before the memory that they use
        cuda.close()


if __name__ == "__main__":
    main()
