"""Embeddings of token ids, for models that take embeddings: from a table, or from an exporter's model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import OptionError, SessionError, UnsupportedModelError
from trt_kvcache.files import export_suffix, is_inside, open_regular, read_object
from trt_kvcache.importer.cache_plan import CachePlan, TensorRole
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.importer.interface import table_rows
from trt_kvcache.importer.protos import elem_type_of, shape_of
from trt_kvcache.runtime.ort.calls import bind, open_on_cpu
from trt_kvcache.runtime.token_inputs import Array, Embeds, Indices

EmbeddingsSource = str | os.PathLike[str] | Array | None
"""A caller's embeddings: a path, an array ``[V, H]``, or None."""

_WHAT = "an .onnx model (token ids in, embeddings out), a table [V, H] as .npy or .safetensors, or an array [V, H]"


class Embeddings:
    """A table with a row for each token id, for models that take embeddings.

    `table` is ``[V, H]`` of any float type, scaled as the decoder expects. Raises `OptionError` for another shape or
    type.
    """

    def __init__(self, table: Array, tensor: TensorRole, name: str = "the table of embeddings") -> None:
        if table.ndim != 2 or not is_float(table.dtype):
            raise OptionError(f"{name} is {table.dtype} {list(table.shape)}; embeddings are a float table [V, H]")
        check_width(table.shape[1], tensor, f"{name} {list(table.shape)}")
        self._table, self._dtype, self._name = table, array_dtype(tensor.dtype), name

    @property
    def rows(self) -> int:
        """Number of rows of the table: token ids are 0 to ``rows - 1``."""
        return int(self._table.shape[0])

    def missing(self, tokens: Sequence[int]) -> int | None:
        """Return the first token without an embedding (unknown, or a placeholder for an image or sound), or None."""
        outside = next((token for token in tokens if not 0 <= token < self.rows), None)
        if outside is not None or not len(tokens):
            return outside
        places = self._places(np.array(tokens, np.int64))
        return int(places[0]) if places.size else None

    def look_up(self, tokens: Indices) -> Array:
        """Return embeddings ``[R, S, H]`` of token ids int64 ``[R, S]``, in the decoder's dtype.

        Raises `SessionError` if a token is `missing`, or the embedding model failed.
        """
        wrong = tokens[(tokens < 0) | (tokens >= self.rows)]  # NumPy would count negative ids from the end
        if wrong.size:
            raise SessionError(f"token id {int(wrong[0])} has no embedding; the table has 0 to {self.rows - 1}")
        places = self._places(tokens)
        if places.size:
            raise SessionError(
                f"token id {int(places[0])} has no embedding of its own in {self._name}: it stands for an image or "
                "sound; give embeddings for it"
            )
        return self._table[tokens].astype(self._dtype, copy=False)

    def _places(self, tokens: Indices) -> Indices:
        """Return the token ids that are placeholders for images or sound, and therefore have no embedding."""
        return tokens[:0].ravel()


def open_embeddings(source: EmbeddingsSource, plan: CachePlan, vocab: int) -> Embeddings | None:
    """Open the table or model that embeds token ids; None for models that take ids.

    Args:
        source: a path; ``FILE:NAME`` names a tensor in a ``.safetensors``. Or an array ``[V, H]``.
        plan: plan of the decoder.
        vocab: the decoder's token ids are 0 to ``vocab - 1``.

    Raises:
        OptionError: the source is missing, not needed, or of another shape or type than the model takes.
        ModelError: `source` is a model that cannot embed token ids.
    """
    tensor = embedded_input(plan)
    if tensor is None:
        if source is not None:
            raise OptionError("embeddings are given, but the model takes token ids; leave the embeddings out")
        return None
    if source is None:
        raise OptionError(
            f"the model takes embeddings (input '{tensor.name}', {tensor.dtype} {list(tensor.shape)}), and it is "
            f"unknown how token ids become embeddings: give --embeddings: {_WHAT}"
        )
    if not isinstance(source, (str, os.PathLike)):
        return Embeddings(np.asarray(source), tensor)
    path, name = _split(os.fspath(source))
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file of embeddings")
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        return ModelEmbeddings(path, tensor, vocab)
    if suffix == ".npy":
        return Embeddings(_read_npy(path), tensor, str(path))
    if suffix == ".safetensors":
        if (setting := scaled_by(path)) is not None:
            raise OptionError(
                f"{path}: the checkpoint's model scales embeddings ({setting} in config.json), and it is unknown "
                "whether the decoder expects scaled embeddings or scales them itself; give the table as the "
                "decoder expects it, as .npy or as an array, or give the exporter's embedding model"
            )
        return Embeddings(*_read_safetensors(path, name, tensor))
    raise OptionError(f"{path}: cannot be read as embeddings; supported: {_WHAT}")


