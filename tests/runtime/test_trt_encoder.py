"""Encoders on a fake GPU with TensorRT's rules: what they make stays there, and is what the CPU makes."""

import gc
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import heard, table
from runtime.engines import write_engine
from runtime.fake_cuda import Machine
from runtime.fake_tensorrt import fake_module
from runtime.test_encoder import CONFIG, LAYOUTS, LENGTHS, PROMPTS, expected, export

from trt_kvcache import DecodeSession
from trt_kvcache.engine.manifest import encoder_path, load_manifest, manifest_path, save_manifest
from trt_kvcache.errors import BackendError, ManifestError, OptionError, PromptError, SessionError
from trt_kvcache.runtime.trt import trt_runner
from trt_kvcache.runtime.trt.context import ContextFactory
from trt_kvcache.runtime.trt.cuda import DeviceArray


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A GPU that `DecodeSession.open` finds."""
    machine = Machine()
    monkeypatch.setattr(trt_runner, "load_tensorrt", lambda backend: fake_module(machine))
    monkeypatch.setattr(trt_runner, "cuda_bindings", machine.bindings)
    return machine


def built(folder: Path, layout: str = "hidden", mask: str = "none", longest: int = 12, **options: Any) -> Path:
    """An export, and its engines: a copy of what one test has written."""
    made = folder.parent / f"built {layout} {mask} {longest} {sorted(options.items())}"
    if not made.exists():
        model = export(made, layout, mask, mask=mask == "ones", **options)
        write_engine(model, max_encoder=longest, encoder="auto")
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder / "decoder_with_past_model.engine"


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["none", "ones"])
def test_each_sequence_has_its_source(machine: Machine, layout: str, mask: str, tmp_path: Path) -> None:
    """As on the CPU; the files of the export are gone."""
    engine = built(tmp_path, layout, mask)
    for file in tmp_path.glob("*.onnx"):
        file.unlink()
    with DecodeSession.open(engine) as session:
        made = [session.encode({"input_features": heard(n, i)}) for i, n in enumerate(LENGTHS)]
        kinds = {name: type(value) for name, value in made[0].items()}
        assert {name for name, kind in kinds.items() if kind is not DeviceArray} <= {"encoder_attention_mask"}
        assert DeviceArray in kinds.values()
        assert "CPU" not in session.name
        if mask == "none":
            assert [r.tokens for r in session.generate(PROMPTS, CONFIG, made)] == [expected(i) for i in range(3)]
        else:
            hidden = [session.generate([PROMPTS[i]], CONFIG, [made[i]])[0].tokens for i in range(3)]
            assert hidden == [r.tokens for r in session.generate(PROMPTS, CONFIG, made)]
    assert machine.used == 0
    kernels = {path.name for path in tmp_path.glob("*.kernels")}
    assert {name.rpartition(".sm")[0] for name in kernels} == {engine.name, encoder_path(engine).name}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_constants_are_those_of_the_cpu(machine: Machine, dtype: str, tmp_path: Path) -> None:
    """Also of an encoder in another type than the decoder's; copied to the host they go to any session."""
    options = {"dtype": 10} if dtype == "float16" else {}
    engine = built(tmp_path, **options)
    model = tmp_path / "decoder_with_past_model.onnx"
    with DecodeSession.open(engine) as session, DecodeSession.open(model) as host:
        for i, length in enumerate(LENGTHS):
            source = {"input_features": heard(length, i)}
            made, wanted = session.encode(source), host.encode(source)
            source["input_features"][:] = np.nan  # which the encoder has read
            copied = {name: np.asarray(array) for name, array in made.items()}
            for name, array in wanted.items():
                assert (made[name].dtype, made[name].shape, made[name].ndim) == (array.dtype, array.shape, array.ndim)
                np.testing.assert_array_equal(copied[name], array)
            assert host.generate([PROMPTS[i]], CONFIG, [copied])[0].tokens == expected(i)
            with pytest.raises(PromptError, match=r"lies on the GPU of another session; give numpy\.asarray of it"):
                host.generate([PROMPTS[i]], CONFIG, [made])


