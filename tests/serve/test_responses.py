"""The Responses API: OpenAI's own client reads its answers and streams, and what needs a store is refused."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed (extra: serve)")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: serve)")
pytest.importorskip("llguidance", reason="llguidance is not installed (extra: structured)")
pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("httpx2", reason="OpenAI's client comes without httpx2")

import httpx2 as httpx
import openai
from serve.asgi import ask
from serve.models import write_served
from serve.test_structured import TEMPLATE, Answer

from trt_kvcache import DecodeSession
from trt_kvcache.serve.service import Service

CLOCK = {
    "type": "function", "name": "Clock", "description": "The time.", "strict": True,
    "parameters": {"type": "object", "properties": {"zone": {"enum": ["x", "y"]}}, "required": ["zone"],
                   "additionalProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeSession]:
    folder: Path = write_served(tmp_path_factory.mktemp("model"), template=TEMPLATE, eos_token="</s>")
    with DecodeSession.open(folder, max_batch=2) as session:
        yield session


@pytest.fixture
def service(session: DecodeSession) -> Iterator[Service]:
    service = Service(session, "tiny", max_queue=10)
    yield service
    service.core.close()
    assert not session.cache.slots


def with_client(service: Service, run: Callable[[Any], Awaitable[None]]) -> None:
    async def connected() -> None:
        there = httpx.AsyncClient(transport=httpx.ASGITransport(service.app))
        async with openai.AsyncOpenAI(base_url="http://x/v1", api_key="x", max_retries=0, http_client=there) as client:
            await run(client)

    asyncio.run(connected())


def test_texts_are_those_of_chats(service: Service, session: DecodeSession) -> None:
    earlier = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "two", "annotations": []}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "brief"}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"},
    ]  # fmt: skip
    expected = session.chat(messages, max_new_tokens=9)
    asked: dict[str, Any] = {
        "model": "tiny", "input": earlier, "instructions": "brief", "temperature": 0, "max_output_tokens": 9,
        "store": True, "include": ["reasoning.encrypted_content"],
    }  # fmt: skip

    async def run(client: Any) -> None:
        whole = await client.responses.create(**asked)
        assert whole.output_text == expected.text
        assert (whole.status, whole.store) == ("incomplete", None if whole.store is None else False)
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(expected.prompt), 9)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert "".join(event.delta for event in events[4:-4]) == events[-4].text == expected.text
        assert events[-1].response.output_text == expected.text
        form: dict[str, Any] = {"model": "tiny", "input": "x", "text_format": Answer, "max_output_tokens": 200}
        parsed = await client.responses.parse(**form, temperature=0)
        assert isinstance(parsed.output_parsed, Answer)
        async with client.responses.stream(**form, temperature=0) as stream:
            assert (await stream.get_final_response()).output_parsed == parsed.output_parsed

    with_client(service, run)


def test_calls_come_and_go_back(service: Service) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [CLOCK], "parallel_tool_calls": False, "temperature": 0}
    first = [{"role": "user", "content": "the time?"}]

    async def run(client: Any) -> None:
        for choice in ("required", {"type": "function", "name": "Clock"}):
            whole = await client.responses.create(**asked, input=first, tool_choice=choice)
            (call,) = whole.output
            assert (whole.status, call.type, call.name, whole.output_text) == (
                "completed",
                "function_call",
                "Clock",
                "",
            )
            assert json.loads(call.arguments)["zone"] in ("x", "y")
            stream = await client.responses.create(**asked, input=first, tool_choice=choice, stream=True)
            events = [event async for event in stream]
            done = next(event for event in events if event.type == "response.function_call_arguments.done")
            (again,) = events[-1].response.output
            assert (done.arguments, done.item_id) == (again.arguments, again.id)
            assert json.loads(again.arguments)["zone"] in ("x", "y")
        told = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        after = await client.responses.create(
            **asked, input=[*first, call.model_dump(exclude_none=True), told], tool_choice="none"
        )
        assert [item.type for item in after.output] == ["message"]

    with_client(service, run)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored here; send the whole"),
        ({"conversation": "conv_1"}, "conversation: nothing is stored here"),
        ({"prompt": {"id": "p"}}, "prompt: prompts are not stored here"),
        ({"max_tool_calls": 1}, "max_tool_calls: tools run at the client"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "nothing is stored here"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type is 'image_generation_call'; supported:"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]: expected a text"),
        ({"tools": [{"type": "web_search"}]}, "there is no tool of type 'web_search' here; supported: function"),
        ({"include": ["message.output_text.logprobs"]}, "Invalid enum value"),
        ({"background": True}, "background"),
        ({"unknown": 1}, "unknown field `unknown`"),
        ({"input": []}, "length >= 1"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_there_is_refused(service: Service, fields: dict[str, Any], said: str) -> None:
    reply = asyncio.run(ask(service.app, "/v1/responses", {"input": "x", **fields}))
    assert (reply.status, said in reply.error["message"]) == (400, True), reply.body