def embedded_input(plan: CachePlan) -> TensorRole | None:
    """Return the model's input for embeddings; None if the model takes token ids."""
    return next((t for t in plan.tensors if t.io == "input" and t.embedded), None)


def embed_step(embeddings: Embeddings, tokens: Indices, starts: Sequence[int], waiting: Sequence[Embeds]) -> Array:
    """Return the embeddings of a step ``[R, S, H]`` for tokens ``[R, S]``: the caller's if given, else the table's.

    `starts` has the index of each row's first token in its sequence; `waiting` the caller's embeddings of each row.
    """
    length = tokens.shape[1]
    parts = [part.within(start, start + length) for part, start in zip(waiting, starts, strict=True)]
    known = np.zeros(tokens.shape, np.bool_)
    for row, part, start in zip(known, parts, starts, strict=True):
        row[part.at - start] = True
    if not known.any():
        return embeddings.look_up(tokens)
    rows = np.concatenate([part.rows for part in parts if len(part.at)])
    embeds = np.empty((*tokens.shape, rows.shape[1]), rows.dtype)
    embeds[known] = rows
    if not known.all():  # ids for which the caller gives embeddings may have no embedding in the table
        embeds[~known] = embeddings.look_up(tokens[~known][np.newaxis])[0]
    return embeds


def check_width(width: int, tensor: TensorRole, what: str) -> None:
    """Raise `OptionError` if embeddings have another width than the decoder takes. `what` names the embeddings."""
    if width != tensor.shape[-1]:
        raise OptionError(
            f"{what}: the embeddings have width {width}, but the model's input '{tensor.name}' {list(tensor.shape)} "
            f"takes {tensor.shape[-1]}; give the embeddings of this model"
        )


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return True if embeddings may have this dtype."""
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _split(text: str) -> tuple[Path, str]:
    head, _, name = text.rpartition(":")
    return (Path(head), name) if head.lower().endswith(".safetensors") else (Path(text), "")


def _read_npy(path: Path) -> Array:
    try:
        open_regular(path).close()
        table: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise OptionError(f"{path}: cannot be read as an .npy table: {error}") from None
    return table


def _read_safetensors(path: Path, name: str, tensor: TensorRole) -> tuple[Array, TensorRole, str]:
    """Read the table called `name`; if `name` is empty, read ``embed_tokens.weight``, or the only table."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
            tables = [key for key, shape in shapes.items() if len(shape) == 2]
            wanted = [name] if name else [k for k in tables if k.endswith("embed_tokens.weight")] or tables
            if len(wanted) != 1 or wanted[0] not in shapes:
                fitting = [k for k in tables if shapes[k][1] == tensor.shape[-1]] or tables
                raise OptionError(
                    f"{path}: "
                    + (f"no tensor {name!r}" if name else f"{len(wanted)} tables, and it is unclear which one is meant")
                    + f"; name one as {path.name}:NAME, such as {', '.join(fitting[:4]) or 'none here'}"
                )
            return file.get_tensor(wanted[0]), tensor, f"{path}:{wanted[0]}"
    except (OSError, SafetensorError) as error:
        raise OptionError(f"{path}: cannot be read as safetensors: {error}") from None


