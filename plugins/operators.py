"""The plugin's operators: ONNX nodes of domain ``trt_kvcache``. For each, TensorRT has a plugin of the same name.

There is one operator for each set of inputs and outputs, because a TensorRT plugin cannot have optional inputs or
outputs. Operators have no attributes. This file needs neither ONNX nor TensorRT.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import IntegerType, KernelConfig, Quantization, arguments

NAMESPACE = "trt_kvcache"
"""The ONNX domain of the nodes. It is also the plugin namespace in TensorRT's registry."""

VERSION = "1"
"""The plugin version; quickly deployable plugins have only this one."""

CACHE_BITS = {
    "float": 32, "float16": 16, "bfloat16": 16, "int8": 8, "float8e4m3fn": 8, "int32": 32, "int64": 64, "int4": 4,
    "float4e2m1": 4,
}  # fmt: skip
"""Bits of the element types (ONNX names) that a cache can have; TensorRT's plugins support neither bool nor uint8."""


@dataclass(frozen=True)
class Operator:
    """One operator of the plugin: its inputs and outputs, and how the update is written into the cache.

    Attributes:
        form: layout of the update: padded ``[B, N, S_new, H]``, or packed ``[T, N, H]`` with cumulative lengths ``[B +
            1]``.
        mode: linear or circular.
        caches: number of caches in one launch: 1, or 2 for the K and V of a layer.
        quantized: quantize on write, with float32 scales ``[1]`` or ``[N]``.
    """

    form: UpdateForm = UpdateForm.PADDED
    mode: UpdateMode = UpdateMode.LINEAR
    caches: int = 1
    quantized: bool = False

    @property
    def packed(self) -> bool:
        """True if the update is packed, ``[T, N, H]`` with cumulative lengths; False if it is padded."""
        return self.form is UpdateForm.PACKED_NHD

    @property
    def name(self) -> str:
        """The ONNX operator type and the plugin's name: ``KVCacheUpdate`` with words for layout, mode and so on."""
        parts = (
            ("Packed", self.packed),
            ("Circular", self.mode is UpdateMode.CIRCULAR),
            ("Pair", self.caches == 2),
            ("Quantized", self.quantized),
        )
        return "KVCacheUpdate" + "".join(part for part, applies in parts if applies)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return arguments(self._any_config()).inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, in order. ``present_i`` has the type and shape of ``cache_i``."""
        return arguments(self._any_config()).outputs

    def _any_config(self) -> KernelConfig:
        types = {"cache_0": "int8", "update_0": "float16" if self.quantized else "int8", "write_indices": "int64"}
        return self.config({**types, "cache_1": "int8", "update_1": types["update_0"], "lengths": "int64"})

    def config(self, types: Mapping[str, str], *, per_head: bool = False) -> KernelConfig:
        """Return the kernel configuration for tensors of these types; raise `OptionError` if there is no such kernel.

        `types` has the ONNX type name of each input, by the operator's input names. `per_head`: each head has a scale.
        """
        for i in range(self.caches):
            cache, update = types[f"cache_{i}"], types[f"update_{i}"]
            if cache not in CACHE_BITS:
                raise OptionError(f"{self.name}: cache_{i} is {cache}; expected one of {', '.join(CACHE_BITS)}")
            if not self.quantized and update != cache:
                raise OptionError(
                    f"{self.name}: update_{i} is {update} and cache_{i} {cache}; they must have one type, or the "
                    "operator must quantize"
                )
        if self.caches == 2 and (types["cache_0"], types["update_0"]) != (types["cache_1"], types["update_1"]):
            raise OptionError(f"{self.name}: the two caches differ in type, {types['cache_0']} and {types['cache_1']}")
        for i in range(self.caches):
            if self.quantized and types.get(f"scale_{i}", "float") != "float":
                raise OptionError(f"{self.name}: scale_{i} is {types[f'scale_{i}']}; scales are float32")
        return KernelConfig(
            element_bits=CACHE_BITS[types["cache_0"]],
            form=self.form,
            mode=self.mode,
            caches=self.caches,
            index_type=self._integer("write_indices", types),
            length_type=self._integer("lengths", types) if self.packed else None,
            quantization=self._quantization(types, per_head) if self.quantized else None,
        )

    def check_shapes(self, shapes: Mapping[str, Sequence[int | None]]) -> None:
        """Raise `OptionError` if ranks or known sizes of an operator's inputs do not fit.

        The kernel takes B, N, S_max and H from the cache, and uses these sizes for all other tensors. `shapes` maps
        input names to shapes, without inputs of unknown rank; None is a dynamic size.
        """
        known: dict[str, tuple[int, str]] = {}
        for name, shape in shapes.items():
            expected = self._sizes(name)
            if len(shape) != len(expected):
                raise OptionError(f"{self.name}: {name} has {len(shape)} dimensions; it must have {len(expected)}")
            for size, label in zip(shape, expected, strict=True):
                if size is None or label == "1 or N":
                    continue
                value = size - 1 if label == "B + 1" else size
                other, where = known.setdefault("B" if label == "B + 1" else label, (value, name))
                if value != other:
                    raise OptionError(
                        f"{self.name}: {name} is {_text(shape)} and {where} is {_text(shapes[where])}; they must be "
                        f"[{', '.join(expected)}] and [{', '.join(self._sizes(where))}]"
                    )
        if self.quantized:
            self._check_scales(shapes)

    def _check_scales(self, shapes: Mapping[str, Sequence[int | None]]) -> None:
        heads = shapes["cache_0"][1] if "cache_0" in shapes else None
        counts = [shapes[f"scale_{i}"][0] for i in range(self.caches) if f"scale_{i}" in shapes]
        for i, count in enumerate(counts):
            if count is not None and heads is not None and count not in (1, heads):
                raise OptionError(f"{self.name}: scale_{i} has {count} values; it must have 1, or one for each of the "
                                  f"{heads} heads")  # fmt: skip
        if None not in counts and len(set(counts)) > 1:
            raise OptionError(f"{self.name}: the scales of the two caches have {counts[0]} and {counts[1]} values; "
                              "both must have the same number")  # fmt: skip

    def _sizes(self, name: str) -> tuple[str, ...]:
        kind, _, i = name.rpartition("_")
        if kind == "cache":
            return ("B", "N", "S_max", f"H_{i}")
        if kind == "update":
            return ("T", "N", f"H_{i}") if self.packed else ("B", "N", "S_new", f"H_{i}")
        if kind == "scale":
            return ("1 or N",)
        return ("B + 1",) if name == "lengths" else ("B",)

    def _integer(self, name: str, types: Mapping[str, str]) -> IntegerType:
        if types[name] not in ("int32", "int64"):
            raise OptionError(f"{self.name}: {name} is {types[name]}; expected int32 or int64")
        return cast(IntegerType, types[name])

    def _quantization(self, types: Mapping[str, str], per_head: bool) -> Quantization:
        source = cast(Literal["float16", "bfloat16", "float"], types["update_0"])
        target = cast(Literal["int8", "float8e4m3fn"], types["cache_0"])
        return Quantization(source, target, per_head)


def _text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _all_operators() -> dict[str, Operator]:
    parts = itertools.product(UpdateForm, UpdateMode, (1, 2), (False, True))
    operators = [Operator(form, mode, caches, quantized) for form, mode, caches, quantized in parts]
    return {operator.name: operator for operator in operators}


OPERATORS = _all_operators()
"""Every operator, by name."""
