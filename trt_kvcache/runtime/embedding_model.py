"""An exporter's embedding model: token ids in, embeddings out, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from trt_kvcache.errors import SessionError, UnsupportedModelError
from trt_kvcache.importer.index_limits import table_rows
from trt_kvcache.importer.plan import TensorRole
from trt_kvcache.importer.protos import elem_type_of, shape_of
from trt_kvcache.importer.source import load_source
from trt_kvcache.runtime.dtypes import array_dtype
from trt_kvcache.runtime.embeddings import check_width
from trt_kvcache.runtime.given import Array, Indices
from trt_kvcache.runtime.ort_calls import ORT_ERRORS, bind, one_line

__all__ = ["ModelEmbeddings"]

_IDS = (TensorProto.INT64, TensorProto.INT32)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_PROBED = 8
_SAME = 1e-3  # of the scale: a normalization of rows may round otherwise in another batch


class ModelEmbeddings:
    """A model run by ONNX Runtime.

    Inputs beside the token ids, such as the features of images, are given empty: their places in a prompt are for its
    caller to fill.

    Args:
        path: of the model: int ``[B, S]`` in, float ``[B, S, H]`` out.
        tensor: the decoder's input.

    Raises:
        InvalidModelError, UnsupportedModelError: it cannot be read, has other inputs or outputs, or does not embed each
            token alone.
        OptionError: its embeddings have another width than the decoder takes.
    """

    def __init__(self, path: Path, tensor: TensorRole) -> None:
        self._path, self._dtype = path, array_dtype(tensor.dtype)
        model = load_source(path).proto
        constants = {t.name for t in model.graph.initializer}
        inputs = [v for v in model.graph.input if v.name not in constants]
        self._ids = self._find_ids(inputs)
        self._empty = {v.name: self._empty_like(v) for v in inputs if v.name != self._ids.name}
        output = self._find_output(model, tensor)
        self._output, self._made = output.name, helper.tensor_dtype_to_np_dtype(elem_type_of(output))
        self._width = int(tensor.shape[-1])
        self._rows = table_rows(model, self._ids.name)
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors arrive as exceptions
        options.intra_op_num_threads = 1  # a row is too little for several, which would spin beside the decoder's
        try:
            self._session: Any = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except ORT_ERRORS as error:
            raise UnsupportedModelError(
                f"{path}: ONNX Runtime {ort.__version__} cannot run it on the CPU: {one_line(error)}; give the table "
                "of embeddings instead"
            ) from None
        self._probe()

    @property
    def rows(self) -> int | None:
        """See `Embeddings`."""
        return self._rows

    def look_up(self, tokens: Indices) -> Array:
        """See `Embeddings`."""
        ids = np.ascontiguousarray(tokens, helper.tensor_dtype_to_np_dtype(self._ids.type.tensor_type.elem_type))
        binding = self._session.io_binding()
        for name, array in ((self._ids.name, ids), *self._empty.items()):
            bind(binding.bind_input, name, array)
        made = np.empty((*ids.shape, self._width), self._made)
        bind(binding.bind_output, self._output, made)
        try:
            self._session.run_with_iobinding(binding)
        except (*ORT_ERRORS, RuntimeError) as error:
            raise SessionError(f"{self._path} failed: {one_line(error)}") from None
        return made.astype(self._dtype, copy=False)

    def _find_ids(self, inputs: Sequence[onnx.ValueInfoProto]) -> onnx.ValueInfoProto:
        """The input of token ids: the only one of integers ``[B, S]``, or the one that is called so."""
        found = [v for v in inputs if v.type.tensor_type.elem_type in _IDS and len(shape_of(v) or ()) == 2]
        named = [v for v in found if v.name == "input_ids"] or found
        if len(named) != 1 or any(isinstance(size, int) for size in shape_of(named[0]) or ()):
            raise UnsupportedModelError(
                f"{self._path}: an embedding model has one input of token ids, int [batch, sequence] of any size; this "
                f"one takes {', '.join(map(_describe, inputs)) or 'nothing'}"
            )
        ids: onnx.ValueInfoProto = named[0]
        return ids

    def _empty_like(self, value: onnx.ValueInfoProto) -> Array:
        """Nothing, in the shape of an input beside the token ids.

        Raises:
            UnsupportedModelError: it cannot be empty.
        """
        shape, ids = shape_of(value) or (), shape_of(self._ids) or ()
        if all(isinstance(size, int) for size in shape) or {*shape} & {*ids} - {"?"}:
            raise UnsupportedModelError(
                f"{self._path}: input {_describe(value)} of the embedding model cannot be left empty, and there is "
                "nothing to give it; supported are token ids, and inputs such as the features of any number of images"
            )
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        return np.zeros([size if isinstance(size, int) else 0 for size in shape], dtype)

    def _find_output(self, model: onnx.ModelProto, tensor: TensorRole) -> onnx.ValueInfoProto:
        """The embeddings: the only float output ``[B, S, H]``."""
        found = [v for v in model.graph.output if elem_type_of(v) in _FLOATS and len(shape_of(v) or ()) == 3]
        named = [v for v in found if v.name == "inputs_embeds"] or found
        if len(named) != 1:
            raise UnsupportedModelError(
                f"{self._path}: an embedding model gives float [batch, sequence, width]; this one gives "
                f"{', '.join(map(_describe, model.graph.output))}"
            )
        width = (shape_of(named[0]) or ())[-1]
        if isinstance(width, int):
            check_width(width, tensor, str(self._path))
        output: onnx.ValueInfoProto = named[0]
        return output

    def _probe(self) -> None:
        """Refuse a model whose embeddings depend on more than the token.

        Raises:
            UnsupportedModelError: see above.
        """
        ids = np.arange(min(self._rows or 2, _PROBED))
        try:
            alone = self.look_up(ids[:, None])[:, 0].astype(np.float64)
            beside = self.look_up(np.stack([ids, ids[::-1]])).astype(np.float64)
        except SessionError as error:
            raise UnsupportedModelError(f"{error}; it must embed token ids of any number, and no images") from None
        scale = np.abs(alone).max(initial=0.0)
        if not np.abs(beside - np.stack([alone, alone[::-1]])).max() <= _SAME * scale:
            raise UnsupportedModelError(
                f"{self._path}: a token's embedding depends on the others or on its place; an embedding model must "
                "give every token its own, wherever it stands"
            )


def _describe(value: onnx.ValueInfoProto) -> str:
    kind = TensorProto.DataType.Name(elem_type_of(value)).lower()
    return f"'{value.name}' ({kind} {list(shape_of(value) or ())})"
