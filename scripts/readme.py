"""Runs the examples of the README and of `docs/`, and compares their output with the pages.

    python scripts/readme.py             compare; exit code 1 and a diff where a page is out of date
    python scripts/readme.py --update    write the output as it is now

Every ``console`` block is run, in the order of `PAGES`, in one empty folder in which ``scripts`` is this folder:
lines that begin with ``$`` are commands, the others their output. ``python`` blocks are run there too, and must not
fail. Numbers are not compared: times and sizes differ between machines.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FIRST = ROOT / "docs" / "verify-and-build.md"  # this page makes the model that other pages use
PAGES = (_FIRST, ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p != _FIRST))
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_examples(text: str, folder: Path) -> str:
    """Return a page with the output that its commands give now; raise `RuntimeError` if a command fails.

    `folder` has the files that earlier pages wrote.
    """
    if not (folder / "scripts").exists():
        (folder / "scripts").symlink_to(ROOT / "scripts")

    def rerun(block: re.Match[str]) -> str:
        kind, body = block[1], block[2]
        if kind == "python":
            _output([sys.executable, "-c", body], folder, body)
            return block[0]
        commands = [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]
        shown = [f"$ {c}\n{_output(['bash', '-c', c], folder, c)}" for c in commands]
        return "```console\n" + "\n".join(shown) + "```"

    return _BLOCK.sub(rerun, text)


def _output(command: list[str], folder: Path, shown: str) -> str:
    # The interpreter that runs this comes first, so that the examples' `python` and `trt-kvcache` are its own.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{shown!r} fails with exit code {done.returncode}:\n{done.stdout}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def comparable(text: str) -> list[str]:
    """Return the lines of a text without what differs between machines: numbers, hashes and the padding around them."""
    without_hashes = re.sub(r"\b[0-9a-f]{16,}\b", "#", text)
    without_numbers = re.sub(r"\d+(\.\d+)*", "#", without_hashes)
    return [re.sub(r"[ ─]+", " ", line).strip() for line in without_numbers.splitlines()]


def differences(page: Path, text: str, current: str) -> list[str]:
    """Return a diff of a page and the same page as it would be now, empty if only numbers differ."""
    old, new = comparable(text), comparable(current)
    return list(difflib.unified_diff(old, new, page.name, f"{page.name}, now", lineterm=""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the output as it is now into the pages")
    update = parser.parse_args().update
    outdated = []
    with tempfile.TemporaryDirectory() as folder:
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            current = run_examples(text, Path(folder))
            if update:
                page.write_text(current, encoding="utf-8")
            else:
                outdated += differences(page, text, current)
    print("\n".join(outdated) or "up to date")
    sys.exit(bool(outdated))


if __name__ == "__main__":
    main()
