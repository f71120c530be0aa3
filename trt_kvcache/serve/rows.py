"""The rows of a batch job: OpenAI's batch lines and plain ones, as JSONL or Parquet; and the file of their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

from trt_kvcache.errors import OptionError, OutputError
from trt_kvcache.files import atomic_file, open_regular

__all__ = ["CHATS", "COMPLETIONS", "Row", "read_rows", "write_lines"]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_LARGEST = 4 << 20
"""Bytes of a line, as of a body that the server takes."""
_OPENAI = {"custom_id", "method", "url", "body"}
_BATCH = 1000
"""Rows of a Parquet file at a time."""


class Row(msgspec.Struct, frozen=True):
    """A row as read. It may be invalid.

    Attributes:
        number: line or row in the file, from 1.
        key: its id as JSON; ``null`` if it has no readable id.
        openai: the row has OpenAI's form, and its answer will have it.
        url: of the request.
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
        """Digest of everything that the answer depends on, except the model."""
        return blake3(msgspec.msgpack.encode(self)).digest(16)


def read_rows(file: Path, defaults: dict[str, Any]) -> Iterator[Row]:
    """Read the rows of a file, one after another. Empty lines count for nothing.

    Args:
        file: JSONL; Parquet where its name ends with ``.parquet``.
        defaults: fields of the requests that do not have them.

    Raises:
        OptionError: the file cannot be read.
    """
    seen: set[bytes] = set()
    for number, line in _parquet_lines(file) if file.suffix.lower() == ".parquet" else _lines(file):
        row = _row(number, line, defaults)
        name = blake3(row.key.encode()).digest(16)
        if row.key != "null" and name in seen:
            row = Row(number, row.key, row.openai, error="an earlier row has the same id; give each row one of its own")
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
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line  # as some editors on Windows write
                if line.strip():
                    yield number, line
    except OSError as error:
        raise OptionError(f"{file} cannot be read: {error.strerror}") from None


def _parquet_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The rows of a Parquet file as lines of JSON, in which a null is no field."""
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
        return Row(number, error=f"the row is no JSON that can be read: {error}")
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
            return Row(number, name, True, error=f"unknown field {unknown[0]!r} beside custom_id, method, url and body")
        if not isinstance(body, dict) or fields.get("method") != "POST" or url not in (COMPLETIONS, CHATS):
            return Row(number, name, True, error=f"method has to be POST, url {COMPLETIONS} or {CHATS}, body an object")
    else:
        body, url = fields, CHATS if "messages" in fields else COMPLETIONS
    body = defaults | body
    if body.pop("stream", None):
        return Row(number, name, openai, error="stream: a batch has no streams; leave it out")
    if body.get("seed") is None:  # the same wherever and whenever the row is computed
        body["seed"] = int.from_bytes(blake3(name.encode()).digest(7))
    return Row(number, name, openai, url, msgspec.json.encode(body))


def write_lines(output: Path, lines: Iterable[bytes]) -> None:
    """Write the answers, which appear whole or not at all.

    Args:
        output: JSONL; a table ``id, status_code, text, body`` where its name ends with ``.parquet``.
        lines: of `trt_kvcache.serve.batch.Answered`.

    Raises:
        OptionError: pyarrow is missing.
        OutputError: it cannot be written.
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
    schema = arrow.schema(
        {
            "id": arrow.string(),
            "status_code": arrow.int32(),
            "text": arrow.list_(arrow.string()),
            "body": arrow.string(),
        }
    )
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
