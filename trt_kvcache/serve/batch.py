"""Batch jobs: a file of requests, computed by a serving core, into a file of answers in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from trt_kvcache.errors import OptionError, OutputError, TrtKvCacheError
from trt_kvcache.files import check_output
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.answers import Answer, TokenNames, whole_answer
from trt_kvcache.serve.core import ServingCore
from trt_kvcache.serve.journal import Journal
from trt_kvcache.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    as_api,
    find_adapter,
    prepare,
    read_request,
)
from trt_kvcache.serve.rows import CHATS, Row, read_rows, write_lines

__all__ = ["Answered", "BatchDone", "RowRunner", "run_batch"]

_MOST = 1024
"""Sequences that one row may ask for."""


class Answered(msgspec.Struct, frozen=True):
    """The answer to a row.

    Attributes:
        number, digest: of the `Row`.
        status: of HTTP; 200: it has an answer.
        line: of the output, JSON.
    """

    number: int
    digest: bytes
    status: int
    line: bytes


class RowRunner:
    """Answers rows with a session, as the server answers requests.

    Args:
        session: stays open; no other code may use it meanwhile.
        name: of the model.

    Attributes:
        model: digest of everything that decides the answers, apart from the rows.
    """

    def __init__(self, session: DecodeSession, name: str) -> None:
        self._session, self._name = session, name
        self._names = TokenNames(session.tokenizer)
        options = session.plan.options
        caches = f"{session.cache.capacity} {options.cache_dtype} {options.cache_ranges}"
        identity = f"{session.identity()} {caches} {session.tokenizer is None} {session.config!r} {session.sampling}"
        if session.adapters:
            identity += f" {session.adapters.digests}"
        self.model = blake3(identity.encode()).hexdigest()
        self._ahead = 2 * session.max_batch
        self._core = ServingCore(session, max_queue=self._ahead * _MOST, name=name)

    def close(self) -> None:
        """End what still runs."""
        self._core.close()

    async def answers(self, rows: Iterable[Row]) -> AsyncGenerator[Answered, None]:
        """Answer rows; those that end first come first. Errors of a row are its answer.

        Raises:
            TrtKvCacheError: the session itself failed.
        """
        running: set[asyncio.Task[Answered]] = set()
        ended: set[asyncio.Task[Answered]] = set()
        try:
            for row in rows:
                running.add(asyncio.create_task(self._answer(row)))
                while len(running) >= self._ahead:
                    ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(ended, key=lambda task: task.exception() is not None):  # no answer is lost
                        yield task.result()
            for last in asyncio.as_completed(list(running)):
                yield await last
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *ended, return_exceptions=True)  # else asyncio complains of their errors

    async def _answer(self, row: Row) -> Answered:
        try:
            status, body = 200, await self._body(row)
        except TrtKvCacheError as error:
            refusal = as_api(error)
            if refusal.status >= 500 and error.sequence is None:  # no fault of this row
                raise
            status, body = refusal.status, refusal.body
        key = msgspec.Raw(row.key.encode())
        line: dict[str, Any] = {"id": f"batch_req_{row.number}", "custom_id": key} if row.openai else {"id": key}
        line["response"] = {"status_code": status, "request_id": f"req_{row.number}", "body": body}
        return Answered(row.number, row.digest, status, msgspec.json.encode(line | {"error": None}))

    async def _body(self, row: Row) -> dict[str, Any]:
        if row.error:
            raise ApiError(400, f"row {row.number}: {row.error}", code="invalid_row")
        request: ChatRequest | CompletionRequest
        request = read_request(row.body, ChatRequest) if row.url == CHATS else read_request(row.body, CompletionRequest)
        adapter = find_adapter(request.model, self._name, self._session.adapters)
        asked = await asyncio.to_thread(prepare, self._session, request, _MOST, adapter)
        answer = Answer(asked, adapter or self._name, self._names)
        return await whole_answer(self._core.events(asked.works, asked.config), answer)


@dataclass(frozen=True)
class BatchDone:
    """A job that is complete.

    Attributes:
        rows: in the file.
        reused: of which an earlier run had the answers.
        errors: rows whose answer is an error.
    """

    rows: int
    reused: int
    errors: int


def run_batch(
    file: Path,
    output: Path,
    defaults: dict[str, Any],
    compute: Callable[[Iterator[Row], Callable[[str, Answered], None]], None],
    progress: Callable[[int, int], None],
) -> BatchDone:
    """Compute the rows of a file that have no answer yet, and write all answers in the order of the rows.

    Finished rows are kept in a `Journal` beside the output until the output is written. A job that was killed continues
    from it.

    Args:
        file: see `read_rows`.
        output: see `write_lines`; it must not exist.
        defaults: see `read_rows`.
        compute: takes the rows to compute; it calls back with the digest of the model, and with each answer.
        progress: called with the rows that are answered, and all rows.

    Raises:
        OptionError: the file cannot be read, has no row, or changes meanwhile.
        OutputError: the output exists, or it or the journal cannot be written.
    """
    real = check_output(output)
    _check_new(real)
    total = sum(1 for _ in read_rows(file, defaults))
    if not total:
        raise OptionError(f'{file} has no row; give lines such as {{"id": 1, "prompt": "Hello"}}')
    with Journal(real) as journal:
        reused = answered = sum(journal.find(row) is not None for row in read_rows(file, defaults))
        progress(answered, total)

        def take(model: str, answer: Answered) -> None:
            nonlocal answered
            journal.claim(model)
            journal.put(answer.number, answer.digest, answer.status, answer.line)
            answered += 1
            progress(answered, total)

        if answered < total:
            compute((row for row in read_rows(file, defaults) if journal.find(row) is None), take)
        else:  # one again, to learn whether this model made the answers
            compute(islice(read_rows(file, defaults), 1), lambda model, _: journal.claim(model))
        errors = 0

        def lines() -> Iterator[bytes]:
            nonlocal errors
            for row in read_rows(file, defaults):
                if (answer := journal.find(row)) is None:
                    raise OptionError(f"{file} has changed meanwhile; the same command computes the rows that are new")
                errors += answer[0] != 200
                yield answer[1]

        _check_new(real)  # the job may have taken hours
        write_lines(real, lines())
        journal.clear()
    return BatchDone(total, reused, errors)


def _check_new(output: Path) -> None:
    if output.exists():
        raise OutputError(f"{output} exists, and a batch writes over nothing; move it away, or give another -o")
