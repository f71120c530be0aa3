"""Faults while a command runs: signals, a full disk, changed files. Each takes random numbers and an empty folder."""

import filecmp
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import onnx
from decoders import DecoderConfig, write_decoder
from hostile.held import LIMITS, Fell, judge, run

ROOT = Path(__file__).resolve().parents[2]
_LONGEST = 120.0  # seconds, on a busy machine
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COMMANDS = {
    "rewrite": ["rewrite", "MODEL", "-o", "OUT/model.onnx"],
    "verify": ["verify", "MODEL", "--tokens", "2"],
    "generate": ["generate", "MODEL", "--tokens", "1,2", "--max-new-tokens", "40"],
}
_PARTS = {"model.onnx", "model.onnx.data"}


@cache
def _source() -> Path:
    """A model with some MB of weights in a file of their own; made once."""
    folder = Path(tempfile.mkdtemp(prefix="attack-model-", dir=os.environ.get("ATTACK_SCRATCH")))
    write_decoder(folder / "model.onnx", DecoderConfig(layers=2, hidden=256, vocab=2048), external_threshold=1024)
    return folder


def _start(rng: random.Random, folder: Path, command: str, limit: int = 0) -> subprocess.Popen[str]:
    """A command as a user starts it, with a copy of the model, once it has its handlers for signals."""
    for part in _PARTS:
        shutil.copy(_source() / part, folder / part)
    (folder / "out").mkdir()
    arguments = [
        a.replace("MODEL", str(folder / "model.onnx")).replace("OUT", str(folder / "out")) for a in _COMMANDS[command]
    ]

    def prepare() -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = subprocess.Popen(
        [sys.executable, "-m", "trt_kvcache", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=prepare, cwd=ROOT,
    )  # fmt: skip
    while process.poll() is None and not _catches(process.pid):
        time.sleep(0.005)
    return process


def _catches(pid: int) -> bool:
    """It handles SIGTERM, so that it has begun."""
    with suppress(OSError):
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return found is not None and bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


@cache
def _usual(command: str) -> float:
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("ATTACK_SCRATCH")))
    try:
        process = _start(random.Random(0), folder, command)
        start = time.monotonic()
        _, said = process.communicate()
        if process.returncode:
            raise Fell(f"the command alone: {said}")
        return time.monotonic() - start
    finally:
        shutil.rmtree(folder)


def kills(rng: random.Random, folder: Path) -> str:
    """Signals at random moments: one line, the signal's exit code, no files; after SIGKILL the next run cleans."""
    command, number = rng.choice([*_COMMANDS]), rng.choice([*_ENDING, signal.SIGKILL])
    wait = rng.random() * _usual(command)
    process = _start(rng, folder, command)
    time.sleep(wait)
    hit = process.poll() is None
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=_LONGEST)
    ends = process.returncode == -number and number is not signal.SIGKILL  # Python has given its handlers back
    if not hit or process.returncode == 0 or (ends and stdout):
        return "too late"
    if number is signal.SIGKILL:
        _clean_after_kill(rng, folder, command)
        return "hit"
    said = stderr.splitlines()
    wanted = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
    gentle = command == "generate" and number is signal.SIGINT  # shows the text so far, and a summary
    if process.returncode != 128 + number or not (gentle or said == [f"error: {wanted}"]):
        raise Fell(f"{command} {number.name} after {wait:.2f} s: exit code {process.returncode}, {stderr[-400:]!a}")
    left = {p.name for p in (folder / "out").iterdir()}
    if left and not (command == "rewrite" and left == _PARTS and _is_complete(folder)):
        raise Fell(f"{command} {number.name} after {wait:.2f} s left {sorted(left)}")
    if {p.name for p in folder.iterdir()} != _PARTS | {"out"}:
        raise Fell(f"{command} {number.name}: beside the model lie {sorted(p.name for p in folder.iterdir())}")
    return "hit"


def _is_complete(folder: Path) -> bool:
    """All that `rewrite` writes is there; a signal may come before it has said so."""
    onnx.checker.check_model(folder / "out" / "model.onnx")
    return filecmp.cmp(folder / "model.onnx.data", folder / "out" / "model.onnx.data", shallow=False)


def _clean_after_kill(rng: random.Random, folder: Path, command: str) -> None:
    left = [*(folder / "out").iterdir()]
    for path in left:
        os.utime(path, (0, 0))  # as if some time had passed
    for path in Path(tempfile.gettempdir()).iterdir():  # of a process that is gone; the system cleans there
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if command == "rewrite":
        run("rewrite", folder / "model.onnx", "-o", folder / "out" / "model.onnx", *LIMITS)
        if {p.name for p in (folder / "out").iterdir()} != _PARTS:
            raise Fell(f"left after SIGKILL and another run: {sorted(p.name for p in (folder / 'out').iterdir())}")


def full(rng: random.Random, folder: Path) -> str:
    """A disk that is full, at a random size: one line, and no files."""
    size = (_source() / "model.onnx.data").stat().st_size
    process = _start(rng, folder, "rewrite", rng.randrange(1, size * 5 // 4))
    stdout, stderr = process.communicate(timeout=_LONGEST)
    judge(process.returncode, stdout, stderr)
    left = {p.name for p in (folder / "out").iterdir()}
    if left != (set() if process.returncode else _PARTS):
        raise Fell(f"exit code {process.returncode}, and there are {sorted(left)}")
    return "refused" if process.returncode else "passed"


def replaced(rng: random.Random, folder: Path) -> str:
    """Files that change at random moments: refused, or the old or the new file, never a mix."""
    process = _start(rng, folder, "rewrite")
    time.sleep(rng.random() * _usual("rewrite"))
    hit = process.poll() is None
    data = folder / "model.onnx.data"
    before = data.read_bytes()
    after = bytes(255 - byte for byte in before[:4096]) + before[4096:-4096] + bytes(255 - b for b in before[-4096:])
    way = rng.choice(["replaced", "written", "cut", "linked", "removed"])
    if way == "written":
        with data.open("r+b") as file:
            file.write(after)
    elif way == "cut":
        os.truncate(data, rng.randrange(len(before)))
    elif way == "removed":
        data.unlink()
    else:
        aside = folder.parent / f"{folder.name}.aside"
        aside.write_bytes(after)
        if way == "linked":
            data.unlink()
            data.symlink_to(aside)
        else:
            aside.replace(data)
    stdout, stderr = process.communicate(timeout=_LONGEST)
    (folder.parent / f"{folder.name}.aside").unlink(missing_ok=True)
    judge(process.returncode, stdout, stderr)
    copied = folder / "out" / "model.onnx.data"
    if process.returncode:
        if any((folder / "out").iterdir()):
            raise Fell(f"refused, and left {sorted(p.name for p in (folder / 'out').iterdir())}")
    elif copied.read_bytes() not in (before, after):
        raise Fell(f"{way}: passed with a file that is neither the old one nor the new one")
    return "hit" if hit else "too late"
