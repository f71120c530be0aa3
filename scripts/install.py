"""Installs packages into the environment of the Python that runs it, as `pip install ARGUMENTS` does, but by uv.

    python scripts/install.py --editable '.[test]'

uv takes a fifth of pip's time. It gets pip's settings: indexes, constraints, certificates. pip installs if uv is
missing, if uv fails, or if pip has a setting that has no counterpart here.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec

PIP = [sys.executable, "-m", "pip"]
UV = "uv>=0.13,<0.14"
# pip's setting: uv's variable, and the separator of its values.
PASSED_ON = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
# Settings that change neither which packages are installed nor where they come from.
LEFT_OUT = {"cache-dir", "disable-pip-version-check", "no-color", "no-input", "progress-bar", "quiet", "retries"}


def uv_variables(listed: str) -> dict[str, str] | None:
    """Return uv's environment variables for the lines of `pip config list`; None if a setting has no counterpart."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # later ones count
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, setting = name.rpartition(".")
        if section in sections:
            sections[section][setting] = ast.literal_eval(value)
    settings = {setting: value for section in sections.values() for setting, value in section.items()}
    if not settings.keys() <= PASSED_ON.keys() | LEFT_OUT:
        return None
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's: the best version of all indexes
    for setting, (variable, separator) in PASSED_ON.items():
        if setting in settings:
            variables[variable] = separator.join(settings[setting].split())
    return variables


def install(arguments: list[str]) -> int:
    """Install what `pip install ARGUMENTS` would, and return the exit code."""
    if by_uv(arguments):
        return 0
    print("pip installs, which takes longer: uv could not", flush=True)
    return by_pip(arguments)


def by_pip(arguments: list[str]) -> int:
    command = [*PIP, "install", "--quiet", "--disable-pip-version-check", "--no-compile", *arguments]
    return subprocess.run(command, check=False).returncode


def by_uv(arguments: list[str]) -> bool:
    """Install by uv, which pip installs if it is missing; return False on failure."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    variables = None if listed.returncode else uv_variables(listed.stdout)
    if variables is None or (find_spec("uv") is None and by_pip([UV])):
        return False
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | variables, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
