"""``trt-kvcache worker``: runs one of the processes to which a distributed server sends requests."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from trt_kvcache.cli.generate import LoraFlags, RunFlags
from trt_kvcache.cli.options import NameOption, QueueOption, RunnableArgument, SessionPlanFlags, TokenizerOption
from trt_kvcache.cli.output import print_warnings
from trt_kvcache.errors import OptionError


def worker(
    model: RunnableArgument,
    running: RunFlags,
    adapters: LoraFlags,
    planning: SessionPlanFlags,
    engine: Annotated[Literal["dynamo"], typer.Option(help="dynamo: NVIDIA Dynamo.")] = "dynamo",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    max_queue: QueueOption = 256,
    name: NameOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Answer requests of NVIDIA Dynamo's frontend until SIGTERM or Ctrl-C. Dynamo's DYN_... variables configure it."""
    options = planning.session_options(model)
    try:
        from trt_kvcache.serve.dynamo import Engine, run, write_texts
    except ImportError as error:
        raise OptionError(
            f"worker needs {error.name}: pip install 'trt-kvcache[dynamo]', and after it "
            "pip install --no-deps ai-dynamo==1.6.1"
        ) from None
    from trt_kvcache.runtime.session import DecodeSession

    if host not in ("127.0.0.1", "::1", "localhost"):
        print_warnings([f"everyone who reaches {host} can use the model: Dynamo's workers ask for no key"])
    named = name or model.resolve().name
    options |= running.options() | adapters.options(named)
    with DecodeSession.open(model, tokenizer=tokenizer, **options) as session:
        texts = write_texts(model, tokenizer, session)

        def started() -> None:
            sys.stderr.write(f"{named}: {session.name}; a worker of Dynamo at {host}, Ctrl-C ends it\n")
            sys.stderr.flush()

        run(Engine(session, named, texts, max_queue), texts, named, host, started)
