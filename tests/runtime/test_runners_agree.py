"""One session, two runners: the same tokens, and caches that travel between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.copier import answer, prompt, write_copier
from runtime.fake_cuda import Machine
from runtime.fake_engines import write_engine
from runtime.fake_tensorrt import fake_module

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions
from trt_kvcache.errors import CacheFileError
from trt_kvcache.importer.plan import CacheLayout
from trt_kvcache.runtime.ort.runner import OnnxRuntimeRunner
from trt_kvcache.runtime.trt.runner import Bindings, TensorRTRunner

CYCLES = ([5, 9, 3, 7, 11], [1, 2], [31, 8, 30, 12, 29, 4, 28], list(range(10, 20)), [6, 5, 4])
VERSION = "1.7.1.116"

Open = Callable[[str], DecodeSession]


@pytest.fixture(params=["linear", "circular"])
def open_on(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens a session over the copier on "cpu", or on a "gpu" that is a fake with TensorRT's rules."""
    model = write_copier(tmp_path / "model.onnx", capacity=64 if request.param == "linear" else 32, mode=request.param)
    engine = write_engine(model)

    def open_(device: str) -> DecodeSession:
        if device == "cpu":
            return DecodeSession(OnnxRuntimeRunner(model, max_batch=3, max_chunk=8))
        machine = Machine()
        module = fake_module(machine, rtx=True, version=VERSION)
        return DecodeSession(TensorRTRunner(engine, bindings=Bindings(module, machine.bindings())))

    return open_


@pytest.mark.few(2)
@pytest.mark.parametrize("look", [None, 4])
def test_both_copy(open_on: Open, look: int | None) -> None:
    """Ragged prompts, more than rows, in chunks; with graphs replayed on the GPU's side."""
    prompts = [prompt(cycle, 1.6) for cycle in CYCLES]
    config = GenerationConfig(max_new_tokens=40, prompt_lookup_num_tokens=look)
    for device in ("cpu", "gpu"):
        with open_on(device) as session:
            results = session.generate(prompts, config)
        for cycle, tokens, result in zip(CYCLES, prompts, results, strict=True):
            assert result.tokens == answer(cycle, tokens, 40), device


@pytest.mark.parametrize(("first", "second"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_caches_travel(open_on: Open, tmp_path: Path, first: str, second: str) -> None:
    """The engine was built from this very model, and lays its caches out alike: what one saved, the other continues."""
    tokens = prompt(CYCLES[0], 3)
    with open_on(first) as session:
        slot = session.cache.acquire()
        session.update({slot: tokens[:-1]})
        copy = session.cache.fork(slot)
        session.cache.save(tmp_path / "cache", [copy])
    with open_on(second) as session:
        session.generate([prompt(CYCLES[1])], GenerationConfig(max_new_tokens=30))  # the rows have been used before
        new = session.cache.load(tmp_path / "cache")[copy]
        session.add(tokens[-1:], GenerationConfig(max_new_tokens=20), slot=new)
        found = []
        while session.running:
            found += [event.token for event in session.step()]
    assert found == answer(CYCLES[0], tokens, 20)


def test_beams_on_both(open_on: Open) -> None:
    found = {}
    for device in ("cpu", "gpu"):
        with open_on(device) as session:
            config = GenerationConfig(max_new_tokens=12, num_beams=3, output_logprobs=True)
            found[device] = session.generate([prompt(CYCLES[0], 1.6)], config)[0]
    assert found["cpu"].tokens == found["gpu"].tokens == answer(CYCLES[0], prompt(CYCLES[0], 1.6), 12)
    np.testing.assert_allclose(found["cpu"].logprobs, found["gpu"].logprobs, atol=1e-4)


def test_another_layout_does_not_load(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=16))
    with DecodeSession(OnnxRuntimeRunner(model)) as session:
        session.update({session.cache.acquire(): [0, 1, 2]})
        session.cache.save(tmp_path / "cache")
    preserved = DecodeSession(OnnxRuntimeRunner(model, PlanOptions(cache_layout=CacheLayout.PRESERVE)))
    with preserved, pytest.raises(CacheFileError, match="caches of other sizes or layouts of the same model"):
        preserved.cache.load(tmp_path / "cache")
