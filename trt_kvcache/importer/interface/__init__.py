"""Finds the role of every graph input and output in a decode loop, and the largest token ids and positions.

The graph shows which inputs and outputs are caches. The roles of all others come from three sources, in this order:
name patterns of the user (``--config``), certain facts of the graph (`role_evidence`), shipped name patterns
(``configs/*.yaml``). Ambiguous roles are an error: after a wrong guess, the model's answers would be nonsense without
any error. Every pattern is a regular expression of RE2 (linear time), and must match the whole name::

    roles:
      tokens: input_ids
      positions: [position_ids, cache_position]
      logits: (lm_)?logits
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import re2
import yaml
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from trt_kvcache.errors import AmbiguousRoleError, OptionError
from trt_kvcache.files import read_file
from trt_kvcache.importer.cache_plan import CachePlan, Role, TensorRole
from trt_kvcache.importer.interface.role_evidence import Fact, GraphIndex, Known, facts, fits, name_axes
from trt_kvcache.importer.operators import PASSES
from trt_kvcache.importer.protos import constants_of, dtype_name, elem_type_of, int_attribute, shape_of
from trt_kvcache.resources import resource_dir

_SINGLE = (Role.TOKENS, Role.LOGITS)
_OF_ROWS = (Role.WRITE_INDICES, Role.VALID_LENGTHS)
NOTHING = "it has no known role in decoding"


@dataclass(frozen=True)
class _Finding:
    role: Role
    found_by: str
    by_user: bool = False


def find_roles(
    model: ModelProto, known: Known, config: str | None = None, *, tokens: str | None = None
) -> tuple[TensorRole, ...]:
    """Find the role of every graph input and output, inputs first, in the order of the graph.

    Roles have names for all axes, even for axes of fixed size; see `open_axes`. The name patterns in the YAML file
    `config` override the graph, but cannot add or remove caches. `tokens` is the input of the new tokens, used if
    neither the graph nor a name shows it.

    Raises:
        AmbiguousRoleError: a tensor fits several roles, or several tensors fit a role that only one can have.
        OptionError: the config is unreadable, contradicts itself, or names a cache.
        UnsupportedModelError: the axes of positions or of a mask have an unsupported order.
    """
    index = GraphIndex(model)
    user = load_patterns(config) if config is not None else ()
    said = facts(index, known)
    tensors = [(info, "input") for info in index.inputs.values()] + [(info, "output") for info in model.graph.output]
    named = [_match(info.name, io, shipped_patterns()) for info, io in tensors]
    named = [
        n if n is None or n.role not in _OF_ROWS or fits(index, info.name, n.role) else None
        for (info, _), n in zip(tensors, named, strict=True)
    ]
    findings = [
        _carried(info.name, io, known, _match(info.name, io, user))
        or _decide(info.name, io, said.get(info.name, []), shipped)
        for (info, io), shipped in zip(tensors, named, strict=True)
    ]
    findings = _masks_of_encoders(tensors, findings)
    if tokens is not None:
        guessed = _Finding(Role.TOKENS, "graph: the only input of embeddings")
        findings = [guessed if pair[0].name == tokens else f for pair, f in zip(tensors, findings, strict=True)]
    findings = _settle_single_roles(tensors, findings, named)
    roles = [
        TensorRole(
            info.name, io, finding.role, dtype_name(elem_type_of(info)), shape_of(info) or (), finding.found_by, ()
        )
        for (info, io), finding in zip(tensors, findings, strict=True)
    ]
    return name_axes(roles, index, known)


def carry_roles(roles: Iterable[TensorRole], model: ModelProto) -> tuple[TensorRole, ...]:
    """Return `roles` for an edited model: with its new shapes, and only for tensors that it still has."""
    before = {(r.io, r.name): r for r in roles}
    carried = []
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            role = before[io, value.name]
            # Some exporters declare fewer positions for logits than the graph computes; see `name_axes`.
            shape = role.shape if role.role is Role.LOGITS else shape_of(value) or ()
            same = role.role is not Role.CACHE and len(role.axes) == len(shape)
            axes = role.axes if same else ("batch", *["?"] * len(shape))[: len(shape)]
            carried.append(replace(role, dtype=dtype_name(elem_type_of(value)), shape=shape, axes=axes))
    return tuple(carried)


def _carried(name: str, io: str, known: Known, named: NamePattern | None) -> _Finding | None:
    is_cache = name in (known.caches if io == "input" else known.caches.values())
    is_state = name in (known.states if io == "input" else known.states.values())
    if named is not None and (is_cache or is_state):
        what = "a cache" if is_cache else "state that each step replaces"
        raise OptionError(
            f"{named.source}: a pattern gives the role '{named.role.value}' to '{name}', which is {what}; use a "
            "narrower pattern"
        )
    if named is not None:
        return _Finding(named.role, f"config: {named.source}", by_user=True)
    if is_cache:
        return _Finding(Role.CACHE, "graph: a cache update writes it" if io == "input" else "graph: an updated cache")
    if is_state:
        return _Finding(
            Role.STATE, "graph: every step replaces it" if io == "input" else "graph: the next value of a state"
        )
    return None


def _decide(name: str, io: str, said: list[Fact], shipped: NamePattern | None) -> _Finding:
    certain = [fact for fact in said if fact.certain]
    if len(certain) > 1:
        raise AmbiguousRoleError(
            f"{io} '{name}' could be {_list([f'{fact.role.value} ({fact.reason})' for fact in certain])}; give its "
            f"role with --config, a YAML file such as: {example({certain[0].role: [name]})}"
        )
    if not certain and shipped is not None:
        return _Finding(shipped.role, f"config: {shipped.source}")
    if best := certain or said:
        return _Finding(best[0].role, f"graph: {best[0].reason}")
    return _Finding(Role.OTHER, f"graph: {NOTHING}")


def _masks_of_encoders(tensors: list[tuple[ValueInfoProto, str]], findings: list[_Finding]) -> list[_Finding]:
    """Give masks ``[B, E]`` over an encoder's keys ``[B, N, E, H]`` the role "constant", whatever their names are."""
    shapes = [shape_of(info) or () for info, _ in tensors]
    pairs = list(zip(shapes, findings, strict=True))
    lengths = {shape[2] for shape, f in pairs if f.role is Role.CONSTANT and len(shape) == 4}
    texts = {d for shape, f in pairs if f.role in (Role.CACHE, Role.TOKENS) for d in shape}
    lengths = {d for d in lengths - texts if isinstance(d, str)}
    masks = _Finding(Role.CONSTANT, "graph: a mask as long as an encoder's output")
    return [
        masks if f.role is Role.MASK and not f.by_user and len(shape) == 2 and shape[1] in lengths else f
        for shape, f in pairs
    ]


