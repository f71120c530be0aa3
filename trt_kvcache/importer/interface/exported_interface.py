"""Describes the inputs and outputs of an exported model, and how TensorScatter and Attention change them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx

from trt_kvcache.errors import AmbiguousRoleError, OptionError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import InterfaceChange, OriginalRole, OriginalTensor, Role, StateUpdate, TensorRole
from trt_kvcache.importer.interface import NOTHING, example, find_roles
from trt_kvcache.importer.interface.role_evidence import Known
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of

if TYPE_CHECKING:
    from trt_kvcache.importer.recognize.records import Cache

_FLOATS = ("float", "float16", "bfloat16", "double")
_INTEGERS = ("int64", "int32")
_SAME = {Role.STATE: OriginalRole.STATE, Role.TOKENS: OriginalRole.TOKENS, Role.LOGITS: OriginalRole.LOGITS}
_AXES = {"encoder": "?", "keys": "?"}


class Interface:
    """The inputs and outputs of an exported model, which has no functions and has inferred shapes.

    Raises `UnsupportedModelError` if no input is known to hold the new tokens, and `AmbiguousRoleError` if a tensor
    fits several roles.

    Attributes:
        tokens: name of the input for the new tokens.
        roles: the roles of all inputs and outputs.
        tensors: all inputs and outputs as `OriginalTensor`.
        states: tensors that every step replaces as a whole; they are no caches.
    """

    def __init__(
        self, model: onnx.ModelProto, updates: Sequence[Cache], config: str | None, states: Sequence[StateUpdate] = ()
    ) -> None:
        self.states = tuple(states)
        self._updates = {f.past.name: f for f in updates}
        self._presents = {f.present.name: f for f in updates}
        self._counted = {name for f in updates for name in f.positions}
        known = Known(caches={f.past.name: f.present.name for f in updates}, states={s.past: s.present for s in states})
        self.roles = find_roles(model, known, config)
        if sum(r.role is Role.TOKENS for r in self.roles) != 1:
            self.roles = find_roles(model, known, config, tokens=self._embeddings())
        brings = next(r for r in self.roles if r.role is Role.TOKENS)
        _check_ids(brings)
        self.tokens = brings.name
        self._inputs = {r.name: r for r in self.roles if r.io == "input"}
        self._check_names()
        tensors = []
        for role in self.roles:
            original = self._role(role)
            axes = self._axes(role, original)
            cache = self._updates.get(role.name) or self._presents.get(role.name)
            rows = None if cache is None else cache.window_rows
            tensors.append(OriginalTensor(role.name, role.io, original, role.dtype, role.shape, axes, rows))
            if original is OriginalRole.POSITIONS and role.role is Role.OTHER:
                seen = "graph: queries see the keys up to these positions"
                self._inputs[role.name] = replace(role, role=Role.POSITIONS, found_by=seen, axes=axes)
        self.tensors = tuple(tensors)
        self.roles = (*self._inputs.values(), *(r for r in self.roles if r.io == "output"))
        self.inputs = {t.name: t for t in tensors if t.io == "input"}

    def of(self, *roles: OriginalRole) -> list[OriginalTensor]:
        """Return the inputs with one of these roles."""
        return [t for t in self.inputs.values() if t.role in roles]

    def fixed_capacity(self, asked: int | None) -> int | None:
        """Return the capacity that the model fixes, or None; raises `OptionError` if `asked` contradicts it."""
        shifted = {
            f.past.name: f.window_rows for f in self._updates.values() if f.shifted and f.window_rows is not None
        }
        growing = [t for t in self.of(OriginalRole.GROWING_CACHE) if t.name not in shifted]
        caches = self.of(OriginalRole.FIXED_CACHE)
        sizes = [t.shape[t.axes.index("capacity")] for t in caches if "capacity" in t.axes]
        fixed = {d for d in sizes if isinstance(d, int)} if growing or caches else set(shifted.values())
        if asked is not None and fixed and fixed != {asked}:
            raise OptionError(
                f"--capacity is {asked}, but the model fixes its cache length at {', '.join(map(str, sorted(fixed)))}: "
                "leave the option out, or export with a symbolic length"
            )
        return max(fixed, default=None)

    def _embeddings(self) -> str:
        """Return the only input that may hold embeddings of the new tokens. Refuse a model with none or several."""
        inputs = [r for r in self.roles if r.io == "input"]
        others = [r for r in inputs if r.role not in (Role.CACHE, Role.STATE) and r.name not in self._counted]
        names = [r.name for r in others if r.dtype in _FLOATS and len(r.shape) == 3]
        for role in others if not names else ():
            _check_ids(role)
        if len(names) != 1:
            raise UnsupportedModelError(
                f"cannot tell which input holds the new tokens (inputs: {', '.join(r.name for r in inputs)}); name "
                "it with --config, a YAML file such as: roles: {tokens: input_ids}"
            )
        return names[0]

    def _role(self, role: TensorRole) -> OriginalRole:
        name, shape, axes = role.name, role.shape, role.axes
        cache = (self._updates if role.io == "input" else self._presents).get(name)
        if cache is not None:
            return OriginalRole.GROWING_CACHE if cache.growing else OriginalRole.FIXED_CACHE
        if role.role in _SAME:
            return _SAME[role.role]
        if role.io == "output":
            return OriginalRole.OTHER
        if name in self._counted or (role.role is Role.POSITIONS and role.dtype in _INTEGERS):
            batch = self._inputs[self.tokens].shape[0]
            per_row = len(shape) == 0 or (len(shape) == 1 and shape[0] in (1, batch) and "sequence" not in axes)
            return OriginalRole.PAST_LENGTH if per_row else OriginalRole.POSITIONS
        if role.role is Role.CONSTANT:
            return OriginalRole.CONSTANT if role.dtype in _FLOATS or len(shape) == 4 else OriginalRole.OTHER
        if role.role is Role.MASK:
            return OriginalRole.PADDING_MASK if len(shape) == 2 else OriginalRole.MASK
        by_step = "sequence" in axes  # each step has new numbers, such as hidden states for a draft model
        return OriginalRole.CONSTANT if role.dtype in _FLOATS and not by_step else OriginalRole.OTHER

    def _check_names(self) -> None:
        """Refuse inputs that look like positions or masks, but whose role neither a name nor the graph shows."""
        tokens = self._inputs[self.tokens]
        suggested: dict[Role, list[str]] = {}
        for role in self._inputs.values():
            if role.role is Role.OTHER and role.found_by.endswith(NOTHING) and role.name not in self._counted:
                dims, kind = role.shape, role.dtype
                by_token = kind in _INTEGERS and dims[-1:] == tokens.shape[-1 if tokens.dtype in _INTEGERS else 1 :][:1]
                over_keys = len(dims) == 2 and dims[1] != 1 and kind in (*_INTEGERS, "bool")
                if by_token:
                    suggested.setdefault(Role.POSITIONS, []).append(role.name)
                elif over_keys or (len(dims) == 4 and dims[1] == 1):
                    suggested.setdefault(Role.MASK, []).append(role.name)
        if suggested:
            names = [name for found in suggested.values() for name in found]
            raise AmbiguousRoleError(
                f"cannot tell the role of the {'input' if len(names) == 1 else 'inputs'} "
                f"{', '.join(map(repr, names))}: the names are not those of known exporters. Give the roles with "
                "--config. A YAML file with guessed roles, which you must check: "
                f"{example({Role.TOKENS: [self.tokens], **suggested})}"
            )

    def _axes(self, role: TensorRole, original: OriginalRole) -> tuple[str, ...]:
        """Return the meaning of each axis of an input or output, such as "batch" or "past" (see `OriginalTensor`)."""
        fixed = any(not f.growing for f in self._updates.values())
        axes = [
            "" if isinstance(d, int) and a in ("?", *_AXES) else _AXES.get(a, a)
            for d, a in zip(role.shape, role.axes, strict=True)
        ]
        match original:
            case OriginalRole.GROWING_CACHE | OriginalRole.FIXED_CACHE:
                cache = self._updates.get(role.name) or self._presents[role.name]
                if cache.axis < len(axes):
                    axes[cache.axis] = "past" if cache.growing else "capacity"
            case OriginalRole.LOGITS:
                axes[:2] = ["batch", "sequence"][: len(axes)]
            case OriginalRole.POSITIONS if len(axes) < 3:
                axes = ["batch", "sequence"][-len(axes) :]
            case OriginalRole.PAST_LENGTH:
                axes = ["batch" for _ in axes]
            case OriginalRole.PADDING_MASK:
                capacities = {self._inputs[name].shape[cache.axis] for name, cache in self._updates.items()}
                axes = ["batch", "capacity" if fixed and role.shape[1] in capacities else "total"]
            case OriginalRole.MASK:
                axes = ["batch", "", "sequence", "capacity" if fixed else "total"][-len(axes) :]
        return tuple(axes)


def _check_ids(role: TensorRole) -> None:
    """Refuse token ids ``[B, K, S]`` with K ids for each token, because tokens must be on axis 1."""
    match role.shape:
        case (_, int() as count, str()) if role.dtype in _INTEGERS and role.role in (Role.TOKENS, Role.OTHER):
            raise UnsupportedModelError(
                f"input '{role.name}' {list(role.shape)} has {count} ids for each new token, as for audio codebooks; "
                f"the tokens of a step must be on axis 1: export it as [B, S, {count}], or export the model with the "
                "sum of the embeddings as input, [B, S, D]"
            )


PASSED_ON = "an unchanged input"
_WHY = {
    OriginalRole.PADDING_MASK: "masks follow from write_indices and nonpad_kv_seqlen; do not pad on the left",
    OriginalRole.PAST_LENGTH: "write_indices gives the number of tokens in the cache, for each sequence",
    OriginalRole.POSITIONS: "new tokens have the positions write_indices, write_indices + 1, ...",
    OriginalRole.MASK: "masks follow from write_indices and nonpad_kv_seqlen",
}
_ADDED = {
    "write_indices": "tokens in the cache before this step: the row of the first new token, per sequence",
    "nonpad_kv_seqlen": "write_indices + number of new tokens, per sequence",
}
_SIZES = {"batch": "B", "sequence": "S", "past": "P", "total": "P + S", "capacity": "L"}


def find_changes(
    exported: Sequence[OriginalTensor], model: onnx.ModelProto, counts: set[str], copies: set[str]
) -> tuple[InterfaceChange, ...]:
    """Return how inputs and outputs of the edited `model` differ from those of the exported model.

    `counts` are removed outputs that only count tokens; `copies` are removed outputs that are copies of inputs.
    """
    changes: list[InterfaceChange] = []
    known = {t.name for t in exported}
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        current = {v.name: v for v in values}
        for tensor in (t for t in exported if t.io == io):
            old = in_words(tensor.name, _dims(tensor))
            if tensor.name not in current:
                why = _WHY.get(tensor.role, "no node reads it")
                why = PASSED_ON if tensor.name in copies else why
                why = "the caller counts tokens itself" if tensor.name in counts else why
                changes.append(InterfaceChange(io, old, "", why))
                continue
            shape, dtype = shape_of(current[tensor.name]) or (), dtype_name(elem_type_of(current[tensor.name]))
            if tensor.role is OriginalRole.GROWING_CACHE:
                new = in_words(tensor.name, ["B" if i == 0 and isinstance(d, str) else d for i, d in enumerate(shape)])
                changes.append(InterfaceChange(io, old, new, "a buffer of fixed capacity, updated in place"))
            if dtype != tensor.dtype:
                old, new = f"{tensor.name} {tensor.dtype}", f"{tensor.name} {dtype}"
                changes.append(InterfaceChange(io, old, new, f"the model reads and writes it as {dtype}"))
        added = {name: value for name, value in current.items() if name not in known}
        for name, value in added.items():
            new = in_words(name, shape_of(value) or ())
            changes.append(InterfaceChange(io, "", new, _ADDED.get(name.rstrip("_"), "")))
    return tuple(changes)


def _dims(tensor: OriginalTensor) -> Iterable[int | str]:
    is_present = tensor.io == "output" and tensor.role is OriginalRole.GROWING_CACHE
    names = {**_SIZES, "past": "P + S"} if is_present else _SIZES
    return [d if isinstance(d, int) else names.get(a, d) for a, d in zip(tensor.axes, tensor.shape, strict=True)]


def in_words(name: str, dims: Iterable[int | str]) -> str:
    """Return a name and a shape as text: ``"attention_mask [B, 128]"``."""
    return f"{name} [{', '.join(map(str, dims))}]"
