"""The finished rows of a batch job: a SQLite file beside its output, which survives a kill at any moment."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType

from trt_kvcache.errors import OutputError
from trt_kvcache.serve.rows import Row

__all__ = ["Journal"]


class Journal:
    """The answers so far, each written to disk as it comes. No other process may have the file open meanwhile.

    Args:
        output: of the job; the file has its name, and ``.journal``.

    Attributes:
        path: of the file.

    Raises:
        OutputError: it cannot be made or read, or another process has it; so does every method, where the disk is full.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + ".journal")
        with self._one_line():
            self._db = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            with self._one_line():
                # Without shared memory, which network file systems lack; and locked until the end.
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute("CREATE TABLE IF NOT EXISTS made (model TEXT)")
                columns = "number INTEGER PRIMARY KEY, digest BLOB, status INTEGER, line BLOB"
                self._db.execute(f"CREATE TABLE IF NOT EXISTS rows ({columns})")
        except OutputError:
            self._db.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                raise OutputError(f"{self.path}: another process writes it; let that end, or give another -o") from None
            if "not a database" in str(error):
                raise OutputError(f"{self.path}: no journal of a batch; remove it") from None
            raise OutputError(
                f"{self.path}: cannot be written: {error}; what is in it stays, and the same command goes on from there"
            ) from None

    def claim(self, model: str) -> None:
        """Say what makes the answers.

        Raises:
            OutputError: something else made those that are there.
        """
        with self._one_line():
            record = self._db.execute("SELECT model FROM made").fetchone()
            if record is None and self._is_empty():
                self._db.execute("INSERT INTO made VALUES (?)", (model,))
                return
        if record != (model,):
            raise OutputError(
                f"{self.path} holds answers of another model, capacity, type of caches, generation config or adapters; "
                "give that one, or remove the file to begin again"
            )

    def put(self, number: int, digest: bytes, status: int, line: bytes) -> None:
        """Keep an answer; once this returns, no kill of the process loses it."""
        with self._one_line():
            self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", (number, digest, status, line))

    def find(self, row: Row) -> tuple[int, bytes] | None:
        """Return the status and the line of a row's answer; None if the journal has no answer for it."""
        with self._one_line():
            record: tuple[int, bytes] | None = self._db.execute(
                "SELECT status, line FROM rows WHERE number = ? AND digest = ?", (row.number, row.digest)
            ).fetchone()
        return record

    def clear(self) -> None:
        """Forget all answers; a journal without one is removed once it is closed."""
        with self._one_line():
            self._db.execute("DELETE FROM rows")
