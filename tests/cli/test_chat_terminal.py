"""``chat`` as typed on a terminal: editing, history, pasted lines, Ctrl-C and Ctrl-D."""

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve.models import write_said
from tokenizers import decoders

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX's")
pytest.importorskip("prompt_toolkit", reason="prompt_toolkit is not installed (extra: text)")

SAID = ["<assistant>", "▁A", "▁cache", "<end>"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}<assistant>"
SECONDS = 30
LEFT, UP, HOME = "\x1b[D", "\x1b[A", "\x1b[H"
PASTE = "\x1b[200~{}\x1b[201~"
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\b]")
ANSWERED = r"in the cache[^\n]*\n> ?$"  # and the next message is read: what is typed earlier is no terminal's to edit


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, folder: Path) -> None:
        self._terminal, end = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "CI"} | {
            "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }  # fmt: skip
        command = [sys.executable, "-m", "trt_kvcache", "chat", "model/", "--max-new-tokens", "4"]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=end, stdout=end, stderr=end, start_new_session=True
        )
        os.close(end)
        self.shown = ""

    def type(self, text: str, until: str = ANSWERED) -> None:
        """Type, and wait for what the terminal shows after it."""
        seen = len(self.shown)
        os.write(self._terminal, text.encode())
        self.wait(until, seen)

    def wait(self, until: str, seen: int = 0) -> None:
        """Wait until what is shown after the first `seen` characters has this pattern; "": until the chat has ended."""
        end = time.monotonic() + SECONDS
        while not until or not re.search(until, SEQUENCE.sub("", self.shown[seen:]), re.DOTALL):
            assert time.monotonic() < end, self.shown
            if not select.select([self._terminal], [], [], 1)[0]:
                continue
            try:
                self.shown += os.read(self._terminal, 1 << 16).decode()
            except OSError:  # the chat has ended
                assert not until, self.shown
                return

    def close(self) -> int:
        """End, and return the exit status."""
        self._process.kill()
        os.close(self._terminal)
        return self._process.wait()

    def status(self) -> int:
        """Return the exit status of a chat that has ended."""
        return self._process.wait(SECONDS)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "model").mkdir()
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    write_said(tmp_path / "model", SAID, decoder=spaces, template=TEMPLATE)
    terminal = Terminal(tmp_path)
    try:
        terminal.wait("Ctrl-D ends\n> ?$")
        yield terminal
    finally:
        terminal.close()


def test_messages_are_edited_and_come_back(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("Helo" + LEFT + "l\r")
    terminal.type(UP + HOME + "Oh, \r")
    terminal.type(PASTE.format("two\nlines"), "two\nlines")
    terminal.type("\r")
    terminal.type("first\x1b\rsecond\r")
    terminal.type('"""several\r', r"\.\.\. ?$")
    terminal.type('lines"""\r')
    terminal.type("not this\x03", "> ?$")
    terminal.type("/save said.json\r", "messages\n> ?$")
    terminal.type("\x04", "")
    assert terminal.status() == 0, terminal.shown
    said = [m["content"] for m in json.loads((tmp_path / "said.json").read_text()) if m["role"] == "user"]
    assert said == ["Hello", "Oh, Hello", "two\nlines", "first\nsecond", "several\nlines"]
