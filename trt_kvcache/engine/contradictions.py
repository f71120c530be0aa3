"""Compares facts that a manifest states twice, so that other code may rely on a manifest.

The hash in a manifest is the engine's. Without these comparisons, a manifest that was damaged or edited by hand would
go unnoticed, and addresses and lengths are computed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from trt_kvcache.importer.plan import TENSORRT_DTYPES, CacheUpdate, Dim, PhysicalLayout, Role, Target, TensorRole

if TYPE_CHECKING:
    from trt_kvcache.engine.manifest import Manifest

__all__ = ["contradictions"]

_SIZES = 1 << 31  # TensorRT counts elements of an axis in 32 bits
_PROFILES = (("prefill",), ("decode",), ("prefill", "decode"), ("encoder",))
_IO = ("input", "output")
_AXES = ("batch", "sequence", "span", "kept", "tokens", "batch+1", "keys", "encoder", "", "?")


def contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield each contradiction of a manifest with itself, as one line."""
    yield from _said_once(manifest)
    tensors = {(t.io, t.name): t for t in manifest.plan.tensors}
    yield from _tensors(manifest)
    yield from _described(manifest)
    for cache in manifest.plan.caches:
        yield from _cache(cache, tensors)
    for state in manifest.plan.states:
        for io, name in zip(_IO, (state.past, state.present), strict=True):
            yield from _is(tensors.get((io, name)), io, name, "state", state.dtype, state.shape)
    yield from _names(manifest)
    yield from _adapters(manifest)
    yield from _original(manifest)
    yield from _profiles(manifest)
    yield from _limits(manifest)


def _said_once(manifest: Manifest) -> Iterator[str]:
    """Yield values that are illegal in every manifest."""
    backends = [target.value for target in Target]
    if manifest.backend not in backends:
        yield f"backend {manifest.backend!r}; there are {', '.join(backends)}"
    elif manifest.plan.options.target.value != manifest.backend:
        yield f"backend {manifest.backend!r}, and the plan is for {manifest.plan.options.target.value}"
    if manifest.plan.schema_version != 1:
        yield f"the plan has schema {manifest.plan.schema_version}"
    for name in ("max_batch", "max_chunk", "max_logits", "vocab", "max_positions"):
        value = getattr(manifest, name)
        if value is not None and not 0 < value < _SIZES:
            yield f"{name} is {value}, which is no size"
    for file in (manifest.engine, manifest.encoder, manifest.proof):
        if file is not None and (file.size < 0 or Path(file.name).name != file.name):
            yield f"file {file.name!r} of {file.size} bytes is none beside the engine"


def _tensors(manifest: Manifest) -> Iterator[str]:
    for tensor in manifest.plan.tensors:
        called = f"{tensor.io} {tensor.name!r}"
        if tensor.io not in _IO or not tensor.name.isprintable():
            yield f"{called} has a control character or line break in its name, or is neither input nor output"
        if tensor.dtype not in TENSORRT_DTYPES:
            yield f"{called} has the dtype {tensor.dtype!r}, which no engine has"
        if any(isinstance(dim, int) and not 0 <= dim < _SIZES for dim in tensor.shape):
            yield f"{called} has the shape {list(tensor.shape)}"
        if len(tensor.axes) != len(tensor.shape):
            yield f"{called} {list(tensor.shape)} has {len(tensor.axes)} axes"
        for dim, axis in zip(tensor.shape, tensor.axes, strict=False):
            if axis not in _AXES or (isinstance(dim, str) and not axis):
                yield f"{called} {list(tensor.shape)} has an axis {dim!r} of {axis or 'a fixed size'!r}"
    for (io, name), times in Counter((t.io, t.name) for t in manifest.plan.tensors).items():
        if times > 1:
            yield f"{io} {name!r} is there twice"


def _described(manifest: Manifest) -> Iterator[str]:
    """Check that inputs and outputs of these roles are exactly the ones that the rest of the plan describes."""
    plan = manifest.plan
    carried = [c for c in plan.caches if c.carried]
    products = () if plan.adapters is None else plan.adapters.products
    described = {
        ("input", Role.CACHE): [c.past for c in carried],
        ("output", Role.CACHE): [c.present for c in carried],
        ("input", Role.STATE): [s.past for s in plan.states],
        ("output", Role.STATE): [s.present for s in plan.states],
        ("input", Role.SPAN): [s.name for s in (*plan.spans, plan.logits_span) if s is not None],
        ("input", Role.ADAPTER): [] if plan.adapters is None else [plan.adapters.index],
        ("input", Role.ADAPTER_WEIGHTS): [name for product in products for name in (product.a, product.b)],
    }
    for (io, role), names in described.items():
        found = [t.name for t in plan.tensors if (t.io, t.role) == (io, role)]
        for name in sorted({*names} ^ {*found}):
            yield f"{role.value} {name!r} is not both an {io} and described"
        yield from (f"{role.value} {name!r} is described twice" for name, n in Counter(names).items() if n > 1)
    for what, actual, expected in (
        ("aliases", manifest.aliases, {c.present: c.past for c in carried if c.in_place}),
        ("double_buffered", manifest.double_buffered, plan.double_buffered),
    ):
        for present in sorted({*actual, *expected}):
            if actual.get(present) != expected.get(present):
                yield f"{what} binds {present!r} to {actual.get(present)!r}, the plan to {expected.get(present)!r}"


