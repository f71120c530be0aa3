"""Registers the plugin's operators with TensorRT: quickly deployable plugins with an ahead-of-time implementation.

TensorRT embeds the kernel from `aot_impl` in the engine, so that trtexec, Triton or C++ can open the engine without
Python. The bindings check the signatures of an operator's two functions, so this module makes both for each operator.
This module follows the checks in the source code of the bindings (``tensorrt.plugin``, read in 10.15 and 11.4).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union

from trt_kvcache.errors import OptionError, TrtKvCacheError
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS, VERSION, Operator
from trt_kvcache.plugins.spec import KernelConfig, Shapes, launch_params

Compile = Callable[[KernelConfig], bytes]
"""A function that returns PTX for a configuration, with ``config.name`` as its entry function."""

TYPES = {
    "FLOAT": "float", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "UINT8": "uint8", "BOOL": "bool",
    "FP8": "float8e4m3fn", "INT32": "int32", "INT64": "int64", "INT4": "int4", "FP4": "float4e2m1",
}  # fmt: skip
"""ONNX names of TensorRT's data types."""


@dataclass(frozen=True)
class Registration:
    """The names of the operators registered with TensorRT, and errors while TensorRT asked for their kernels."""

    names: tuple[str, ...]
    errors: list[TrtKvCacheError] = field(default_factory=list)


def register_plugins(trt: Any, compile_kernel: Compile, *, declare_aliases: bool = False) -> Registration:
    """Register every operator of the plugin with TensorRT, in this process. Call this before a network is parsed.

    Args:
        trt: the module ``tensorrt``, 10.15 or later.
        compile_kernel: compiles PTX; called while an engine is built, once for each kernel that it needs.
        declare_aliases: tell TensorRT that present and past are one buffer, with the preview feature
            ``ALIASED_PLUGIN_IO_10_03``. If False, the caller binds one address to both, and the kernel recognizes this.

    Raises:
        OptionError: this TensorRT does not support such plugins, or the operators are registered already.
    """
    try:
        import tensorrt.plugin as trtp
    except ImportError as error:
        raise OptionError(f"TensorRT {trt.__version__} has no quickly deployable plugins: {error}") from error
    if not hasattr(trtp, "aot_impl"):
        raise OptionError(f"TensorRT {trt.__version__} has no ahead-of-time plugins; 10.15 or later is needed")
    if trt.get_plugin_registry().get_creator("KVCacheUpdate", VERSION, NAMESPACE) is not None:
        raise OptionError("the cache-update plugin is already registered in this process")
    registration = Registration(tuple(OPERATORS))
    for operator in OPERATORS.values():
        name = f"{NAMESPACE}::{operator.name}"
        trtp.register(name)(_description(trtp, operator, declare_aliases, registration.errors))
        trtp.aot_impl(name)(_implementation(trtp, operator, compile_kernel, registration.errors))
    return registration


def _description(trtp: Any, operator: Operator, declare_aliases: bool, errors: list[TrtKvCacheError]) -> Any:
    """Return the function that describes an operator's outputs to TensorRT: ``present_i`` is like ``cache_i``."""

    def describe(*inputs: Any) -> Any:
        tensors = dict(zip(operator.inputs, inputs, strict=True))
        operator.check_shapes({name: [_constant(size) for size in t.shape_expr] for name, t in tensors.items()})
        config = _config(operator, tensors)
        _check_bytes(operator, tensors, config.element_bits)
        caches = [tensors[f"cache_{i}"] for i in range(operator.caches)]
        return tuple(cache.aliased() if declare_aliases else cache.like() for cache in caches)

    descs = (trtp.TensorDesc,) * len(operator.outputs)
    parameters = _tensors(trtp, operator)
    return _typed(describe, errors, inspect.Signature(parameters, return_annotation=tuple[descs]))  # type: ignore[valid-type]


