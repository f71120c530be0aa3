"""Updates of caches for each type, mode and length: by which route a target takes them."""

from collections.abc import Iterator
from functools import partial

import onnx
from cases import packed_model
from graphs import scatter_model
from onnx import TensorProto

from corpus import Entry, built

(_ANY,) = (t for t in onnx.defs.get_schema("TensorScatter", 24).type_constraints if t.type_param_str == "T")
TYPES = sorted(name.removeprefix("tensor(").removesuffix(")").upper() for name in _ANY.allowed_type_strs)


def entries() -> Iterator[Entry]:
    linear = {name: partial(scatter_model, dtype=TensorProto.DataType.Value(name)) for name in TYPES}
    circular = {str(n): partial(scatter_model, mode="circular", length=n) for n in (1, 3, 4, "S")}
    circular["no indices"] = partial(scatter_model, mode="circular", indices=False)
    packs = {m: partial(packed_model, mode=m) for m in ("linear", "circular")}
    for target in ("tensorrt", "tensorrt-rtx"):
        yield from built(f"route, {target}", linear, target=target)
        yield from built(f"route, {target}", {f"packed {m}": pack for m, pack in packs.items()}, target=target)
        for fallback in ("auto", "contract", "functional"):
            yield from built(f"route, {target}, {fallback}", circular, target=target, fallback=fallback)
    yield from built("route, before 11", {"packed": packs["linear"]}, target="tensorrt", packed_native=False)
