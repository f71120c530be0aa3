"""Batch jobs: every answer is that of the same request alone, in the order of the rows, computed once."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: batch)")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")

from commands import invoke

from trt_kvcache import DecodeSession, PlanOptions
from trt_kvcache.errors import OptionError, OutputError, SessionError
from trt_kvcache.plan import CacheDtype
from trt_kvcache.serve.batch_job import Answered, BatchDone, Journal, Row, RowRunner, run_batch

TEXT = "/v1/completions"


def compute(session: DecodeSession, most: int | None = None, computed: list[int] | None = None) -> Callable[..., None]:
    """`most`: answers after which the job dies."""

    def run(todo: Iterator[Row], take: Callable[[str, Answered], None]) -> None:
        runner = RowRunner(session, "tiny")

        async def go() -> None:
            async for answered in runner.answers(todo):
                if most is not None and len(found) == most:
                    raise KeyboardInterrupt
                take(runner.model, answered)
                found.append(answered.number)

        found: list[int] = [] if computed is None else computed
        try:
            asyncio.run(go())
        finally:
            runner.close()
            assert not session.cache.slots

    return run


def job(file: Path, output: Path, run: Callable[..., None], defaults: dict[str, Any] | None = None) -> BatchDone:
    return run_batch(file, output, defaults or {}, run, lambda *_: None)


def write(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def text_of(line: dict[str, Any]) -> str:
    assert line["response"]["status_code"] == 200
    (choice,) = line["response"]["body"]["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def openai(key: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": key, "method": "POST", "url": url, "body": body}


def test_answers_are_those_of_the_requests_alone_in_the_order_of_the_rows(
    tmp_path: Path, rows: DecodeSession, alone: DecodeSession
) -> None:
    """Long and short ones, so that they end in another order."""
    draw = random.Random(3)
    lengths = [draw.choice((1, 2, 30, 60)) for _ in range(24)]
    given: list[Any] = []
    for at, length in enumerate(lengths):
        sampled = {"seed": at} if at % 2 else {"temperature": 0}
        if at % 3 == 2:
            given.append(openai(f"key {at}", TEXT, prompt=f"row {at}", max_tokens=length, model="tiny", **sampled))
        elif at % 3:
            messages = [{"role": "user", "content": f"row {at}"}]
            given.append({"id": at, "messages": messages, "max_completion_tokens": length, **sampled})
        else:
            given.append({"id": f"é {at}", "prompt": f"row {at}", "max_tokens": length, **sampled})
    done = job(write(tmp_path / "in.jsonl", given), tmp_path / "out.jsonl", compute(rows))
    found = read(tmp_path / "out.jsonl")
    assert done == BatchDone(24, 0, 0)
    assert [line.get("custom_id", line["id"]) for line in found] == [g.get("custom_id", g.get("id")) for g in given]
    for at, (line, length) in enumerate(zip(found, lengths, strict=True)):
        settings: dict[str, Any] = {"seed": at, "do_sample": True, "top_k": 0} if at % 2 else {}
        if "messages" in given[at]:
            expected = alone.chat(given[at]["messages"], max_new_tokens=length, **settings)
        else:
            expected = alone.generate(f"row {at}", max_new_tokens=length, **settings)
        assert text_of(line) == expected.text
        assert line["error"] is None
        assert line["response"]["body"]["usage"]["completion_tokens"] == len(expected.tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_rows_without_a_seed_get_one_from_their_id(tmp_path: Path, rows: DecodeSession) -> None:
    """Another order and another split change no answer; other ids do."""
    given = [{"id": f"row {at}", "prompt": "the same", "max_tokens": 12} for at in range(8)]
    whole = write(tmp_path / "whole.jsonl", given)
    parts = [write(tmp_path / "a.jsonl", given[5::-1]), write(tmp_path / "b.jsonl", given[6:])]
    texts: list[dict[str, str]] = []
    for files in ([whole], parts):
        found: dict[str, str] = {}
        for file in files:
            job(file, file.with_suffix(".out"), compute(rows))
            found |= {line["id"]: text_of(line) for line in read(file.with_suffix(".out"))}
        texts.append(found)
    assert texts[0] == texts[1]
    assert len(set(texts[0].values())) > 1


WRONG: list[tuple[Any, int, str]] = [
    ("{", 400, "row 1: the row is not valid JSON"),
    ("[1]", 400, "row 1: the row has to be a JSON object"),
    ({"prompt": "x"}, 400, "row 1: the row needs an id"),
    ({"id": True, "prompt": "x"}, 400, "row 1: the row needs an id"),
    (openai("a", "/v1/embeddings", input="x"), 400, "row 1: method has to be POST, url /v1/completions or"),
    (openai("a", TEXT, prompt="x") | {"more": 1}, 400, "row 1: unknown field 'more'; expected: custom_id"),
    ({"id": 1, "prompt": "x", "stream": True}, 400, "row 1: stream: a batch has no streams"),
    ({"id": 1, "prompt": "x", "best_of": 2}, 400, "best_of: "),
    ({"id": 1, "prompt": "x", "model": "other"}, 404, "there is no model 'other'; this is 'tiny'"),
    ({"id": 1, "prompt": "x" * 600}, 400, "the prompt has 600 tokens, and the model takes 512"),
    ({"id": 1, "prompt": "x", "n": 2000}, 400, "Expected `int` <= 128"),
    ('{"id": 1, "prompt": "' + "x" * (4 << 20) + '"}', 400, "row 1: the row has more than 4194304 bytes"),
]


def test_a_row_in_error_is_written_with_its_error(tmp_path: Path, rows: DecodeSession) -> None:
    for line, status, message in WRONG:
        good = {"id": "good", "prompt": "x", "max_tokens": 1}
        output = tmp_path / "out.jsonl"
        done = job(write(tmp_path / "in.jsonl", ["", line, "", good]), output, compute(rows))
        wrong, right = read(output)
        assert done == BatchDone(2, 0, 1)
        assert wrong["response"]["status_code"] == status
        assert wrong["response"]["body"]["error"]["message"].startswith(message.replace("row 1", "row 2")), wrong
        assert text_of(right)
        output.unlink()


def test_an_id_that_came_before_is_an_error(tmp_path: Path, rows: DecodeSession) -> None:
    given = [{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "x"}, {"id": 1, "prompt": "y"}]
    assert job(write(tmp_path / "in.jsonl", given), tmp_path / "out", compute(rows), {"max_tokens": 1}).errors == 1
    assert "an earlier row has the same id" in read(tmp_path / "out")[2]["response"]["body"]["error"]["message"]


def test_a_job_that_was_killed_goes_on(tmp_path: Path, rows: DecodeSession) -> None:
    """Rows that are finished are not computed again, unless they changed; the result is that of one run."""
    given = [{"id": at, "prompt": f"row {at}", "max_tokens": 1 + at % 5} for at in range(20)]
    file, output = write(tmp_path / "in.jsonl", given), tmp_path / "out.jsonl"
    computed: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        job(file, output, compute(rows, 7, computed))
    assert not output.exists()
    first = list(computed)
    given[first[0] - 1]["prompt"] = "another"
    computed.clear()
    assert job(write(file, [*given, {"id": 20, "prompt": "new"}]), output, compute(rows, None, computed)).reused == 6
    assert set(computed) == {*range(1, 22)} - set(first[1:])
    assert len(computed) == len(set(computed))
    once = tmp_path / "once.jsonl"
    job(file, once, compute(rows))
    assert [text_of(line) for line in read(output)] == [text_of(line) for line in read(once)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_kill_loses_no_answer(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys
from trt_kvcache.serve.batch_job import Journal
journal = Journal(pathlib.Path(sys.argv[1]))
for number in range(50):
    journal.put(number, b"", 200, b"line %d" % number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")]).returncode == -9
    with Journal(tmp_path / "out") as journal:
        found = journal._db.execute("SELECT number, line FROM rows ORDER BY number").fetchall()
    assert found == [(number, b"line %d" % number) for number in range(50)]


def test_a_full_disk_is_one_line_and_the_job_goes_on_later(
    tmp_path: Path, rows: DecodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [{"id": at, "prompt": "x", "max_tokens": 1, "echo": True} for at in range(40)]
    file, output = write(tmp_path / "in.jsonl", given), tmp_path / "out.jsonl"
    usual = Journal.claim

    def small(journal: Journal, model: str) -> None:
        journal._db.execute("PRAGMA max_page_count=6")  # of 4096 bytes
        usual(journal, model)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "claim", small)
        with pytest.raises(
            OutputError, match=r"journal: cannot be written: database or disk is full; its content"
        ) as e:
            job(file, output, compute(rows))
    assert "\n" not in str(e.value)
    done = job(file, output, compute(rows))
    assert 0 < done.reused < 40
    assert [line["id"] for line in read(output)] == list(range(40))


def test_a_session_that_fails_ends_the_job_and_no_row(
    tmp_path: Path, rows: DecodeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "in.jsonl", [{"id": at, "prompt": "x", "max_tokens": 3} for at in range(12)])
    step, steps = rows.step, iter(range(5))

    def failing() -> Any:
        if next(steps, None) is None:
            raise SessionError("the device is lost")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(rows, "step", failing)
        with pytest.raises(SessionError, match="the device is lost"):
            job(file, tmp_path / "out.jsonl", compute(rows))
    done = job(file, tmp_path / "out.jsonl", compute(rows))
    assert 1 <= done.reused <= 4  # of the first rows of the session, which may join a step apart
    assert done.errors == 0


def test_refusals(tmp_path: Path, rows: DecodeSession) -> None:
    file, output = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x"}]), tmp_path / "out.jsonl"
    for missing in ("no.jsonl", "no.parquet"):
        with pytest.raises(OptionError, match=f"{missing} (cannot be read: No such file|needs pyarrow)"):
            job(tmp_path / missing, output, compute(rows))
    with pytest.raises(OptionError, match="has no row"):
        job(write(tmp_path / "empty.jsonl", [""]), output, compute(rows))
    output.write_text("mine")
    with pytest.raises(OutputError, match="exists, and a batch never overwrites a file"):
        job(file, output, compute(rows))
    output.unlink()
    with Journal(output) as journal:
        with pytest.raises(OutputError, match="another process is writing it"):
            Journal(output)
        journal.claim("another")
        journal.put(7, b"", 200, b"")
    with pytest.raises(OutputError, match="holds answers of another model, capacity, type of caches"):
        job(file, output, compute(rows))
    (tmp_path / "out.jsonl.journal").write_text("no database" * 100)
    with pytest.raises(OutputError, match="this file is not the journal of a batch; remove it"):
        job(file, output, compute(rows))


def test_a_complete_journal_of_another_model_is_refused(tmp_path: Path, folder: Path, rows: DecodeSession) -> None:
    """As where the job was killed before it wrote its file; the same model writes it, and computes nothing anew."""
    file = write(tmp_path / "in.jsonl", [{"id": at, "prompt": "x", "max_tokens": 4} for at in range(3)])
    output, once = tmp_path / "out.jsonl", tmp_path / "once.jsonl"
    job(file, once, compute(rows))

    def killed(todo: Iterator[Row], take: Callable[[str, Answered], None]) -> None:
        compute(rows)(todo, take)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(file, output, killed)
    options = PlanOptions(cache_dtype=CacheDtype.INT8)
    refused = pytest.raises(OutputError, match="holds answers of another model, capacity, type of caches")
    with DecodeSession.open(folder, max_batch=4, plan_options=options) as session, refused:
        job(file, output, compute(session))
    assert not output.exists()
    assert job(file, output, compute(rows)) == BatchDone(3, 3, 0)
    assert [text_of(line) for line in read(output)] == [text_of(line) for line in read(once)]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_existing_file_stays_beside_a_journal(when: str, tmp_path: Path, rows: DecodeSession) -> None:
    file = write(tmp_path / "in.jsonl", [{"id": at, "prompt": "x", "max_tokens": 1} for at in range(3)])
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        job(file, output, compute(rows, 2))
    if when == "before":
        output.write_text("mine")

    def run(todo: Iterator[Row], take: Callable[[str, Answered], None]) -> None:
        compute(rows)(todo, take)
        output.write_text("mine")

    with pytest.raises(OutputError, match="exists, and a batch never overwrites a file; move it"):
        job(file, output, run)
    assert output.read_text() == "mine"
    output.unlink()
    assert job(file, output, compute(rows)).reused == (2 if when == "before" else 3)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, rows: DecodeSession) -> None:
    file = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x", "max_tokens": 1}])
    run = compute(rows)

    def changing(todo: Iterator[Row], take: Callable[[str, Answered], None]) -> None:
        run(todo, take)
        write(file, [{"id": 2, "prompt": "x", "max_tokens": 1}])

    with pytest.raises(OptionError, match="changed during the run"):
        job(file, tmp_path / "out.jsonl", changing)
    assert not (tmp_path / "out.jsonl").exists()
    assert job(file, tmp_path / "out.jsonl", run).rows == 1


def test_parquet_is_the_same_as_lines(tmp_path: Path, rows: DecodeSession) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: batch)")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "x", "name": None}, {"role": "assistant", "content": "y", "name": "z"}]
    given = [{"id": 1, "prompt": "x"}, {"id": 2, "messages": chat}, {"id": 3, "prompt": "x", "max_tokens": 2}]
    bodies = [openai("a", TEXT, prompt=[1, 2]), openai("b", TEXT, prompt=[3]) | {"method": "GET"}]
    as_text = [line | {"body": json.dumps(line["body"])} for line in bodies]
    for name, lines, table in (("plain", given, given), ("openai", bodies, bodies), ("text", bodies, as_text)):
        whole = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(table, None if name != "plain" else pyarrow.schema({
            "id": pyarrow.int64(), "prompt": pyarrow.string(), "max_tokens": pyarrow.int32(),
            "messages": pyarrow.list_(pyarrow.struct({k: pyarrow.string() for k in ("role", "content", "name")})),
        })), whole)  # fmt: skip
        plain = [json.loads(json.dumps(line), object_hook=without_nulls) for line in lines]
        job(write(tmp_path / "in.jsonl", plain), tmp_path / f"{name}.out", compute(rows), {"max_tokens": 3})
        job(whole, tmp_path / f"{name}.out.parquet", compute(rows), {"max_tokens": 3})
        expected = read(tmp_path / f"{name}.out")
        found = parquet.read_table(tmp_path / f"{name}.out.parquet").to_pylist()
        assert [row["id"] for row in found] == [str(line.get("custom_id", line["id"])) for line in expected]
        for row, line in zip(found, expected, strict=True):
            assert row["status_code"] == line["response"]["status_code"]
            if row["status_code"] == 200:
                assert row["text"] == [text_of(line)]
            else:
                assert (row["text"], json.loads(row["body"])) == (None, line["response"]["body"])


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def test_the_command(tmp_path: Path, folder: Path) -> None:
    file = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x"}, {"id": 2, "prompt": "y", "top_k": "no"}])
    command = ["batch", str(folder), str(file), "-o", str(tmp_path / "out.jsonl")]
    done = invoke(*command, "--defaults", '{"max_tokens": 3}', "--max-batch", "2", code=None)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'out.jsonl'}: 2 rows; 1 in error\n")
    assert read(tmp_path / "out.jsonl")[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    for flags, message in (
        (("--defaults", "[]"), "give a JSON object"),
        (("--defaults", "{"), "give a JSON object"),
        (("--workers", "2"), "--workers 2 has no effect without --ray; add --ray, or give --max-batch"),
    ):
        done = invoke(*command, *flags, code=1)
        assert message in done.output
