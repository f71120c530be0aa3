"""``trt-kvcache score``: computes the perplexity of a text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.generate import RunFlags
from trt_kvcache.cli.options import (
    JsonOption,
    RunnableArgument,
    SessionPlanFlags,
    TokenizerOption,
    bounded_on_cpu,
    file_argument,
)
from trt_kvcache.cli.prompts import read_text


def score(
    model: RunnableArgument,
    file: Annotated[Path, file_argument(metavar="FILE", help="File with the text; - is stdin.")],
    running: RunFlags,
    planning: SessionPlanFlags,
    window: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            help="Tokens per window for long texts; windows overlap by half. Default: the capacity, at most 2048.",
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=2, metavar="N", help="Score the first N tokens only.")] = None,
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Score a text: perplexity, the exponential of the mean negative log-probability of its tokens."""
    text = read_text(file, "FILE")
    options = planning.session_options(model)
    from trt_kvcache.cli.output import console, print_json
    from trt_kvcache.errors import OptionError
    from trt_kvcache.runtime.scoring import score as score_text
    from trt_kvcache.runtime.session import DecodeSession

    with (
        bounded_on_cpu(model),
        DecodeSession.open(model, tokenizer=tokenizer, **{"max_batch": 1, **running.options()}, **options) as session,
    ):
        if session.tokenizer is None:
            raise OptionError("a text needs a tokenizer, and there is none beside the model; give --tokenizer")
        ids = session.tokenizer.encode(text)[:tokens]
        start = time.perf_counter()
        result = score_text(session, ids, window)
        rate = result.tokens / (time.perf_counter() - start)
        on = session.name
    if json:
        print_json(
            {"tokens": result.tokens, "nats": result.nats, "perplexity": result.perplexity, "tokens_per_second": rate}
        )
    else:
        console().print(
            f"{file}: perplexity {result.perplexity:.4g}, {result.nats:.4f} nats per token; {result.tokens} tokens, "
            f"{rate:.1f} tokens/s; {on}"
        )