def find_embeddings(model: Path) -> Path | None:
    """Return the path of the embedding model in the folder of a decoder or engine, or None."""
    return next((path for path in _candidates(model) if path.is_file()), None)


def _candidates(model: Path) -> Iterator[Path]:
    folder = model if model.is_dir() else model.parent
    for suffix in dict.fromkeys((export_suffix(model), "")):
        yield folder / f"embed_tokens{suffix}.onnx"
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is no config, or it has another layout
        name = read_object(folder / "genai_config.json")["model"]["embedding"]["filename"]
        if is_inside(name):
            yield folder / name
    yield from (folder / name for name in ("embedding.onnx", "embeddings.onnx", "embedding/model.onnx"))
    if folder.absolute().name == "decoder":
        yield folder.absolute().parent / "embedding" / "model.onnx"


def scaled_by(checkpoint: Path) -> str | None:
    """Return the setting in a checkpoint's ``config.json`` that scales embeddings; None if there is none.

    In transformers 5.23, Gemma, MiniCPM3 and BART scale embeddings when they look tokens up, while Granite scales them
    later. So the setting alone does not tell whether an exported decoder takes scaled embeddings.
    """
    try:
        config = read_object(checkpoint.parent / "config.json")
    except (OSError, ValueError):
        return None
    parts = [config, config.get("text_config")]
    for part in (p for p in parts if isinstance(p, dict)):
        kind = part.get("model_type")
        if isinstance(kind, str) and "gemma" in kind:
            return f"model_type {kind!r}"
        for name in ("embedding_multiplier", "scale_emb", "scale_embedding"):
            value = part.get(name)
            if value is True or value not in (None, False, 1):
                return f"{name} {json.dumps(value)}"
    return None


_IDS = (TensorProto.INT64, TensorProto.INT32)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_NEW, _OWN, _PLACE = np.arange(3, dtype=np.int8)  # a token id: not run yet; has an embedding; is a placeholder
_PROBED = 8
_SAME = 1e-3  # largest relative difference: a normalization of rows may round differently in another batch


