"""The process: OpenAI's own client, what the command refuses, and an orderly end."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra: serve)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

import openai
from commands import invoke

from trt_kvcache import DecodeSession


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "trt_kvcache", "serve", str(folder), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"http://\S+/v1", line) for line in process.stderr)), None)
            assert found, "the server ended without an address"
            yield process, found[0]
        finally:
            process.kill()


@pytest.mark.slow  # a process takes seconds to start; tests/serve/test_app.py has the client without one
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can answer")
def test_the_real_client_and_the_end(folder: Path, alone: DecodeSession, tmp_path: Path) -> None:
    """One server for all: its start is what takes time. Sync and async, whole and streamed, keys; then SIGTERM."""
    keys = tmp_path / "keys"
    keys.write_text("# for tests\nsecret\n")
    keys.chmod(0o600)
    messages: Any = [{"role": "user", "content": "the cache"}]
    expected = alone.chat(messages, max_new_tokens=8).text
    completed = alone.generate("the", max_new_tokens=8, seed=4, do_sample=True, top_k=0).text
    flags = f"--max-batch 2 --name tiny --max-queue 4 --prefix-cache 1MiB --api-key-file {keys}"
    with serving(folder, *flags.split()) as (process, url):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        asked: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 8}
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.chat.completions.create(**asked).choices[0].message.content == expected
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        found = client.completions.create(model="tiny", prompt="the", seed=4, max_tokens=8, extra_body={"top_k": 0})
        assert found.choices[0].text == completed
        with pytest.raises(openai.BadRequestError, match="end-of-sequence token, and the model names none"):
            client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "f"}}])
        with pytest.raises(openai.AuthenticationError, match="no valid API key"):
            openai.OpenAI(base_url=url, api_key="other", max_retries=0).models.list()

        async def several() -> list[str]:
            async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:

                async def one() -> str:
                    stream = await client.chat.completions.create(**asked, stream=True)
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

                return list(await asyncio.gather(*(one() for _ in range(5))))

        assert asyncio.run(several()) == [expected] * 5

        long = {"model": "tiny", "prompt": [1], "temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**long, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        rest = list(stream)  # what runs ends as if nothing were
        assert rest[-1].choices[0].finish_reason == "length"
        assert process.wait(20) == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can answer")
def test_what_takes_longer_than_the_drain_is_cut_off(folder: Path) -> None:
    with serving(folder, "--drain-timeout", "0.2") as (process, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model=folder.name, prompt=[1] * 3, max_tokens=500, n=64, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server ended before"):
            list(stream)
        assert process.wait(20) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can answer")
@pytest.mark.slow
def test_a_signal_right_after_the_start(folder: Path) -> None:
    with serving(folder) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def run(*arguments: str) -> str:
    result = invoke("serve", *arguments, code=1)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
    return line


def test_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1 port {port} cannot be used" in run(str(folder), "--port", port)
    assert "cannot be used" in run(str(folder), "--host", "host.invalid", "--no-api-key")


def test_key_files(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "cannot be read" in run(str(folder), "--api-key-file", str(keys))
    keys.write_text("# nothing\n\n")
    keys.chmod(0o600)
    assert "holds no key" in run(str(folder), "--api-key-file", str(keys))
    keys.write_bytes(b"\xff")
    assert "not UTF-8 text" in run(str(folder), "--api-key-file", str(keys))
    if os.name == "posix":
        keys.write_text("secret")
        keys.chmod(0o640)
        assert "others may read it; run: chmod 600" in run(str(folder), "--api-key-file", str(keys))


def test_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("trt_kvcache.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert "pip install 'trt-kvcache[serve]'" in run(str(folder))
