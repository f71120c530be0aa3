"""Runs batch jobs: a serving core computes a file of requests; the answers go to a file, in the same order."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

from trt_kvcache.errors import OptionError, OutputError, TrtKvCacheError
from trt_kvcache.files import atomic_file, check_output, open_regular
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.answers import Answer, TokenNames, whole_answer
from trt_kvcache.serve.api_requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    as_api,
    find_adapter,
    prepare,
    read_request,
)
from trt_kvcache.serve.core import ServingCore

_MOST = 1024
"""Most sequences that one row (request) may ask for."""


class Answered(msgspec.Struct, frozen=True):
    """The answer to one row (request) of a batch job, with the number and digest of the `Row`.

    `status` is 200, or the HTTP status of the row's error. `line` is the line of the output, as JSON.
    """

    number: int
    digest: bytes
    status: int
    line: bytes


class RowRunner:
    """Answers the rows (requests) of a batch job in the same way as the server, with a session that nobody else uses.

    Attributes:
        model: digest of everything that the answers depend on, except the rows.
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
        """End the sequences of the batch job that still run."""
        self._core.close()

    async def answers(self, rows: Iterable[Row]) -> AsyncGenerator[Answered, None]:
        """Yield answers to rows in the order in which they end. If a row fails, its answer is the error."""
        running: set[asyncio.Task[Answered]] = set()
        ended: set[asyncio.Task[Answered]] = set()
        try:
            for row in rows:
                running.add(asyncio.create_task(self._answer(row)))
                while len(running) >= self._ahead:
                    ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(ended, key=lambda task: task.exception() is not None):  # errors last
                        yield task.result()
            for last in asyncio.as_completed(list(running)):
                yield await last
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *ended, return_exceptions=True)  # else asyncio reports their errors

    async def _answer(self, row: Row) -> Answered:
        try:
            status, body = 200, await self._body(row)
        except TrtKvCacheError as error:
            refusal = as_api(error)
            if refusal.status >= 500 and error.sequence is None:  # the session failed, not this row
                raise
            status, body = refusal.status, refusal.body
        key = msgspec.Raw(row.key.encode())
        line: dict[str, Any] = {"id": f"batch_req_{row.number}", "custom_id": key} if row.openai else {"id": key}
        line["response"] = {"status_code": status, "request_id": f"req_{row.number}", "body": body}
        return Answered(row.number, row.digest, status, msgspec.json.encode(line | {"error": None}))

    async def _body(self, row: Row) -> dict[str, Any]:
        if row.error:
            raise ApiError(400, f"row {row.number}: {row.error}", code="invalid_row")
        kind: type[ChatRequest | CompletionRequest] = ChatRequest if row.url == CHATS else CompletionRequest
        request = read_request(row.body, kind)
        adapter = find_adapter(request.model, self._name, self._session.adapters)
        asked = await asyncio.to_thread(prepare, self._session, request, _MOST, adapter)
        answer = Answer(asked, adapter or self._name, self._names)
        return await whole_answer(self._core.events(asked.works, asked.config), answer)


