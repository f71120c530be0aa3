"""Output files appear whole or not at all."""

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import pytest
from blake3 import blake3
from runtime.interrupts import interrupted

from trt_kvcache import files
from trt_kvcache.errors import OutputError
from trt_kvcache.files import atomic_file, check_output, identify, publish, temporary_file


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_identity_is_of_the_content(tmp_path: Path) -> None:
    data = os.urandom(3 * (1 << 20) + 17)
    (tmp_path / "x.bin").write_bytes(data)
    found = identify(tmp_path / "x.bin", "sub/x.bin")
    assert (found.name, found.size, found.blake3) == ("sub/x.bin", len(data), blake3(data).hexdigest())
    assert identify(tmp_path / "x.bin").name == "x.bin"


def test_hashing_stops_when_it_is_no_longer_wanted(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(InterruptedError):
        identify(tmp_path / "x", cancelled=cancelled)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_atomic_file_leaves_nothing_after_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def fail_half_way() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"out"}


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "out") as file:
            file.write(b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    with atomic_file(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "out").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/out", "no such folder: .*missing; create it first"),
        (".", "a directory; give the name of a file"),
        ("/dev/null", "not a regular file"),
        ("/dev/stdout", "not a regular file"),  # even where it leads to one
    ],
)
def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        check_output(tmp_path / path)


def test_an_output_that_no_path_leads_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / "circle", Path("~nobody-has-this-name/out")):
        with pytest.raises(OutputError, match=f"{path.name}: its links form a circle, or the user after ~ is unknown"):
            check_output(path)


def test_a_folder_without_permission_is_an_output_error() -> None:
    # /proc refuses new files even to root.
    with pytest.raises(OutputError, match="/proc/out: cannot be written"), temporary_file(Path("/proc/out")):
        pass


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize("existing", [True, False])
def test_if_the_second_file_fails_the_first_is_as_before(
    tmp_path: Path, existing: bool, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def no_links(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(files.os, "link", no_links)
    first, second = tmp_path / "engine", tmp_path / "engine.json"
    if existing:
        first.write_bytes(b"old engine")
        second.write_bytes(b"old manifest")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with temporary_file(first) as a:
        a.write_bytes(b"new")
        with pytest.raises(OutputError, match="engine.json: cannot be written"):
            publish([(a, first), (tmp_path / "never written", second)])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("old", [(), ("a",), ("a", "b")])
def test_an_interrupt_of_publish_at_any_line_leaves_all_old_or_all_new(old: tuple[str, ...], tmp_path: Path) -> None:
    for line in count(1):
        folder = tmp_path / str(line)
        folder.mkdir()
        for name in old:
            (folder / name).write_text("old")
        with suppress(KeyboardInterrupt), ExitStack() as stack:
            pending = [(stack.enter_context(temporary_file(folder / name)), folder / name) for name in "ab"]
            for temporary, _ in pending:
                temporary.write_text("new")
            with interrupted(line, "trt_kvcache/files.py") as left:
                publish(pending)
        found = {path.name: path.read_text() for path in folder.iterdir()}
        assert found in (dict.fromkeys(old, "old"), dict.fromkeys("ab", "new"))
        if left[0] > 0:
            return


@pytest.mark.skipif(sys.platform == "win32", reason="Windows moves no open file, so that none is locked")
@pytest.mark.parametrize("name", ["model.engine", "odd[name].engine"])
def test_what_killed_processes_left_is_removed(name: str, tmp_path: Path) -> None:
    """Not what somebody writes, what is new, what is of another file, or is nobody's temporary file."""
    final = tmp_path / name
    left = [tmp_path / f".{name}.0123abcd.tmp", tmp_path / f".{name}.0123abce.tmp"]
    others = [tmp_path / n for n in (f".{name}x.0123abcd.tmp", f".{name}.other.tmp", f".{name}.0123abcd.old", "a.tmp")]
    new = tmp_path / f".{name}.ffffffff.tmp"
    old = time.time() - 60
    for path in (*left, *others, new):
        path.touch()
        os.utime(path, (old, old) if path != new else None)
    with temporary_file(final) as mine:
        os.utime(mine, (old, old))
        with temporary_file(final) as second:
            assert mine.exists()
            assert {*tmp_path.iterdir()} == {*others, new, mine, second}
    assert {*tmp_path.iterdir()} == {*others, new}


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)
    left = tmp_path / ".model.engine.0123abcd.tmp"
    left.touch()
    os.utime(left, (0, 0))
    with temporary_file(tmp_path / "model.engine") as path:
        assert path.exists()
    assert [*tmp_path.iterdir()] == [left]
