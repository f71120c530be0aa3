"""Embeddings of token ids, for models that take embeddings: from a table, or from an exporter's model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.files import open_regular
from trt_kvcache.importer.plan import CachePlan, TensorRole
from trt_kvcache.runtime.embedding_files import scaled_by
from trt_kvcache.runtime.token_inputs import Array, Embeds, Indices

__all__ = [
    "Embeddings",
    "EmbeddingsSource",
    "TableEmbeddings",
    "check_range",
    "check_width",
    "embed_step",
    "embedded_input",
    "is_float",
    "open_embeddings",
]

EmbeddingsSource = str | os.PathLike[str] | Array | None
"""A caller's embeddings: a path, an array ``[V, H]``, or None."""

_WHAT = "an .onnx model (token ids in, embeddings out), a table [V, H] as .npy or .safetensors, or an array [V, H]"


class Embeddings(Protocol):
    """Looks up the embeddings of token ids."""

    @property
    def rows(self) -> int:
        """Number of ids: token ids are 0 to ``rows - 1``."""
        ...

    def missing(self, tokens: Sequence[int]) -> int | None:
        """Return the first token without an embedding of its own: an unknown id, or the place of an image or sound."""
        ...

    def look_up(self, tokens: Indices) -> Array:
        """Return embeddings ``[R, S, H]`` of token ids int64 ``[R, S]``, in the decoder's dtype.

        Raises:
            SessionError: a token is `missing`, or the embedding model failed.
        """
        ...


class TableEmbeddings:
    """A table with a row for each token.

    Args:
        table: ``[V, H]`` of any float type, scaled as the decoder expects.
        tensor: the decoder's input.
        name: name of the table, for messages.

    Raises:
        OptionError: the table has another shape or type.
    """

    def __init__(self, table: Array, tensor: TensorRole, name: str = "the table of embeddings") -> None:
        if table.ndim != 2 or not is_float(table.dtype):
            raise OptionError(f"{name} is {table.dtype} {list(table.shape)}; embeddings are a float table [V, H]")
        check_width(table.shape[1], tensor, f"{name} {list(table.shape)}")
        self._table, self._dtype = table, array_dtype(tensor.dtype)

    @property
    def rows(self) -> int:
        """Number of rows, V."""
        return int(self._table.shape[0])

    def missing(self, tokens: Sequence[int]) -> int | None:
        """See `Embeddings`."""
        return next((token for token in tokens if not 0 <= token < self.rows), None)

    def look_up(self, tokens: Indices) -> Array:
        """See `Embeddings`."""
        check_range(tokens, self.rows)
        rows: Array = self._table[tokens].astype(self._dtype, copy=False)
        return rows


def open_embeddings(source: EmbeddingsSource, plan: CachePlan, vocab: int) -> Embeddings | None:
    """Open the table or model that embeds token ids; None for models that take ids.

    Args:
        source: a path; ``FILE:NAME`` names a tensor in a ``.safetensors``. Or an array ``[V, H]``.
        plan: plan of the decoder.
        vocab: the decoder's token ids are 0 to ``vocab - 1``.

    Raises:
        OptionError: the model takes embeddings and there is no source, or it takes ids and there is one; or the two do
            not fit.
        ModelError: `source` is a model that cannot be used for this.
    """
    tensor = embedded_input(plan)
    if tensor is None:
        if source is not None:
            raise OptionError("embeddings are given, and the model takes token ids; leave them out")
        return None
    if source is None:
        raise OptionError(
            f"the model takes embeddings (input '{tensor.name}', {tensor.dtype} {list(tensor.shape)}), and nothing "
            f"says how token ids become these: give --embeddings: {_WHAT}"
        )
    if not isinstance(source, (str, os.PathLike)):
        return TableEmbeddings(np.asarray(source), tensor)
    path, name = _split(os.fspath(source))
    suffix = path.suffix.lower()
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file of embeddings")
    if suffix == ".onnx":
        from trt_kvcache.runtime.embedding_model import ModelEmbeddings

        return ModelEmbeddings(path, tensor, vocab)
    if suffix == ".npy":
        return TableEmbeddings(_read_npy(path), tensor, str(path))
    if suffix == ".safetensors":
        if (setting := scaled_by(path)) is not None:
            raise OptionError(
                f"{path}: the checkpoint's model scales embeddings ({setting} in config.json), and nothing says "
                "whether the decoder takes them scaled or scales them itself; give the table as it takes them, as .npy "
                "or as an array, or the exporter's embedding model"
            )
        return TableEmbeddings(*_read_safetensors(path, name, tensor))
    raise OptionError(f"{path}: cannot be read as embeddings; supported: {_WHAT}")


def embedded_input(plan: CachePlan) -> TensorRole | None:
    """Return the input of embeddings, for a model that takes embeddings instead of tokens; else None."""
    return next((t for t in plan.tensors if t.io == "input" and t.embedded), None)


def embed_step(embeddings: Embeddings, tokens: Indices, starts: Sequence[int], waiting: Sequence[Embeds]) -> Array:
    """Return the embeddings of a step ``[R, S, H]``: the caller's, and looked-up ones for other tokens.

    Args:
        embeddings: looks ids up.
        tokens: int64 ``[R, S]``.
        starts: index of the first token of each row in its sequence.
        waiting: the caller's embeddings, by row.
    """
    if not any(len(part.at) for part in waiting):
        return embeddings.look_up(tokens)
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
    if not known.all():  # ids under the caller's embeddings may have no embedding
        embeds[~known] = embeddings.look_up(tokens[~known][np.newaxis])[0]
    return embeds


def check_range(tokens: Indices, rows: int) -> None:
    """Refuse ids outside of 0 to ``rows - 1``: NumPy would count negative ids from the end.

    Raises:
        SessionError: an id is outside.
    """
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < rows:
        wrong = tokens[(tokens < 0) | (tokens >= rows)]
        raise SessionError(f"token id {int(wrong[0])} has no embedding; there are those of 0 to {rows - 1}")


def check_width(width: int, tensor: TensorRole, what: str) -> None:
    """Refuse embeddings of another width than the decoder takes.

    Raises:
        OptionError: the widths differ.
    """
    if width != tensor.shape[-1]:
        raise OptionError(
            f"{what}: embeddings of width {width}, and the model's input '{tensor.name}' {list(tensor.shape)} takes "
            f"{tensor.shape[-1]}; give those of this model"
        )


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return True for a float type that embeddings may have."""
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _split(text: str) -> tuple[Path, str]:
    """Split ``FILE:NAME`` into a path and the name of a tensor."""
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
    """The table of that name; else the only table, or the one named ``embed_tokens.weight`` as in checkpoints."""
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
                    + (f"no tensor {name!r}" if name else f"{len(wanted)} tables, and nothing says which is meant")
                    + f"; name one as {path.name}:NAME, such as {', '.join(fitting[:4]) or 'none here'}"
                )
            return file.get_tensor(wanted[0]), tensor, f"{path}:{wanted[0]}"
    except (OSError, SafetensorError) as error:
        raise OptionError(f"{path}: cannot be read as safetensors: {error}") from None
