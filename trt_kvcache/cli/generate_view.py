"""Runs prompts and shows the result: as live text, or as JSON at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from trt_kvcache.cli.output import print_json, print_warnings, visible
from trt_kvcache.cli.signals import interruptible
from trt_kvcache.errors import SessionError
from trt_kvcache.progress import phase
from trt_kvcache.runtime.events import FinishReason, SpeculationStats, TokenEvent
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.token_masks import Grammar
from trt_kvcache.runtime.prefix import PrefixStats
from trt_kvcache.runtime.requests import Generation
from trt_kvcache.runtime.session import DecodeSession


@dataclass
class Run:
    """The record of one run of `generate`: sequences, times and counts.

    Attributes:
        runs_on: the runner and its device.
        capacity: tokens per sequence; None: unlimited.
        opening: seconds until the session was opened.
        first: seconds from the opened session to the first token.
        total: seconds from the opened session to the last token.
        speculation: counts of guessed tokens, over all sequences; None without guesses.
        prefixes: counts of the prefix cache; None without a prefix cache.
    """

    runs_on: str
    capacity: int | None
    config: GenerationConfig
    sequences: list[Generation]
    opening: float
    first: float | None = None
    total: float = 0.0
    speculation: SpeculationStats | None = None
    prefixes: PrefixStats | None = None

    @property
    def count(self) -> int:
        """Number of new tokens in all sequences."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def rate(self) -> float | None:
        """New tokens per second after the first token (in beam search: of the whole run); None without tokens."""
        if self.config.num_beams > 1:
            return self.count / self.total if self.total else None
        later = self.total - (self.first or 0.0)
        return (self.count - 1) / later if self.count > 1 and later > 0 else None


def run(
    open_session: Callable[[], DecodeSession],
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    view: JsonView | LiveView,
    beside: Callable[[DecodeSession], Mapping[str, Any]],
    grammar: Callable[[DecodeSession], Grammar | None] = lambda _: None,
) -> bool:
    """Continue prompts with a session, and show the tokens as they come; return True if Ctrl-C ended the run early.

    `beside` returns the other arguments of `DecodeSession.stream`, and `grammar` the grammar of the texts; None: no
    grammar.
    """
    start = time.perf_counter()
    with open_session() as session:
        config = replace(config, grammar=grammar(session) or config.grammar)
        opened = time.perf_counter()
        sequences = [Generation(list(prompt)) for prompt in prompts]
        result = Run(session.name, session.cache.capacity, config, sequences, opened - start)
        with (
            interruptible() as interrupted,
            closing(_events(session, prompts, config, beside(session))) as events,
            ExitStack() as waiting,
        ):
            waiting.enter_context(phase("computing the first token"))
            try:
                for event in events:
                    waiting.close()
                    result.total = time.perf_counter() - opened
                    if result.first is None:
                        result.first = result.total
                    result.sequences[event.sequence].take(event)
                    if event.speculation is not None:
                        result.speculation = result.speculation or SpeculationStats()
                        result.speculation.add(event.speculation)
                    view.show(event, result)
                    if interrupted.is_set():
                        break
            except SessionError:  # a step that hung was ended
                if not interrupted.is_set():
                    raise
        for sequence in result.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = FinishReason.CANCELLED
        result.prefixes = session.cache.prefix_stats
        view.end(result)
        if full := sum(s.finish_reason is FinishReason.CAPACITY for s in result.sequences):
            what = "text ends because its cache is" if full == 1 else "texts end because their caches are"
            print_warnings([f"{full} {what} full at {session.cache.capacity} tokens; more need a larger --capacity"])
        return interrupted.is_set()


