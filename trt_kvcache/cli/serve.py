"""``trt-kvcache serve``: serves OpenAI's API with an engine or a model."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.generate import LoraFlags, RunFlags, sampling_text
from trt_kvcache.cli.options import (
    NameOption,
    QueueOption,
    RunnableArgument,
    SessionPlanFlags,
    TokenizerOption,
    file_flag,
)
from trt_kvcache.cli.output import print_warnings, visible
from trt_kvcache.errors import OptionError

_LINES = 1000
"""Most lines of the log that wait to be written."""


def serve(
    model: RunnableArgument,
    running: RunFlags,
    adapters: LoraFlags,
    planning: SessionPlanFlags,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen at; 0: a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, file_flag(metavar="FILE", help="File of keys, one per line. Each request must send one of them.")
    ] = None,
    no_api_key: Annotated[
        bool, typer.Option("--no-api-key", help="Serve without keys to everyone who can reach the address.")
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this origin send requests, such as https://example.org; repeatable.",
        ),
    ] = None,
    lora_folder: Annotated[
        Path | None,
        file_flag(
            metavar="FOLDER",
            help="Let clients load adapters from this folder, and unload adapters (/v1/load_lora_adapter).",
        ),
    ] = None,
    max_queue: QueueOption = 256,
    drain_timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time for running requests to end after SIGTERM.")
    ] = 30.0,
    name: NameOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Serve OpenAI's API until SIGTERM or Ctrl-C: /v1/chat/completions, /v1/responses, /metrics."""
    options = planning.session_options(model)
    try:
        from trt_kvcache.serve.server import bind, read_keys
        from trt_kvcache.serve.server import serve as run
        from trt_kvcache.serve.service import Service
    except ImportError as error:
        raise OptionError(f"serve needs {error.name}: pip install 'trt-kvcache[serve]'") from None
    from trt_kvcache.runtime.session import DecodeSession

    keys = read_keys(api_key_file) if api_key_file is not None else []
    if not keys and not no_api_key and host not in ("127.0.0.1", "::1", "localhost"):
        raise OptionError(
            f"everyone who reaches {host} could use the model; give --api-key-file FILE, or --no-api-key to allow it"
        )
    named = name or model.resolve().name
    options |= running.options() | adapters.options(named)
    with bind(host, port) as sock, DecodeSession.open(model, tokenizer=tokenizer, **options) as session:
        if session.tokenizer is None:
            print_warnings(["there is no tokenizer: /v1/completions takes and gives token ids, and there are no chats"])
        told = _start_log()
        service = Service(
            session, named, keys, max_queue=max_queue, origins=allow_origin or (), lora_folder=lora_folder, told=told
        )
        address, actual = sock.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        capacity = "" if session.cache.capacity is None else f", capacity {session.cache.capacity}"

        def started() -> None:
            server = f"http://{shown}:{actual}"
            chat = f"a chat at {server}/, the API at {server}/v1"
            sys.stderr.write(f"{named}: {session.name}{capacity}; {sampling_text(session)}\n{chat}; Ctrl-C ends it\n")
            sys.stderr.flush()

        run(service, sock, drain_timeout, started)


def _start_log() -> Callable[[str], None]:
    """Return a function that writes a line to stderr and never waits. If nobody reads stderr, lines are lost."""
    lines: queue.Queue[str] = queue.Queue(_LINES)

    def write() -> None:
        with suppress(OSError):  # stderr was closed
            while True:
                os.write(2, lines.get().encode(errors="backslashreplace"))  # takes no lock, which would delay the end

    def log(line: str) -> None:
        with suppress(queue.Full):
            lines.put_nowait(f"{time.strftime('%H:%M:%S')} {visible(line)}\n")

    threading.Thread(target=write, name="trt-kvcache-log", daemon=True).start()
    return log
