"""Runs a worker of NVIDIA Dynamo over a serving core: token ids come in, and token ids go out.

Dynamo's frontend has the HTTP interface, chat templates and tokenizers. If a worker ends, the frontend sends its
requests to another worker, and appends the tokens so far to the prompt. Texts stay the same, because only seed and
position decide how a token is drawn. Each adapter (LoRA) is registered as a model.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from trt_kvcache.engine.engine_folder import TEXTS, new_folders
from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.files import atomic_file, read_file, read_object
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.settings import changed
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.answers import REASONS
from trt_kvcache.serve.api_requests import as_api, find_adapter
from trt_kvcache.serve.core import EndingError, ServingCore, Work

_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
"""The addresses that a worker listens at: Dynamo takes the address of the machine if they are not set."""
_LARGEST = 1 << 28  # most bytes of a file
_SLOW, _POLL = 10.0, 0.05
"""Most seconds to wait until the frontend has read the last errors of a worker, and seconds between two checks."""
_UNBOUNDED = 4096
"""Most new tokens if the request gives no number and the caches never fill up."""
_COUNTED = ("min_new_tokens", "begin_suppress_tokens", "forced_bos_token_id", "exponential_decay_length_penalty")
"""Settings that count new tokens. Another worker that continues the request would count from 0 again."""

_PENALTY = "use repetition_penalty, or leave it out"
_ONLY: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "sampling_options": {
        "n": ((1,), "a request has one answer; ask several times"),
        "best_of": ((1,), "sequences are not ranked; leave it out"),
        "presence_penalty": ((0,), _PENALTY),
        "frequency_penalty": ((0,), _PENALTY),
        "use_beam_search": ((False,), "there is no beam search here; leave it out"),
        "length_penalty": ((1,), "there is no beam search here; leave it out"),
        "guided_decoding": ((), "structured output is not supported by workers; leave response_format out"),
        "include_stop_str_in_output": ((False,), "texts end before a stop; leave it out"),
    },
    "stop_conditions": {
        "min_tokens": ((0,), "it would start counting again on another worker; leave it out"),
        "max_thinking_tokens": ((), "thinking is not counted; leave it out"),
    },
    "output_options": {
        "logprobs": ((), "workers give no log-probabilities; leave it out"),
        "prompt_logprobs": ((), "workers give no log-probabilities, and echo needs them; leave both out"),
    },
}
"""Fields that are accepted only with these values, which have no effect; and the reason for the error message."""
_KNOWN = {
    "sampling_options": {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"},
    "stop_conditions": {
        "max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden", "ignore_eos",
    },
    "output_options": {"skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"},
}  # fmt: skip
"""Fields that this worker follows, or the frontend, which handles `stop`."""
_PROMPTS = ("prompt_embeds", "multi_modal_data", "encoder_result", "prefill_result", "bootstrap_info")


def write_texts(model: Path, tokenizer: Path | None, session: DecodeSession) -> Path:
    """Write the files that Dynamo's frontend requires: tokenizer, chat template, and entries of ``config.json``.

    Returns a folder in ``~/.cache``, which is not deleted. Its name follows from its contents, because for Dynamo,
    workers with different paths have different models. `tokenizer` is ``tokenizer.json`` or its folder; None: the one
    in the model's folder. Raises `OptionError` if there is no tokenizer, and `OutputError` if the folder cannot be
    written.
    """
    source = tokenizer or model
    source = source if source.is_dir() else source.parent
    if not (source / "tokenizer.json").is_file():
        raise OptionError(
            f"{source} has no tokenizer.json, and Dynamo's frontend makes token ids of all texts; give --tokenizer "
            "FOLDER, or use 'trt-kvcache serve', which takes token ids"
        )
    config = source / "config.json"
    try:
        said = read_object(config) if config.is_file() else {}
    except (OSError, ValueError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise OptionError(f"{config} {why}; copy the file again") from None
    ends = sorted(session.config.eos_token_ids)
    defaults = {"architectures": ["trt_kvcache"], "model_type": "trt_kvcache", "eos_token_id": ends}
    texts = {name: read_file(source / name, _LARGEST) for name in TEXTS if (source / name).is_file()}
    texts["config.json"] = json.dumps(defaults | said).encode()
    digest = blake3(msgspec.json.encode(sorted(texts.items()))).hexdigest(16)
    folder = Path.home() / ".cache" / "trt-kvcache" / "dynamo" / digest
    with new_folders(folder):
        for name, content in texts.items():
            with atomic_file(folder / name) as file:
                file.write(content)
    return folder


class Engine(LLMEngine):  # type: ignore[misc]  # Dynamo has no types of its own
    """The interface between Dynamo's worker, which calls the methods, and a serving core.

    `texts` is the folder that `write_texts` wrote; `max_queue` is the most sequences that wait for a batch row. Raises
    `OptionError` if a sequence could get other tokens on another worker, because a default setting counts new tokens,
    or because tokens of one step see each other.
    """

    def __init__(self, session: DecodeSession, name: str, texts: Path, max_queue: int) -> None:
        if session.plan.prefill_in_one_step:
            raise OptionError(
                "tokens of one step see each other in this model, and a sequence that moves to another worker is "
                "computed again in one step, which changes its numbers; use 'trt-kvcache serve'"
            )
        plain = GenerationConfig()
        for setting in _COUNTED:
            if getattr(session.config, setting) != getattr(plain, setting):
                raise OptionError(
                    f"generation_config.json sets {setting}, which counts new tokens; a sequence that moves to another "
                    "worker would start counting again; remove it, or use 'trt-kvcache serve'"
                )
        self._session, self._name, self._texts = session, name, str(texts)
        self._core = ServingCore(session, max_queue=max_queue, name=name)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # tasks by id of the request

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Raise `OptionError`: Dynamo's own command line cannot start this engine, but `trt-kvcache worker` can."""
        raise OptionError("Dynamo cannot start this engine by a command line of its own; start 'trt-kvcache worker'")

    async def start(self, worker_id: int) -> EngineConfig:
        """Return the model's name and limits for the frontend."""
        limits = LlmRegistration(
            context_length=self._session.cache.capacity,
            max_num_seqs=self._session.max_batch,
            max_num_batched_tokens=self._session.max_batch * self._session.max_chunk,
        )
        return EngineConfig(model=self._name, served_model_name=self._name, llm=limits)

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Register each adapter at Dynamo, as a separate model."""
        for name in self._session.adapters:
            await register_model(
                ModelInput.Tokens,
                ModelType.Chat | ModelType.Completions,
                endpoint,
                self._texts,
                worker_type=WorkerType.Aggregated,
                lora_name=name,
                base_model_path=self._texts,
                ignore_weights=True,
            )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Continue the prompt of a request; yield chunks of one token each.

        Raises:
            InvalidArgument: the request cannot be run (HTTP 400).
            HttpError: the queue is full (429), or the sequence failed (500).
            EngineShutdown: this worker ends; another worker continues the request.
        """
        chunks: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._continue(request, chunks))
        self._tasks[context.id()] = task
        try:
            while (chunk := await chunks.get()) is not None:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self._tasks.pop(context.id(), None)
            task.cancel()

    async def abort(self, context: Any) -> None:
        """Free the batch row of an abandoned request: Dynamo stops reading `generate`, but does not close it."""
        if (task := self._tasks.pop(context.id(), None)) is not None:
            task.cancel()

    async def _continue(
        self, request: dict[str, Any], chunks: asyncio.Queue[dict[str, Any] | Exception | None]
    ) -> None:
        try:
            work, config = read_request(self._session, self._name, request)
            count = 0
            async with aclosing(self._core.events([work], config)) as events:
                async for _, event in events:
                    tokens = [] if event.token is None else [event.token]
                    count += len(tokens)
                    chunk: dict[str, Any] = {"token_ids": tokens, "index": 0}
                    if event.finish_reason is not None:
                        chunk["finish_reason"] = REASONS.get(event.finish_reason, "stop")
                        counts = {"prompt_tokens": len(work.tokens), "completion_tokens": count}
                        chunk["completion_usage"] = counts | {"total_tokens": sum(counts.values())}
                    chunks.put_nowait(chunk)
        except TrtKvCacheError as error:
            chunks.put_nowait(_as_dynamo(error))
        finally:
            chunks.put_nowait(None)

    async def cleanup(self) -> None:
        """End running requests, and wait until the frontend knows, which then moves them to other workers."""
        await asyncio.to_thread(self._core.close)
        until = time.monotonic() + _SLOW
        while self._tasks and time.monotonic() < until:
            await asyncio.sleep(_POLL)
        await asyncio.sleep(_POLL)  # time to send the last error: Dynamo closes the event loop after this


