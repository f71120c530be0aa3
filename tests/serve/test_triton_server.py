"""A real Triton serves the repository that `deploy triton` writes: streams, whole answers, cancelling, refusals."""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if shutil.which("tritonserver") is None and importlib.util.find_spec("pytriton") is None:
    pytest.skip("there is no tritonserver, neither on PATH nor of the package nvidia-pytriton", allow_module_level=True)
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

import numpy as np
import tritonclient.grpc.aio as client_aio
from serve.models import free_port, write_served
from tritonclient.grpc import InferInput, InferRequestedOutput

from trt_kvcache import DecodeSession
from trt_kvcache.serve.repository import write_repository

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
NAME, ROWS = "tiny", 4


def prepared(folder: Path) -> list[str]:
    """A command: the wheel has a stub of the backend for each Python, and Triton wants one of this one."""
    if (found := shutil.which("tritonserver")) is not None:
        return [found]
    (root,) = importlib.util.find_spec("pytriton").submodule_search_locations  # type: ignore[union-attr, misc]
    backends = folder / "backends"
    shutil.copytree(Path(root, "tritonserver", "backends"), backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = "triton_python_backend_stub"
    shutil.copy(Path(root, "tritonserver", "python_backend_stubs", version, stub), backends / "python" / stub)
    return [f"{root}/tritonserver/bin/tritonserver", "--backend-directory", str(backends)]


@contextmanager
def triton(repository: Path, command: list[str]) -> Iterator[tuple[str, str]]:
    """A server, and its addresses for HTTP and gRPC."""
    http, grpc = free_port(), free_port()
    command = [*command, "--model-repository", str(repository), "--allow-metrics", "false"]
    command += ["--disable-auto-complete-config"]
    command += ["--http-address", "127.0.0.1", "--http-port", str(http), "--reuse-http-port", "1"]
    command += ["--grpc-address", "127.0.0.1", "--grpc-port", str(grpc)]
    libraries = [sysconfig.get_config_var("LIBDIR"), *(f"{path}/nvidia_pytriton.libs" for path in sys.path)]
    environment = os.environ | {  # the backend runs in the first Python on PATH
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(path for path in sys.path if path),
        "LD_LIBRARY_PATH": ":".join(libraries),
    }
    log = repository.with_name("log")
    with log.open("wb") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        try:
            until = time.monotonic() + 120
            while not answers(f"http://127.0.0.1:{http}/v2/health/ready"):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{http}/v2/models/{NAME}", f"127.0.0.1:{grpc}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def inputs(prompt: str | list[int], stream: bool, **settings: Any) -> list[InferInput]:
    given: dict[str, tuple[str, Any]] = {
        "stream": ("BOOL", np.array([stream])),
        "sampling_parameters": ("BYTES", np.array([json.dumps(settings).encode()], np.object_)),
    }
    if isinstance(prompt, str):
        given["text_input"] = ("BYTES", np.array([prompt.encode()], np.object_))
    else:
        given["input_ids"] = ("INT64", np.array(prompt, np.int64))
    made = []
    for name, (kind, array) in given.items():
        made.append(InferInput(name, list(array.shape), kind))
        made[-1].set_data_from_numpy(array)
    return made


async def ask(client: Any, prompt: str | list[int], stream: bool = True, **settings: Any) -> tuple[str, list[int], int]:
    """The text, the tokens, and the number of responses."""

    async def once() -> Any:
        yield {"model_name": NAME, "inputs": inputs(prompt, stream, **settings), "outputs": OUTPUTS}

    text, tokens, count, reason = b"", [], 0, b""
    async for result, error in client.stream_infer(once()):
        if error is not None:
            raise error
        text += result.as_numpy("text_output")[0]
        tokens += result.as_numpy("output_ids").tolist()
        reason = result.as_numpy("finish_reason")[0]
        count += 1
        if reason:
            break
    return text.decode(), tokens, count


OUTPUTS = [InferRequestedOutput(name) for name in ("text_output", "output_ids", "finish_reason")]
CASES: list[dict[str, Any]] = [{"temperature": 0}, *({"seed": seed} for seed in range(5))]


def test_triton_serves_the_repository(tmp_path: Path) -> None:
    """One server for all: its start is what takes time."""
    folder = write_served(tmp_path / "model", capacity=2048)
    write_repository(folder, tmp_path / "repository", NAME, {"max_batch": ROWS, "max_queue": 60})
    prompts: list[str | list[int]] = ["the cache", [1, 2, 3], "reads what", [7] * 40]
    with DecodeSession.open(folder, max_batch=1) as session:
        expected = {}
        for at, prompt in enumerate(prompts):
            for case, given in enumerate(CASES):
                sampled = {"do_sample": True, "top_k": 0, **given} if "seed" in given else {}
                alone = session.generate(prompt, max_new_tokens=24, eos_token_id=(), **sampled)
                expected[at, case] = alone.text, alone.tokens
    settings = {"max_tokens": 24, "ignore_eos": True}

    async def main(address: str) -> None:
        client = client_aio.InferenceServerClient(address)
        jobs = {
            key: ask(client, prompts[key[0]], stream=at % 3 > 0, **settings, **CASES[key[1]])
            for at, key in enumerate(expected)
        }
        found = dict(zip(jobs, await asyncio.gather(*jobs.values()), strict=True))
        assert {key: said[:2] for key, said in found.items()} == expected
        assert {said[2] for said in found.values()} == {1, 24}  # responses: one whole, or one for each token

        # Requests that nobody waits for: without cancelling, 28,000 steps come before the next one.
        long = [
            asyncio.ensure_future(ask(client, [1], max_tokens=2000, temperature=0, ignore_eos=True)) for _ in range(56)
        ]
        await asyncio.sleep(1)
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        start = time.monotonic()
        assert (await ask(client, prompts[1], **settings, temperature=0))[:2] == expected[1, 0]
        assert time.monotonic() - start < 10

        await client.close()

    with triton(tmp_path / "repository", prepared(tmp_path)) as (http, grpc):
        asyncio.run(main(grpc))
        assert generate(http, text_input="the cache", sampling_parameters={**settings, "temperature": 0}) == {
            "text": expected[0, 0][0], "tokens": expected[0, 0][1]
        }  # fmt: skip
        assert "one may ask for 1" in generate(http, text_input="a", sampling_parameters={"n": 2})["refused"]


def generate(url: str, sampling_parameters: Any = None, **given: Any) -> dict[str, Any]:
    """The answer of Triton's HTTP extension, or its error of status 400."""
    body = {**given, "sampling_parameters": json.dumps(sampling_parameters or {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", json.dumps(body).encode())) as answer:
            said = json.load(answer)
            return {"text": said["text_output"], "tokens": said["output_ids"]}
    except urllib.error.HTTPError as error:
        said = json.load(error)["error"]
        return {"refused" if error.code == 400 else "failed": said}
