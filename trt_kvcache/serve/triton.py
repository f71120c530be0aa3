"""Runs a `ServingCore` as a model of Triton's python backend, in a repository from `trt_kvcache.serve.repository`.

A request has one prompt, as `text_input` or `input_ids`. `sampling_parameters` has the fields of ``/v1/completions`` as
JSON; its field `model` chooses an adapter. With `stream`, the answer is one response for each event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils  # exists only in a process that Triton starts

from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.runtime.requests import Generation
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.answers import REASONS
from trt_kvcache.serve.api_requests import ApiError, CompletionRequest, as_api, find_adapter, prepare, read_request
from trt_kvcache.serve.core import ServingCore
from trt_kvcache.serve.repository import ADAPTERS, FOLDER

_log = logging.getLogger(__name__)
_POLL = 0.05
"""Seconds between two checks whether a client has cancelled: Triton does not notify the model."""
_ELSEWHERE = {
    "prompt": "give it as text_input or input_ids",
    "stream": "give it as an input of its own",
    "stream_options": "the last response has the finish_reason; leave it out",
    "echo": "the prompt is not repeated; leave it out",
    "logprobs": "there is no output for them; leave it out",
}
# Names, because Triton also imports this file to complete the configuration, when its error codes do not exist yet.
_CODES = {400: "INVALID_ARG", 404: "INVALID_ARG", 429: "UNAVAILABLE", 503: "UNAVAILABLE"}


class TritonPythonModel:
    """The model class that Triton's python backend calls. All its requests share the batch rows of one session."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the session and the serving core, with the ``parameters`` that `write_repository` wrote."""
        parameters = {n: v["string_value"] for n, v in json.loads(args["model_config"])["parameters"].items()}
        options = {name: int(parameters[name]) for name in ("max_batch", "capacity") if name in parameters}
        if args["model_instance_kind"] == "GPU":
            options["gpu"] = int(args["model_instance_device_id"])
        version = Path(args["model_repository"]) / args["model_version"]
        adapters = {folder.name: folder for folder in (version / ADAPTERS).glob("*")}
        self._session = DecodeSession.open(version / FOLDER, adapters=adapters, **options)  # type: ignore[arg-type]
        self._name = args["model_name"]
        self._core = ServingCore(self._session, max_queue=int(parameters.get("max_queue", 256)), name=self._name)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="answers", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Start requests; another thread sends their answers later."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._answer(request, request.get_response_sender()), self._loop)

    def finalize(self) -> None:
        """End running requests with an error, and close the session."""
        self._core.close()
        asyncio.run_coroutine_threadsafe(_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._session.close()

    async def _answer(self, request: Any, sender: Any) -> None:
        work = asyncio.ensure_future(self._send(request, sender))
        while not (await asyncio.wait([work], timeout=_POLL))[0]:
            if sender.is_cancelled():
                work.cancel()
        try:
            await work
            return
        except asyncio.CancelledError:
            error = pb_utils.TritonError("the client cancelled the request", pb_utils.TritonError.CANCELLED)
        except TrtKvCacheError as failed:
            refused = as_api(failed)
            code = getattr(pb_utils.TritonError, _CODES.get(refused.status, "INTERNAL"))
            error = pb_utils.TritonError(refused.message, code)
        except Exception:  # noqa: BLE001 - a bug: the client still needs an answer
            _log.exception("a request failed")
            error = pb_utils.TritonError("the model failed; Triton's log says why", pb_utils.TritonError.INTERNAL)
        sender.send(pb_utils.InferenceResponse([], error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _send(self, request: Any, sender: Any) -> None:
        read = _read(request)
        adapter = find_adapter(read.model, self._name, self._session.adapters)
        asked = await asyncio.to_thread(prepare, self._session, read, 1, adapter)
        stream = _element(request, "stream")
        done = Generation(asked.works[0].tokens)
        async with aclosing(self._core.events(asked.works, asked.config)) as events:
            async for _, event in events:
                done.take(event)
                last = event.finish_reason is not None
                if not (stream or last):
                    continue
                text, tokens = done.text, done.tokens
                if stream:
                    text, tokens = event.text, [] if event.token is None else [event.token]
                reason = REASONS.get(event.finish_reason, "stop") if event.finish_reason is not None else ""
                outputs = [
                    pb_utils.Tensor("text_output", np.array([text.encode()], np.object_)),
                    pb_utils.Tensor("output_ids", np.array(tokens, np.int64)),
                    pb_utils.Tensor("finish_reason", np.array([reason.encode()], np.object_)),
                ]
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
                sender.send(pb_utils.InferenceResponse(outputs), flags)


async def _others() -> None:
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


def _read(request: Any) -> CompletionRequest:
    text, ids = _element(request, "text_input"), pb_utils.get_input_tensor_by_name(request, "input_ids")
    if (text is None) == (ids is None):
        raise ApiError(400, "give the prompt as either text_input or input_ids")
    said = _element(request, "sampling_parameters")
    try:
        fields = {} if said is None else msgspec.json.decode(said, type=dict[str, Any])
        prompt = ids.as_numpy().tolist() if text is None else text.decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"text_input must be a text, and sampling_parameters a JSON object: {error}") from None
    for name, why in _ELSEWHERE.items():
        if name in fields:
            raise ApiError(400, f"sampling_parameters: {name}: {why}", name)
    return read_request(msgspec.json.encode({**fields, "prompt": prompt}), CompletionRequest)


def _element(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    array = tensor.as_numpy()
    if array.size != 1:
        raise ApiError(400, f"{name} has {array.size} elements; give one")
    return array.item()
