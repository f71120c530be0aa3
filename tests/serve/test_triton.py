"""The model repository for Triton, run by a stand-in for its python backend."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: serve)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

import numpy as np
from adapters import Tiny, draw
from commands import invoke

from trt_kvcache import DecodeSession
from trt_kvcache.errors import OptionError, OutputError
from trt_kvcache.serve.repository import write_repository

FINAL = 1


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self.name, self.array = name, array

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self.array


class TritonError:
    INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = range(4)

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.outputs, self.error = {tensor.name: tensor.array.tolist() for tensor in output_tensors}, error


@dataclass
class Request:
    inputs: dict[str, Any]
    responses: list[InferenceResponse] = field(default_factory=list)
    cancelled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not self.ended.is_set()
        self.responses.append(response)
        if flags == FINAL:
            self.ended.set()

    def wait(self) -> list[InferenceResponse]:
        assert self.ended.wait(30)
        return self.responses

    @property
    def error(self) -> tuple[int, str]:
        error = self.wait()[-1].error
        assert error is not None
        return error.code, error.message


def asked(prompt: str | list[int], /, *, stream: bool = True, **settings: Any) -> Request:
    made: dict[str, Any] = {"stream": np.array([stream]), "sampling_parameters": encoded(json.dumps(settings))}
    made |= {"text_input": encoded(prompt)} if isinstance(prompt, str) else {"input_ids": np.array(prompt, np.int64)}
    return Request(made)


def encoded(text: str) -> np.ndarray[Any, Any]:
    return np.array([text.encode()], np.object_)


@contextmanager
def opened(written: Path, parameters: dict[str, int]) -> Iterator[Any]:
    """The model of a repository, as the backend drives it."""
    backend = ModuleType("triton_python_backend_utils")
    vars(backend).update(
        Tensor=Tensor, TritonError=TritonError, InferenceResponse=InferenceResponse,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        get_input_tensor_by_name=lambda request, name: (
            Tensor(name, request.inputs[name]) if name in request.inputs else None
        ),
    )  # fmt: skip
    said = {name: {"string_value": str(value)} for name, value in parameters.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, backend.__name__, backend)
        spec = importlib.util.spec_from_file_location("model_of_triton", written / "1" / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = module.TritonPythonModel()
        made.initialize({
            "model_config": json.dumps({"parameters": said}), "model_instance_kind": "CPU", "model_name": "tiny",
            "model_instance_device_id": "0", "model_repository": str(written), "model_version": "1",
        })  # fmt: skip
        yield made
        left = asked([1], max_tokens=500, ignore_eos=True)
        made.execute([left])
        made.finalize()
        assert left.error[0] in (TritonError.UNAVAILABLE, TritonError.INVALID_ARG)
        patch.delitem(sys.modules, "trt_kvcache.serve.triton")


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    parameters = {"max_batch": 2, "max_queue": 4}
    written = write_repository(folder, tmp_path_factory.mktemp("repository"), "tiny", parameters)
    with opened(written, parameters) as made:
        yield made


def test_requests_choose_an_adapter(tmp_path: Path) -> None:
    tiny = Tiny("mobius/llama_dynamic_f32")
    merged = tmp_path / "merged" / "model.onnx"
    tiny.merged(draw(tiny, tmp_path / "ann", 0), merged)
    wanted = []
    for path in (tiny.path, merged):
        with DecodeSession.open(path, tokenizer=False, capacity=64) as session:
            wanted.append(session.generate([5, 17, 33], max_new_tokens=6, eos_token_id=()).tokens)
    assert wanted[0] != wanted[1]
    parameters = {"capacity": 64}
    done = run(tiny.path.parent, "-o", tmp_path / "r", "--name", "m", "--capacity", 64, "--lora", tmp_path / "ann")
    assert done.exit_code == 0, done.output
    with opened(tmp_path / "r" / "m", parameters) as made:
        fields = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
        requests = [asked([5, 17, 33], stream=False, **fields, **chosen) for chosen in ({}, {"model": "ann"})]
        unknown = asked([5], model="cid")
        made.execute([*requests, unknown])
        assert [request.wait()[-1].outputs["output_ids"] for request in requests] == wanted
        assert "there is no model 'cid'; this is 'tiny', with adapters 'ann'" in unknown.error[1]
    assert "no adapter: there is no" in run(tiny.path.parent, "-o", tmp_path / "s", "--lora", tmp_path / "r").stderr


def test_answers_are_those_of_the_same_prompt_alone(model: Any, alone: DecodeSession) -> None:
    prompts: list[str | list[int]] = ["the cache", [1, 2, 3], "reads", [7] * 20]
    greedy = [alone.generate(p, max_new_tokens=12, eos_token_id=()) for p in prompts]
    drawn = alone.generate("the", max_new_tokens=12, eos_token_id=(), do_sample=True, top_k=0, seed=5)
    requests = [asked(p, temperature=0, max_tokens=12, ignore_eos=True) for p in prompts]
    requests.append(asked("the", seed=5, max_tokens=12, ignore_eos=True))
    model.execute(requests[:2])
    model.execute(requests[2:])
    for request, wanted in zip(requests, [*greedy, drawn], strict=True):
        responses = [response.outputs for response in request.wait()]
        assert [said["output_ids"] for said in responses] == [[token] for token in wanted.tokens]
        assert b"".join(said["text_output"][0] for said in responses).decode() == wanted.text
        assert [said["finish_reason"] for said in responses] == [[b""]] * 11 + [[b"length"]]
    whole = asked("the cache", stream=False, temperature=0, max_tokens=12, ignore_eos=True)
    model.execute([whole])
    (response,) = whole.wait()
    assert response.outputs == {
        "text_output": [greedy[0].text.encode()], "output_ids": greedy[0].tokens, "finish_reason": [b"length"],
    }  # fmt: skip


def test_a_cancelled_request_gives_its_row_to_the_next(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are taken, and the queue is full; those that are cancelled leave without their 500 steps."""
    runner = model._session._runner
    step = runner.step
    monkeypatch.setattr(runner, "step", lambda batch: (time.sleep(0.005), step(batch))[1])  # 2.5 s for all of them
    requests = [asked([1], max_tokens=500, ignore_eos=True) for _ in range(6)]
    model.execute(requests)
    while not (requests[0].responses and requests[1].responses):
        time.sleep(0.005)
    late = asked([2], max_tokens=1)
    model.execute([late])
    assert late.error == (TritonError.UNAVAILABLE, "6 sequences run or wait (at most 6 can); ask again later")
    for request in requests:
        request.cancelled = True
    assert {request.error for request in requests} == {(TritonError.CANCELLED, "the client cancelled the request")}
    assert max(len(request.responses) for request in requests) < 500
    for _ in range(500):  # a row is free once the step that runs has ended
        after = asked([2], max_tokens=1)
        model.execute([after])
        if after.wait()[-1].error is None:
            break
        assert after.error[0] == TritonError.UNAVAILABLE
        time.sleep(0.005)
    else:
        pytest.fail("no row became free")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (asked("a", n=2).inputs, "the request asks for 2 sequences; the most for a request is 1"),
        (asked("a", tools=[{}]).inputs, "tools"),
        (asked("a", echo=True).inputs, "sampling_parameters: echo: the prompt is not repeated; leave it out"),
        (asked("a", stream=False, prompt="b").inputs, "sampling_parameters: prompt: give it as text_input or"),
        (asked([]).inputs, "the prompt is empty"),
        (asked([300]).inputs, "token id 300 is out of range; the model has 0 to 299"),
        (asked([1] * 2000).inputs, "the prompt has 2000 tokens, and the model takes 512"),
        ({}, "give the prompt as either text_input or input_ids"),
        (asked("a").inputs | asked([1]).inputs, "give the prompt as either text_input or input_ids"),
        ({"text_input": np.array([b"a", b"b"], np.object_)}, "text_input has 2 elements; give one"),
        ({"text_input": np.array([b"\xff"], np.object_)}, "text_input must be a text, and sampling_parameters"),
        (asked("a").inputs | {"sampling_parameters": encoded("[1]")}, "sampling_parameters a JSON object"),
    ],
)
def test_what_cannot_be_done_is_an_invalid_argument(model: Any, inputs: dict[str, Any], message: str) -> None:
    request = Request(inputs)
    model.execute([request])
    code, said = request.error
    assert code == TritonError.INVALID_ARG
    assert message in said
    assert len(request.responses) == 1


