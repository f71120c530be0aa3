"""Engines with the cache-update plugin, on full TensorRT: equal to ONNX Runtime, past several wraps, with no Python.

Nobody has run these on a GPU yet.
"""

import shutil
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig

from trt_kvcache import BuildOptions, build_engine, load_manifest
from trt_kvcache.importer.cache_plan import Fallback, PlanOptions, Route
from trt_kvcache.runtime.runner import StepBatch

pytestmark = pytest.mark.gpu

CIRCULAR = DecoderConfig(capacity=16, mode="circular")
REFERENCE = PlanOptions(fallback=Fallback.FUNCTIONAL)


@pytest.fixture
def full(workshop: Any) -> Any:
    """The workshop of full TensorRT; TensorRT for RTX takes no plugins."""
    if workshop.backend != "tensorrt":
        pytest.skip(f"{workshop.backend} takes no plugins")
    return workshop


def build(workshop: Any, folder: Path, *, declare_aliases: bool) -> Path:
    output = folder / "plugin.engine"
    options = BuildOptions(backend="tensorrt", max_batch=3, max_chunk=16, declare_aliases=declare_aliases)
    manifest = build_engine(workshop.model(CIRCULAR), output, build=options)
    assert {cache.route for cache in manifest.plan.caches} == {Route.PLUGIN}
    assert set(manifest.aliases) == {cache.present for cache in manifest.plan.caches}
    assert load_manifest(output).options["declare_aliases"] is declare_aliases
    return output


@pytest.mark.parametrize("declare_aliases", [False, True])
def test_circular_decode_past_three_wraps(full: Any, declare_aliases: bool, tmp_path: Path) -> None:
    """Steps of several tokens that straddle the end of the buffer, and of one; every row and every logit."""
    engine = full.open(build(full, tmp_path, declare_aliases=declare_aliases))
    reference = full.reference(CIRCULAR, REFERENCE)
    rng = np.random.default_rng(0)
    lengths = np.zeros(2, np.int64)
    for length in (8, 5, 1, 7, 1, 5, 3, 16, 1, 6, 5, 1):
        batch = StepBatch(0, rng.integers(0, engine.vocab, (2, length)), lengths.copy(), length)
        actual, expected = engine.step(batch), reference.step(batch)
        assert np.isfinite(actual).all()
        assert np.abs(actual - expected).max() <= 5e-3 * np.abs(expected).max()
        lengths += length
    assert lengths.min() > 3 * CIRCULAR.capacity
    for cache in engine.plan.caches:
        rows = [runner.read_row(cache.past, 1, cache.capacity) for runner in (engine, reference)]
        np.testing.assert_allclose(*rows, rtol=5e-3, atol=5e-3)


def test_trtexec_needs_no_python(full: Any, tmp_path: Path) -> None:
    """The kernel is in the engine: nothing registers a plugin here.

    All numbers are 0: those that trtexec makes up are no tokens and no places.
    """
    trtexec = shutil.which("trtexec")
    if trtexec is None:
        pytest.skip("trtexec is not on the PATH")
    engine = build(full, tmp_path, declare_aliases=False)
    manifest = load_manifest(engine)
    shapes = {name: range_.opt for name, range_ in manifest.profiles[0].shapes.items()}
    numbers = [t.name for t in manifest.plan.tensors if t.name in shapes and t.dtype == "int64"]
    for name in numbers:
        (tmp_path / name).write_bytes(bytes(8 * prod(shapes[name])))
    command = [trtexec, f"--loadEngine={engine}", "--iterations=1", "--warmUp=0", "--duration=0"]
    command.append("--shapes=" + ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items()))
    command.append("--loadInputs=" + ",".join(f"{name}:{tmp_path / name}" for name in numbers))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