class ModelEmbeddings(Embeddings):
    """A table of embeddings that is filled by running an exporter's embedding model in ONNX Runtime.

    The model takes ids ``[B, S]`` and returns float ``[B, S, H]``. Its other inputs, such as features of images, get
    empty arrays. A placeholder id marks where such features go; it has no embedding here, and the caller must give one.

    Raises:
        InvalidModelError, UnsupportedModelError: the model cannot be read, has other inputs or outputs, or does not
            embed each token alone.
        OptionError: the model's embeddings have another width than the decoder takes.
    """

    def __init__(self, path: Path, tensor: TensorRole, vocab: int) -> None:
        self._path, self._name, self._dtype = path, str(path), array_dtype(tensor.dtype)
        model = load_source(path).proto
        constants = {t.name for t in model.graph.initializer}
        inputs = [v for v in model.graph.input if v.name not in constants]
        self._ids = self._find_ids(inputs)
        self._others = [v for v in inputs if v.name != self._ids.name]
        self._empty = self._filled(0)
        output = self._find_output(model, tensor)
        self._output, self._output_dtype = output.name, helper.tensor_dtype_to_np_dtype(elem_type_of(output))
        rows = min(table_rows(model, self._ids.name) or vocab, vocab)
        self._table = np.empty((rows, int(tensor.shape[-1])), self._dtype)  # takes memory only where written
        self._known = np.full(rows, _NEW)
        # One row is too little work for several threads, which would spin beside the decoder's.
        self._session = open_on_cpu(str(path), path, "give the table of embeddings instead", threads=1)
        self._probe()

    def _places(self, tokens: Indices) -> Indices:
        self._look_at(tokens)
        places: Indices = tokens[self._known[tokens] == _PLACE]
        return places

    def _look_at(self, tokens: Indices) -> None:
        """Run the embedding model for ids that are not in the table yet, and fill in their embeddings.

        Features are first NaN: an id whose embedding becomes NaN is a placeholder for features.
        """
        new = np.unique(tokens[self._known[tokens] == _NEW])
        if not new.size:
            return
        try:
            bare = np.isnan(self._run(new[np.newaxis], self._filled(len(new)))[0].astype(np.float32)).any(axis=1)
        except SessionError:  # the model takes exactly as many features as there are placeholders
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
                f"{self._path}: an embedding model must have exactly one input of token ids, int [batch, sequence] "
                f"of any size; this one takes {', '.join(map(_describe, inputs)) or 'nothing'}"
            )
        return named[0]

    def _features(self, value: onnx.ValueInfoProto, count: int) -> Array:
        """Return `count` features of NaN for an input other than token ids. Refuse an input that cannot be empty."""
        shape, ids = shape_of(value) or (), shape_of(self._ids) or ()
        if all(isinstance(size, int) for size in shape) or {*shape} & {*ids} - {"?"}:
            raise UnsupportedModelError(
                f"{self._path}: input {_describe(value)} of the embedding model needs values, and the session has "
                "none for it; supported inputs are token ids, and inputs that may be empty, such as the features "
                "of any number of images"
            )
        dtype = helper.tensor_dtype_to_np_dtype(elem_type_of(value))
        free = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
        sizes = [size if isinstance(size, int) else min(count, 1) for size in shape]
        sizes[free[0]] = count
        return np.full(sizes, np.nan if elem_type_of(value) in _FLOATS else 0, dtype)

    def _find_output(self, model: onnx.ModelProto, tensor: TensorRole) -> onnx.ValueInfoProto:
        """Return the output for embeddings: the only float output ``[B, S, H]``, or the one named ``inputs_embeds``."""
        outputs: list[onnx.ValueInfoProto] = [v for v in model.graph.output if elem_type_of(v) in _FLOATS]
        fitting = [v for v in outputs if len(shape_of(v) or ()) == 3]
        named = [v for v in fitting if v.name == "inputs_embeds"] or fitting
        if len(named) != 1:
            raise UnsupportedModelError(
                f"{self._path}: an embedding model must return float [batch, sequence, width]; this one returns "
                f"{', '.join(map(_describe, model.graph.output))}"
            )
        width = (shape_of(named[0]) or ())[-1]
        if isinstance(width, int):
            check_width(width, tensor, str(self._path))
        return named[0]

    def _probe(self) -> None:
        """Raise `UnsupportedModelError` if a token's embedding depends on other tokens or on its position."""
        ids = np.arange(min(self.rows, _PROBED))
        self._look_at(ids)
        ids = ids[self._known[ids] == _OWN]
        if not ids.size:
            raise UnsupportedModelError(
                f"{self._path}: no token id has an embedding of its own: the model's other inputs change all of "
                "them; give the table of embeddings instead"
            )
        try:
            alone = self._run(ids[:, np.newaxis], self._empty)[:, 0].astype(np.float64)
            beside = self._run(np.stack([ids, ids[::-1]]), self._empty).astype(np.float64)
        except SessionError as error:
            raise UnsupportedModelError(f"{error}; the embedding model must take any number of token ids") from None
        scale = np.abs(alone).max(initial=0.0)
        if not np.abs(beside - np.stack([alone, alone[::-1]])).max() <= _SAME * scale:
            raise UnsupportedModelError(
                f"{self._path}: a token's embedding depends on the other tokens or on its position; an embedding "
                "model must return the same embedding for a token at every position"
            )


def _describe(value: onnx.ValueInfoProto) -> str:
    kind = TensorProto.DataType.Name(elem_type_of(value)).lower()
    return f"'{value.name}' ({kind} {list(shape_of(value) or ())})"
