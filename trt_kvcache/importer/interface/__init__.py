"""Finds the role of every graph input and output in a decode loop, and the meaning of each dynamic size.

The graph shows which inputs and outputs are caches. The roles of all others come from three sources, in this order:
name patterns of the user (``--config``), certain facts of the graph (`role_evidence`), shipped name patterns
(``configs/*.yaml``). Ambiguous roles are an error: after a wrong guess, the model's answers would be nonsense without
any error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from onnx import ModelProto, ValueInfoProto

from trt_kvcache.errors import AmbiguousRoleError, OptionError
from trt_kvcache.importer.cache_plan import Role, TensorRole
from trt_kvcache.importer.interface.role_evidence import Fact, GraphIndex, Known, facts, fits, name_axes, open_axes
from trt_kvcache.importer.interface.role_patterns import NamePattern, example, load_patterns, shipped_patterns
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of

__all__ = ["NOTHING", "Known", "carry_roles", "find_roles", "open_axes"]

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
