"""Runs the network that TensorRT's parser made of a model, in NumPy, without a GPU.

Each layer computes what TensorRT documents for its class
(https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api/infer/Graph/LayerBase.html); undocumented
details were measured on TensorRT for RTX 1.7.1 in ``tests/compare/test_network.py``. Layers of this project's plugin
follow `trt_kvcache.importer.families.plugin_route`. They were tested only with a replacement for TensorRT, because
TensorRT for RTX has no plugins. Unknown layers are refused, not skipped.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.importer.protos import Array
from trt_kvcache.plugins.operators import Operator

_DTYPES: dict[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "INT64": np.int64, "INT32": np.int32,
    "INT8": np.int8, "UINT8": np.uint8, "BOOL": np.bool_, "FP8": ml_dtypes.float8_e4m3fn, "INT4": np.int8,
}  # fmt: skip
_ABSENT = (None,) * 6  # optional inputs that a layer does not have
_CONSTANTS = 1 << 31  # bytes of constants that are kept in float32; other constants are converted at each use


class NetworkError(TrtKvCacheError):
    """Raised if NumPy cannot compute a network on its inputs; the message names the layer."""


class UnknownLayerError(NetworkError):
    """Raised if a network has a layer that NumPy cannot compute here; the message names the layer."""


@dataclass(frozen=True, eq=False)
class Node:
    """A layer of the network.

    Attributes:
        op_type: type of the layer, such as ``"SLICE"``.
        layer: TensorRT's own object, of the class of its type.
        input: names of its input tensors; an empty name stands for an absent optional input.
        output: names of its output tensors.
        dtypes: dtypes of its outputs, by TensorRT's names, such as ``"HALF"``.
    """

    name: str
    op_type: str
    layer: Any
    input: tuple[str, ...]
    output: tuple[str, ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return f"layer '{self.name}' ({self.op_type}) of TensorRT's network"


class Network:
    """A parsed network that runs in NumPy. Floating-point tensors are float32, so that no rounding hides small faults.

    The network, its builder and its parser must live as long as this object. `trt` is the module that parsed the
    network. `updates` are the plugin's operators, by first output. Raises `UnknownLayerError` for unknown layers.
    """

    def __init__(self, network: Any, trt: Any, updates: Mapping[str, Operator] | None = None) -> None:
        self._room, self._updates = _CONSTANTS, updates or {}
        self._kinds = {getattr(trt.DataType, name, None): name for name in _DTYPES}
        self._classes = {n.lower(): getattr(trt, n) for n in dir(trt) if n.startswith("I") and n.endswith("Layer")}
        self._constants: dict[str, Array] = {}
        self._types = {t.name: self._kinds[t.dtype] for t in map(network.get_input, range(network.num_inputs))}
        self._outputs = [network.get_output(i).name for i in range(network.num_outputs)]
        nodes = [self._node(network.get_layer(i)) for i in range(network.num_layers)]
        # TensorRT represents an attention by two layers: the first has its inputs, the second computes its output.
        read = {n.name.removesuffix("Input"): n.input for n in nodes if n.op_type == "ATTENTION_INPUT"}
        outputs = ((n, n.name.removesuffix("Output")) for n in nodes)
        nodes = [replace(n, input=read[name]) if n.op_type == "ATTENTION_OUTPUT" else n for n, name in outputs]
        self.nodes = _ordered(nodes, self._types)
        tables = {node.input[0] for node in self.nodes if node.op_type == "GATHER"}
        others = {name for n in self.nodes for name in (n.input[1:] if n.op_type == "GATHER" else n.input)}
        self._tables = tables - others - {*self._outputs}  # a Gather reads few rows: only these rows become float32
        self._last = {name: at for at, node in enumerate(self.nodes) for name in (*node.output, *node.input)}

    def run(
        self, feeds: Mapping[str, Array], watch: Callable[[Node, Sequence[Array]], None] = lambda *_: None
    ) -> dict[str, Array]:
        """Run the network once on `feeds` (all inputs), and return all outputs by name, floats as float32.

        `watch` is called after each layer with its results. Raises `NetworkError` if a layer cannot run on its inputs.
        """
        values: dict[str, Array] = {name: _converted(feeds[name], kind) for name, kind in self._types.items()}
        for at, node in enumerate(self.nodes):
            read = [values.get(name) for name in node.input]
            try:
                with np.errstate(all="ignore"):  # values that are not finite are compared, without warnings
                    results = self._results(node, read)
                    if node.op_type != "CONSTANT":
                        results = [_converted(y, dtype) for y, dtype in zip(results, node.dtypes, strict=True)]
            except UnknownLayerError as error:
                raise UnknownLayerError(f"NumPy cannot compute {node}: {error}") from error
            except (ValueError, IndexError, TypeError, AttributeError, KeyError) as error:
                said = " ".join(str(error).split())
                raise NetworkError(f"{node} fails on inputs that the model accepts: {said}") from error
            values.update(zip(node.output, results, strict=True))
            watch(node, results)
            for name in {*node.input, *node.output}.difference(self._outputs):
                if self._last[name] <= at:
                    values.pop(name, None)
        return {name: values[name] for name in self._outputs}

    def _node(self, layer: Any) -> Node:
        kind = layer.type.name
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        names = tuple("" if t is None else t.name for t in map(layer.get_input, range(layer.num_inputs)))
        dtypes = tuple(self._kinds.get(t.dtype, "") for t in outputs)
        node = Node(layer.name, kind, layer, names, tuple(t.name for t in outputs), dtypes)
        if kind == "PLUGIN_V3" and outputs[0].name in self._updates:
            return node
        known = kind in _RUN or kind == "CONSTANT"
        if not known or "" in dtypes:
            what = f"gives {outputs[dtypes.index('')].dtype}" if known else f"has the type {kind}"
            raise UnknownLayerError(
                f"layer '{layer.name}' of TensorRT's network {what}, which NumPy cannot compute here"
            )
        layer.__class__ = self._classes[f"i{kind.replace('_', '').lower()}layer"]  # this gives access to its attributes
        return node

    def _results(self, node: Node, read: list[Any]) -> list[Any]:
        if node.op_type == "CONSTANT":
            return [self._constant(node)]
        if node.op_type == "PLUGIN_V3":
            return _plugin_update(self._updates[node.output[0]], read)
        results = _RUN[node.op_type](node.layer, [*read, *_ABSENT])
        return results if isinstance(results, list) else [results]

    def _constant(self, node: Node) -> Any:
        name, layer = node.output[0], node.layer
        if name in self._constants:
            return self._constants[name]
        values = _weights(layer.weights).reshape(tuple(layer.shape))
        if name in self._tables:
            return values
        values = _converted(values, node.dtypes[0])
        if values.nbytes <= self._room:
            self._room -= values.nbytes
            self._constants[name] = values
        return values


def _converted(given: Any, dtype: str) -> Any:
    kind = np.float32 if dtype in ("HALF", "BF16") else _DTYPES[dtype]
    return np.asarray(np.asarray(given) != 0 if dtype == "BOOL" else given).astype(kind, copy=False)


def _ordered(nodes: list[Node], inputs: Mapping[str, str]) -> tuple[Node, ...]:
    """Return the layers, each after the layers that it reads. TensorRT does not guarantee this order."""
    makers = {name: node for node in nodes for name in node.output}
    done, order = {*inputs, ""}, dict[int, Node]()
    for start in nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            if len(stack) > len(nodes):
                raise NetworkError(f"{node} reads its own output")
            if before := [makers[name] for name in node.input if name not in done]:
                stack.append(before[0])
            else:
                order[id(node)] = stack.pop()
                done.update(node.output)
    return tuple(order.values())


def _weights(weights: Any) -> Any:
    """Return the numbers of TensorRT's ``Weights``, which lie in the parser's memory.

    TensorRT gives Python no arrays of bfloat16, fp8 and int4. For these types, this reads the C struct
    ``nvinfer1::Weights`` (type, address, count) from the Python object's memory (pybind11), and checks the count.
    """
    if isinstance(weights, np.ndarray):
        return weights
    kind = weights.dtype.name
    struct = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value or 0
    _, address, count = map(int, (ctypes.c_int64 * 3).from_address(struct))
    if count != weights.size or not address:
        raise UnknownLayerError(f"weights of {kind} cannot be read in this version of TensorRT")
    size = (count + 1) // 2 if kind == "INT4" else count * np.dtype(_DTYPES[kind]).itemsize
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    if kind == "INT4":  # two in a byte, the first in the lower half
        return np.stack([raw << 4, raw], -1).reshape(-1)[:count].view(np.int8) >> 4
    return raw.view(_DTYPES[kind])


def _name(member: Any) -> str:
    return str(member).rsplit(".", 1)[-1]


def _axes(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(32) if mask >> i & 1)


def _ints(values: Any) -> list[int]:
    return [int(v) for v in np.atleast_1d(np.asarray(values))]


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _softmax(x: Array, axes: tuple[int, ...]) -> Array:
    """Return the softmax. Rows without a number above -inf give NaN, as in TensorRT."""
    highest = x.max(axis=axes, keepdims=True)
    powers = np.exp(x - np.where(np.isfinite(highest), highest, 0))
    return np.asarray(powers / powers.sum(axis=axes, keepdims=True))


def _attention(layer: Any, x: Sequence[Any]) -> Any:
    """Compute ``IAttention``, which does not scale Q ``[B, N, S, H]``. K, V: ``[B, M, T, H]``, where M divides N."""
    attention, (q, k, v, mask) = layer.attention, x[:4]
    for lengths in ("query_lengths", "key_value_lengths", "normalization_quantize_scale"):
        if getattr(attention, lengths, None) is not None:
            raise UnknownLayerError(f"it has {lengths}")
    (batch, heads, queries, size), groups = q.shape, q.shape[1] // k.shape[1]
    grouped = q.reshape(batch, k.shape[1], groups * queries, size)
    scores = (grouped @ np.swapaxes(k, -1, -2)).reshape(batch, heads, queries, k.shape[2])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    kind = _name(getattr(attention, "causal_kind", "UPPER_LEFT" if attention.causal else "NONE"))
    if kind != "NONE":
        offset = scores.shape[-1] - queries if kind == "LOWER_RIGHT" else 0
        sees = np.arange(scores.shape[-1]) <= np.arange(queries)[:, None] + offset
        scores = np.where(sees, scores, -np.inf)
    if _name(attention.norm_op) == "SOFTMAX":
        scores = _softmax(scores, (-1,))
    weights = scores.reshape(batch, k.shape[1], groups * queries, -1)
    return (weights @ v).reshape(batch, heads, queries, v.shape[-1])


def _slice(layer: Any, x: Sequence[Any]) -> Any:
    data = x[0]
    starts = _ints(tuple(layer.start) if x[1] is None else x[1])
    sizes = _ints(tuple(layer.shape) if x[2] is None else x[2])
    strides = _ints(tuple(layer.stride) if x[3] is None else x[3])
    axes = _ints(tuple(layer.axes or ()) if x[5] is None else x[5])
    mode = _name(layer.mode)
    for axis, start, size, stride in zip(axes or range(data.ndim), starts, sizes, strides, strict=True):
        at, length, rows = start + stride * np.arange(size), data.shape[axis], np.moveaxis(data, axis, 0)
        inside = (at >= 0) & (at < length)
        if mode == "STRICT_BOUNDS" and not inside.all():
            raise ValueError(
                f"it reads rows {start} to {start + stride * (size - 1)} of axis {axis}, which has {length} rows"
            )
        if mode == "REFLECT":
            period = max(2 * (length - 1), 1)
            at = np.abs((at + length - 1) % period - (length - 1))
        elif mode == "WRAP":
            at = at % length
        elif mode == "CLAMP":
            at = np.clip(at, 0, max(length - 1, 0))
        if mode == "FILL" and not inside.all():
            filled = np.full((size, *rows.shape[1:]), 0 if x[4] is None else x[4], data.dtype)
            filled[inside] = rows[at[inside]]
            rows = filled
        elif at.size and (np.diff(at) == 1).all():  # a slice copies no data
            rows = rows[int(at[0]) : int(at[-1]) + 1]
        else:
            rows = rows[at]
        data = np.moveaxis(rows, 0, axis)
    return data


def _shuffle(layer: Any, x: Sequence[Any]) -> Array:
    data = _transposed(x[0], layer.first_transpose)
    try:
        dims = list(layer.reshape_dims) if x[1] is None else _ints(x[1])
    except (TypeError, ValueError):  # no sizes are set
        dims = list(data.shape)
    if layer.zero_is_placeholder:
        dims = [data.shape[i] if d == 0 else d for i, d in enumerate(dims)]
    return _transposed(data.reshape(dims), layer.second_transpose)


def _transposed(data: Array, order: Any) -> Array:
    axes = tuple(order)[: data.ndim]
    return data.transpose(axes) if sorted(axes) == list(range(data.ndim)) else data


def _gather(layer: Any, x: Sequence[Any]) -> Any:
    data, indices = x[0], x[1].astype(np.int64)
    mode, shared = _name(layer.mode), layer.num_elementwise_dims
    bounds = data.shape[shared : shared + indices.shape[-1]] if mode == "ND" else data.shape[layer.axis]
    if indices.size and ((indices < -np.asarray(bounds)) | (indices >= bounds)).any():
        raise IndexError(f"it gathers rows {indices.min()} to {indices.max()} of a tensor with {bounds}")
    if mode == "ELEMENT":
        return np.take_along_axis(data, indices, layer.axis)

    def gathered(one: Any, at: Array) -> Any:
        return one[tuple(np.moveaxis(at, -1, 0))] if mode == "ND" else np.take(one, at, layer.axis - shared)

    if not shared:
        return gathered(data, indices)
    parts = [gathered(data[i], indices[i]) for i in np.ndindex(*data.shape[:shared])]
    return np.stack(parts).reshape(*data.shape[:shared], *parts[0].shape)


def _scatter(layer: Any, x: Sequence[Any]) -> Any:
    data, indices = x[0].copy(), x[1].astype(np.int64)
    if _name(layer.mode) == "ELEMENT":
        np.put_along_axis(data, indices, x[2], layer.axis)
    else:
        data[tuple(np.moveaxis(indices, -1, 0))] = x[2]
    return data


def _divide(a: Array, b: Array) -> Any:
    integers = a.dtype.kind != "f"  # integer quotients are rounded towards 0
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)) if integers else a / b


_ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "SUB": np.subtract, "DIV": _divide,
    "POW": np.power, "FLOOR_DIV": np.floor_divide, "AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor,
    "EQUAL": np.equal, "GREATER": np.greater, "LESS": np.less,
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {
    "EXP": np.exp, "LOG": np.log, "SQRT": np.sqrt, "RECIP": lambda x: 1 / x, "ABS": np.abs, "NEG": np.negative,
    "SIN": np.sin, "COS": np.cos, "TAN": np.tan, "SINH": np.sinh, "COSH": np.cosh, "ASIN": np.arcsin, "ACOS": np.arccos,
    "ATAN": np.arctan, "ASINH": np.arcsinh, "ACOSH": np.arccosh, "ATANH": np.arctanh, "CEIL": np.ceil,
    "FLOOR": np.floor, "ERF": _erf, "NOT": np.logical_not, "SIGN": np.sign, "ROUND": np.rint, "ISINF": np.isinf,
    "ISNAN": np.isnan,
}  # fmt: skip
_ACTIVATION: dict[str, Callable[[Any, float, float], Any]] = {
    "RELU": lambda x, a, b: np.maximum(x, 0),
    "SIGMOID": lambda x, a, b: 1 / (1 + np.exp(-x)),
    "TANH": lambda x, a, b: np.tanh(x),
    "LEAKY_RELU": lambda x, a, b: np.where(x >= 0, x, a * x),
    "ELU": lambda x, a, b: np.where(x >= 0, x, a * np.expm1(x)),
    "SELU": lambda x, a, b: b * np.where(x > 0, x, a * np.expm1(x)),
    "SOFTSIGN": lambda x, a, b: x / (1 + np.abs(x)),
    "SOFTPLUS": lambda x, a, b: a * np.log1p(np.exp(-np.abs(b * x))) + a * np.maximum(b * x, 0),
    "CLIP": lambda x, a, b: np.clip(x, a, b),
    "HARD_SIGMOID": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "SCALED_TANH": lambda x, a, b: a * np.tanh(b * x),
    "THRESHOLDED_RELU": lambda x, a, b: np.where(x > a, x, 0),
    "GELU_ERF": lambda x, a, b: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "GELU_TANH": lambda x, a, b: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
_REDUCE: dict[str, Any] = {"SUM": np.sum, "PROD": np.prod, "MAX": np.max, "MIN": np.min, "AVG": np.mean}


def _matrix_multiply(layer: Any, x: Sequence[Any]) -> Any:
    a, b = x[0], x[1]
    first, second = _name(layer.op0), _name(layer.op1)
    a = a[..., None, :] if first == "VECTOR" else np.swapaxes(a, -1, -2) if first == "TRANSPOSE" else a
    b = b[..., None] if second == "VECTOR" else np.swapaxes(b, -1, -2) if second == "TRANSPOSE" else b
    return np.squeeze(a @ b, tuple(axis for axis, kind in ((-2, first), (-1, second)) if kind == "VECTOR"))


def _fill(layer: Any, x: Sequence[Any]) -> Any:
    if _name(layer.operation) != "LINSPACE":
        raise UnknownLayerError(f"fills of the kind {_name(layer.operation)} are not supported")
    shape = list(layer.shape) if x[0] is None else _ints(x[0])
    first = layer.alpha if x[1] is None else x[1]
    steps = np.atleast_1d(layer.beta if x[2] is None else x[2])
    exact = np.int64 if np.asarray(first).dtype.kind in "iu" else np.float64
    places = zip(np.broadcast_to(steps, len(shape)), np.indices(shape, sparse=True), strict=True)
    return sum((step * place for step, place in places), np.full(shape, first, exact))


def _rotary(layer: Any, x: Sequence[Any]) -> Any:
    from onnx.reference.ops.op_rotary_embedding import rotary_embedding  # slow to import

    return rotary_embedding(x[0], x[1], x[2], x[3], layer.interleaved, layer.rotary_embedding_dim)


def _update(layer: Any, x: Sequence[Any]) -> Any:
    """Compute ``IKVCacheUpdateLayer``. Like TensorRT (measured), it silently drops an update beyond the capacity."""
    if _name(layer.cache_mode) != "LINEAR":
        raise UnknownLayerError(f"its mode is {_name(layer.cache_mode)}")
    packed = _name(layer.update_form).startswith("PACKED")
    return _plugin_update(Operator(UpdateForm.PACKED_NHD if packed else UpdateForm.PADDED), x)


def _plugin_update(operator: Operator, x: Sequence[Any]) -> list[Any]:
    """Compute the cache update of this project's plugin: one or two caches, padded or packed, linear or circular."""
    count, packed, circular = operator.caches, operator.packed, operator.mode is UpdateMode.CIRCULAR
    starts, (capacity, length) = _ints(x[2 * count]), (x[0].shape[2], x[count].shape[0 if packed else 2])
    bounds = _ints(x[2 * count + 1]) if packed else []
    spans = list(itertools.pairwise(bounds)) if packed else [(0, length)] * len(starts)
    scales = x[-count:] if operator.quantized else [None] * count
    presents = [cache.copy() for cache in x[:count]]
    for present, update, scale in zip(presents, x[count : 2 * count], scales, strict=True):
        new = np.swapaxes(update, 0, 1) if packed else update  # packed: [N, T, H]
        if scale is not None:
            kind = "INT8" if present.dtype == np.int8 else "FP8"
            new = _codes(new / scale.reshape(-1, 1, 1), kind).astype(present.dtype)
        for row, (start, (begin, end)) in enumerate(zip(starts, spans, strict=True)):
            legal = sorted(bounds) == bounds and 0 <= begin <= end <= length
            if legal and (circular or 0 <= start <= capacity - (end - begin)):
                first = max(begin, end - capacity)  # if several tokens go to one row of a ring, the last one is written
                rows = (start + np.arange(first - begin, end - begin)) % capacity
                present[row][:, rows] = (new if packed else new[row])[:, first:end]
    return presents


