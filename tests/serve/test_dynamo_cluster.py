"""A real Dynamo: its frontend and three workers, two of which go under load. Nothing is lost, no text changes."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.frontend") is None:
    pytest.skip("NVIDIA Dynamo is not installed (extra: dynamo, and ai-dynamo)", allow_module_level=True)
pytest.importorskip("openai", reason="OpenAI's client is not installed")

import openai
from serve.models import free_port, write_served

from trt_kvcache import DecodeSession

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
ROWS, TOKENS = 4, 400


@contextmanager
def process(log: Path, environment: dict[str, str], *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as file,
        subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=file, stderr=file) as started,
    ):
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()


@contextmanager
def cluster(
    folder: Path, tmp_path: Path, *flags: str, count: int = 3
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The frontend's URL, and workers, from which it fetches tokenizer and configuration over HTTP."""
    port = free_port()
    environment = os.environ | {
        "DYN_FILE_KV": str(tmp_path / "discovery"), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_SYSTEM_HOST": "127.0.0.1", "HOME": str(tmp_path),
    }  # fmt: skip
    worker = (
        "trt_kvcache",
        "worker",
        str(folder),
        "--engine",
        "dynamo",
        "--name",
        "tiny",
        "--max-batch",
        str(ROWS),
        "--max-queue",
        "20",
        *flags,
    )
    frontend = (
        "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--discovery-backend", "file",
        "--request-plane", "tcp", "--event-plane", "zmq", "--router-mode", "round-robin", "--migration-limit", "3",
    )  # fmt: skip
    with ExitStack() as stack:
        workers = []
        for at in range(count):
            own = environment | {"DYN_SYSTEM_PORT": str(free_port()), "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
            workers.append(stack.enter_context(process(tmp_path / f"worker{at}", own, *worker)))
        stack.enter_context(process(tmp_path / "frontend", environment, *frontend))
        yield f"http://127.0.0.1:{port}/v1", workers


def instances(url: str) -> int:
    """Workers that the frontend sends requests to."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=5) as answer:
        return len([one for one in json.load(answer)["instances"] if one["endpoint"] == "generate"])


def until_there(url: str, logs: list[Path]) -> None:
    """Wait until the frontend has the model, and knows all workers; logs are theirs, and the frontend's."""
    until = time.monotonic() + 120
    while True:
        assert time.monotonic() < until, "\n".join(log.read_text(errors="replace") for log in logs)
        time.sleep(0.5)
        with suppress(OSError):
            with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
                models = json.load(answer)["data"]
            if models and instances(url) == len(logs) - 1:
                return


def test_workers_go_under_load(tmp_path: Path) -> None:
    folder = write_served(tmp_path / "model", capacity=2048)
    texts = ["the cache", "reads", "what the model wrote", "a", "keeps what"]
    cases: list[dict[str, Any]] = [{"temperature": 0}, *({"seed": seed, "temperature": 1} for seed in range(3))]
    with DecodeSession.open(folder, max_batch=1) as session:
        assert session.tokenizer is not None
        alone = {
            (text, case): session.generate(
                session.render_chat([{"role": "user", "content": text}]), max_new_tokens=TOKENS, eos_token_id=(),
                **({"do_sample": True, "top_k": 0, "seed": given["seed"]} if "seed" in given else {}),
            ).text
            for text in texts for case, given in enumerate(cases)
        }  # fmt: skip

    async def main(url: str, workers: list[subprocess.Popen[bytes]]) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            heard, logs = 0, [tmp_path / f"worker{at}" for at in range(3)]

            async def ask(text: str, case: int, tokens: int = TOKENS) -> str:
                nonlocal heard
                stream: Any = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": text}], max_tokens=tokens, stream=True,
                    extra_body={"ignore_eos": True}, **cases[case],
                )  # fmt: skip
                said = ""
                async for chunk in stream:
                    said += chunk.choices[0].delta.content or ""
                    heard += 1
                return said

            jobs = {key: asyncio.ensure_future(ask(*key)) for key in alone}

            async def freeze_and_kill() -> None:
                """As Kubernetes does with a process that answers no probe."""
                workers[0].send_signal(signal.SIGSTOP)
                await asyncio.sleep(2)
                workers[0].kill()

            async def terminate() -> None:
                workers[1].terminate()

            for end, count in ((freeze_and_kill, 200), (terminate, 600)):
                while heard < count:
                    await asyncio.sleep(0.01)
                    assert time.monotonic() < start + 300
                assert all(b"request received" in log.read_bytes() for log in logs)  # none of them idles
                await end()
                assert not all(job.done() for job in jobs.values())
            found = dict(zip(jobs, await asyncio.gather(*jobs.values(), return_exceptions=True), strict=True))
            assert found == alone
            assert (tmp_path / "frontend").read_bytes().count(b"recreating stream") > 1

            # Clients that go away free rows and queue of the worker that is left.
            gone = [asyncio.ensure_future(ask("the cache", 0, 1900)) for _ in range(20)]
            await asyncio.sleep(3)
            for job in gone:
                job.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            again = time.monotonic()
            assert await ask("reads", 0) == alone["reads", 0]
            assert time.monotonic() - again < 10

            # A request for two choices does not move on, and a killed worker gets requests until its lease ends.
            while await asyncio.to_thread(instances, url) > 1:
                await asyncio.sleep(0.2)
                assert time.monotonic() < again + 60
            for given in ({"n": 2, "temperature": 1}, {"response_format": {"type": "json_object"}}, {"logprobs": True}):
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=3, **given
                    )

    start = time.monotonic()
    with cluster(folder, tmp_path) as (url, workers):
        until_there(url, [tmp_path / name for name in ("worker0", "worker1", "worker2", "frontend")])
        asyncio.run(main(url, workers))
        workers[2].terminate()
        for at in (1, 2):
            assert workers[at].wait(60) == 0, (tmp_path / f"worker{at}").read_text(errors="replace")