def test_ids_and_what_is_beyond_the_table(machine: Machine, tmp_path: Path) -> None:
    with DecodeSession.open(built(tmp_path, ids=True)) as session:
        hidden = session.encode([5, 9, 3, 8])["encoder_hidden_states"]
        np.testing.assert_array_equal(np.asarray(hidden)[0], table()[[5, 9, 3, 8]])
        for ids in ([5, len(table())], [-1]):
            with pytest.raises(
                PromptError, match=rf"'input_ids' has the token id -?\d+; the encoder knows 0 to {len(table()) - 1}"
            ):
                session.encode(ids)
        with pytest.raises(
            PromptError, match=r"'input_ids' is \[1, 13\], but .* takes \[1, 1\] to \[1, 12\]: build it .*max_encoder"
        ):
            session.encode([1] * 13)


@pytest.mark.slow
def test_memory_of_sources_comes_back(machine: Machine, tmp_path: Path) -> None:
    """With the next source: an array may go while a graph is recorded. What a slot holds stays."""
    with DecodeSession.open(built(tmp_path, "keys of the encoder")) as session:
        source = {"input_features": heard(6, 0)}
        slot = session.cache.acquire(constants=session.encode(source))
        session.encode(source)
        gc.collect()
        steady = None
        for _ in range(5):
            session.encode(source)
            gc.collect()
            steady = steady or machine.used
            assert machine.used == steady
        before = session.update({slot: PROMPTS[0]})[slot]
        again = session.cache.acquire(constants=session.encode(source))
        np.testing.assert_array_equal(session.update({again: PROMPTS[0]})[again], before)
        session.cache.save(tmp_path / "saved", [slot])
        session.cache.release(slot)
        loaded = session.cache.load(tmp_path / "saved")[slot]
        scores = [session.update({held: [3]})[held] for held in (again, loaded)]
        np.testing.assert_array_equal(*scores)


def test_what_a_closed_session_made_cannot_be_copied(machine: Machine, tmp_path: Path) -> None:
    with DecodeSession.open(built(tmp_path)) as session:
        made = session.encode({"input_features": heard(6, 0)})["encoder_hidden_states"]
    with pytest.raises(SessionError, match="the session is closed"):
        np.asarray(made)
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(made, copy=False)
    assert "float32 [1, 6, 32] on NVIDIA" in repr(made)
    del made
    assert machine.used == 0


def test_without_an_engine_it_runs_on_the_cpu_and_says_so(machine: Machine, tmp_path: Path) -> None:
    engine = built(tmp_path)
    beside = encoder_path(engine)
    source = {"input_features": heard(6, 0)}
    with DecodeSession.open(engine, encoder=tmp_path / "encoder_model.onnx") as session:
        assert "CPU" not in session.name
        assert isinstance(session.encode(source)["encoder_hidden_states"], np.ndarray)
        assert session.name.endswith(", encoder on the CPU")
    beside.unlink()
    with DecodeSession.open(engine) as session:
        with pytest.warns(
            RuntimeWarning,
            match=r"encoder_model.onnx runs on the CPU: .*encoder.engine, which was built with .* is not there",
        ):
            made = session.encode(source)
        assert session.generate([PROMPTS[0]], CONFIG, [made])[0].tokens == expected(0)
    save_manifest(replace(load_manifest(engine), encoder=None), manifest_path(engine))
    with DecodeSession.open(engine) as session, pytest.warns(RuntimeWarning, match="without the engine of an encoder"):
        session.encode(source)


