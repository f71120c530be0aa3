"""Runs Python programs in forks of one process that imported their large packages: importing torch takes seconds.

    python forks.py MODULE ...

Each line on stdin is a program, as a JSON list of an interpreter's arguments: ``-c CODE ...``, ``-m MODULE ...`` or
``FILE ...``. After a program, this process writes a line to stdout: a NUL and the program's exit code. On Windows,
where processes cannot fork, each program gets a new interpreter. This file needs nothing of this package: it runs in
the interpreter of an exporter.
"""

import json
import os
import runpy
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path


def run_program(words: list[str]) -> None:
    """Run one program in this process as ``__main__``. `words` are the interpreter's arguments."""
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Import the modules that the command line names, then run each program that stdin names."""
    for name in sys.argv[1:] if sys.platform != "win32" else ():
        with suppress(Exception):  # the program that needs it will say why it cannot be imported
            import_module(name)
    for line in sys.stdin:
        words = json.loads(line)
        if sys.platform == "win32":
            code = subprocess.run([sys.executable, *words], stdin=subprocess.DEVNULL).returncode
        elif child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            run_program(words)
            return
        sys.stdout.write(f"\n\0{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
