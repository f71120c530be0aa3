"""Decoders in two forms: token ids in, as exported, and the same without its embedding, which the caller computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from graphs import Graph
from onnx import TensorProto, helper, numpy_helper
from runtime.engines import runner_on

from trt_kvcache import DecodeSession, PlanOptions

MODELS = Path(__file__).parents[1] / "models"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Forms:
    """One decoder.

    Attributes:
        ids, embeds: the model file of each form.
        table: ``[V, H]``.
    """

    ids: Path
    embeds: Path
    table: Array


def cut(source: Path, folder: Path) -> Forms:
    """Write both forms of a model whose token ids go into one Gather."""
    model = onnx.load(source)
    ids, embeds = folder / "ids.onnx", folder / "embeds.onnx"
    onnx.save(model, ids)
    (gather,) = [n for n in model.graph.node if "input_ids" in n.input]
    assert gather.op_type == "Gather"
    table = next(t for t in model.graph.initializer if t.name == gather.input[0])
    tokens = next(v for v in model.graph.input if v.name == "input_ids")
    sizes = [d.dim_param or d.dim_value for d in tokens.type.tensor_type.shape.dim]
    given = helper.make_tensor_value_info("inputs_embeds", table.data_type, [*sizes, table.dims[1]])
    model.graph.node.remove(gather)
    model.graph.input.remove(tokens)
    model.graph.input.insert(0, given)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == gather.output[0]:
                node.input[i] = "inputs_embeds"
    kept = [v for v in model.graph.value_info if v.name != gather.output[0]]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    found = numpy_helper.to_array(table).copy()
    model.graph.initializer.remove(table)
    onnx.save(model, embeds)
    return Forms(ids, embeds, found)


def opened(model: Path, device: str, **more: Any) -> DecodeSession:
    """A session on ONNX Runtime, or on a fake GPU with TensorRT's rules: 3 rows, 8 tokens per step."""
    return DecodeSession(runner_on(device, model, PlanOptions(capacity=64), max_batch=3, max_chunk=8), **more)


class Recomputed:
    """The model as exported, caches that grow, in ONNX Runtime: the whole text again for every token, and no cache.

    Args:
        model: that takes embeddings or token ids, positions ``[planes, B, S]`` or ``[B, S]``, and a padding mask.
    """

    def __init__(self, model: Path) -> None:
        self._session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        self._inputs = self._session.get_inputs()

    def logits(self, embeds: Array, places: Array) -> Array:
        """``[V]`` after tokens with embeddings ``[S, H]``, or ids ``[S]``, at positions ``[3, S]``."""
        feeds = {}
        for value in self._inputs:
            if value.name in ("inputs_embeds", "input_ids"):
                feeds[value.name] = embeds[np.newaxis]
            elif value.name == "attention_mask":
                feeds[value.name] = np.ones((1, len(embeds)), np.int64)
            elif value.name == "position_ids":
                feeds[value.name] = (places[:, np.newaxis] if len(value.shape) == 3 else places[:1]).astype(np.int64)
            else:
                shape = [0 if axis == 2 else 1 if axis == 0 else size for axis, size in enumerate(value.shape)]
                shape = [16 if isinstance(size, str) else size for size in shape]
                feeds[value.name] = np.zeros(shape, embeds.dtype if embeds.dtype.kind == "f" else np.float32)
        found: Array = self._session.run(["logits"], feeds)[0][0, -1]
        return found.astype(np.float64)

    def greedy(self, embeds: Array, places: Array, table: Array, count: int) -> list[int]:
        """The likeliest tokens after a prompt; each stands after the largest position before it."""
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(int(self.logits(embeds, places).argmax()))
            embeds = np.concatenate([embeds, table[tokens[-1:]]])
            places = np.concatenate([places, np.full((3, 1), places.max() + 1)], axis=1)
        return tokens


def embedding_model(
    table: Array, path: Path, *, features: Sequence[int | str] = ("images", 0), place: bool = False, merge: str = "take"
) -> Path:
    """Write what exporters write beside a decoder: token ids, and the features of images instead of token 7.

    Args:
        table: ``[V, H]``.
        path: of the file.
        features: the shape of the features of images; 0: the width.
        merge: how features come into their places: "take" gives zeros where there are too few of them, "scatter" takes
            exactly as many as there are places, "mix" adds their sum, times 0 elsewhere.
        place: also add to each embedding how many tokens stand before it, as no decoder's embedding should.
    """
    width, kind, g = table.shape[1], helper.np_dtype_to_tensor_dtype(table.dtype), Graph()
    ids = g.input("input_ids", TensorProto.INT64, ["batch", "length"])
    images = g.input("image_features", kind, [size or width for size in features])
    text, here = g.Gather(g.constant(table, table.dtype), ids), g.Equal(ids, 7)
    rows = g.Concat(g.constant(np.zeros((1, width)), table.dtype), images, axis=0)
    if merge == "take":
        which = g.Min(g.CumSum(g.Cast(here, to=TensorProto.INT64), 1), g.Sub(g.Gather(g.Shape(rows), 0), 1))
        x = g.Where(g.Unsqueeze(here, [-1]), g.Gather(rows, which), text)
    elif merge == "scatter":
        x = g.ScatterND(text, g.Transpose(g.NonZero(here), perm=[1, 0]), images)
    else:
        x = g.Add(text, g.Mul(g.ReduceSum(rows, [0], keepdims=1), g.Cast(g.Unsqueeze(here, [-1]), to=kind)))
    if place:
        x = g.Add(x, g.Mul(g.CumSum(x, 1), g.constant([[0.01]], table.dtype)))
    g.Identity(x, out="inputs_embeds")
    g.output("inputs_embeds", kind, ["batch", "length", width])
    path.parent.mkdir(exist_ok=True)
    onnx.save(g.model(18), path)
    return path