@dataclass(frozen=True)
class BatchDone:
    """The counts of a completed batch job: rows, rows that an earlier run had answered (`reused`), and errors."""

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
    """Run a batch job: answer the rows of a file that have no answer yet; write all answers in the order of the rows.

    Finished rows are kept in a `Journal` beside the output until the output is written, so that a killed job can
    continue.

    Args:
        file: path of the requests, see `read_rows`.
        output: path of the answers, see `write_lines`; it must not exist.
        defaults: values of fields that a request does not have.
        compute: answers rows. Its second argument is a function to call with the model's digest and each answer.
        progress: called with the numbers of answered rows and of all rows.

    Raises:
        OptionError: the file cannot be read, has no row, or changes during the job.
        OutputError: the output exists, or the output or the journal cannot be written.
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
        else:  # run one row again to check that the stored answers are this model's
            compute(islice(read_rows(file, defaults), 1), lambda model, _: journal.claim(model))
        errors = 0

        def lines() -> Iterator[bytes]:
            nonlocal errors
            for row in read_rows(file, defaults):
                if (answer := journal.find(row)) is None:
                    raise OptionError(f"{file} changed during the run; run it again to compute the new rows")
                errors += answer[0] != 200
                yield answer[1]

        _check_new(real)  # the job may have taken hours
        write_lines(real, lines())
        journal.clear()
    return BatchDone(total, reused, errors)


def _check_new(output: Path) -> None:
    if output.exists():
        raise OutputError(f"{output} exists, and a batch never overwrites a file; move it, or give another -o")


class Journal:
    """The answers of a batch job so far, in a file. Each answer is stored at once, so that a killed job can continue.

    The file is ``<output>.journal``. Raises `OutputError` if it cannot be made or read, or another process has it open.
    All methods raise it if the disk is full.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + ".journal")
        with self._one_line():
            self._db = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        columns = "number INTEGER PRIMARY KEY, digest BLOB, status INTEGER, line BLOB"
        try:
            with self._one_line():
                # Locked until the end, so that SQLite needs no shared memory, which network file systems lack.
                for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
                    self._db.execute(f"PRAGMA {pragma}")
                self._db.execute("CREATE TABLE IF NOT EXISTS made (model TEXT)")
                self._db.execute(f"CREATE TABLE IF NOT EXISTS rows ({columns})")
        except OutputError:
            self._db.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        with self._one_line(), closing(self._db):
            empty = self._is_empty()
        if empty:
            self.path.unlink(missing_ok=True)

    def _is_empty(self) -> bool:
        return self._db.execute("SELECT 1 FROM rows").fetchone() is None

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if "locked" in str(error):
                why = "another process is writing it; wait for its end, or give another -o"
            elif "not a database" in str(error):
                why = "this file is not the journal of a batch; remove it"
            else:
                why = f"cannot be written: {error}; its content is kept, and the same command continues from there"
            raise OutputError(f"{self.path}: {why}") from None

    def claim(self, model: str) -> None:
        """Record the model's digest (`RowRunner.model`); raise `OutputError` if the journal is of another model."""
        with self._one_line():
            record = self._db.execute("SELECT model FROM made").fetchone()
            if record is None and self._is_empty():
                self._db.execute("INSERT INTO made VALUES (?)", (model,))
                return
        if record != (model,):
            raise OutputError(
                f"{self.path} holds answers of another model, capacity, type of caches, generation config or adapters; "
                "repeat the batch with the same ones, or remove the file to start again"
            )

    def put(self, number: int, digest: bytes, status: int, line: bytes) -> None:
        """Store an answer on disk: after this returns, the answer is not lost even if the process is killed."""
        with self._one_line():
            self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", (number, digest, status, line))

    def find(self, row: Row) -> tuple[int, bytes] | None:
        """Return the status and the line of a row's answer; None if the journal has no answer for it."""
        with self._one_line():
            query = "SELECT status, line FROM rows WHERE number = ? AND digest = ?"
            record: tuple[int, bytes] | None = self._db.execute(query, (row.number, row.digest)).fetchone()
        return record

    def clear(self) -> None:
        """Remove all answers from the journal; the end of its ``with`` block removes the file of an empty journal."""
        with self._one_line():
            self._db.execute("DELETE FROM rows")


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_LARGEST = 4 << 20
"""Most bytes of a line, the same as of a body that the server accepts."""
_OPENAI = {"custom_id", "method", "url", "body"}
_BATCH = 1000
"""Rows of a Parquet file that are read at a time."""


class Row(msgspec.Struct, frozen=True):
    """One request of a batch job, as read from the file. It may be invalid.

    Attributes:
        number: line or row in the file, from 1.
        key: the id in the row, as JSON; ``null`` if the row has no readable id.
        openai: True if the row has OpenAI's form; then its answer has this form, too.
        url: path of the API that answers the request.
        body: the request as JSON, with the defaults and a seed that follows from the key.
        error: why the row is invalid; empty if it is valid.
    """

    number: int
    key: str = "null"
    openai: bool = False
    url: str = ""
    body: bytes = b""
    error: str = ""

    @property
    def digest(self) -> bytes:
        """Digest of everything on which the answer to this row depends, except the model."""
        return blake3(msgspec.msgpack.encode(self)).digest(16)


def read_rows(file: Path, defaults: dict[str, Any]) -> Iterator[Row]:
    """Read the requests of a batch job, one after another, from a JSONL file, or from a ``.parquet`` file.

    `defaults` are values of fields that a request does not have. Raises `OptionError` if the file cannot be read.
    """
    seen: set[bytes] = set()
    for number, line in _parquet_lines(file) if file.suffix.lower() == ".parquet" else _lines(file):
        row = _row(number, line, defaults)
        name = blake3(row.key.encode()).digest(16)
        if row.key != "null" and name in seen:
            row = Row(number, row.key, row.openai, error="an earlier row has the same id; give each row another id")
        seen.add(name)
        yield row


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with open_regular(file) as stream:
            while line := stream.readline(_LARGEST + 2):
                number += 1
                end = line
                while not end.endswith(b"\n") and (end := stream.readline(_LARGEST)):
                    pass
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line  # written by some Windows editors
                if line.strip():
                    yield number, line
    except OSError as error:
        raise OptionError(f"{file} cannot be read: {error.strerror}") from None