def _match(name: str, io: str, patterns: tuple[NamePattern, ...]) -> NamePattern | None:
    """Return the pattern that matches a name, or None. Raise `OptionError` if patterns of several roles match."""
    rules = [pattern for pattern in patterns if pattern.matches(name, io)]
    for other in rules[1:]:
        if other.role is not rules[0].role:
            raise OptionError(
                f"{rules[0].source}, {other.source}: '{name}' matches both '{rules[0].regex.pattern}' of the role "
                f"'{rules[0].role.value}' and '{other.regex.pattern}' of the role '{other.role.value}'; use a narrower "
                "pattern for one of them"
            )
    return rules[0] if rules else None


def _settle_single_roles(
    tensors: list[tuple[ValueInfoProto, str]], findings: list[_Finding], shipped: list[NamePattern | None]
) -> list[_Finding]:
    """If several tensors could be the tokens or the logits, keep the one that the user's or a shipped pattern names."""
    settled = list(findings)
    for role in _SINGLE:
        claims = [i for i, finding in enumerate(findings) if finding.role is role]
        if len(claims) < 2:
            continue
        chosen = [i for i in claims if findings[i].by_user] or [
            i for i in claims if (named := shipped[i]) is not None and named.role is role
        ]
        if len(chosen) != 1:
            names = [f"'{tensors[i][0].name}' ({findings[i].found_by})" for i in claims]
            raise AmbiguousRoleError(
                f"several tensors could have the role '{role.value}': {_list(names)}; give the right one with "
                f"--config, a YAML file such as: {example({role: [tensors[claims[0]][0].name]})}"
            )
        for i in set(claims) - set(chosen):
            named = shipped[i]
            settled[i] = (  # for example positions, whose table has as many rows as there are token ids
                _Finding(named.role, f"config: {named.source}")
                if named and named.role is not role
                else _Finding(
                    Role.OTHER, f"{findings[i].found_by}; but '{tensors[chosen[0]][0].name}' has the role {role.value}"
                )
            )
    return settled