def _as_dynamo(error: TrtKvCacheError) -> Exception:
    if isinstance(error, EndingError):
        return EngineShutdown(str(error))  # type: ignore[no-any-return]
    refused = as_api(error)
    if refused.status == 400:
        return InvalidArgument(refused.message)  # type: ignore[no-any-return]
    return HttpError(refused.status, refused.message)  # type: ignore[no-any-return]


def read_request(session: DecodeSession, name: str, request: dict[str, Any]) -> tuple[Work, GenerationConfig]:
    """Convert a ``PreprocessedRequest`` of Dynamo's frontend to a prompt and the settings of its generation.

    Raises `ApiError` for an unknown model or adapter, `OptionError` for an unsupported field or illegal value, and
    `PromptError` or `CapacityError` if the prompt does not fit.
    """
    adapter = find_adapter(request.get("model"), name, session.adapters)
    for field in _PROMPTS:
        if request.get(field):
            raise OptionError(f"{field}: a worker takes only token ids, and prefills them itself; leave the field out")
    asked: dict[str, Any] = {}
    for group, known in _KNOWN.items():
        for field, value in (request.get(group) or {}).items():
            if value is None:
                continue
            values, why = _ONLY[group].get(field, ((), "it is not known here; leave it out"))
            if field in known:
                asked[field] = value
            elif value not in values:
                raise OptionError(f"{field}: {why}")
    tokens = list(request["token_ids"])
    capacity = session.cache.capacity
    left = _UNBOUNDED if capacity is None else max(1, capacity - len(tokens) + 1)
    ends = {*session.config.eos_token_ids}
    for field in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"):
        ends.update(asked.get(field) or ())
    settings: dict[str, Any] = {"max_new_tokens": asked.get("max_tokens") or left, "eos_token_id": tuple(sorted(ends))}
    if asked.get("ignore_eos"):
        settings |= {"eos_token_id": (), "forced_eos_token_id": None}
    temperature = asked.get("temperature", 1.0)
    settings["do_sample"] = temperature != 0
    if temperature != 0:  # greedy decoding takes none of these
        settings |= {"temperature": temperature, "top_k": max(0, asked.get("top_k", 0))}
        settings |= {"top_p": asked.get("top_p", 1.0), "min_p": asked.get("min_p"), "seed": asked.get("seed")}
    if "repetition_penalty" in asked:
        settings["repetition_penalty"] = asked["repetition_penalty"]
    return Work(tokens), changed(session.config, settings | {"adapter": adapter})


def run(engine: Engine, texts: Path, name: str, host: str, started: Callable[[], None]) -> None:
    """Register the worker at Dynamo, and answer requests until SIGTERM or Ctrl-C; then close the engine's core.

    Dynamo's environment variables (``DYN_NAMESPACE``, ``DYN_DISCOVERY_BACKEND``, ...) configure the worker. Without
    them, workers find each other through files on this machine. `host` is the address to listen at; `started` is called
    before the worker is registered.
    """
    for variable in _HOSTS:
        os.environ.setdefault(variable, host)
    config = WorkerConfig(
        namespace=os.environ.get("DYN_NAMESPACE", "dynamo"),
        component="trt-kvcache",
        model_name=str(texts),
        served_model_name=name,
        discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
        request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
        enable_kv_routing=False,  # the worker sends no events of a prefix cache
    )
    # Dynamo handles signals now, and also calls the handlers that were installed before.
    watch = signal.set_wakeup_fd(-1)
    usual = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    started()
    try:
        asyncio.run(Worker(engine, config).run())
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(watch, warn_on_full_buffer=False)