def _parquet_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the JSON text of each row of a Parquet file, without fields that are null."""
    arrow, parquet = _arrow(file)
    number = 0
    try:
        with open_regular(file) as stream:
            for batch in parquet.ParquetFile(stream).iter_batches(_BATCH):
                for fields in batch.to_pylist():
                    number += 1
                    if isinstance(body := fields.get("body"), str):
                        fields["body"] = msgspec.Raw(body.encode())
                    yield number, msgspec.json.encode(_without_nulls(fields))
    except (OSError, TypeError, arrow.ArrowException) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise OptionError(f"{file} cannot be read: {why}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _arrow(file: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise OptionError(f"{file} needs pyarrow: pip install 'trt-kvcache[batch]'; or give JSONL") from None
    return pyarrow, pyarrow.parquet


def _row(number: int, line: bytes, defaults: dict[str, Any]) -> Row:
    if len(line) > _LARGEST + 1:
        return Row(number, error=f"the row has more than {_LARGEST} bytes; give a shorter prompt")
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return Row(number, error=f"the row is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return Row(number, error="the row has to be a JSON object")
    openai = "custom_id" in fields
    key = fields.get("custom_id") if openai else fields.pop("id", None)
    if type(key) is not str and (openai or type(key) is not int):
        return Row(number, openai=openai, error="the row needs an id: custom_id in OpenAI's form, else id")
    name = msgspec.json.encode(key).decode()
    if openai:
        body, url = fields.get("body"), fields.get("url")
        if unknown := sorted(fields.keys() - _OPENAI):
            said = f"unknown field {unknown[0]!r}; expected: custom_id, method, url, body"
            return Row(number, name, True, error=said)
        if not isinstance(body, dict) or fields.get("method") != "POST" or url not in (COMPLETIONS, CHATS):
            return Row(number, name, True, error=f"method has to be POST, url {COMPLETIONS} or {CHATS}, body an object")
    else:
        body, url = fields, CHATS if "messages" in fields else COMPLETIONS
    body = defaults | body
    if body.pop("stream", None):
        return Row(number, name, openai, error="stream: a batch has no streams; leave it out")
    if body.get("seed") is None:  # a seed that is the same in every run, on every machine
        body["seed"] = int.from_bytes(blake3(name.encode()).digest(7))
    return Row(number, name, openai, url, msgspec.json.encode(body))


def write_lines(output: Path, lines: Iterable[bytes]) -> None:
    """Write the answers to a file, completely or not at all: JSONL, or ``.parquet``.

    A Parquet file is a table ``id, status_code, text, body``. Raises `OptionError` if pyarrow is missing, and
    `OutputError` if the file cannot be written.
    """
    with atomic_file(output) as file:
        if output.suffix.lower() != ".parquet":
            file.writelines(line + b"\n" for line in lines)
            return
        with _table(output, file) as add:
            for line in lines:
                add(msgspec.json.decode(line))


@contextmanager
def _table(output: Path, file: BinaryIO) -> Iterator[Any]:
    arrow, parquet = _arrow(output)
    text = arrow.string()
    schema = arrow.schema({"id": text, "status_code": arrow.int32(), "text": arrow.list_(text), "body": text})
    rows: list[dict[str, Any]] = []

    def flush() -> None:
        writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema))
        rows.clear()

    def add(line: dict[str, Any]) -> None:
        key, response = line.get("custom_id", line["id"]), line["response"]
        choices = response["body"].get("choices")
        texts = [c["text"] if "text" in c else c["message"]["content"] for c in choices] if choices else None
        rows.append({
            "id": key if key is None else str(key), "status_code": response["status_code"], "text": texts,
            "body": msgspec.json.encode(response["body"]).decode(),
        })  # fmt: skip
        if len(rows) == _BATCH:
            flush()

    try:
        with parquet.ParquetWriter(file, schema) as writer:
            yield add
            flush()
    except arrow.ArrowException as error:
        raise OutputError(f"{output}: cannot be written: {' '.join(str(error).split())}") from None