def _is(tensor: TensorRole | None, io: str, name: str, what: str, dtype: str, shape: Sequence[Dim]) -> Iterator[str]:
    """Check that an input or output fits a cache or state; a state's batch may have another name."""
    first = int(what == "state")
    if dtype not in TENSORRT_DTYPES:
        yield f"{name!r} has the dtype {dtype!r}, which no engine has"
    elif not shape:
        yield f"{what} {name!r} has no axes"
    elif tensor is None or tensor.dtype != dtype or tensor.shape[first:] != tuple(shape)[first:]:
        found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        yield f"{io} {name!r} is {found}, its {what} {dtype} {list(shape)}"


def _cache(cache: CacheUpdate, tensors: dict[tuple[str, str], TensorRole]) -> Iterator[str]:
    called = f"cache {cache.past!r}"
    for io, name in zip(_IO, (cache.past, cache.present), strict=True):
        if cache.carried:
            yield from _is(tensors.get((io, name)), io, name, "cache", cache.dtype, cache.physical_shape)
    for shape, axis in (
        (cache.logical_shape, cache.sequence_axis),
        (cache.physical_shape, cache.physical_sequence_axis),
    ):
        if not 0 <= axis < len(shape):
            yield f"{called} {list(shape)} has no axis {axis}"
        elif cache.capacity < 1 or cache.capacity != shape[axis]:
            yield f"{called} has a capacity of {cache.capacity}, its shape {list(shape)} says otherwise"
    if not _is_laid_out(cache):
        layout = f"{list(cache.physical_shape)} {cache.layout.value}"
        yield f"{called} is {list(cache.logical_shape)} in the model, and {layout}"
    most = None if cache.contract is None else cache.contract.max_update_length
    for length in (cache.update_length, most):
        if isinstance(length, int) and not 0 < length <= cache.capacity:
            yield f"{called} of {cache.capacity} rows is updated by {length}"


def _is_laid_out(cache: CacheUpdate) -> bool:
    """Return True if the physical shape fits the layout."""
    logical, axis, physical = cache.logical_shape, cache.sequence_axis, cache.physical_shape
    if cache.layout is PhysicalLayout.AS_IS:
        return (logical, axis) == (physical, cache.physical_sequence_axis)
    heads = axis == 1 or cache.layout is PhysicalLayout.VIEW
    return heads and logical[:1] == physical[:1] and _elements(logical[1:]) == _elements(physical[1:])


def _elements(shape: Sequence[Dim]) -> int:
    return prod(dim for dim in shape if isinstance(dim, int))


def _names(manifest: Manifest) -> Iterator[str]:
    """Check that names in the plan refer to parts that exist."""
    plan = manifest.plan
    caches, nodes = {c.past for c in plan.caches}, {a.node for a in plan.attention}
    masks, spans = {m.name for m in plan.masks}, {s.name for s in plan.spans}
    named: list[tuple[str, str | None, set[str]]] = []
    for attention in plan.attention:
        named += [(f"cache of {attention.node!r}", name, caches) for name in attention.caches]
        named.append((f"mask of {attention.node!r}", attention.mask, masks))
        if attention.keys not in ("span", "mask", "all"):
            yield f"keys of {attention.node!r} are {attention.keys!r}"
        for size in (attention.query_heads, attention.kv_heads, attention.head_size, attention.value_head_size):
            if isinstance(size, int) and not 0 < size < _SIZES:
                yield f"{attention.node!r} has {size} heads, or heads of that size"
    named += [(f"reader of {c.past!r}", name, nodes) for c in plan.caches for name in c.readers]
    named += [(f"span of mask {m.name!r}", m.span, spans) for m in plan.masks]
    if plan.logits_span is not None:
        outputs = {t.name for t in plan.tensors if t.io == "output"}
        named.append(("output of the logits' span", plan.logits_span.output, outputs))
    yield from (f"{what} is {name!r}, which is none" for what, name, known in named if name not in (None, *known))
    shapes = {t.name: t.shape for t in plan.tensors if t.io == "input"}
    for span in (*plan.spans, plan.logits_span):
        if span is not None and shapes.get(span.name, ()) != (span.symbol,):
            yield f"span {span.name!r} is {list(shapes.get(span.name, ()))}, and not of {span.symbol!r}"
    rows = {c.capacity for c in plan.caches}
    yield from (
        f"span {s.name!r} has {s.capacity} rows, and no cache has" for s in plan.spans if s.capacity not in rows
    )


