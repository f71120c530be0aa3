"""Runs with the real bindings (see real_bindings.py): registers the plugin, asks it what TensorRT would, prints JSON.

What the builder provides is stood in for here: dimension expressions and their builder (abstract in the bindings, so
that instances are made without their constructor), evaluated to text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorrt as trt
from tensorrt_bindings.plugin import _plugin_class, _tensor

from trt_kvcache.errors import OptionError
from trt_kvcache.plugins.compile import nvrtc_version
from trt_kvcache.plugins.embed import kernels_for
from trt_kvcache.plugins.operators import NAMESPACE, VERSION
from trt_kvcache.plugins.register import TYPES, register_plugins

_SIGNS = {"SUM": "+", "SUB": "-", "PROD": "*", "FLOOR_DIV": "//", "CEIL_DIV": "/^"}
_DATA = {onnx: getattr(trt.DataType, name) for name, onnx in TYPES.items() if hasattr(trt.DataType, name)}


class Dim(trt.IDimensionExpr):  # type: ignore[misc]
    value: Any

    def is_constant(self) -> bool:
        return isinstance(self.value, int)

    def get_constant_value(self) -> int:
        return int(self.value)

    def is_size_tensor(self) -> bool:
        return False


def dim(value: Any) -> Dim:
    made = Dim.__new__(Dim)
    made.value = value
    return made


class Expressions:
    """IExprBuilder: constants are folded, as TensorRT does."""

    def constant(self, value: int) -> Dim:
        return dim(value)

    def operation(self, op: Any, a: Dim, b: Dim) -> Dim:
        text = f"({a.value} {_SIGNS[op.name]} {b.value})"
        return dim(eval(text) if a.is_constant() and b.is_constant() else text)


class Dims(list[Any]):
    def __init__(self, count: int) -> None:
        super().__init__([None] * count)


class Settable(dict[Any, Any]):
    """Launch parameters and symbolic expressions, which TensorRT hands out to be filled."""

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Recorded(_tensor.SymExprImpl):  # type: ignore[misc]
    """The real expression object has no getter."""

    def __init__(self, expr: Any) -> None:
        super().__init__(expr)
        self.seen = (expr._expr.value, type(expr).__name__)


_plugin_class.trt.DimsExprs = Dims
_tensor.SymExprImpl = Recorded


def tensor(dtype: str, shape: list[Any]) -> Any:
    desc = trt.PluginTensorDesc()
    desc.dims = tuple(size if isinstance(size, int) else -1 for size in shape)
    desc.type, desc.format = _DATA[dtype], trt.TensorFormat.LINEAR
    dynamic = trt.DynamicPluginTensorDesc()
    dynamic.desc = desc
    return dynamic


def describe(case: dict[str, Any]) -> dict[str, Any]:
    """The answers of one operator for inputs of given types and shapes, up to what goes wrong."""
    creator = trt.get_plugin_registry().get_creator(case["name"], VERSION, NAMESPACE)
    fields = trt.PluginFieldCollection([])
    strict = trt.QuickPluginCreationRequest.STRICT_AOT
    plugin = creator.create_plugin(case["name"], NAMESPACE, fields, trt.TensorRTPhase.BUILD, strict)
    types, shapes = zip(*case["inputs"], strict=True)
    answer: dict[str, Any] = {"fields": len(creator.field_names), "outputs": plugin.get_num_outputs()}
    try:
        given = plugin.get_output_data_types([_DATA[t] for t in types], [len(s) for s in shapes])
        answer["types"] = [TYPES[t.name] for t in given]
        answer["aliases"] = plugin.aliased_map
        outputs = plugin.get_output_shapes([[dim(d) for d in s] for s in shapes], [], Expressions())
        answer["shapes"] = [[d.value for d in s] for s in outputs]
        tensors = [tensor(t, s) for t, s in zip(types, shapes, strict=True)]
        results = [tensor(t, case["inputs"][0][1] if len(s) == 4 else s)
                   for t, s in zip(answer["types"], answer["shapes"], strict=True)]  # fmt: skip
        combination = plugin.get_supported_format_combinations([*tensors, *results], len(tensors))
        answer["formats"] = sorted({str(c.format) for c in combination})
        answer["io_types"] = [TYPES[c.type.name] for c in combination]
        plugin = plugin.clone()
        plugin.configure_plugin(tensors, results)
        answer["tactics"] = plugin.get_valid_tactics()
        answer["serialized"] = len(plugin.get_fields_to_serialize())
        plugin.set_tactic(0)
        launch, scalars = Settable(), Settable()
        plugin.get_launch_params(None, [*tensors, *results], len(tensors), launch, scalars, Expressions())
        answer["launch"] = {name: value.seen for name, value in launch.items()}
        count = scalars.pop("nbSymExprs")
        answer["scalars"] = [scalars[i].seen for i in range(count)]
        name, ptx = plugin.get_kernel([t.desc for t in tensors], [t.desc for t in results])
        answer["kernel"], answer["ptx"] = name, ptx.decode()
    except OptionError as error:
        answer["error"] = str(error)
    return answer


def main() -> None:
    question = json.load(sys.stdin)
    compiled: list[str] = []
    real = kernels_for(question["arch"], nvrtc_version()) if "arch" in question else None

    def compile_kernel(config: Any) -> bytes:
        compiled.append(config.name)
        return b"// " + config.name.encode() if real is None else real(config)

    registration = register_plugins(trt, compile_kernel, declare_aliases=question["declare_aliases"])
    answer = {"version": trt.__version__,
              "registered": [n
                             for n in registration.names
                             if trt.get_plugin_registry().get_creator(n, VERSION, NAMESPACE) is not None],
              "cases": [describe(case) for case in question["cases"]], "compiled": compiled,
              "refused": [str(error) for error in registration.errors]}  # fmt: skip
    try:
        register_plugins(trt, compile_kernel)
    except OptionError as error:
        answer["again"] = str(error)
    sys.stdout.write(json.dumps(answer) + "\n")


main()