def run(*arguments: object) -> Any:
    return invoke("deploy", "triton", *arguments, code=None)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.mkdir()
    (ids / "model.onnx").write_bytes((folder / "model.onnx").read_bytes())
    done = run(ids, "-o", tmp_path / "repository", "--name", "m", "--max-batch", 3, "--capacity", 40)
    assert done.exit_code == 0, done.output
    assert "there is no tokenizer: the model takes input_ids and gives output_ids" in done.stderr
    written = tmp_path / "repository" / "m"
    files = {path.relative_to(written) for path in written.rglob("*") if path.is_file()}
    assert files == {Path("config.pbtxt"), Path("1", "model.py"), Path("1", "model", "model.onnx")}
    config = (written / "config.pbtxt").read_text()
    for line in (
        'name: "m"', "kind: KIND_CPU", 'key: "max_batch", value { string_value: "3" }',
        'key: "capacity", value { string_value: "40" }',
    ):  # fmt: skip
        assert line in config
    assert "max_queue" not in config


def test_an_engine_gets_an_instance_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "model.engine").write_bytes(b"engine")
    assert "an engine needs the manifest" in run(engine, "-o", tmp_path / "r").stderr
    monkeypatch.setattr("trt_kvcache.serve.repository.load_manifest", lambda folder: None)
    write_repository(engine, tmp_path / "r", "e", {})
    assert "kind: KIND_GPU" in (tmp_path / "r" / "e" / "config.pbtxt").read_text()
    said = run(engine, "-o", tmp_path / "r", "--capacity", 40).stderr
    assert "looks like an engine, which has its own; leave it out" in said


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    assert "give the folder of an engine or a model, which is copied" in run(folder / "model.onnx", "-o", "x").stderr
    (tmp_path / "empty").mkdir()
    assert "a directory without an .onnx file" in run(tmp_path / "empty", "-o", repository).stderr
    with pytest.raises(OptionError, match="give letters, digits"):
        write_repository(folder, repository, "../m", {})
    with pytest.raises(OutputError, match="lies in .* which is copied"):
        write_repository(folder, folder / "r", "m", {})
    (repository / "m").mkdir(parents=True)
    with pytest.raises(OutputError, match="m exists; remove it"):
        write_repository(folder, repository, "m", {})
    assert not list((repository / "m").iterdir())


def test_a_copy_that_fails_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(OutputError, match="m cannot be written: .*No space left on device"):
        write_repository(folder, tmp_path / "repository", "m", {})
    assert not list((tmp_path / "repository").iterdir())
