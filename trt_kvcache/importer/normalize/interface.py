"""What the inputs and outputs of a model as exported are: tokens, positions, lengths, masks, caches and the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import onnx
import onnx_graphsurgeon as gs

from trt_kvcache.errors import NoCapacityError, OptionError, UnsupportedModelError
from trt_kvcache.importer.plan import OriginalRole, OriginalTensor, Role, StateUpdate
from trt_kvcache.importer.protos import dtype_name, elem_type_of, shape_of
from trt_kvcache.importer.roles import GraphFacts, find_roles
from trt_kvcache.importer.roles.mrope import axes_of_planes

_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
_INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32}


class Found(Protocol):
    """A cache as the search by structure sees it: `trt_kvcache.importer.normalize.idioms.writes.Candidate`."""

    @property
    def past(self) -> gs.Tensor:
        """The graph input."""
        ...

    @property
    def present(self) -> gs.Tensor:
        """The graph output."""
        ...

    @property
    def axis(self) -> int | None:
        """The sequence axis, if known."""
        ...

    @property
    def growing(self) -> bool:
        """Whether present has more rows than past."""
        ...

    @property
    def positions(self) -> tuple[str, ...]:
        """Names of the graph inputs that say where rows go."""
        ...


class Interface:
    """The inputs and outputs of a model as exported.

    Args:
        model: flat, with shapes inferred.
        found: its caches.
        config: the user's name patterns.
        states: its state that is no cache.
        kept: rows, at most, of caches that are cut to the newest ones, by name of past or present.

    Raises:
        UnsupportedModelError: no input brings new tokens.
        AmbiguousRoleError, OptionError: see `find_roles`.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        found: Sequence[Found],
        config: str | None,
        states: Sequence[StateUpdate] = (),
        kept: Mapping[str, int] | None = None,
    ) -> None:
        self._found = {f.past.name: f for f in found}
        self._presents = presents = {f.present.name: f for f in found}
        none: frozenset[str] = frozenset()
        caches = {f.past.name: f.present.name for f in found}
        axes = {f.past.name: f.axis for f in found if f.axis is not None}
        facts = GraphFacts(caches, none, none, none, none, axes)
        roles = {(r.io, r.name): r.role for r in find_roles(model, facts, config)}
        counted = {name for f in found for name in f.positions}
        fixed_lengths = {f.past.name for f in found if not f.growing}
        self._inputs = {v.name: v for v in model.graph.input}
        self._states = {name for state in states for name in (state.past, state.present)}
        self.tokens = self._find_tokens(roles, counted)
        batches, news = self._symbols()
        tensors = []
        for io, values in (("input", model.graph.input), ("output", model.graph.output)):
            for value in values:
                shape = tuple(shape_of(value) or ())
                if value.name in self._states:
                    role = OriginalRole.STATE
                elif io == "input":
                    role = self._input_role(value, roles[io, value.name], counted, news)
                elif value.name in presents:
                    growing = presents[value.name].growing
                    role = OriginalRole.GROWING_CACHE if growing else OriginalRole.FIXED_CACHE
                else:
                    is_logits = roles[io, value.name] is Role.LOGITS
                    role = OriginalRole.LOGITS if is_logits else OriginalRole.OTHER
                names = self._axes(value.name, shape, role, batches, news, bool(fixed_lengths))
                dtype = dtype_name(elem_type_of(value))
                tensors.append(OriginalTensor(value.name, io, role, dtype, shape, names, (kept or {}).get(value.name)))
        self.tensors = tuple(tensors)
        self.inputs = {t.name: t for t in tensors if t.io == "input"}

    def of(self, *roles: OriginalRole) -> list[OriginalTensor]:
        """The inputs with one of these roles."""
        return [t for t in self.inputs.values() if t.role in roles]

    def capacity(self, given: int | None) -> int:
        """The capacity: of fixed caches, or as given.

        Raises:
            NoCapacityError: caches grow or have a symbolic length, and none is given.
            OptionError: it contradicts a fixed one.
        """
        if self.room is not None:
            whole = self.room + (self._new_tokens() or 1)
            if given not in (None, whole):
                raise OptionError(
                    f"--capacity is {given}, but the model has {self.room} rows of a past beside the new ones, {whole} "
                    "in all: leave the option out, or export with another length"
                )
            return whole
        fixed = {
            int(t.shape[axis])
            for t in self.of(OriginalRole.FIXED_CACHE)
            if (axis := t.axes.index("capacity") if "capacity" in t.axes else None) is not None
            and isinstance(t.shape[axis], int)
        }
        if given is not None and not (fixed and fixed != {given}):
            return given
        if given is not None:
            raise OptionError(
                f"--capacity is {given}, but the model fixes its cache length at {', '.join(map(str, sorted(fixed)))}: "
                "leave the option out, or export with a symbolic length"
            )
        growing = self.of(OriginalRole.GROWING_CACHE)
        if growing or not fixed:
            name = (growing or self.of(OriginalRole.FIXED_CACHE))[0].name
            raise NoCapacityError(
                f"the cache '{name}' {'is as long as the text' if growing else 'has a symbolic length'}, and TensorRT "
                "needs a fixed one: pass --capacity N, the most tokens that a sequence may have"
            )
        return max(fixed)

    @property
    def room(self) -> int | None:
        """Rows of a past that always has as many, of which a mask hides those that hold nothing; None: it grows.

        Raises:
            UnsupportedModelError: caches have it otherwise.
        """
        growing = self.of(OriginalRole.GROWING_CACHE)
        found = {t.room for t in growing}
        if len(found) > 1 or (found > {None} and self.of(OriginalRole.FIXED_CACHE)):
            shown = ", ".join(f"'{t.name}' {list(t.shape)}" for t in growing[:4])
            raise UnsupportedModelError(
                f"some caches have another fixed length, or none ({shown}); supported are new rows behind pasts that "
                "all grow, or that all have one fixed length"
            )
        return found.pop() if found else None

    def _new_tokens(self) -> int | None:
        tokens = self.inputs[self.tokens]
        length = dict(zip(tokens.axes, tokens.shape, strict=True)).get("sequence")
        return length if isinstance(length, int) else None

    def _find_tokens(self, roles: Mapping[tuple[str, str], Role], counted: set[str]) -> str:
        named = [n for (io, n), role in roles.items() if io == "input" and role is Role.TOKENS]
        embedded = [
            n
            for n, v in self._inputs.items()
            if n not in {*self._found, *self._states, *counted}
            and elem_type_of(v) in _FLOATS
            and len(shape_of(v) or ()) == 3
        ]
        for names in (named, embedded):
            if len(names) == 1:
                return names[0]
        raise UnsupportedModelError(
            f"nothing says which input brings the new tokens (inputs: {', '.join(self._inputs)}); name it with "
            "--config, a YAML file such as: roles: {tokens: input_ids}"
        )

    def _symbols(self) -> tuple[set[str], set[str]]:
        """The symbols of the batch, and of the number of new tokens."""
        tokens = shape_of(self._inputs[self.tokens]) or ()
        firsts = [(shape_of(self._inputs[n]) or ("?",))[0] for n in self._found] + list(tokens[:1])
        news = {d for d in tokens[1:2] if isinstance(d, str)}
        return {d for d in firsts if isinstance(d, str)} - {"?", ""}, news - {"?", ""}

    def _input_role(self, value: onnx.ValueInfoProto, role: Role, counted: set[str], news: set[str]) -> OriginalRole:
        name, shape = value.name, shape_of(value) or ()
        if name in self._found:
            return OriginalRole.GROWING_CACHE if self._found[name].growing else OriginalRole.FIXED_CACHE
        if name == self.tokens:
            return OriginalRole.TOKENS
        if name in counted or (role is Role.POSITIONS and elem_type_of(value) in _INTEGERS):
            first = shape[0] if shape else 1
            batch = (shape_of(self._inputs[self.tokens]) or ("?",))[0]
            per_row = len(shape) == 0 or (len(shape) == 1 and (first in (1, batch)) and first not in news)
            return OriginalRole.PAST_LENGTH if per_row else OriginalRole.POSITIONS
        is_bool = elem_type_of(value) == onnx.TensorProto.BOOL
        if role is Role.MASK or (
            len(shape) == 4 and (is_bool or _is_over_queries(shape, news) or self._is_over_room(shape))
        ):
            if shape and shape[-1] in self._lengths_of_constants(news):
                return OriginalRole.CONSTANT
            return OriginalRole.PADDING_MASK if len(shape) == 2 else OriginalRole.MASK
        return OriginalRole.CONSTANT if elem_type_of(value) in _FLOATS else OriginalRole.OTHER

    def _is_over_room(self, shape: Sequence[int | str]) -> bool:
        """Whether a shape is that of a mask over a past that always has as many rows, and so many new tokens."""
        length = dict(enumerate(shape_of(self._inputs[self.tokens]) or ())).get(1)
        if not isinstance(length, int) or len(shape) != 4 or shape[1:3] != (1, length):
            return False
        lengths = {(shape_of(self._inputs[n]) or ())[f.axis] for n, f in self._found.items() if f.growing and f.axis}
        return any(isinstance(room, int) and shape[3] == room + length for room in lengths)

    def _lengths_of_constants(self, news: set[str]) -> set[str]:
        """Symbols of what is only read, such as the length of an encoder's output: its masks are no masks of tokens."""
        own = {*self._found, *self._states, self.tokens}
        floats = [shape_of(v) or () for n, v in self._inputs.items() if n not in own and elem_type_of(v) in _FLOATS]
        lengths = {d for shape in floats if not _is_over_queries(shape, news) for d in shape if isinstance(d, str)}
        known = {d for n in (*self._found, self.tokens) for d in shape_of(self._inputs[n]) or ()}
        return lengths - known - {"?"}

    def _axes(
        self,
        name: str,
        shape: tuple[int | str, ...],
        role: OriginalRole,
        batches: set[str],
        news: set[str],
        fixed: bool,
    ) -> tuple[str, ...]:
        axes = [
            "" if isinstance(d, int) else "batch" if d in batches else "sequence" if d in news else "?" for d in shape
        ]
        match role:
            case OriginalRole.TOKENS | OriginalRole.LOGITS:
                axes[:2] = ["batch", "sequence"][: len(axes)]
            case OriginalRole.GROWING_CACHE | OriginalRole.FIXED_CACHE:
                cache = self._found.get(name) or self._presents[name]
                axes[:1] = ["batch"][: len(axes)]  # of an output, the model need not say a shape
                if cache.axis is not None and cache.axis < len(axes):
                    axes[cache.axis] = "past" if cache.growing else "capacity"
            case OriginalRole.POSITIONS if len(axes) == 3:
                tokens = shape_of(self._inputs[self.tokens]) or ()
                axes = list(axes_of_planes(name, shape, {*batches, *tokens[:1]}))
            case OriginalRole.POSITIONS:
                axes = ["sequence"] if len(axes) == 1 else ["batch", *["" for _ in axes[2:]], "sequence"]
            case OriginalRole.PAST_LENGTH:
                axes = ["batch" for _ in axes[:1]]
            case OriginalRole.PADDING_MASK:
                axes = ["batch", "capacity" if fixed and self._is_capacity(shape[1]) else "total"]
            case OriginalRole.MASK:
                last = "capacity" if fixed else "total"
                axes = [*(["batch", "", "sequence"][-len(axes[:-1]) :] if len(axes) > 1 else []), last][: len(axes)]
            case OriginalRole.CONSTANT if len(axes) > 2 and axes[0] == "?" and "batch" not in axes:
                axes[0] = "batch"  # the exporter gave it a symbol of its own, as if it could be another number
        return tuple(axes)

    def _is_capacity(self, dim: int | str) -> bool:
        lengths = {
            shape[f.axis] for n, f in self._found.items() if f.axis is not None and (shape := shape_of(self._inputs[n]))
        }
        return dim in lengths


def _is_over_queries(shape: Sequence[int | str], news: set[str]) -> bool:
    """Whether a shape is that of a mask ``[B, 1, S, keys]``."""
    return len(shape) == 4 and shape[1] == 1 and shape[2] in news
