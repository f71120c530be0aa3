"""An exporter's embedding model: token ids in, embeddings out, on the CPU.

Each token's embedding depends on its id alone. So the model runs once for each new id, and later steps read the
embedding from a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import SessionError, UnsupportedModelError
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.importer.plan import TensorRole
from trt_kvcache.importer.planning.index_limits import table_rows
from trt_kvcache.importer.protos import elem_type_of, shape_of
from trt_kvcache.runtime.embeddings import check_range, check_width
from trt_kvcache.runtime.ort.calls import bind, open_on_cpu
from trt_kvcache.runtime.token_inputs import Array, Indices

__all__ = ["ModelEmbeddings"]

_IDS = (TensorProto.INT64, TensorProto.INT32)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_NEW, _OWN, _PLACE = np.arange(3, dtype=np.int8)  # an id not looked up yet; with its own embedding; a place without one
_PROBED = 8
_SAME = 1e-3  # relative to the scale: a normalization of rows may round differently in another batch


class ModelEmbeddings:
    """An embedding model, run by ONNX Runtime.

    Inputs beside the token ids, such as features of images, are empty here. For ids that mark the places of these
    features, some exporters' models return zeros; such ids have no embedding here, and the caller has to give it.

    Args:
        path: path of the model: int ``[B, S]`` in, float ``[B, S, H]`` out.
        tensor: the decoder's input.
        vocab: token ids are at most ``vocab - 1``.

    Raises:
        InvalidModelError, UnsupportedModelError: the model cannot be read, has other inputs or outputs, or does not
            embed each token alone.
        OptionError: its embeddings have another width than the decoder takes.
    """

    def __init__(self, path: Path, tensor: TensorRole, vocab: int) -> None:
        self._path = path
        model = load_source(path).proto
        constants = {t.name for t in model.graph.initializer}
        inputs = [v for v in model.graph.input if v.name not in constants]
        self._ids = self._find_ids(inputs)
        others = [v for v in inputs if v.name != self._ids.name]
        self._empty = {v.name: self._features(v, 0) for v in others}
        self._others = others
        output = self._find_output(model, tensor)
        self._output, self._output_dtype = output.name, helper.tensor_dtype_to_np_dtype(elem_type_of(output))
        self._rows = min(table_rows(model, self._ids.name) or vocab, vocab)
        # uses memory only where written
        self._table = np.empty((self._rows, int(tensor.shape[-1])), array_dtype(tensor.dtype))
        self._known = np.full(self._rows, _NEW)
        # One row is too little work for several threads, which would spin beside the decoder's.
        self._session = open_on_cpu(str(path), path, "give the table of embeddings instead", threads=1)
        self._probe()

    @property
    def rows(self) -> int:
        """See `Embeddings`."""
        return self._rows

    def missing(self, tokens: Sequence[int]) -> int | None:
        """See `Embeddings`."""
        outside = next((token for token in tokens if not 0 <= token < self._rows), None)
        if outside is not None or not len(tokens):
            return outside
        ids = np.array(tokens, np.int64)
        self._look_at(ids)
        unknown = ids[self._known[ids] == _PLACE]
        return int(unknown[0]) if unknown.size else None

    def look_up(self, tokens: Indices) -> Array:
        """See `Embeddings`."""
        check_range(tokens, self._rows)
        self._look_at(tokens)
        places = tokens[self._known[tokens] == _PLACE]
        if places.size:
            raise SessionError(f"token id {int(places[0])} has no embedding of its own in {self._path}")
        rows: Array = self._table[tokens]
        return rows

    def _look_at(self, tokens: Indices) -> None:
        """Look up new ids. A second run with NaN as features shows which ids have no embedding of their own.

        Raises:
            SessionError: the model failed.
        """
        new = np.unique(tokens[self._known[tokens] == _NEW])
        if not new.size:
            return
        try:
            bare = np.isnan(self._run(new[np.newaxis], self._filled(len(new)))[0].astype(np.float32)).any(axis=1)
        except SessionError:  # the model takes exactly as many features as there are places
            bare = np.array([self._is_place(token) for token in new.tolist()])
        if not bare.all():
            self._table[new[~bare]] = self._run(new[np.newaxis, ~bare], self._empty)[0]
        self._known[new] = np.where(bare, _PLACE, _OWN)

    def _is_place(self, token: int) -> bool:
        ids = np.array([[token]])
        with suppress(SessionError):
            return bool(np.isnan(self._run(ids, self._filled(1)).astype(np.float32)).any())
        with suppress(SessionError):
            self._run(ids, self._empty)
            return False
        return True

    def _filled(self, count: int) -> dict[str, Array]:
        return {v.name: self._features(v, count) for v in self._others}

    def _run(self, tokens: Indices, others: Mapping[str, Array]) -> Array:
        """Return embeddings from the model.

        Raises:
            SessionError: the model failed.
        """
        ids = np.ascontiguousarray(tokens, helper.tensor_dtype_to_np_dtype(self._ids.type.tensor_type.elem_type))
        binding = self._session.binding()
        for name, array in ((self._ids.name, ids), *others.items()):
            bind(binding.bind_input, name, array)
        embeds = np.empty((*ids.shape, self._table.shape[1]), self._output_dtype)
        bind(binding.bind_output, self._output, embeds)
        self._session.run_bound(binding)
        return embeds

    def _find_ids(self, inputs: Sequence[onnx.ValueInfoProto]) -> onnx.ValueInfoProto:
        """Return the input of token ids: the only integer input ``[B, S]``, or the one named ``input_ids``."""
        fitting = [v for v in inputs if v.type.tensor_type.elem_type in _IDS and len(shape_of(v) or ()) == 2]
        named = [v for v in fitting if v.name == "input_ids"] or fitting
        if len(named) != 1 or any(isinstance(size, int) for size in shape_of(named[0]) or ()):
            raise UnsupportedModelError(
                f"{self._path}: an embedding model has one input of token ids, int [batch, sequence] of any size; this "
                f"one takes {', '.join(map(_describe, inputs)) or 'nothing'}"
            )
        ids: onnx.ValueInfoProto = named[0]
        return ids

    def _features(self, value: onnx.ValueInfoProto, count: int) -> Array:
        """Return the value of an input beside the token ids: NaN for `count` places, empty for 0.

        Raises:
            UnsupportedModelError: the input cannot be empty.
        """
        shape, ids = shape_of(value) or (), shape_of(self._ids) or ()
        if all(isinstance(size, int) for size in shape) or {*shape} & {*ids} - {"?"}:
            raise UnsupportedModelError(
                f"{self._path}: input {_describe(value)} of the embedding model cannot be left empty, and there is "
                "nothing to give it; supported are token ids, and inputs such as the features of any number of images"
            )
        dtype = helper.tensor_dtype_to_np_dtype(elem_type_of(value))
        free = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
        sizes = [size if isinstance(size, int) else min(count, 1) for size in shape]
        sizes[free[0]] = count
        return np.full(sizes, np.nan if elem_type_of(value) in _FLOATS else 0, dtype)

    def _find_output(self, model: onnx.ModelProto, tensor: TensorRole) -> onnx.ValueInfoProto:
        """Return the output of embeddings: the only float output ``[B, S, H]``, or the one named ``inputs_embeds``."""
        fitting = [v for v in model.graph.output if elem_type_of(v) in _FLOATS and len(shape_of(v) or ()) == 3]
        named = [v for v in fitting if v.name == "inputs_embeds"] or fitting
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
            UnsupportedModelError: they do; or no id has an embedding of its own.
        """
        ids = np.arange(min(self._rows, _PROBED))
        self._look_at(ids)
        ids = ids[self._known[ids] == _OWN]
        if not ids.size:
            raise UnsupportedModelError(
                f"{self._path}: no token id has an embedding of its own: what the model's other inputs hold is in all "
                "of them; give the table of embeddings instead"
            )
        try:
            alone = self._run(ids[:, np.newaxis], self._empty)[:, 0].astype(np.float64)
            beside = self._run(np.stack([ids, ids[::-1]]), self._empty).astype(np.float64)
        except SessionError as error:
            raise UnsupportedModelError(f"{error}; it must embed any number of token ids") from None
        scale = np.abs(alone).max(initial=0.0)
        if not np.abs(beside - np.stack([alone, alone[::-1]])).max() <= _SAME * scale:
            raise UnsupportedModelError(
                f"{self._path}: a token's embedding depends on the others or on its place; an embedding model must "
                "give every token its own, wherever it stands"
            )


def _describe(value: onnx.ValueInfoProto) -> str:
    kind = TensorProto.DataType.Name(elem_type_of(value)).lower()
    return f"'{value.name}' ({kind} {list(shape_of(value) or ())})"
