"""Long commands on a terminal of 80 columns, recorded in ``golden/``: the bars that they showed, and what is left.

Time is collapsed: each bar stands once, and # in the place of each number. What two threads show comes in any order, so
that bars are sorted. To write them anew: ``GOLDEN=write python -m pytest tests/cli/test_recordings.py``.
"""

import fcntl
import importlib.util
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from serve.models import write_said
from tokenizers import decoders

GOLDEN = Path(__file__).parent / "golden"
COLOR, MOVE = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
BAR = re.compile(r"[━╸╺]{4,}")
NUMBER = re.compile(r"\d+(\.\d+)?([eE][-+]?\d+)?")
SAID = ["<assistant>", "▁A", "▁cache", "▁keeps", "▁what", "▁the", "▁model", "▁read", ".", "<end>"]
COMMANDS = {
    "export": "export checkpoint/ -o my-export/ --exporter mobius --capacity 64",
    "plan": "plan model/",
    "verify": "verify model/",
    "build": "build model/ -o my-engine/",
    "generate": "generate model/ --prompt '<assistant>' --max-new-tokens 8",
    "chat": "chat model/ --max-new-tokens 8",
    "batch": "batch model/ rows.jsonl -o answers.jsonl",
    "bench": "bench model/ --lengths 4 --positions 4 --batches 1 --repeats 3",
    "serve": "serve model/ --port 0",
}
NEEDS = {"export": "mobius", "build": "tensorrt_rtx", "serve": "starlette", "batch": "pyarrow"}
TYPED = {"chat": "Hello\n/exit\n"}
LAST = {"serve": "Ctrl-C ends it"}  # commands that run until they are ended, and their last words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "model").mkdir()
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    write_said(folder / "model", SAID, decoder=spaces, template="{{ messages[-1].content }}<assistant>")
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [0], "max_tokens": 8}}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX's")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_shows_what_is_recorded(name: str, folder: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    if name == "export":
        make_checkpoint(folder / "checkpoint")
    shown = play(shlex.split(COMMANDS[name]), folder, TYPED.get(name), LAST.get(name))
    said = collapsed(shown.replace(sys.executable, "python").replace(f"{folder}/", ""))
    recorded = GOLDEN / f"terminal-{name}.txt"
    said = f"$ trt-kvcache {COMMANDS[name]}\n{said}"
    if os.environ.get("GOLDEN") == "write":
        recorded.write_text(said)
    assert said == recorded.read_text()


def make_checkpoint(folder: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "small_checkpoint.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)


def play(words: list[str], folder: Path, typed: str | None, last: str | None) -> str:
    """All that a terminal of 80 columns gets."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "CI")}
    environment |= {
        "TERM": "xterm", "TRT_KVCACHE_VERDICTS": "off", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("recorded.py")), *words]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=end, stderr=end, close_fds=True
    ) as process:
        os.close(end)
        assert process.stdin is not None
        process.stdin.write((typed or "").encode())
        process.stdin.close()
        shown = bytearray()
        while True:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # the command is gone
                break
            shown += part
            if last is not None and last.encode() in shown:
                process.send_signal(signal.SIGINT)
                last = None
    os.close(terminal)
    assert process.returncode in (0, 130), shown.decode()
    return shown.decode()


def collapsed(shown: str) -> str:
    """The bars, each once, and the lines that stay; TensorRT's own bars, in capitals, change with its versions."""
    lines = re.split(r"[\r\n]+", MOVE.sub("\r", COLOR.sub("", shown)))
    bars, left = set(), []
    for line in lines:
        name, *rest = BAR.split(line)
        if not rest:
            left.append(re.sub(r"  +", "  ", NUMBER.sub("#", line)).rstrip())
        elif name.strip()[0].islower():
            bars.add(f"  ━━ {name.strip()}{' # of #' * (' of ' in rest[-1])}\n")
    return "".join(sorted(bars)) + "".join(f"{line}\n" for line in left if line)
