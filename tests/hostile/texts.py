"""Templates, tokenizers, patterns and settings that never end, or that make texts of any length."""

from __future__ import annotations

import json
import random
from typing import Any

from hostile.files import CONTROL, VALUES

TEMPLATES = {
    "never ends": "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "text without end": "{{ 'x' * 10**10 }}",
    "grows by itself": "{% set n = namespace(t='x') %}"
    "{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a large number": "{{ 10**(10**9) }}",
    "by a filter": "{{ 'x' | center(10**11) }}",
    "by a format": "{{ '%99999999999d' % 1 }}",
    "long": "{{ messages[0].content }}{{ 'x' * (2 ** 24 + 1) }}",
}

PATTERNS = ["(a+)+$", "(a|aa)+$", "(" * 10_000 + ")" * 10_000, "(a?){500}a{500}"]

_PIECES = (
    "{{ messages }}", "{{ messages[0].content }}", "{{ bos_token }}", "{{ cycler.__init__.__globals__ }}", "{% raw %}",
    "{{ ''.__class__.__mro__ }}", f"{{{{ raise_exception({CONTROL!r}) }}}}", "{{ strftime_now('%Y' * 1000) }}",
    "{% for m in messages %}{{ m.role }}{% endfor %}", "{{ 1 // 0 }}", "{{ x.y.z }}", "{% include 'a' %}",
    "{{ messages.append(1) }}", "{{ 'a' | tojson }}", "{% generation %}a{% endgeneration %}", "{% if %}",
    "{{ range(10**9) | list }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ " + "(" * 300 + ")" * 300 + " }}", CONTROL,
)  # fmt: skip


def template(rng: random.Random) -> str:
    """A template of odd pieces, now and then one without an end."""
    if rng.random() < 0.1:
        return rng.choice([*TEMPLATES.values()])
    return "".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 4)))


def _replace(pattern: str, content: str, *, regex: bool = False) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex" if regex else "String": pattern}, "content": content}


def _sequence(kind: str, parts: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: parts}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GROWING = [_replace("e", "ee" * 50) for _ in range(8)]
_REPEATED = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
_CATASTROPHE = r"(?:(?:(?:e|t|h| |c|a|k|p|s|w|m|o|d|l|r|n|i)+)+)+\x00"

TOKENIZERS: dict[str, dict[str, Any]] = {
    "a normalizer that grows": {"normalizer": _sequence("normalizers", _GROWING)},
    "a normalizer that backtracks": {"normalizer": _replace(_CATASTROPHE, "", regex=True)},
    "a pattern that backtracks": {"pre_tokenizer": _split(_CATASTROPHE)},
    "patterns that backtrack": {"pre_tokenizer": _sequence("pretokenizers", [_split(_CATASTROPHE)] * 50)},
    "a template that repeats": {"post_processor": _REPEATED},
    "an added token that grows": {
        "normalizer": _sequence("normalizers", _GROWING),
        "added_tokens": [
            {
                "id": 900, "content": "eeee", "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": True, "special": False,
            }
        ],
    },
    "a decoder that grows": {"decoder": _sequence("decoders", _GROWING)},
    "a decoder that backtracks": {"decoder": _replace(_CATASTROPHE, "", regex=True)},
}  # fmt: skip
"""Parts of a ``tokenizer.json`` in the place of its own."""


def tokenizer(rng: random.Random, good: str) -> str:
    """A ``tokenizer.json`` made of a good one."""
    tree = json.loads(good)
    if rng.random() < 0.5:
        tree |= TOKENIZERS[rng.choice([*TOKENIZERS])]
    else:
        part = rng.choice(
            ["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens", "version"]
        )
        if isinstance(tree.get(part), (dict, list)) and tree[part]:
            holder = tree[part]
            key = rng.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
            holder[key] = rng.choice(VALUES)
        else:
            tree[part] = rng.choice([*VALUES, _replace("", "xx"), _split("("), _split("(?<=a)b*"), {"type": "Evil"}])
    return json.dumps(tree)


def roles(rng: random.Random) -> bytes:
    """A role config."""
    texts = [
        *(json.dumps({"roles": {"tokens": pattern}}) for pattern in PATTERNS),
        "roles: {tokens: [" + "(" * 10_000 + "]}", "[" * 10_000, "{" * 10_000, "- " * 5_000,
        "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(24)),
        "roles: !!python/object/apply:os.system [true]", "roles: {tokens: 2001-99-99}", "roles: {tokens: '\\C'}",
        f"roles: {{tokens: {json.dumps(CONTROL)}}}", "roles: {cache: a}", "roles: {tokens: [1, 2]}", "roles: {evil: a}",
        "roles: {? [a] : b}", "\x00",
    ]  # fmt: skip
    return rng.choice(texts).encode()
