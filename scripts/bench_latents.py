"""Steps over cached latents, with queries that go to them, and with keys and values that are computed from them.

    python scripts/bench_latents.py

One random decoder with latent attention (scripts/foreign_decoders.py), rewritten both ways (`--latent-attention`),
makes the same steps of some tokens over some rows, in turns, on ONNX Runtime with one thread. Processor time, not the
clock's, so that other work on the machine counts little: the least of all turns.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
from decoders import DecoderConfig
from foreign_decoders import make_foreign

from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import LatentAttention, PlanOptions, Role
from trt_kvcache.runtime.inputs import SPAN_BUCKET

SIZES = ((1, 512), (1, 4096), (1, 16384), (64, 512), (64, 4096), (128, 4096), (256, 4096), (512, 4096))
"""New tokens of a step, and rows that hold tokens after it."""


class Form:
    """The decoder in one of both forms, with caches of random rows.

    Args:
        path: the model.
        capacity: rows of its caches.
        form: which one.
    """

    def __init__(self, path: Path, capacity: int, form: LatentAttention) -> None:
        imported = import_model(path, PlanOptions(capacity=capacity, latent_attention=form))
        self._plan, self._capacity = imported.plan, capacity
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        self._session = ort.InferenceSession(
            imported.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        rng = np.random.default_rng(0)
        shapes = {c.past: [1, *(int(d) for d in c.physical_shape[1:])] for c in imported.plan.caches}
        rows = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
        self._buffers = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in rows.items()}

    def step(self, tokens: int, rows: int) -> tuple[float, np.ndarray]:
        """One step that ends at `rows`.

        Returns:
            Milliseconds of processor time, and the logits.
        """
        binding, first = self._session.io_binding(), rows - tokens
        feeds = {
            Role.TOKENS: np.arange(tokens)[None] % 7,
            Role.POSITIONS: np.arange(first, rows)[None],
            Role.WRITE_INDICES: np.array([first]),
            Role.VALID_LENGTHS: np.array([rows]),
            Role.SPAN: np.arange(min(-(-rows // SPAN_BUCKET) * SPAN_BUCKET, self._capacity)),
        }
        for tensor in self._plan.tensors:
            if tensor.io == "input" and tensor.role is not Role.CACHE:
                binding.bind_cpu_input(tensor.name, feeds[tensor.role])
        binding.bind_output("logits")
        for cache in self._plan.caches:
            binding.bind_ortvalue_input(cache.past, self._buffers[cache.past])
            binding.bind_ortvalue_output(cache.present, self._buffers[cache.past])
        begin = time.process_time()
        self._session.run_with_iobinding(binding)
        return 1e3 * (time.process_time() - begin), binding.get_outputs()[0].numpy()


def measure(forms: dict[str, Form], tokens: int, rows: int, turns: int) -> dict[str, float]:
    """The least milliseconds of each form, and how much their logits differ, of the largest."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    logits: dict[str, np.ndarray] = {}
    for _ in range(turns + 1):
        for name, form in forms.items():
            spent, logits[name] = form.step(tokens, rows)
            times[name].append(spent)
    absorbed, expanded = (logits[form.value] for form in (LatentAttention.ABSORBED, LatentAttention.EXPANDED))
    result = {f"{name}_ms": min(spent[1:]) for name, spent in times.items()}
    return result | {"difference": float(np.abs(absorbed - expanded).max() / np.abs(expanded).max())}


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--turns", type=int, default=5)
    for name, default in (("layers", 2), ("hidden", 1024), ("heads", 16), ("head-size", 128), ("vocab", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = DecoderConfig(
        layers=given.layers, hidden=given.hidden, query_heads=given.heads, kv_heads=given.heads,
        head_size=given.head_size, vocab=given.vocab, capacity=given.capacity, positions=given.capacity,
    )  # fmt: skip
    sizes = [(tokens, rows) for tokens, rows in SIZES if rows <= given.capacity]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "latents.onnx"
        onnx.save(make_foreign("latents", config), path)
        forms = {form.value: Form(path, given.capacity, form) for form in LatentAttention}
        results = [
            {"tokens": tokens, "rows": rows, **measure(forms, tokens, rows, given.turns)} for tokens, rows in sizes
        ]
    print(f"{given.layers} layers, hidden {given.hidden}, {given.heads} heads of {given.head_size}, ", end="")
    print(f"latents of {4 * given.head_size}, ONNX Runtime {ort.__version__}, 1 thread")
    print("ms of processor time per step")
    print(f"{'tokens':>7}{'rows':>8}" + "".join(f"{name:>12}" for name in forms) + f"{'ratio':>9}{'difference':>12}")
    for r in results:
        times = [r[f"{name}_ms"] for name in forms]
        print(f"{r['tokens']:>7}{r['rows']:>8}" + "".join(f"{t:>12.1f}" for t in times)
              + f"{times[1] / times[0]:>9.2f}{r['difference']:>12.1e}")  # fmt: skip
    print(json.dumps({"benchmark": "latents", "capacity": given.capacity, "steps": results}))


if __name__ == "__main__":
    main()