@pytest.mark.slow
def test_engines_that_are_not_its_encoder(machine: Machine, tmp_path: Path) -> None:
    engine = built(tmp_path)
    source = {"input_features": heard(6, 0)}

    def refused(match: str, error: type[Exception] = ManifestError, **options: Any) -> None:
        with DecodeSession.open(engine, **options) as session, pytest.raises(error, match=match):
            session.encode(source)

    other = built(tmp_path / "other", longest=9)
    refused(
        "is not the encoder that was built with the decoder's engine; .*build both again", encoder=encoder_path(other)
    )
    refused("not the engine of an encoder", encoder=other)
    beside = encoder_path(engine)
    with DecodeSession.open(engine, encoder=beside) as session:
        session.encode(source)
    content = beside.read_bytes()
    beside.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(
        "its manifest says .*build again, or put back the pair .*; or give .*encoder_model"
        r"\.onnx as encoder, so that the encoder runs on the CPU$"
    )
    beside.write_bytes(content)
    manifest_path(beside).rename(tmp_path / "kept")
    refused("an engine needs the manifest")
    (tmp_path / "kept").rename(manifest_path(beside))
    machine_words = "no kernel image for this GPU"
    faults = fake_module(machine, refuse=machine_words)
    with DecodeSession.open(engine) as session:
        session._runner.resources.trt.module.Runtime = faults.Runtime  # type: ignore[attr-defined]
        with pytest.raises(SessionError, match=f"cannot open this engine.*{machine_words}.*; or give "):
            session.encode(source)
        (tmp_path / "encoder_model.onnx").rename(tmp_path / "gone")
        with pytest.raises(SessionError) as caught:
            session.encode(source)
        assert "CPU" not in str(caught.value)
        (tmp_path / "gone").rename(tmp_path / "encoder_model.onnx")
        with pytest.raises(SessionError, match=machine_words):
            session.encode(source)
    with pytest.raises(OptionError, match="is the engine of an encoder; open the engine of its decoder"):
        DecodeSession.open(beside)
    engine = tmp_path / "decoder_with_past_model.onnx"
    refused("looks like an engine, but .* runs on the CPU", OptionError, encoder=beside)


def test_too_little_memory(machine: Machine, tmp_path: Path) -> None:
    engine = built(tmp_path)
    source = {"input_features": heard(6, 0)}
    with DecodeSession.open(engine) as session:
        machine.total = machine.used + (129 << 20)
        made = [session.encode(source)]
        machine.total = machine.used
        with pytest.raises(
            SessionError, match=r"for the encoder's output of one source. .* drop these references, or keep numpy"
        ):
            made.append(session.encode(source))
        made.clear()
        gc.collect()
        session.encode(source)
        machine.total = 1 << 30
    with DecodeSession.open(engine) as session:
        machine.total = machine.used + (128 << 20)
        with pytest.raises(SessionError, match="the encoder's weights .*; open the decoder with a smaller max_batch"):
            session.encode(source)


def test_what_cannot_be_opened_leaves_nothing(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And can be opened later, when there is room."""
    engine = built(tmp_path)
    source = {"input_features": heard(6, 0)}
    with DecodeSession.open(engine) as session:
        module, used = session._runner.resources.trt.module, machine.used  # type: ignore[attr-defined]
        machine.total = used + (128 << 20) + encoder_path(engine).stat().st_size
        with pytest.raises(SessionError, match="encoder's activations .*, its inputs .*, what it makes of one"):
            session.encode(source)
        machine.total = 1 << 30
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise BackendError("no more")

            patch.setattr(ContextFactory, "allocate", fail)
            with pytest.raises(SessionError, match="no more"):
                session.encode(source)
        gc.collect()
        assert machine.used == used
        assert not module.hung
        made = session.encode(source)
        assert session.generate([PROMPTS[0]], CONFIG, [made])[0].tokens == expected(0)
    assert machine.used == 0
    assert not module.hung


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["fail_steps", "fail_late"])
def test_an_encoder_that_fails_once(machine: Machine, fault: str, tmp_path: Path) -> None:
    """Also where a part of it is on the stream by then: its memory is freed when that has run, and no earlier."""
    with DecodeSession.open(built(tmp_path)) as session:
        source = {"input_features": heard(6, 0)}
        session.encode(source)
        faults = session._runner.resources.trt.module.faults  # type: ignore[attr-defined]
        for _ in range(3):
            faults[fault] = "out of memory"
            with pytest.raises(SessionError, match=r"TensorRT for RTX .* cannot run a step: .*\(out of memory\)"):
                session.encode(source)
            faults.clear()
            gc.collect()
            made = session.encode(source)
            assert session.generate([PROMPTS[0]], CONFIG, [made])[0].tokens == expected(0)
            del made
    assert machine.used == 0
