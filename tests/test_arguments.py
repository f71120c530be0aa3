"""Whatever is given to a public function is taken, or refused by name at the call: nothing ends with a trace inside."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import DecoderConfig, write_decoder
from runtime.hash_runner import HashRunner

import trt_kvcache
from trt_kvcache import (
    BuildOptions,
    DecodeSession,
    GenerationConfig,
    PlanOptions,
    TrtKvCacheError,
    VerifyOptions,
    build_engine,
    calibrate_caches,
    export_checkpoint,
    inspect_engine,
    load_manifest,
    plan_model,
    rewrite_model,
    score,
    verify_model,
)
from trt_kvcache.decoding import CpuOptions
from trt_kvcache.runtime.cache import KVCache

VALUES: dict[str, Any] = {
    "None": None, "True": True, "int": 3, "below 0": -1, "huge": 10**30, "beyond decimals": 10**5000, "float": 1.5,
    "nan": np.nan, "NumPy int": np.int64(1), "NumPy float": np.float32(1), "bytes": b"x", "text": "nope",
    "empty text": "", "NUL": "a\0b", "surrogate": "\ud800", "path": Path("nope"), "list": [1], "empty list": [],
    "texts": ["a"], "ragged": [[1, "a"], 2], "tuple": (1, 2), "dict": {}, "texts by name": {"a": 1}, "set": {1},
    "range": range(3), "array": np.zeros((2, 2)), "number as array": np.array(1), "function": lambda *_: None,
    "class": int, "object": object(), "generator": iter,
}  # fmt: skip
BRIEF = GenerationConfig(max_new_tokens=2)
Call = Callable[[Any], object]


def refusals(call: Call) -> Iterator[str]:
    """The values that `call` refuses; what else it raises ends the test."""
    for name, value in VALUES.items():
        given = (number for number in [1]) if name == "generator" else value
        try:
            made = call(given)
            if inspect.isgenerator(made):
                list(made)
        except TrtKvCacheError as error:
            said = str(error)
            yield name
        else:
            said = ""
        assert len(said) < 1000


def exported(model: Path, **given: Any) -> object:
    """Export what looks like a checkpoint. Nothing is exported: the interpreter has no exporter."""
    folder = model.parent / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    given = {"checkpoint": folder, "output": model.parent / "new", "python": model, **given}
    return export_checkpoint(given.pop("checkpoint"), given.pop("output"), **given)


FUNCTIONS: dict[str, tuple[Callable[[Path, Any], object], str]] = {
    "plan_model": (lambda m, v: plan_model(v), ""),
    "plan_model options": (lambda m, v: plan_model(m, v), ""),
    "rewrite_model": (lambda m, v: rewrite_model(v, m.with_name("o.onnx")), ""),
    "rewrite_model output": (lambda m, v: rewrite_model(m, v), "text, path"),
    "rewrite_model options": (lambda m, v: rewrite_model(m, m.with_name("o.onnx"), v), ""),
    "verify_model": (lambda m, v: verify_model(v), ""),
    "verify_model options": (lambda m, v: verify_model(m, v), ""),
    "verify_model verify": (lambda m, v: verify_model(m, PlanOptions(), v), ""),
    "build_engine": (lambda m, v: build_engine(v, m.with_name("e")), ""),
    "build_engine options": (lambda m, v: build_engine("none.onnx", m.with_name("e"), options=v), ""),
    "build_engine build": (lambda m, v: build_engine("none.onnx", m.with_name("e"), build=v), ""),
    "build_engine output": (lambda m, v: build_engine("none.onnx", v), ""),
    "build_engine progress": (lambda m, v: build_engine("none.onnx", m.with_name("e"), progress=v), ""),
    "calibrate_caches": (lambda m, v: calibrate_caches(v, [[1]]), ""),
    "calibrate_caches prompts": (lambda m, v: calibrate_caches(m, v), ""),
    "calibrate_caches options": (lambda m, v: calibrate_caches(m, [[1]], v), ""),
    "score": (lambda m, v: score(v, [1, 2]), ""),
    **{
        f"export_checkpoint {name}": (lambda m, v, name=name: exported(m, **{name: v}), "")  # type: ignore[misc]
        for name in ("checkpoint", "output", "exporter", "dtype", "int4", "capacity", "python", "told")
    },
    "inspect_engine": (lambda m, v: inspect_engine(v), ""),
    "load_manifest": (lambda m, v: load_manifest(v), ""),
    "from_file": (lambda m, v: GenerationConfig.from_file(v), ""),
    "for_model": (lambda m, v: GenerationConfig.for_model(v), "text, path"),
    "open": (lambda m, v: DecodeSession.open(v), ""),
    **{
        f"open {name}": (lambda m, v, name=name: DecodeSession.open(m, **{name: v}).close(), taken)  # type: ignore[misc]
        for name, taken in {
            "device": "", "encoder": "None, text, path",
            "max_batch": "None, int, NumPy int", "max_chunk": "None, int, NumPy int",
            "capacity": "None", "plan_options": "None", "cpu": "None", "gpu": "None", "schedule": "None",
        }.items()
    },
    **{
        f"open {name}": (
            lambda m, v, name=name: DecodeSession.open(m, cpu=CpuOptions(**{name: v})).close(),  # type: ignore[misc]
            "None, int, NumPy int",
        )
        for name in ("threads", "default_capacity")
    },
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function, taken = FUNCTIONS[name]
    model = write_decoder(tmp_path / "m.onnx", DecoderConfig(layers=1))
    refused = [*refusals(lambda value: function(model, value))]
    assert [value for value in VALUES if value not in refused] == (taken.split(", ") if taken else [])


@pytest.mark.parametrize("kind", [PlanOptions, BuildOptions, VerifyOptions, GenerationConfig])
def test_options(kind: Any) -> None:
    """They hold plain values that JSON has: no switch is on because of ``"off"``."""
    for field in dataclasses.fields(kind):
        took = []

        def make(value: object, name: str = field.name, took: list[object] = took) -> None:
            took.append(getattr(kind(**{name: value}), name))

        refused = {*refusals(make)}
        assert {"object", "float", "array", "NUL"} - refused <= {"float", "NUL"}, field.name
        for value in took:
            plain = isinstance(value, (bool, int, float, str, tuple, dict)) or value is None or callable(value)
            assert plain, (field.name, value)
            assert not isinstance(value, np.generic)


SLOT = "NumPy int"
SESSION: dict[str, tuple[Callable[[DecodeSession, Any], object], str]] = {
    "generate": (lambda s, v: s.generate(v, BRIEF), "list, empty list, tuple, range"),
    "generate of one": (lambda s, v: s.generate([v], BRIEF), "int, NumPy int, list, tuple, set, range, generator"),
    "generate config": (lambda s, v: s.generate([[1]], v, max_new_tokens=2), "None"),
    "generate a setting": (lambda s, v: s.generate([[1]], max_new_tokens=v), "int, huge, NumPy int"),
    "chat": (lambda s, v: s.chat(v), ""),
    "stream_chat": (lambda s, v: list(s.stream_chat(v)), ""),
    "render_chat": (lambda s, v: s.render_chat(v), ""),
    "generate constants": (lambda s, v: s.generate([[1]], BRIEF, v), "None"),
    "generate constants of one": (lambda s, v: s.generate([[1]], BRIEF, [v]), "None, dict"),
    "generate inputs_embeds": (lambda s, v: s.generate([[1]], BRIEF, inputs_embeds=v), "None"),
    "generate inputs_embeds of one": (lambda s, v: s.generate([[1]], BRIEF, inputs_embeds=[v]), "None"),
    "generate positions": (lambda s, v: s.generate([[1]], BRIEF, positions=v), "None"),
    "generate positions of one": (lambda s, v: s.generate([[1]], BRIEF, positions=[v]), "None"),
    "stream": (lambda s, v: s.stream(v, BRIEF), "list, empty list, tuple, range"),
    "add": (lambda s, v: s.add(v, BRIEF), "list, tuple, set, range, generator"),
    "add config": (lambda s, v: s.add([1], v, max_new_tokens=2), "None"),
    "add slot": (lambda s, v: s.add([1], BRIEF, slot=v), f"None, {SLOT}"),
    "add keep": (lambda s, v: s.add([1], BRIEF, keep=v), "True"),
    "add index": (lambda s, v: s.add([1], BRIEF, index=v), "int, huge, NumPy int"),
    "add constants": (lambda s, v: s.add([1], BRIEF, constants=v), "None, dict"),
    "add inputs_embeds": (lambda s, v: s.add([1], BRIEF, inputs_embeds=v), "None"),
    "add positions": (lambda s, v: s.add([1], BRIEF, positions=v), "None"),
    "remove": (lambda s, v: s.remove(v), SLOT),
    "stop": (lambda s, v: s.stop(v), SLOT),
    "update": (lambda s, v: s.update(v), "dict"),
    "update of one": (lambda s, v: s.update({0: v}), "list, tuple, set, range, generator"),
    "update keep": (lambda s, v: s.update({0: [1]}, v), "int, huge, NumPy int"),
    "update inputs_embeds": (lambda s, v: s.update({0: [1]}, inputs_embeds=v), "None, dict"),
    "update inputs_embeds of one": (lambda s, v: s.update({0: [1]}, inputs_embeds={0: v}), "None"),
    "update positions": (lambda s, v: s.update({0: [1]}, positions=v), "None, dict"),
    "update positions of one": (lambda s, v: s.update({0: [1]}, positions={0: v}), "None"),
    "encode": (lambda s, v: s.encode(v), ""),
    "takes": (lambda s, v: s.takes(v), ", ".join(VALUES)),
    "acquire": (lambda s, v: s.cache.acquire(v), "list, empty list, tuple, set, range, generator"),
    "acquire constants": (lambda s, v: s.cache.acquire([1], v), "None, dict"),
    "read_constants": (lambda s, v: s.cache.read_constants(v), "None, dict"),
    **{
        name: (lambda s, v, name=name: getattr(s.cache, name)(v), SLOT)  # type: ignore[misc]
        for name in ("release", "reset", "fork", "tokens", "free_tokens", "slot")
    },
    "in": (lambda s, v: v in s.cache, ", ".join(VALUES)),
    "crop": (lambda s, v: s.cache.crop(v, 1), SLOT),
    "crop length": (lambda s, v: s.cache.crop(0, v), "int, NumPy int"),
    "reorder": (lambda s, v: s.cache.reorder(v), ""),
    "reorder to one": (lambda s, v: s.cache.reorder([v, v]), "NumPy int"),
    "reorder slots": (lambda s, v: s.cache.reorder([0], v), "list, set, generator"),
    "move": (lambda s, v: s.cache.move(v, 3), SLOT),
    "move row": (lambda s, v: s.cache.move(0, v), "int"),
    "save": (lambda s, v: s.cache.save(v), "text, path"),
    "save slots": (lambda s, v: s.cache.save("c", v), "None, list, empty list, set, generator"),
    "save slots of one": (lambda s, v: s.cache.save("c", [v]), SLOT),
    "load": (lambda s, v: s.cache.load(v), ""),
    "offload": (lambda s, v: s.cache.offload(v), SLOT),
    "offload path": (lambda s, v: s.cache.offload(0, v), "None, text, path"),
    "restore": (lambda s, v: s.cache.restore(v), SLOT),
    "view": (lambda s, v: s.cache.view(v), ""),
    "DecodeSession": (lambda s, v: DecodeSession(v), ""),
    "DecodeSession tokenizer": (lambda s, v: DecodeSession(HashRunner(), v), "None"),
    "DecodeSession embeddings": (lambda s, v: DecodeSession(HashRunner(), None, v), "None"),
}


@pytest.mark.parametrize("name", SESSION)
def test_sessions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused value has changed nothing."""
    monkeypatch.chdir(tmp_path)
    method, taken = SESSION[name]

    def call(value: object) -> None:
        with DecodeSession(HashRunner()) as session:
            session.update({session.cache.acquire(): [1, 2, 3]})
            session.cache.acquire([4])
            before = {slot: (session.cache.tokens(slot), session.cache.lengths[slot]) for slot in session.cache.slots}
            try:
                made = method(session, value)
                if inspect.isgenerator(made):
                    list(made)
            except TrtKvCacheError:
                after = {
                    slot: (session.cache.tokens(slot), session.cache.lengths[slot]) for slot in session.cache.slots
                }
                assert (after, session.running) == (before, ())
                raise
            while session.running:
                session.step()

    refused = [*refusals(call)]
    assert [value for value in VALUES if value not in refused] == (taken.split(", ") if taken else [])


def test_everything_public_is_here() -> None:
    functions = {name for name in trt_kvcache.__all__ if inspect.isfunction(getattr(trt_kvcache, name))} - {"diagnose"}
    assert functions <= {name.split()[0] for name in FUNCTIONS}
    kinds = (DecodeSession, KVCache)
    methods = {name for kind in kinds for name, value in vars(kind).items() if name[0] != "_" and callable(value)}
    assert methods - {"step", "close", "compact"} - {
        "astream",
        "identity",
        "note_written",
        "note_chosen",
        "put",
        "note_touched",
        "take",
        "give_back",
        "recall",
        "remember",
        "give_row",
        "seat_together",
    } <= {name.split()[0] for name in SESSION}
