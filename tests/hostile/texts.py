"""Patterns and settings that never end, or that are made of any depth."""

import json
import random

from hostile.files import CONTROL

PATTERNS = ["(a+)+$", "(a|aa)+$", "(" * 10_000 + ")" * 10_000, "(a?){500}a{500}"]


def roles(rng: random.Random) -> bytes:
    texts = [
        *(json.dumps({"roles": {"tokens": pattern}}) for pattern in PATTERNS),
        "roles: {tokens: [" + "(" * 10_000 + "]}", "[" * 10_000, "{" * 10_000, "- " * 5_000,
        "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(24)),
        "roles: !!python/object/apply:os.system [true]", "roles: {tokens: 2001-99-99}", "roles: {tokens: '\\C'}",
        f"roles: {{tokens: {json.dumps(CONTROL)}}}", "roles: {cache: a}", "roles: {tokens: [1, 2]}", "roles: {evil: a}",
        "roles: {? [a] : b}", "\x00",
    ]  # fmt: skip
    return rng.choice(texts).encode()