def _adapters(manifest: Manifest) -> Iterator[str]:
    adapters, options = manifest.plan.adapters, manifest.plan.options
    if adapters is None:
        return
    if (options.lora_slots, options.lora_rank) != (adapters.slots, adapters.rank):
        asked = f"{options.lora_slots} of rank {options.lora_rank}"
        yield f"adapters are {adapters.slots} of rank {adapters.rank}, and the options ask for {asked}"
    inputs = {t.name: t for t in manifest.plan.tensors if t.io == "input"}
    shapes = {name: tensor.shape for name, tensor in inputs.items()}
    if len(shapes.get(adapters.index, ())) != 1 or not 0 < adapters.slots < _SIZES or not 0 < adapters.rank < _SIZES:
        yield f"adapters are {adapters.slots} of rank {adapters.rank}, chosen by '{adapters.index}'"
    for product in adapters.products:
        slots = adapters.slots + 1
        wanted = {product.a: (slots, product.inputs, product.rank), product.b: (slots, product.rank, product.outputs)}
        yield from (
            f"{name!r} is no input {product.dtype} {list(shape)}"
            for name, shape in wanted.items()
            if shapes.get(name) != shape or inputs[name].dtype != product.dtype
        )
        if not all(0 <= part.start < part.stop <= product.outputs for part in product.parts):
            yield f"{product.a!r} has modules outside of its {product.outputs} columns"


def _original(manifest: Manifest) -> Iterator[str]:
    """Check the inputs and outputs of the model as exported."""
    plan = manifest.plan
    for tensor in plan.original:
        if tensor.io not in _IO or len(tensor.axes) != len(tensor.shape):
            yield f"{tensor.io} {tensor.name!r} {list(tensor.shape)} as exported has {len(tensor.axes)} axes"


def _profiles(manifest: Manifest) -> Iterator[str]:
    names = tuple(profile.name for profile in manifest.profiles)
    if names not in _PROFILES:
        yield f"its profiles are {', '.join(names)}" if names else "it has no profiles"
    if (names == ("encoder",)) is bool(manifest.plan.caches):
        yield f"an engine of {len(manifest.plan.caches)} caches has profiles of {', '.join(names) or 'nothing'}"
    inputs = {tensor.name: tensor for tensor in manifest.plan.tensors if tensor.io == "input"}
    dynamic = {name for name, tensor in inputs.items() if any(isinstance(dim, str) for dim in tensor.shape)}
    spans = {span.name: span.capacity for span in manifest.plan.spans}
    for profile in manifest.profiles:
        for name in sorted(profile.shapes.keys() ^ dynamic):
            which = "has" if name in profile.shapes else "lacks"
            what = "which is no input of free sizes" if name in profile.shapes else "whose sizes are free"
            yield f"profile {profile.name!r} {which} {name!r}, {what}"
        for name in sorted(profile.shapes.keys() & dynamic):
            tensor, range_ = inputs[name], profile.shapes[name]
            shapes = (range_.min, range_.opt, range_.max)
            if {len(shape) for shape in shapes} != {len(tensor.shape)}:
                yield f"profile {profile.name!r} has {name!r} of other lengths than {list(tensor.shape)}"
                continue
            sizes = list(zip(*shapes, strict=True))
            one = profile.name == "decode"
            for dim, axis, ordered in zip(tensor.shape, tensor.axes, sizes, strict=False):
                most = dim if isinstance(dim, int) else spans.get(name, _SIZES) if axis == "span" else _SIZES - 1
                most = 1 if one and isinstance(dim, str) and axis == "sequence" else most
                if not all(low <= high for low, high in pairwise((dim if isinstance(dim, int) else 0, *ordered, most))):
                    yield f"profile {profile.name!r} has sizes of {name!r} in no order, or beyond {most}: {sizes}"


def _limits(manifest: Manifest) -> Iterator[str]:
    """Compare `max_batch`, `max_chunk` and `max_logits` with profiles, caches and each other."""
    plan = manifest.plan
    if (manifest.max_logits is None) is not (plan.logits_span is None):
        yield f"max_logits is {manifest.max_logits}, and the plan says otherwise"
    contracts = [c.contract.max_update_length for c in plan.caches if c.contract is not None]
    for most in {
        n for n in (*contracts, *(c.capacity for c in plan.caches)) if n is not None and n < manifest.max_chunk
    }:
        yield f"max_chunk is {manifest.max_chunk}, and a cache takes {most} in one update"
    for tensor in plan.tensors:
        shapes = [p.shapes[tensor.name].max for p in manifest.profiles if tensor.name in p.shapes]
        for what, axis, limit in (
            ("max_batch", "batch", manifest.max_batch),
            ("max_chunk", "sequence", manifest.max_chunk),
            ("max_logits", "kept", manifest.max_logits or 1),
        ):
            for at in (i for i, found in enumerate(tensor.axes) if found == axis):
                largest = max((shape[at] for shape in shapes if at < len(shape)), default=limit)
                if limit > largest:
                    yield f"{what} is {limit}, the profiles of {tensor.name!r} end at {largest}"
