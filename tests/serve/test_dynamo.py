"""Dynamo's worker on stand-ins for Dynamo; test_dynamo_cluster.py has the real one, and kills a worker."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: serve)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from adapters import Tiny, draw
from commands import invoke
from serve.models import TEMPLATE

from trt_kvcache import DecodeSession, PlanOptions
from trt_kvcache.errors import OptionError


class InvalidArgument(Exception):  # noqa: N818 - Dynamo's name
    pass


class EngineShutdown(Exception):  # noqa: N818
    pass


class HttpError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """`trt_kvcache.serve.dynamo`, with stand-ins for what it imports."""
    backend = ModuleType("dynamo.common.backend")
    vars(backend).update(
        EngineConfig=SimpleNamespace, LlmRegistration=SimpleNamespace, WorkerConfig=SimpleNamespace, LLMEngine=object,
        Worker=None,
    )  # fmt: skip
    llm = ModuleType("dynamo.llm")
    llm.registered = []  # type: ignore[attr-defined]

    async def register_model(*given: Any, **named: Any) -> None:
        llm.registered.append((*given, named["lora_name"], named["base_model_path"], named["worker_type"]))

    kinds = SimpleNamespace(Chat=1, Completions=2)
    vars(llm).update(
        ModelInput=SimpleNamespace(Tokens="tokens"), ModelType=kinds, WorkerType=SimpleNamespace(Aggregated="all"),
        register_model=register_model,
    )  # fmt: skip
    exceptions = ModuleType("dynamo.llm.exceptions")
    vars(exceptions).update(InvalidArgument=InvalidArgument, EngineShutdown=EngineShutdown, HttpError=HttpError)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dynamo", "dynamo.common"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, llm.__name__, llm)
        patch.setitem(sys.modules, backend.__name__, backend)
        patch.setitem(sys.modules, exceptions.__name__, exceptions)
        import trt_kvcache.serve.dynamo

        yield trt_kvcache.serve.dynamo
        patch.delitem(sys.modules, "trt_kvcache.serve.dynamo")


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[DecodeSession]:
    with DecodeSession.open(folder, max_batch=2) as session:
        yield session


@pytest.fixture
def engine(module: Any, session: DecodeSession) -> Iterator[Any]:
    engine = module.Engine(session, "tiny", Path("texts"), 4)
    yield engine
    asyncio.run(engine.cleanup())
    assert not session.cache.slots


@dataclass(frozen=True)
class Context:
    name: str = "one"

    def id(self) -> str:
        return self.name


def asked(tokens: list[int], limit: int | None = 8, **groups: dict[str, Any]) -> dict[str, Any]:
    stops = {"max_tokens": limit, "stop": None, "ignore_eos": True} | groups.get("stop_conditions", {})
    sampling = {"n": None, "temperature": 0.0} | groups.get("sampling_options", {})
    return {
        "model": "tiny", "token_ids": tokens, "eos_token_ids": [], "stop_conditions": stops,
        "sampling_options": sampling, "output_options": {"logprobs": None} | groups.get("output_options", {}),
    }  # fmt: skip


async def chunks(engine: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(request, Context())]


def tokens_of(said: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in said for token in chunk["token_ids"]]


SAMPLED = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0, "repetition_penalty": 1.2}, SAMPLED])
def test_a_request_that_moves_goes_on_as_if_it_had_stayed(
    engine: Any, session: DecodeSession, sampling: dict[str, Any]
) -> None:
    """As Dynamo's frontend does: the tokens so far end the prompt, and are taken off the limit."""
    given = {name: value for name, value in sampling.items() if value}
    config = {"do_sample": "seed" in given, **given, "max_new_tokens": 12, "eos_token_id": ()}
    alone = session.generate([1, 2, 3], **config).tokens
    whole = asyncio.run(chunks(engine, asked([1, 2, 3], 12, sampling_options=sampling)))
    assert tokens_of(whole) == alone
    assert [chunk["token_ids"] for chunk in whole] == [[token] for token in alone]
    assert whole[-1]["finish_reason"] == "length"
    assert whole[-1]["completion_usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    for cut in (1, 5, 11):
        moved = asked([1, 2, 3, *alone[:cut]], 12 - cut, sampling_options=sampling)
        assert tokens_of(asyncio.run(chunks(engine, moved))) == alone[cut:]


def test_ends_are_those_of_the_request_and_of_the_model(engine: Any, session: DecodeSession) -> None:
    first, second = session.generate([1, 2, 3], max_new_tokens=2, eos_token_id=()).tokens
    assert first != second
    stops: dict[str, Any] = {"ignore_eos": None, "stop_token_ids_hidden": [second]}
    said = asyncio.run(chunks(engine, asked([1, 2, 3], None, stop_conditions=stops)))
    assert tokens_of(said) == [first, second]
    assert said[-1]["finish_reason"] == "stop"
    said = asyncio.run(chunks(engine, asked([1] * 505, None)))  # no limit but the capacity
    assert said[-1]["finish_reason"] == "length"
    assert len(tokens_of(said)) == 512 - 505 + 1


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (asked([1], sampling_options={"n": 2}), "n: a request has one answer"),
        (asked([1], sampling_options={"presence_penalty": 0.5}), "presence_penalty: use repetition_penalty"),
        (asked([1], sampling_options={"guided_decoding": {"json": {}}}), "guided_decoding: structured output"),
        (asked([1], sampling_options={"new_of_dynamo": 1}), "new_of_dynamo: it is not known here"),
        (asked([1], sampling_options={"temperature": -1.0, "seed": 1}), "temperature|do_sample"),
        (asked([1], sampling_options={"temperature": 1.0, "seed": -1}), "seed is -1"),
        (asked([1], stop_conditions={"min_tokens": 3}), "min_tokens: it would start counting again on another worker"),
        (asked([1], output_options={"logprobs": 0}), "logprobs: workers give no log-probabilities"),
        (asked([]), "empty"),
        (asked([300]), "300"),
        (asked([1] * 600), "600"),
        (asked([1]) | {"multi_modal_data": {"image_url": []}} | {"prompt_embeds": "x"}, "embeds: a worker takes"),
    ],
)
def test_what_cannot_be_done_is_a_bad_request(engine: Any, request_: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        asyncio.run(chunks(engine, request_))


def test_fields_that_ask_for_nothing_are_taken(engine: Any) -> None:
    request = asked([1], sampling_options={"n": 1, "presence_penalty": 0.0}, stop_conditions={"min_tokens": 0})
    assert len(tokens_of(asyncio.run(chunks(engine, request)))) == 8


def test_adapters_are_models_of_their_own(module: Any, tmp_path: Path) -> None:
    tiny = Tiny("mobius/llama_dynamic_f32")
    folders = {name: tmp_path / name for name in ("ann", "bob")}
    for seed, folder in enumerate(folders.values()):
        draw(tiny, folder, seed)
    options = PlanOptions(capacity=64)
    with DecodeSession.open(tiny.path, tokenizer=False, adapters=folders, plan_options=options) as session:
        wanted = {
            name or "tiny": session.generate([5, 17, 33], adapter=name, max_new_tokens=8, eos_token_id=()).tokens
            for name in (None, *folders)
        }
        engine = module.Engine(session, "tiny", Path("texts"), 4)

        async def all_names() -> dict[str, list[int]]:
            config = await engine.start(0)
            assert config.served_model_name == "tiny"
            await engine.on_endpoint_ready("endpoint")
            given = [("tokens", 3, "endpoint", "texts", name, "texts", "all") for name in folders]
            assert sys.modules["dynamo.llm"].registered == given
            read = [chunks(engine, asked([5, 17, 33]) | {"model": name}) for name in wanted]
            return dict(zip(wanted, map(tokens_of, await asyncio.gather(*read)), strict=True))

        assert asyncio.run(all_names()) == wanted
        assert len({tuple(tokens) for tokens in wanted.values()}) == 3
        with pytest.raises(HttpError, match="no model 'cid'; this is 'tiny', with adapters 'ann', 'bob'") as refused:
            asyncio.run(chunks(engine, asked([1]) | {"model": "cid"}))
        assert refused.value.code == 404
        asyncio.run(engine.cleanup())


def test_a_request_that_is_aborted_frees_its_row(engine: Any, session: DecodeSession) -> None:
    """Dynamo stops to read the generator, and does not close it."""

    async def main() -> None:
        read = [engine.generate(asked([1], 500), Context(str(at))) for at in range(6)]
        for one in read[:2]:
            await anext(one)
        waiting = [asyncio.ensure_future(anext(one)) for one in read[2:]]
        await asyncio.sleep(0)  # they are in the queue
        while engine._core.waiting < 4:
            await asyncio.sleep(0.001)
        with pytest.raises(HttpError, match="6 sequences run or wait") as error:
            await chunks(engine, asked([1]))
        assert error.value.code == 429
        for at in range(6):
            await engine.abort(Context(str(at)))
        await engine.abort(Context("nobody's"))
        until = time.monotonic() + 10
        while session.running or engine._core.waiting:
            assert time.monotonic() < until
            await asyncio.sleep(0.001)
        for task in waiting:
            with pytest.raises(StopAsyncIteration):
                await task
        for one in read:
            await one.aclose()

    asyncio.run(main())


def test_a_worker_that_ends_hands_over_what_runs(module: Any, session: DecodeSession) -> None:
    async def main() -> None:
        engine = module.Engine(session, "tiny", Path("texts"), 4)
        read = engine.generate(asked([1], 500), Context())
        await anext(read)

        async def rest() -> None:
            async for _ in read:
                await asyncio.sleep(0.01)  # slower than the session

        reader = asyncio.ensure_future(rest())
        await engine.cleanup()
        assert reader.done()  # nothing runs in this event loop after cleanup
        with pytest.raises(EngineShutdown):  # which Dynamo's frontend answers with another worker
            await reader
        with pytest.raises(EngineShutdown):
            await chunks(engine, asked([1]))
        await engine.cleanup()

    asyncio.run(main())


def test_a_step_that_fails_is_an_error_of_the_server(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine._session, "step", fail)
    with pytest.raises(HttpError, match="a step failed") as error:
        asyncio.run(chunks(engine, asked([1])))
    assert error.value.code == 500


def test_settings_that_count_new_tokens_are_refused(
    module: Any, session: DecodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "config", replace(session.config, begin_suppress_tokens=(5,)))
    with pytest.raises(OptionError, match=r"generation_config.json sets begin_suppress_tokens, which counts new"):
        module.Engine(session, "tiny", Path("texts"), 4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path / "home"


def test_what_the_frontend_reads(module: Any, folder: Path, session: DecodeSession, tmp_path: Path, home: Path) -> None:
    written = module.write_texts(folder / "model.onnx", None, session)
    assert written.is_relative_to(home)
    assert json.loads((written / "tokenizer_config.json").read_text()) == {"chat_template": TEMPLATE}
    assert (written / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    config = json.loads((written / "config.json").read_text())
    assert config == {"architectures": ["trt_kvcache"], "model_type": "trt_kvcache", "eos_token_id": []}
    own = tmp_path / "own"
    own.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (own / name).write_bytes((folder / name).read_bytes())
    assert module.write_texts(folder, own, session) == written  # the same contents: workers of one model
    (own / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}))
    other = module.write_texts(folder, own, session)
    assert other != written
    config = json.loads((other / "config.json").read_text())
    assert config == {"architectures": ["LlamaForCausalLM"], "model_type": "trt_kvcache", "eos_token_id": 2}
    (own / "config.json").write_bytes(b'{"architectures": ')
    with pytest.raises(OptionError, match=r"config.json is not JSON: .*; copy the file again"):
        module.write_texts(folder, own, session)
    (own / "tokenizer.json").unlink()
    with pytest.raises(OptionError, match=r"own has no tokenizer.json, and Dynamo's frontend"):
        module.write_texts(folder, own, session)


def test_where_it_listens(module: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one address, unless the environment says another; workers find each other by files unless it says how."""
    seen: dict[str, Any] = {}

    class Worker:
        def __init__(self, engine: Any, config: SimpleNamespace) -> None:
            seen["config"] = config

        async def run(self) -> None:
            seen["hosts"] = [module.os.environ[name] for name in module._HOSTS]

    monkeypatch.setattr(module, "Worker", Worker)
    for name in (*module._HOSTS, "DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "10.0.0.1")
    module.run(engine, Path("texts"), "tiny", "127.0.0.1", lambda: None)
    assert seen["hosts"] == ["127.0.0.1", "127.0.0.1", "10.0.0.1", "127.0.0.1"]
    assert vars(seen["config"]) == {
        "namespace": "dynamo", "component": "trt-kvcache", "model_name": "texts", "served_model_name": "tiny",
        "discovery_backend": "file", "request_plane": "tcp", "event_plane": "zmq", "enable_kv_routing": False,
    }  # fmt: skip
    for name in module._HOSTS:
        monkeypatch.delenv(name)


def test_the_command(
    module: Any, folder: Path, session: DecodeSession, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    opened: dict[str, Any] = {}

    @contextmanager
    def given(path: Path, **options: Any) -> Iterator[DecodeSession]:
        opened.update(options)
        yield session

    monkeypatch.setattr(DecodeSession, "open", given)
    monkeypatch.setattr(module, "run", lambda *given: (seen.append(given), given[-1]()))
    done = invoke("worker", folder, "--host", "0.0.0.0", "--name", "m", "--max-batch", "3")
    assert "everyone who reaches 0.0.0.0 can use the model: Dynamo's workers ask for no key" in done.stderr
    assert "a worker of Dynamo at 0.0.0.0, Ctrl-C ends it" in done.stderr
    ((engine, texts, name, host, _),) = seen
    assert (name, host, opened["max_batch"]) == ("m", "0.0.0.0", 3)
    assert texts.is_relative_to(home)
    asyncio.run(engine.cleanup())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.onnx").write_bytes((folder / "model.onnx").read_bytes())
    done = invoke("worker", bare, code=1)
    assert "bare has no tokenizer.json" in done.stderr
    monkeypatch.delitem(sys.modules, "trt_kvcache.serve.dynamo")
    monkeypatch.setitem(sys.modules, "dynamo.common.backend", None)
    done = invoke("worker", folder, code=1)
    assert "worker needs dynamo.common.backend: pip install 'trt-kvcache[dynamo]', and after it" in done.stderr
