"""scripts/install.py: uv gets pip's settings, and pip installs where uv cannot."""

from __future__ import annotations

import subprocess
from typing import Any

import install
import pytest

LISTED = """\
:env:.cert='/certificates.crt'
:env:.find-links='/wheels'
:env:.timeout='180'
:env:.no-input='1'
download.index-url='https://downloads.example/simple'
global.constraint='/constraints.txt'
global.extra-index-url='\\nfile:///one/simple\\nfile:///two/simple'
global.find-links='/others'
global.index-url='https://user:a=b@first.example/simple'
install.index-url='https://second.example/simple'
"""
VARIABLES = {
    "UV_INDEX_STRATEGY": "unsafe-best-match",
    "UV_DEFAULT_INDEX": "https://second.example/simple",
    "UV_INDEX": "file:///one/simple file:///two/simple",
    "UV_FIND_LINKS": "/wheels",
    "UV_CONSTRAINT": "/constraints.txt",
    "UV_HTTP_TIMEOUT": "180",
    "SSL_CERT_FILE": "/certificates.crt",
}


def test_uv_gets_pips_settings_in_pips_order() -> None:
    assert install.uv_variables(LISTED) == VARIABLES
    assert install.uv_variables("global.index-url='https://user:a=b@x.example'\n") == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://user:a=b@x.example",
    }


@pytest.mark.parametrize("setting", ["no-index='true'", "only-binary=':all:'", "index='https://x.example'"])
def test_pip_installs_where_uv_would_not_know_a_setting(setting: str) -> None:
    assert install.uv_variables(f"global.{setting}\n") is None


@pytest.mark.parametrize(
    ("fails", "installers", "code"),
    [
        ((), ["uv"], 0),
        (("uv",), ["uv", "pip"], 0),
        (("config",), ["pip"], 0),
        (("get uv",), ["pip"], 0),
        (("uv", "pip"), ["uv", "pip"], 1),
    ],
)
def test_pip_takes_the_place_of_uv(
    fails: tuple[str, ...], installers: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(command: list[str], env: dict[str, str] | None = None, **_: Any) -> subprocess.CompletedProcess[str]:
        step = "config" if "config" in command else "get uv" if install.UV in command else command[2]
        if step in ("uv", "pip"):
            ran.append(step)
            assert command[-2:] == ["--editable", ".[test]"]
            assert (env is not None and env.items() >= VARIABLES.items()) == (step == "uv")
        return subprocess.CompletedProcess(command, int(step in fails), stdout=LISTED)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "find_spec", lambda name: None)
    assert install.install(["--editable", ".[test]"]) == code
    assert ran == installers
