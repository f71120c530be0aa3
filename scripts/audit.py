"""Compares the packages of `docker/*.txt` with the vulnerabilities that PyPI knows of, by pip-audit.

    python scripts/audit.py    0: no vulnerability is known; 1: some are; 3: not every package was checked

pip-audit itself ends with 0 and "No known vulnerabilities found", even if the index does not know a package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = tuple(sorted((ROOT / "docker").glob("*.txt")))
UNCHECKED = 3


def verdict(packages: list[dict[str, Any]]) -> tuple[int, str]:
    found = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in "
        + (", ".join(vulnerability["fix_versions"]) or "no version")
        for package in packages
        for vulnerability in package.get("vulns", [])
    ]
    skipped = [package for package in packages if "skip_reason" in package]
    checked = len(packages) - len(skipped)
    if found:
        return 1, "\n".join(["dependencies with known vulnerabilities; update them by scripts/lock --upgrade:", *found])
    if skipped or not packages:
        of_them = f"{len(skipped)} of {len(packages)} packages: {skipped[0]['skip_reason']}" if skipped else ""
        return UNCHECKED, not_checked(of_them or "pip-audit named no package")
    return 0, f"dependencies: {checked} packages checked, no known vulnerability"


def not_checked(reason: str) -> str:
    return f"dependencies NOT checked for known vulnerabilities: {reason}"


def main() -> None:
    if find_spec("pip_audit") is None:
        print(not_checked("pip-audit is not installed"))
        sys.exit(UNCHECKED)
    locks = [word for lock in LOCKS for word in ("-r", str(lock))]
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--format", "json", *locks], capture_output=True, text=True, check=False, timeout=120
        )
        packages = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        code, text = UNCHECKED, not_checked("pip-audit took more than 120 s")
    except (json.JSONDecodeError, KeyError):  # pip-audit prints no JSON without an index, or without a file of packages
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        code, text = UNCHECKED, not_checked(f"pip-audit: {lines[-1]}")
    else:
        code, text = verdict(packages)
    print(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
