"""Structured answers and tool calls: OpenAI's own client reads each, and none depends on what else runs."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed (extra: serve)")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: serve)")
pytest.importorskip("llguidance", reason="llguidance is not installed (extra: structured)")
pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("httpx2", reason="OpenAI's client comes without httpx2")

import httpx2 as httpx
import openai
from pydantic import BaseModel, Field
from serve.asgi import Reply, ask
from serve.models import write_served

from trt_kvcache import DecodeSession, Grammars
from trt_kvcache.errors import OptionError
from trt_kvcache.runtime.text.chat_template import Chat, render
from trt_kvcache.serve.service import Service
from trt_kvcache.serve.tools import GENERIC, CallReader, Tool, ToolForm, find_form, in_text
from trt_kvcache.serve.tools import Function as ToolFunction

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# As the templates of Hermes and Qwen write calls.
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n' if not loop.first }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}</s>{% endfor %}<assistant>"
)


class Answer(BaseModel):
    name: str = Field(max_length=5)
    kind: Literal["a", "ü"]
    sizes: list[int] = Field(max_length=2)


class Weather(BaseModel):
    """Look at the sky."""

    city: str = Field(max_length=4)
    days: Literal[1, 2, 3]


class Clock(BaseModel):
    zone: Literal["x", "y"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("model"), template=TEMPLATE, eos_token="</s>")


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[DecodeSession]:
    with DecodeSession.open(folder, max_batch=4) as session:
        yield session


@pytest.fixture
def service(session: DecodeSession) -> Iterator[Service]:
    service = Service(session, "tiny", max_queue=100)
    yield service
    service.core.close()
    assert not session.cache.slots


def post(service: Service, body: Any, path: str = TEXT) -> Reply:
    return asyncio.run(ask(service.app, path, body))


MESSAGES: Any = [{"role": "user", "content": "the cache"}]


def test_the_real_client_reads_models_and_calls(service: Service) -> None:
    """Whole and streamed, pydantic models and tools; and a call goes back with its result."""
    tools = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]

    async def run() -> None:
        there = httpx.AsyncClient(transport=httpx.ASGITransport(service.app))
        async with openai.AsyncOpenAI(base_url="http://x/v1", api_key="x", max_retries=0, http_client=there) as client:
            chat = client.chat.completions
            asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_completion_tokens": 200}
            whole = await chat.parse(**asked, response_format=Answer)
            assert isinstance(whole.choices[0].message.parsed, Answer)
            async with chat.stream(**asked, response_format=Answer) as stream:
                streamed = await stream.get_final_completion()
            assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed

            for choice in ("required", {"type": "function", "function": {"name": "Clock"}}):
                one = {**asked, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
                message = (await chat.parse(**one)).choices[0]
                assert (message.finish_reason, message.message.content) == ("tool_calls", None)
                (call,) = message.message.tool_calls
                assert isinstance(call.function.parsed_arguments, Weather | Clock)
                assert choice == "required" or isinstance(call.function.parsed_arguments, Clock)
                async with chat.stream(**one) as stream:
                    (again,) = (await stream.get_final_completion()).choices[0].message.tool_calls
                assert again.function == call.function
            told = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
            after = await chat.create(**{**asked, "messages": [*MESSAGES, message.message, told]}, tools=tools)
            assert after.choices[0].message.role == "assistant"

    asyncio.run(run())


def test_answers_are_those_alone(service: Service, folder: Path) -> None:
    """Many at once, each with its own grammar or none."""
    rng = random.Random(0)
    schema = Answer.model_json_schema()
    formats: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
         lambda g: g.json_schema(schema)),
        ({"structured_outputs": {"json": schema}}, lambda g: g.json_schema(schema)),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda g: g.regex("[ab]{3}")),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, lambda g: g.choice(["red", "blue"])),
        ({"structured_outputs": {"grammar": 'start: "x" start | "y"'}}, lambda g: g.lark('start: "x" start | "y"')),
        ({"response_format": {"type": "json_object"}}, lambda g: g.json_object()),
        ({"response_format": {"type": "text"}}, lambda g: None),
    ]  # fmt: skip
    asked = [(i, *formats[i % len(formats)], [rng.randrange(3, 300) for _ in range(5)]) for i in range(14)]

    async def run() -> list[Reply]:
        body = {"max_tokens": 120, "top_k": 0}
        return await asyncio.gather(
            *(ask(service.app, TEXT, body | fields | {"seed": i, "prompt": ids}) for i, fields, _, ids in asked)
        )

    replies = asyncio.run(run())
    with DecodeSession.open(folder, max_batch=1) as alone:
        grammars = Grammars(alone)
        for (i, _, make, prompt), reply in zip(asked, replies, strict=True):
            settings: dict[str, Any] = {"seed": i, "top_k": 0, "max_new_tokens": 120, "grammar": make(grammars)}
            assert reply.data["choices"][0]["text"] == alone.generate(prompt, **settings).text


def fields(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 3} | fields


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TALK = {"messages": MESSAGES, "max_tokens": 3}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (TEXT, fields(response_format={"type": "json_schema"}), "json_schema is missing; give", "response_format"),
    (TEXT, fields(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}),
     "response_format: the JSON schema does not compile: Invalid type: x", "response_format"),
    (TEXT, fields(structured_outputs={"regex": "(("}), "structured_outputs: the regular expression does not compile",
     "structured_outputs"),
    (TEXT, fields(structured_outputs={}), "nothing is given; give one of json, json_object", "structured_outputs"),
    (TEXT, fields(structured_outputs={"regex": "a", "choice": ["b"]}), "regex, choice is given", "structured_outputs"),
    (TEXT, fields(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), "leave out one",
     "structured_outputs"),
    (TEXT, fields(structured_outputs={"regex": "a"}, ignore_eos=True), "say where the text ends", "ignore_eos"),
    (TEXT, fields(structured_outputs={"regex": "a"}, logit_bias={"97": -100}), "", ""),
    (CHAT, TALK | {"tools": [tool()], "tool_choice": "f"}, "tools: tool_choice: supported: none", "tools"),
    (CHAT, TALK | {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "there is no tool 'g'", "tools"),
    (CHAT, TALK | {"tools": [tool(type="x")]}, "tools: the grammar does not compile", "tools"),
    (CHAT, TALK | {"tools": [tool("a b")]}, "Expected `str` matching regex", "tools"),
    (CHAT, TALK | {"tools": [tool()], "response_format": {"type": "json_object"}}, "another field already",
     "response_format"),
    (CHAT, {"messages": [*MESSAGES, CALLED]}, "have to be a JSON object", "messages"),
    (CHAT, TALK | {"tool_choice": "required"}, "tool_choice is 'required', and there are no tools", "tools"),
]  # fmt: skip


def test_what_cannot_be_done_is_refused_with_its_reason(service: Service) -> None:
    for path, body, said, param in REFUSED:
        reply = post(service, body, path)
        if not said:
            assert reply.status == 200, reply.body
            continue
        assert (reply.status, reply.error["param"]) == (400, param), (body, reply.body)
        assert said in reply.error["message"], (body, reply.body)


# The form of calls, as templates show it.

LLAMA = (
    "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{% set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}.{% endfor %}[assistant]"
)
LISTED = (
    "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}CALLS ["
    "{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}ID}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}.{% endfor %}[assistant]"
)
FORMS = {
    "hermes": (TEMPLATE, ToolForm('<tool_call>\n{"name": "', '", "arguments": ',
                                  '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>")),
    "llama": (LLAMA, ToolForm('{"name": "', '", "parameters": ', None, "}")),
    "listed": (LISTED.replace("ID", ""), ToolForm('CALLS [{"name": "', '", "arguments": ', '}, {"name": "', "}]")),
}  # fmt: skip


def form_in(template: str) -> ToolForm:
    def written(messages: Any, tools: Any) -> str:
        return "".join(part.text for part in render(template, Chat(messages, tools), {}, (), "it"))

    return find_form(written, ["</s>", "<call>"])


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_calls_is_read_from_the_template(name: str) -> None:
    template, form = FORMS[name]
    assert form_in(template) == form
    thinking = template.replace("{{ m.content }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}")
    if name == "hermes":
        assert form_in(thinking) == form


@pytest.mark.parametrize(("template", "said"), [
    (LISTED.replace("ID", ', "id": "{{ c.id }}"'), "supported: calls without ids"),
    (LISTED.replace("CALLS ", "<call>"), "calls without special tokens; here they contain <call>"),
    (LISTED.replace(" | tojson }}ID", " | length }}ID"), "supported: a name followed by the arguments as JSON"),
])  # fmt: skip
def test_forms_that_cannot_be_read_are_refused(template: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        form_in(template)


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


def test_a_template_without_tools_gets_them_as_text(tmp_path: Path) -> None:
    assert form_in(PLAIN) == GENERIC
    tools: list[dict[str, Any]] = [dict(openai.pydantic_function_tool(kind)) for kind in (Weather, Clock)]
    with DecodeSession.open(write_served(tmp_path, capacity=2048, template=PLAIN, eos_token="</s>")) as session:
        service = Service(session, "tiny")
        body = {"messages": MESSAGES, "tools": tools, "temperature": 0, "tool_choice": "required"}
        body["parallel_tool_calls"] = False
        whole = post(service, body, CHAT)
        assert whole.status == 200, whole.body
        (choice,) = whole.data["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        {"Weather": Weather, "Clock": Clock}[call["function"]["name"]].model_validate_json(
            call["function"]["arguments"]
        )
        named = {"type": "function", "function": {"name": "Clock"}}
        format_too = {"type": "json_object"}  # of texts; instructor gives both
        forced = {**body, "tool_choice": named, "parallel_tool_calls": True, "response_format": format_too}
        (choice,) = post(service, forced, CHAT).data["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["Clock"]
        after = [*MESSAGES, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "noon"}]
        reply = post(service, body | {"messages": after, "tool_choice": "none", "max_tokens": 4}, CHAT)
        assert reply.status == 200, reply.body
        service.core.close()


@pytest.mark.parametrize("system", [True, False])
def test_tools_calls_and_results_are_text(system: bool) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *([{"role": "system", "content": "brief"}] if system else []), {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call, call]}, {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]  # fmt: skip
    made = in_text(messages, [{"type": "function", "function": {"name": "f", "description": "does"}}])
    assert [m["role"] for m in made] == [*(["system"] if system else []), "user", "assistant", "user"]
    first = made[0]["content"]
    assert '{"name": "f", "description": "does"}' in first
    assert first.startswith("brief\n\n") if system else first.endswith("\n\ngo")
    written_call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert made[-2]["content"] == f"{written_call}\n{written_call}"
    assert made[-1]["content"] == "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert in_text(MESSAGES, []) == MESSAGES


TOOLS = [Tool("function", ToolFunction("f", None, {"properties": {"a": {"type": "string"}}})),
         Tool("function", ToolFunction("g"))]  # fmt: skip


def written(form: ToolForm, *calls: tuple[str, str]) -> str:
    return form.begin + (form.between or "").join(f"{name}{form.middle}{given}" for name, given in calls) + form.end


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_from_texts_in_pieces(name: str) -> None:
    form, rng = FORMS[name][1], random.Random(0)
    calls = [("f", '{"a": "} {\\" <tool_call>"}'), ("g", "{}")][: 2 if form.between else 1]
    for before, made in (("", calls), ("say ", calls), ("<tool no {x} <to", []), ("", [])):
        if made and before and form.trigger == "{":
            continue
        text = before + (written(form, *made) if made else "")
        for _ in range(20):
            reader, said, at = CallReader(form, TOOLS, required=False), "", 0
            while at < len(text):
                step = rng.randrange(1, 9)
                said += reader.push(text[at : at + step], last=at + step >= len(text))
                at += step
            assert [(call["function"]["name"], call["function"]["arguments"]) for call in reader.calls] == made
            assert said == before
    cut = CallReader(form, TOOLS, required=True)
    assert cut.push(written(form, *calls)[:-4], last=True) == ""
    assert len(cut.calls) == len(calls) - (len(form.end) < 4)
