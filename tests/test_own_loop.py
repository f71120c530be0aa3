"""The loop that the docs show runs engines as `DecodeSession` does, and refuses what it does not know."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import own_loop
import pytest
from decoders import DecoderConfig, write_decoder
from foreign_decoders import make_foreign
from runtime import fake_tensorrt
from runtime.engines import write_engine
from runtime.fake_cuda import Machine

from trt_kvcache import DecodeSession, GenerationConfig, PlanOptions

CAPACITY = 300  # more than one bucket of the span
PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7, 8], [*range(3, 22)])


def stand_in(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> Machine:
    """Put the fake GPU where the loop looks for TensorRT and CUDA."""
    machine = Machine(pageable=True)
    bindings = machine.bindings()
    module = fake_tensorrt.fake_module(machine, **faults)
    monkeypatch.setattr(fake_tensorrt, "_first_logger", {})  # the loop is alone in its process
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)
    monkeypatch.setattr(own_loop, "cuda", SimpleNamespace(core=bindings.core))
    monkeypatch.setattr(own_loop, "driver", bindings.driver)
    return machine


@pytest.mark.few(1)
@pytest.mark.parametrize(("form", "dtype"), [("mobius", "float16"), ("five-d", "float32"), ("concat", "float32")])
def test_tokens_are_those_of_a_session(form: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.onnx"
    if form == "concat":
        onnx.save(make_foreign(form, DecoderConfig()), model)
    else:
        write_decoder(model, DecoderConfig(form=form, dtype=dtype, capacity=CAPACITY))
    count = CAPACITY - len(PROMPTS[2]) + 1  # the last token is never written
    with DecodeSession.open(model, capacity=CAPACITY) as session:
        asked = [GenerationConfig(max_new_tokens=n) for n in (40, 40, count)]
        expected = [session.generate([p], c)[0].tokens for p, c in zip(PROMPTS, asked, strict=True)]
    engine = write_engine(model, options=PlanOptions(capacity=CAPACITY))
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        stand_in(monkeypatch)
        assert own_loop.generate(engine, prompt, len(tokens)) == list(tokens)


def test_a_full_cache_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = write_engine(write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=CAPACITY)))
    stand_in(monkeypatch)
    with pytest.raises(SystemExit, match=f"{CAPACITY + 1} tokens do not fit into caches of {CAPACITY}"):
        own_loop.generate(engine, PROMPTS[2], CAPACITY)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DecoderConfig(form="heads-major", mode="circular"), "knows linear caches, in place, and no inputs of"),
        (DecoderConfig(form="heads-major", mask="bool", lengths=False, causal=False), r"no inputs of \['mask'\]"),
    ],
)
def test_what_it_does_not_know_is_refused(
    config: DecoderConfig, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = write_engine(write_decoder(tmp_path / "model.onnx", config), options=PlanOptions(fallback="functional"))
    stand_in(monkeypatch)
    with pytest.raises(SystemExit, match=words):
        own_loop.Engine(engine)