def _implementation(trtp: Any, operator: Operator, compile_kernel: Compile, errors: list[TrtKvCacheError]) -> Any:
    """Return the function from which TensorRT gets an operator's kernel and the arguments of its launch."""

    def implement(*arguments: Any) -> Any:
        tensors = dict(zip(operator.inputs, arguments, strict=False))
        config = _config(operator, tensors)
        launch = launch_params(config, _shapes(operator, tensors))
        params = trtp.KernelLaunchParams(grid_x=launch.grid, block_x=launch.block)
        scalars = trtp.SymIntExprs(len(launch.scalars))
        for i, value in enumerate(launch.scalars):
            scalars[i] = trtp.SymInt32(value)
        return config.name, compile_kernel(config), params, scalars

    descs = (trtp.TensorDesc,) * len(operator.outputs)
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        *_tensors(trtp, operator),
        inspect.Parameter("outputs", keyword, annotation=tuple[descs]),  # type: ignore[valid-type]
        inspect.Parameter("tactic", keyword, annotation=int),
    ]
    # The bindings look for typing.Union.
    text = Union[str, bytes]  # noqa: UP007
    returned = tuple[text, text, trtp.KernelLaunchParams, trtp.SymExprs]
    return _typed(implement, errors, inspect.Signature(parameters, return_annotation=returned))


def _tensors(trtp: Any, operator: Operator) -> list[inspect.Parameter]:
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, keyword, annotation=trtp.TensorDesc) for name in operator.inputs]


def _typed(function: Any, errors: list[TrtKvCacheError], signature: inspect.Signature) -> Any:
    """Return a wrapper of `function` with this signature. It also appends each error of `function` to `errors`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TrtKvCacheError as error:
            errors.append(error)
            raise

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper


def _config(operator: Operator, tensors: dict[str, Any]) -> KernelConfig:
    types = {name: TYPES.get(tensor.dtype.name, tensor.dtype.name) for name, tensor in tensors.items()}
    return operator.config(types, per_head=operator.quantized and _per_head(operator, tensors))


def _per_head(operator: Operator, tensors: dict[str, Any]) -> bool:
    """Return True if each head has its own scale; False while TensorRT has not computed shapes."""
    for i in range(operator.caches):
        count = tensors[f"scale_{i}"].shape_expr[0]
        if _open(count) or (_constant(count) not in (None, 1) and _open(tensors["cache_0"].shape_expr[1])):
            raise OptionError(f"{operator.name}: the number of heads and the number of values in scale_{i} must be "
                              "fixed, but one of them is dynamic; give one scale, or one for each head")  # fmt: skip
    return _constant(tensors["scale_0"].shape_expr[0]) not in (None, 1)


def _check_bytes(operator: Operator, tensors: dict[str, Any], bits: int) -> None:
    """Raise an error for rows of 4-bit elements that do not end at a full byte."""
    for i in range(operator.caches):
        size = tensors[f"cache_{i}"].shape_expr[3]
        if bits % 8 and (_open(size) or (_constant(size) or 0) * bits % 8):
            raise OptionError(f"{operator.name}: rows of cache_{i} hold {'?' if _open(size) else _constant(size)} "
                              f"elements of {bits} bits and do not end at a full byte; the number of elements must "
                              "be even")  # fmt: skip


def _open(size: Any) -> bool:
    """Return True if a size of a tensor is known only while the engine runs."""
    return not size.is_fake and not size.is_constant


def _constant(size: Any) -> int | None:
    """Return a fixed size; None if it is dynamic, or if TensorRT has not computed shapes yet."""
    return int(size.constant_value()) if not size.is_fake and size.is_constant else None


def _shapes(operator: Operator, tensors: dict[str, Any]) -> Shapes:
    batch, heads, capacity, _ = tensors["cache_0"].shape_expr
    length = tensors["update_0"].shape_expr[0 if operator.packed else 2]
    sizes = tuple(tensors[f"cache_{i}"].shape_expr[3] for i in range(operator.caches))
    return Shapes(batch, heads, capacity, length, sizes)
