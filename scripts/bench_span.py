"""Step time against capacity, with and without the attention span, on ONNX Runtime.

    python scripts/bench_span.py

A decoder with small and large caches is rewritten twice, with the span input and without, and all four models run one
decode step at the same position, in turns. Past and present are bound to one buffer, so that updates are in place, as
on a GPU. Without the span a step reads the whole cache; with it, the rows that are in use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime as ort
from decoders import DecoderConfig, write_decoder

from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.plan import PlanOptions, Role

POSITION = 160
SPAN = 256  # the bucket that holds the position


def make_step(imported: ImportedModel, threads: int) -> Callable[[], np.ndarray]:
    """One decode step of a rewritten model, ready to run; returns the logits.

    Args:
        imported: the rewritten model.
        threads: of ONNX Runtime.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(imported.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    feeds: dict[Role, np.ndarray] = {
        Role.TOKENS: np.array([[7]]),
        Role.POSITIONS: np.array([[POSITION]]),
        Role.WRITE_INDICES: np.array([POSITION]),
        Role.VALID_LENGTHS: np.array([POSITION + 1]),
        Role.SPAN: np.arange(SPAN),
    }
    rng = np.random.default_rng(0)
    values: list[ort.OrtValue] = []  # bindings do not keep their buffers alive
    for tensor in imported.plan.tensors:
        if tensor.io == "input" and tensor.role is not Role.CACHE:
            values.append(ort.OrtValue.ortvalue_from_numpy(feeds[tensor.role]))
            binding.bind_ortvalue_input(tensor.name, values[-1])
    for cache in imported.plan.caches:
        shape = [dim if isinstance(dim, int) else 1 for dim in cache.physical_shape]
        contents = np.zeros(shape, np.float32)
        contents[:, :, :POSITION] = rng.uniform(-1, 1, (*shape[:2], POSITION, shape[3]))
        values.append(ort.OrtValue.ortvalue_from_numpy(contents))
        binding.bind_ortvalue_input(cache.past, values[-1])
        binding.bind_ortvalue_output(cache.present, values[-1])
    binding.bind_output("logits")
    bound = [*(cache.present for cache in imported.plan.caches), "logits"]

    def step() -> np.ndarray:
        session.run_with_iobinding(binding)
        return binding.get_outputs()[bound.index("logits")].numpy()

    step()
    written = values[-1].numpy()[:, :, POSITION : POSITION + 2]
    if not written[:, :, 0].any() or written[:, :, 1].any():
        raise SystemExit("the step did not update its cache in place")
    return step


def measure(steps: dict[tuple[bool, int], Callable[[], np.ndarray]], repeats: int) -> dict[tuple[bool, int], float]:
    """Median milliseconds of each step, run in turns so that all meet the same load on the machine."""
    times: dict[tuple[bool, int], list[float]] = {key: [] for key in steps}
    for _ in range(repeats):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            times[key].append(1e3 * (time.perf_counter() - start))
    return {key: statistics.median(values) for key, values in times.items()}


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=512, help="capacity")
    parser.add_argument("--large", type=int, default=16384, help="capacity")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    capacities = (given.small, given.large)
    steps: dict[tuple[bool, int], Callable[[], np.ndarray]] = {}
    with TemporaryDirectory() as folder:
        for capacity in capacities:
            config = DecoderConfig(
                layers=4, hidden=256, query_heads=8, kv_heads=8, head_size=32, capacity=capacity, positions=1024
            )
            path = write_decoder(Path(folder) / f"{capacity}.onnx", config)
            for span in (True, False):
                imported = import_model(path, PlanOptions(attention_span=span))
                steps[span, capacity] = make_step(imported, given.threads)
        logits = {key: step() for key, step in steps.items()}
        medians = measure(steps, given.repeats)
    reference = logits[False, given.small]
    difference = max(float(np.abs(value - reference).max()) for value in logits.values())
    ratios = {span: medians[span, given.large] / medians[span, given.small] for span in (True, False)}

    print(f"4 layers, position {POSITION}, ONNX Runtime {ort.__version__}, {given.threads} thread(s), ", end="")
    print(f"medians of {given.repeats} interleaved steps, in ms")
    print(f"{'':16}" + "".join(f"{f'capacity {c}':>18}" for c in capacities) + f"{'ratio':>10}")
    for span, label in ((True, f"span {SPAN}"), (False, "without span")):
        print(f"{label:16}" + "".join(f"{medians[span, c]:18.2f}" for c in capacities) + f"{ratios[span]:10.2f}")
    print(f"largest difference of the logits between all four: {difference:.2g}")
    print(
        json.dumps(
            {
                "benchmark": "span", "position": POSITION, "span": SPAN, "capacities": capacities,
                "ms_with_span": [medians[True, c] for c in capacities],
                "ms_without_span": [medians[False, c] for c in capacities],
                "ratio_with_span": ratios[True], "ratio_without_span": ratios[False],
                "logits_difference": difference,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