@dataclass(frozen=True)
class JsonView:
    """Shows a run as one JSON object at the end. `text` is True if there is a tokenizer."""

    text: bool

    def show(self, event: TokenEvent, run: Run) -> None:
        """Ignore the event: the object is printed at the end."""

    def end(self, run: Run) -> None:
        """Print the JSON object of the run."""
        speculation = None
        if (stats := run.speculation) is not None:
            counts = {"proposed": stats.proposed, "accepted": stats.accepted}
            speculation = counts | {"acceptance": round(stats.acceptance, 4), "impossible": stats.impossible or None}
        print_json(
            {
                "runs_on": run.runs_on,
                "capacity": run.capacity,
                "seed": run.config.seed,
                "sequences": [
                    {
                        "prompt_tokens": len(sequence.prompt),
                        "tokens": sequence.tokens,
                        "text": sequence.text if self.text else None,
                        "finish_reason": sequence.finish_reason,
                        **({"logprobs": sequence.logprobs} if run.config.output_logprobs else {}),
                    }
                    for sequence in run.sequences
                ],
                "speculation": speculation,
                "prefix_cache": None if run.prefixes is None else asdict(run.prefixes),
                "timings": {
                    "open_seconds": round(run.opening, 6),
                    "first_token_seconds": None if run.first is None else round(run.first, 6),
                    "total_seconds": round(run.total, 6),
                    "new_tokens": run.count,
                    "tokens_per_second": None if run.rate is None else round(run.rate, 3),
                },
            }
        )


@dataclass(frozen=True)
class LiveView:
    """Shows the text or the token ids of a run as they come; for several prompts, each text when it is complete."""

    text: bool

    def show(self, event: TokenEvent, run: Run) -> None:
        """Print the event's text or token."""
        sequence = run.sequences[event.sequence]
        if len(run.sequences) == 1:
            if self.text:
                self._write(event.text)
            elif event.token is not None:
                self._write(f"{' ' if len(sequence.tokens) > 1 else ''}{event.token}")
        elif event.finish_reason is not None:
            self._whole(event.sequence, sequence)

    def end(self, run: Run) -> None:
        """Print which sequences Ctrl-C cut off, and a summary, on stderr."""
        if len(run.sequences) == 1:
            self._write("\n")
        else:
            for index, sequence in enumerate(run.sequences):
                if sequence.finish_reason is FinishReason.CANCELLED:
                    self._whole(index, sequence)
        prompt = sum(len(sequence.prompt) for sequence in run.sequences)
        reasons = ", ".join(sorted({s.finish_reason.value for s in run.sequences if s.finish_reason}))
        parts = [f"{prompt} prompt tokens", f"{run.count} new ({reasons})"]
        parts += [] if run.first is None or run.config.num_beams > 1 else [f"the first after {run.first:.3f} s"]
        parts += [] if run.rate is None else [f"{run.rate:.1f} tokens/s"]
        stats = run.speculation
        if stats is not None:
            told = f"{stats.accepted} of {stats.proposed} proposed tokens accepted"
            parts.append(f"no tokens proposed ({stats.impossible})" if stats.impossible else told)
        if run.prefixes is not None:
            parts.append(f"{run.prefixes.saved_tokens} prompt tokens from the prefix cache")
        parts += [f"seed {run.config.seed}"] if run.config.do_sample else []
        capacity = "" if run.capacity is None else f", capacity {run.capacity}"
        print(f"{', '.join(parts)}; {run.runs_on}{capacity}", file=sys.stderr)  # noqa: T201

    def _whole(self, index: int, sequence: Generation) -> None:
        body = sequence.text if self.text else " ".join(map(str, sequence.tokens))
        reason = sequence.finish_reason.value if sequence.finish_reason else ""
        self._write(f"--- {index} ({reason})\n{body}\n")

    def _write(self, text: str) -> None:
        # A file or a pipe gets the model's text unchanged.
        sys.stdout.write(visible(text, "\n\t") if sys.stdout.isatty() else text)
        sys.stdout.flush()


def _events(
    session: DecodeSession, prompts: Sequence[Sequence[int]], config: GenerationConfig, beside: Mapping[str, Any]
) -> Generator[TokenEvent]:
    """Yield the events of `DecodeSession.stream`, as a generator, which can be closed."""
    yield from session.stream(prompts, config, **beside)