def _list(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} or {items[-1]}" if len(items) > 1 else items[0]


_FROM_GRAPH = (Role.CACHE, Role.SPAN, Role.STATE, Role.ADAPTER, Role.ADAPTER_WEIGHTS)
_NAMED_ROLES = tuple(role for role in Role if role not in _FROM_GRAPH)
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
    if key not in [role.value for role in _NAMED_ROLES]:
        in_graph = key in (Role.CACHE.value, Role.STATE.value)
        what = f"the graph shows each {key}, so names cannot" if in_graph else "there is no such role"
        known = ", ".join(role.value for role in _NAMED_ROLES)
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


_SHIFTING = {"Add": 1, "Sub": -1}


@dataclass(frozen=True)
class IndexLimits:
    """Exclusive upper bounds of token ids and positions, by input. Inputs without a bound are absent."""

    tokens: dict[str, int]
    positions: dict[str, int]


def index_limits(model: ModelProto, plan: CachePlan) -> IndexLimits:
    """Find the exclusive upper bounds of the token and position inputs of a model without functions."""
    logits = [t.shape[-1] for t in plan.tensors if t.role is Role.LOGITS and t.io == "output" and t.shape]
    vocabulary = min((n for n in logits if isinstance(n, int)), default=None)
    limits = IndexLimits({}, {})
    for tensor in plan.tensors:
        if tensor.io != "input" or tensor.role not in (Role.TOKENS, Role.POSITIONS):
            continue
        rows = table_rows(model, tensor.name)
        if tensor.role is Role.TOKENS:
            known = [n for n in (rows, vocabulary) if n is not None]
            if known:
                limits.tokens[tensor.name] = min(known)
        elif rows is not None:
            limits.positions[tensor.name] = rows
    return limits


def table_rows(model: ModelProto, name: str) -> int | None:
    """Return the number of rows of the smallest table that this input indexes, or None.

    If the graph adds a constant to the index, rows before this constant do not count.
    """
    constants = constants_of(model.graph)
    aliases, rows = {name: 0}, []  # tensors that hold the input plus a constant, and this constant
    for node in model.graph.node:  # in topological order
        if node.op_type in PASSES and node.input and node.input[0] in aliases:
            aliases.update(dict.fromkeys(node.output, aliases[node.input[0]]))
        elif node.op_type in _SHIFTING:
            _shift(node, aliases, constants)
        elif node.op_type == "Gather" and node.input[1] in aliases and node.input[0] in constants:
            rows.append(constants[node.input[0]].dims[int_attribute(node, "axis")] - aliases[node.input[1]])
        elif node.op_type == "RotaryEmbedding":
            # ONNX: X, cos_cache, sin_cache, position_ids; com.microsoft: X, position_ids, cos_cache, sin_cache.
            positions, table = (1, 2) if node.domain == "com.microsoft" else (3, 1)
            if len(node.input) > positions and node.input[positions] in aliases and node.input[table] in constants:
                rows.append(constants[node.input[table]].dims[0] - aliases[node.input[positions]])
    return min(rows, default=None)


def _shift(node: NodeProto, aliases: dict[str, int], constants: dict[str, TensorProto]) -> None:
    pairs = [(node.input[0], node.input[1])]
    pairs += [(node.input[1], node.input[0])] * (node.op_type == "Add")
    for source, other in pairs:
        shift = constants.get(other)
        if source in aliases and shift is not None and not shift.external_data and list(shift.dims) in ([], [1]):
            number = numpy_helper.to_array(shift).item()
            if isinstance(number, int):
                aliases[node.output[0]] = aliases[source] + _SHIFTING[node.op_type] * number
