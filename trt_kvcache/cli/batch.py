"""``trt-kvcache batch``: answers a file of requests with a file of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.generate import LoraFlags, RunFlags
from trt_kvcache.cli.options import (
    RunnableArgument,
    SessionPlanFlags,
    TokenizerOption,
    bounded_on_cpu,
    file_argument,
    output_flag,
)
from trt_kvcache.cli.prompts import json_object
from trt_kvcache.errors import OptionError
from trt_kvcache.progress import ProgressEvent, tell

if TYPE_CHECKING:
    from trt_kvcache.serve.batch_job import Answered, Row


def batch(
    model: RunnableArgument,
    file: Annotated[
        Path,
        file_argument(
            metavar="ROWS",
            help='JSONL or .parquet: lines {"id", "prompt", ...} or {"id", "messages", ...}, or OpenAI\'s batch lines.',
        ),
    ],
    output: Annotated[Path, output_flag(metavar="FILE", help="File for the answers: JSONL or .parquet.")],
    running: RunFlags,
    adapters: LoraFlags,
    planning: SessionPlanFlags,
    defaults: Annotated[
        str, typer.Option(metavar="JSON", help="Defaults for rows, such as '{\"max_tokens\": 200}'.")
    ] = "{}",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model name that rows may give. Default: the file's or folder's.")
    ] = None,
    tokenizer: TokenizerOption = None,
    with_ray: Annotated[bool, typer.Option("--ray", help="Run on Ray, with one session in each worker.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Workers of --ray. Default: one for each GPU, or one on the CPU."),
    ] = None,
) -> None:
    """Answer a file of requests, in its order.

    If the command was killed, run it again: it continues with the requests that are left.
    """
    named = name or model.resolve().name
    options = running.options() | adapters.options(named) | planning.session_options(model) | {"tokenizer": tokenizer}
    fields = json_object(defaults, "--defaults", '{"max_tokens": 200}')
    try:
        from trt_kvcache.serve.batch_job import RowRunner, run_batch

        if with_ray:
            from trt_kvcache.serve.with_ray import answer_with_ray
    except ImportError as error:
        extra = "ray" if with_ray else "batch"
        raise OptionError(f"batch needs {error.name}: pip install 'trt-kvcache[{extra}]'") from None
    if workers is not None and not with_ray:
        raise OptionError(
            f"--workers {workers} has no effect without --ray; add --ray, or give --max-batch for more requests at once"
        )
    import asyncio

    from trt_kvcache.runtime.session import DecodeSession

    def compute(rows: Iterator[Row], take: Callable[[str, Answered], None]) -> None:
        async def run() -> None:
            async for answered in runner.answers(rows):
                take(runner.model, answered)

        with bounded_on_cpu(model), DecodeSession.open(model, **options) as session:
            runner = RowRunner(session, named)
            try:
                asyncio.run(run())
            finally:
                runner.close()

    def compute_with_ray(rows: Iterator[Row], take: Callable[[str, Answered], None]) -> None:
        answer_with_ray(model, named, options, workers, rows, take)

    def report(answered: int, total: int) -> None:
        tell(ProgressEvent("rows", None, answered, total))

    done = run_batch(file, output, fields, compute_with_ray if with_ray else compute, report)
    from trt_kvcache.cli.output import console

    reused = f", {done.reused} of them from an earlier run" if done.reused else ""
    console().print(f"{output}: {done.rows} rows{reused}; {done.errors} in error")
