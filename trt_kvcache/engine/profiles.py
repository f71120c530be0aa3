"""Makes optimization profiles: the ranges of shapes that an engine accepts.

Prefill and decode need different kernels: ``prefill`` writes up to `max_chunk` tokens per sequence and step, ``decode``
one. If a profile always multiplies a weight with one row, TensorRT for RTX 1.7.1 stores the weight twice. So even if
the largest batch is one, ``decode`` allows a batch of two, and ``prefill`` allows logits of two positions. Quantized
weights are the exception: with a batch of exactly one in ``decode``, engines are smaller. Sizes of weights and engines:

    float16, ``decode``     202 MB of weights     377 MB with a batch of one     227 MB with up to two
    float16, ``prefill``    232 MB of weights     323 MB with one position       245 MB with up to two
    int4, ``decode``         81 MB of weights      90 MB with a batch of one     109 MB with up to two
    int8, ``decode``        126 MB of weights     172 MB with a batch of one     263 MB with up to two
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trt_kvcache.engine.build_options import DEFAULT_CHUNK, DEFAULT_LOGITS, BuildOptions
from trt_kvcache.engine.manifest import ENCODER, Profile, ShapeRange
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import CachePlan, TensorRole
from trt_kvcache.messages import shape_text

_SHAPES = {"--minShapes": "min_shapes", "--optShapes": "opt_shapes", "--maxShapes": "max_shapes"}
_FROM = {
    "batch": "--max-batch", "batch+1": "--max-batch", "sequence": "--max-chunk", "tokens": "--max-chunk",
    "encoder": "--max-encoder", "kept": "--max-logits",
}  # fmt: skip
"""The option that gives the largest size of an axis."""


@dataclass(frozen=True)
class Limits:
    """The sizes of a decode loop that an engine is built for.

    Attributes:
        max_chunk: largest number of tokens of one sequence in one step.
        capacity: rows of the smallest cache.
        max_logits: the most positions per sequence whose logits a step returns; None: the model decides.
        encoder: smallest, typical and largest length of an encoder's output; None: not given.
    """

    max_batch: int
    opt_batch: int
    max_chunk: int
    capacity: int
    max_logits: int | None = None
    encoder: tuple[int, int, int] | None = None


Range = tuple[int, int, int]
"""Smallest, typical and largest size of one axis."""


def resolve_limits(plan: CachePlan, build: BuildOptions) -> Limits:
    """Return the sizes of the engine: those that the model fixes, and those of the build options or their defaults.

    Raises `OptionError` if an option contradicts the model, or a chunk is longer than a cache.
    """
    if not plan.caches:
        raise OptionError("the model has no KV cache to build for: no TensorScatter or packed update was found in it")
    shapes = [*(c.physical_shape for c in plan.caches), *(s.shape for s in plan.states)]
    batch = _fixed({shape[0] for shape in shapes}, "batch", "--max-batch", build.max_batch)
    chunk = _fixed({c.update_length for c in plan.caches}, "update length", "--max-chunk", build.max_chunk)
    capacity = min(c.capacity for c in plan.caches)
    bounds = [c.contract.max_update_length for c in plan.caches if c.contract is not None]
    longest = min((b for b in bounds if b is not None), default=capacity)
    max_batch = batch or build.max_batch or 1
    max_chunk = chunk or build.max_chunk or min(DEFAULT_CHUNK, capacity, longest)
    opt_batch = build.opt_batch or max_batch
    if opt_batch > max_batch:
        raise OptionError(f"--opt-batch is {opt_batch}, more than the largest batch ({max_batch}); raise --max-batch")
    if max_chunk > longest and longest < capacity:
        raise OptionError(
            f"--max-chunk is {max_chunk}, but the plan allows updates of at most {longest} tokens into its circular "
            f"caches: give --max-chunk {longest} or less, or plan with a larger --window-chunk"
        )
    if max_chunk > capacity:
        smallest = min(plan.caches, key=lambda c: c.capacity)
        raise OptionError(
            f"--max-chunk is {max_chunk}, but cache {smallest.past!r} holds {capacity} tokens; "
            f"give --max-chunk {capacity} or less, or a larger --capacity if the model leaves it open"
        )
    encoder = _encoder(build)
    if encoder and not any("encoder" in t.axes for t in plan.tensors):
        raise OptionError(
            "--max-encoder is given, but no input of the model has the length of an encoder's output; leave it out"
        )
    return Limits(max_batch, opt_batch, max_chunk, capacity, _logits(plan, build, chunk, max_chunk), encoder)


def _logits(plan: CachePlan, build: BuildOptions, fixed: int | None, max_chunk: int) -> int | None:
    """Return the largest number of positions for which a step returns logits; None if the model decides.

    With updates of a fixed length, shorter steps are padded at the end, so any position may have the last token.
    """
    asked = build.max_logits
    if plan.logits_span is None:
        if asked is not None:
            raise OptionError(
                f"--max-logits is {asked}, but the plan leaves the model's logits as they are (see its notes, and "
                "--logits); leave it out"
            )
        return None
    if asked is not None and asked > max_chunk:
        raise OptionError(
            f"--max-logits is {asked}, but a step has at most {max_chunk} positions; give that number or less"
        )
    if fixed is not None and asked not in (None, fixed):
        raise OptionError(
            f"--max-logits is {asked}, but the logits of all {fixed} positions are needed, because every update of "
            f"the model has {fixed} tokens, and any of them may be the last valid one: leave it out"
        )
    return fixed or asked or min(DEFAULT_LOGITS, max_chunk)


def make_profiles(
    plan: CachePlan, build: BuildOptions, limits: Limits, *, quantized: bool = False
) -> tuple[Profile, ...]:
    """Return the optimization profiles for a plan: prefill and decode, or one if both have the same shapes.

    `limits` are from `resolve_limits`. Raises `OptionError` if the caller does not give the unknown size of an axis, or
    a shape from the caller contradicts the model or the limits.
    """
    inputs = [t for t in plan.tensors if t.io == "input"]
    _check_names(inputs, build)
    shared = not quantized if build.decode_weights == "auto" else build.decode_weights == "shared"
    several = shared and limits.max_batch == 1  # let profiles take two rows, only to share weights
    if several and limits.max_logits == 1:
        limits = replace(limits, max_logits=2)
    prefill = Profile("prefill", dict(_ranges(plan, inputs, build, limits, limits.max_chunk)))
    decode = Profile("decode", dict(_ranges(plan, inputs, build, limits, 1)))
    if prefill.shapes == decode.shapes:
        return (decode if limits.max_chunk == 1 else prefill,)
    return prefill, _wider(plan, decode) if several else decode


def make_encoder_profile(plan: CachePlan, build: BuildOptions) -> Profile:
    """Return the optimization profile of an encoder, which reads one source (such as an image or a text) at a time.

    Shapes of the decoder's inputs in `build` are ignored. Raises `OptionError` if the longest source is unknown, or a
    shape from the caller does not fit the model.
    """
    inputs = [t for t in plan.tensors if t.io == "input"]
    own = _with_shapes(build, lambda name: any(t.name == name for t in inputs))
    _check_names(inputs, own)
    return Profile(ENCODER, dict(_ranges(plan, inputs, own, Limits(1, 1, 1, 1, encoder=_encoder(build)), 1)))


def without_shapes(build: BuildOptions, decoder: CachePlan, encoder: CachePlan) -> BuildOptions:
    """Return the build options for the decoder, without shapes of inputs that only the encoder has."""
    own, others = ({t.name for t in plan.tensors if t.io == "input"} for plan in (decoder, encoder))
    return _with_shapes(build, lambda name: name not in others - own)


def _with_shapes(build: BuildOptions, wanted: Callable[[str], bool]) -> BuildOptions:
    shapes: dict[str, Any] = {
        kind: {n: s for n, s in getattr(build, kind).items() if wanted(n)} for kind in _SHAPES.values()
    }
    return replace(build, **shapes)


def _encoder(build: BuildOptions) -> Range | None:
    return None if build.max_encoder is None else (1, build.max_encoder, build.max_encoder)


def _wider(plan: CachePlan, profile: Profile) -> Profile:
    tensors, shapes = {t.name: t for t in plan.tensors if t.io == "input"}, {}
    for name, range_ in profile.shapes.items():
        tensor = tensors[name]
        axes = ["" if isinstance(d, int) else axis for d, axis in zip(tensor.shape, tensor.axes, strict=True)]
        if "?" in axes:
            return profile
        more = (axis in ("batch", "batch+1", "tokens") for axis in axes)
        shapes[name] = replace(range_, max=tuple(map(operator.add, range_.max, more)))
    return replace(profile, shapes=shapes)


def _fixed(sizes: set[int | str], what: str, flag: str, asked: int | None) -> int | None:
    """Return the fixed size of an axis; None if the axis is dynamic. Refuse another size from the caller."""
    fixed = sorted(s for s in sizes if isinstance(s, int))
    if len(fixed) > 1:
        raise OptionError(f"the model's caches have different fixed {what}s: {', '.join(map(str, fixed))}")
    if fixed and asked not in (None, fixed[0]):
        raise OptionError(f"{flag} is {asked}, but the model's {what} is fixed at {fixed[0]}; leave {flag} out")
    return fixed[0] if fixed else None


def _ranges(
    plan: CachePlan, inputs: list[TensorRole], build: BuildOptions, limits: Limits, chunk: int
) -> Iterator[tuple[str, ShapeRange]]:
    """Yield the name and the range of shapes of each dynamic input, for updates of up to `chunk` tokens."""
    for tensor in inputs:
        if all(isinstance(d, int) for d in tensor.shape):
            continue
        shapes = [getattr(build, kind).get(tensor.name) for kind in _SHAPES.values()]
        axes = []
        for i, axis in enumerate(tensor.axes):
            known = _axis(plan, tensor, i, limits, chunk)
            # Decode takes one token per sequence; the caller's shapes are for prefill.
            of_prefill = axis in ("sequence", "tokens", "kept") and chunk == 1 != limits.max_chunk
            if known is None or not (of_prefill or isinstance(tensor.shape[i], int)):
                known = _asked(tensor, i, [shape and shape[i] for shape in shapes], known)
            axes.append(known)
        low, typical, high = (tuple(column) for column in zip(*axes, strict=True))
        yield tensor.name, ShapeRange(low, typical, high)


def _asked(tensor: TensorRole, index: int, asked: list[int | None], known: Range | None) -> Range:
    """Return the range of an axis that the caller asks for; check that it lies within the known range.

    If no range is known, sizes that the caller does not give follow from those that the caller gives.
    """
    given = [size for size in (asked[1], asked[2], asked[0]) if size is not None]
    if known is None and not given:
        raise _unknown(tensor)
    default = known or (min(given), given[0], max(given))
    low, typical, high = (d if a is None else a for a, d in zip(asked, default, strict=True))
    if asked[1] is None:  # the default typical size is moved into the caller's bounds
        typical = min(max(typical, low), high)
    axis = tensor.axes[index]
    if known and (high > known[2] or (axis in _FROM and high < known[2])):
        allowed = f"{known[2]} (from {_FROM[axis]})" if axis in _FROM else f"at most {known[2]} (the capacity)"
        raise OptionError(
            f"--maxShapes gives {tensor.name!r} {high} in dimension {index} ({axis}); it must be {allowed}"
        )
    if known and low < known[0]:
        raise OptionError(
            f"--minShapes gives {tensor.name!r} {low} in dimension {index} ({axis}); it must be at least {known[0]}"
        )
    if not low <= typical <= high:
        raise OptionError(
            f"the shapes of {tensor.name!r} must grow from --minShapes over --optShapes to --maxShapes; "
            f"dimension {index} is {low}, {typical}, {high}"
        )
    return low, typical, high


def _axis(plan: CachePlan, tensor: TensorRole, index: int, limits: Limits, chunk: int) -> Range | None:
    """Return the range of one axis of an input; None if only the caller can know it."""
    size = tensor.shape[index]
    if isinstance(size, int):
        return size, size, size
    match tensor.axes[index]:
        case "batch":
            return 1, limits.opt_batch, limits.max_batch
        case "batch+1":
            return 2, limits.opt_batch + 1, limits.max_batch + 1
        case "sequence":
            return 1, chunk, chunk
        case "kept":
            fixed = any(isinstance(c.update_length, int) for c in plan.caches)
            return 1, 1, limits.max_logits or 1 if fixed else min(limits.max_logits or 1, chunk)
        case "tokens":
            return 1, limits.opt_batch * chunk, limits.max_batch * chunk
        case "keys":
            return _rows(limits.capacity, chunk)
        case "encoder":
            return limits.encoder
        case "span":
            return _rows(next((s.capacity for s in plan.spans if s.name == tensor.name), limits.capacity), chunk)
    return None


def _rows(capacity: int, chunk: int) -> Range:
    """Return the smallest, typical and largest size of an axis that counts cache rows.

    TensorRT chooses kernels for the typical size: half the capacity, but at least a chunk, which a prefill has just
    written.
    """
    return 1, max(capacity // 2, chunk, 1), capacity


def _check_names(inputs: list[TensorRole], build: BuildOptions) -> None:
    """Refuse shapes from the caller whose input does not exist, has another rank, or has another fixed size."""
    known = {t.name: t.shape for t in inputs}
    for flag, name, shape in ((f, n, s) for f, kind in _SHAPES.items() for n, s in getattr(build, kind).items()):
        if (model := known.get(name)) is None:
            raise OptionError(f"{flag} names {name!r}, which is not an input of the model; inputs: {', '.join(known)}")
        mismatch = f"{flag} gives {name!r} the shape {shape_text(shape)}, but in the model it is {shape_text(model)}"
        if len(shape) != len(model):
            raise OptionError(f"{mismatch}: give it {len(model)} dimensions")
        for i, (asked, size) in enumerate(zip(shape, model, strict=True)):
            if isinstance(size, int) and asked != size:
                raise OptionError(f"{mismatch}: dimension {i} is fixed at {size}")


def _unknown(tensor: TensorRole) -> OptionError:
    sizes = zip(tensor.shape, tensor.axes, strict=True)
    unknown = [(str(size), axis) for size, axis in sizes if axis in ("?", "encoder")]
    names, shown = ", ".join(size for size, _ in unknown), f"input {tensor.name!r} {shape_text(tensor.shape)}"
    if any(axis == "encoder" for _, axis in unknown):
        return OptionError(
            f"{shown}: the longest output of the encoder is unknown ({names}); give the most positions with "
            "--max-encoder, such as --max-encoder 1500"
        )
    example = "x".join(str(s) if isinstance(s, int) else "1" for s in tensor.shape)
    return OptionError(
        f"{shown}: the largest {names} is unknown; give its shapes with --minShapes, --optShapes and --maxShapes, as "
        f"in --maxShapes {tensor.name}:{example}"
    )
