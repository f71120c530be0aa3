"""Reads name patterns for roles from YAML: those in ``configs/``, and those of the user (``--config``).

Every pattern is a regular expression of RE2 (linear time), and must match the whole name::

    roles:
      tokens: input_ids
      positions: [position_ids, cache_position]
      logits: (lm_)?logits

Patterns do not name caches: the graph shows which inputs and outputs are caches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import re2
import yaml

from trt_kvcache.errors import OptionError
from trt_kvcache.files import read_file
from trt_kvcache.importer.cache_plan import Role
from trt_kvcache.resources import resource_dir

_FROM_GRAPH = (Role.CACHE, Role.SPAN, Role.STATE, Role.ADAPTER, Role.ADAPTER_WEIGHTS)
NAMED_ROLES = tuple(role for role in Role if role not in _FROM_GRAPH)
"""The roles that a pattern can give. `Role.OTHER` means that a tensor has no role, whatever the graph shows."""

_QUIET = re2.Options()
_QUIET.log_errors = False


@dataclass(frozen=True)
class NamePattern:
    """One pattern for one role, with the name of its file (`source`) for messages."""

    role: Role
    regex: re2._Regexp
    source: str

    def matches(self, name: str, io: str) -> bool:
        """True if the pattern applies to the graph input or output with this name."""
        fits_io = self.role is Role.OTHER or (io == "output") == (self.role is Role.LOGITS)
        return fits_io and self.regex.fullmatch(name) is not None


def example(names: Mapping[Role, Sequence[str]]) -> str:
    """Return a config, on one line, that gives each role in `names` to the tensors with these names."""

    def pattern(name: str) -> str:
        plain = re.fullmatch(r"[A-Za-z_][\w.]*", name) is not None and yaml.safe_load(name) == name
        return name if plain else "'" + re.escape(name).replace("'", "''") + "'"

    def patterns(found: Sequence[str]) -> str:
        return pattern(found[0]) if len(found) == 1 else f"[{', '.join(map(pattern, found))}]"

    return f"roles: {{{', '.join(f'{role.value}: {patterns(found)}' for role, found in names.items())}}}"


@cache
def shipped_patterns() -> tuple[NamePattern, ...]:
    """Return the patterns of all files in ``configs/``."""
    files = sorted(resource_dir("configs").glob("*.yaml"))
    return tuple(pattern for file in files for pattern in load_patterns(file))


def load_patterns(path: str | Path) -> tuple[NamePattern, ...]:
    """Read the name patterns in one config file. Raises `OptionError` for missing, invalid or wrong YAML."""
    path = Path(path)
    try:
        content = yaml.safe_load(read_file(path, 1 << 20).decode())
    except OSError as error:
        raise OptionError(f"{path}: the role config cannot be read ({error.strerror}); give a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: for example an impossible date
        raise OptionError(f"{path}: the role config is not YAML: {' '.join(str(error).split())}") from None
    roles = content.get("roles") if isinstance(content, dict) else None
    if not isinstance(roles, dict) or set(content) - {"roles"}:
        shown = example({Role.TOKENS: ["input_ids"]})
        raise OptionError(f"{path}: a role config must be one mapping under the key 'roles', such as: {shown}")
    return tuple(pattern for key, value in roles.items() for pattern in _patterns(key, value, path))


def _patterns(key: Any, value: Any, path: Path) -> list[NamePattern]:
    if key not in [role.value for role in NAMED_ROLES]:
        in_graph = key in (Role.CACHE.value, Role.STATE.value)
        what = f"the graph shows each {key}, so names cannot" if in_graph else "there is no such role"
        known = ", ".join(role.value for role in NAMED_ROLES)
        raise OptionError(f"{path}: role '{key}': {what}; a pattern can give the roles {known}")
    texts = value if isinstance(value, list) else [value]
    patterns = []
    for text in texts:
        if not isinstance(text, str) or not text:
            raise OptionError(
                f"{path}: role '{key}' has the pattern {text!r}; a pattern must be a string or a list of strings"
            )
        try:
            patterns.append(NamePattern(Role(key), re2.compile(text, _QUIET), path.name))
        except (re2.error, UnicodeEncodeError) as error:
            said = error.args[0].decode(errors="replace") if isinstance(error, re2.error) else error
            raise OptionError(
                f"{path}: role '{key}' has '{text}', which is not a regular expression of RE2: {said}"
            ) from None
    return patterns