def _normalization(layer: Any, x: Sequence[Any]) -> Any:
    data, axes, shape = x[0], _axes(layer.axes), x[0].shape
    if layer.num_groups != 1:
        data, axes = data.reshape(shape[0], layer.num_groups, -1), (2,)
    mean = data.mean(axis=axes, keepdims=True)
    scaled = (data - mean) / np.sqrt(((data - mean) ** 2).mean(axis=axes, keepdims=True) + layer.epsilon)
    return scaled.reshape(shape) * x[1] + x[2]


def _topk(layer: Any, x: Sequence[Any]) -> list[Any]:
    (axis,), count = _axes(layer.axes), layer.k if x[1] is None else _ints(x[1])[0]
    order = np.argsort(-x[0] if _name(layer.op) == "MAX" else x[0], axis=axis, kind="stable")
    places = order.take(range(count), axis)
    return [np.take_along_axis(x[0], places, axis), places]


def _scales(layer: Any, data: Array, scale: Any) -> Any:
    """Return a (de)quantize layer's scales or zero points (None: 0), float32, in a shape that broadcasts to `data`."""
    scale = np.zeros((), np.float32) if scale is None else scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim == 1:
        return np.moveaxis(scale.reshape(-1, *[1] * (data.ndim - 1)), 0, layer.axis)
    for axis, (size, blocks) in enumerate(zip(data.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, -(-size // blocks), axis) if size != blocks else scale
    return scale[tuple(slice(n) for n in data.shape)]


def _codes(values: Array, kind: str) -> Any:
    if kind == "FP8":
        return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    limits = np.iinfo(np.dtype(_DTYPES[kind]))
    low, high = (-8, 7) if kind == "INT4" else (limits.min, limits.max)
    return np.clip(np.rint(values), low, high)


def _convolution(layer: Any, x: Sequence[Any]) -> Any:
    given = ((layer.kernel, x[1]), (layer.bias, x[2]))
    kernel, bias = (_weights(own).astype(np.float32) if read is None else read for own, read in given)
    if "SAME" in _name(layer.padding_mode):
        raise UnknownLayerError(f"its padding is {_name(layer.padding_mode)}")
    pads = [(0, 0), (0, 0), *zip(tuple(layer.pre_padding), tuple(layer.post_padding), strict=True)]
    sizes, dilations, rank = tuple(layer.kernel_size_nd), tuple(layer.dilation_nd), x[0].ndim - 2
    reach = tuple(d * (n - 1) + 1 for d, n in zip(dilations, sizes, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x[0], pads), reach, tuple(range(2, 2 + rank)))
    windows = windows[tuple(slice(None, None, step) for step in (1, 1, *tuple(layer.stride_nd), *dilations))]
    batch, groups, maps = len(windows), layer.num_groups, layer.num_output_maps
    windows = windows.reshape(batch, groups, -1, *windows.shape[2:])
    kernel = kernel.reshape(groups, maps // groups, -1, *sizes)
    out, inner = list(range(3, 3 + rank)), list(range(3 + rank, 3 + 2 * rank))
    total = np.einsum(windows, [0, 1, 2, *out, *inner], kernel, [1, 49, 2, *inner], [0, 1, 49, *out])
    total = total.reshape(batch, maps, *total.shape[3:])
    return total + bias.reshape(1, -1, *[1] * rank) if bias.size else total


def _cumulative(layer: Any, x: Sequence[Any]) -> Any:
    data, axis = x[0], _ints(x[1])[0]
    data = np.flip(data, axis) if layer.reverse else data
    total = np.cumsum(data, axis, dtype=data.dtype)
    total = total - data if layer.exclusive else total
    return np.flip(total, axis) if layer.reverse else total


def _assertion(layer: Any, x: Sequence[Any]) -> list[Any]:
    if not np.all(x[0]):
        raise ValueError(f"its assertion is false: {layer.message}")
    return []


_RUN: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    # `_node` changed the class of the layer. Since then, `layer.type` is the activation, such as RELU.
    "ACTIVATION": lambda layer, x: _ACTIVATION[_name(layer.type)](x[0], layer.alpha, layer.beta),
    "ASSERTION": _assertion,
    "ATTENTION_INPUT": lambda layer, x: [x[0]] * layer.num_outputs,  # nothing reads this
    "ATTENTION_OUTPUT": _attention,
    "CAST": lambda layer, x: np.trunc(x[0]) if "INT" in _name(layer.to_type) and x[0].dtype.kind == "f" else x[0],
    "CONCATENATION": lambda layer, x: np.concatenate([v for v in x if v is not None], layer.axis),
    "CONVOLUTION": _convolution,
    "CUMULATIVE": _cumulative,
    "DEQUANTIZE": lambda layer, x: (x[0].astype(np.float32) - _scales(layer, x[0], x[2])) * _scales(layer, x[0], x[1]),
    "EINSUM": lambda layer, x: np.einsum(layer.equation, *(v for v in x if v is not None)),
    "ELEMENTWISE": lambda layer, x: _ELEMENTWISE[_name(layer.op)](x[0], x[1]),
    "FILL": _fill,
    "GATHER": _gather,
    "IDENTITY": lambda _, x: x[0],
    "KV_CACHE_UPDATE": _update,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "NON_ZERO": lambda _, x: np.stack(np.nonzero(x[0])),
    "NORMALIZATION": _normalization,
    "ONE_HOT": lambda layer, x: np.moveaxis(
        np.where(x[0][..., None] == np.arange(_ints(x[2])[0]), x[1][1], x[1][0]), -1, layer.axis
    ),
    "PARAMETRIC_RELU": lambda _, x: np.where(x[0] >= 0, x[0], x[0] * x[1]),
    "QUANTIZE": lambda layer, x: _codes(x[0] / _scales(layer, x[0], x[1]), _name(layer.to_type)),
    "REDUCE": lambda layer, x: _REDUCE[_name(layer.op)](x[0], axis=_axes(layer.axes), keepdims=layer.keep_dims),
    "ROTARY_EMBEDDING": _rotary,
    "SCATTER": _scatter,
    "SELECT": lambda _, x: np.where(x[0], x[1], x[2]),
    "SHAPE": lambda _, x: np.array(x[0].shape, np.int64),
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": lambda layer, x: _softmax(x[0], _axes(layer.axes)),
    "SQUEEZE": lambda _, x: np.squeeze(x[0], None if x[1] is None else tuple(_ints(x[1]))),
    "TOPK": _topk,
    "UNARY": lambda layer, x: _UNARY[_name(layer.op)](x[0]),
    "UNSQUEEZE": lambda _, x: np.expand_dims(x[0], tuple(_ints(x[1]))),
}
