"""Decoders as they might have been exported, each with its canonical form: normalized by hand.

Both come from one decoder of `scripts/decoders.py`, so they have the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from decoders import DecoderConfig, make_decoder
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from corpus import Entry, built
from trt_kvcache.importer import ImportedModel, import_model
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.importer.plan import OriginalRole, OriginalTensor, PlanOptions, Role, StateUpdate

_ROLES = {
    "input_ids": OriginalRole.TOKENS,
    "embed": OriginalRole.TOKENS,
    "position_ids": OriginalRole.POSITIONS,
    "attention_mask": OriginalRole.PADDING_MASK,
    "cur_len": OriginalRole.PAST_LENGTH,
    "attn_mask": OriginalRole.MASK,
    "state": OriginalRole.STATE,
    "state_out": OriginalRole.STATE,
    "bias": OriginalRole.CONSTANT,
    "logits": OriginalRole.LOGITS,
}
_AXES = {
    OriginalRole.TOKENS: ("batch", "sequence"),
    OriginalRole.POSITIONS: ("batch", "sequence"),
    OriginalRole.PADDING_MASK: ("batch", "total"),
    OriginalRole.MASK: ("batch", "", "sequence", "capacity"),
    OriginalRole.STATE: ("batch",),
    OriginalRole.CONSTANT: ("batch", "?"),
    OriginalRole.LOGITS: ("batch", "sequence"),
}


@dataclass(frozen=True)
class OriginalConfig:
    """How a decoder is exported.

    Attributes:
        decoder: sizes; heads-major.
        cache: ``"concat"`` (grows) or ``"assign"`` (a fixed capacity, written from the scalar `cur_len` on).
        window: keys that a query sees, its own included; None: all.
        embedded: takes embeddings instead of token ids.
        extras: a state, a constant ``[B, n]`` and a counter beside the caches.
        batch: a fixed batch size; None: open.
    """

    decoder: DecoderConfig
    cache: str = "concat"
    window: int | None = None
    embedded: bool = False
    extras: bool = False
    batch: int | None = None


class Editor:
    """Adds to a model and takes away from it."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self._first: list[NodeProto] = []

    def constant(self, values: object, dtype: type = np.int64) -> str:
        name = f"edit.constant.{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def op(self, op: str, inputs: list[str], output: str | None = None, **attributes: object) -> str:
        name = output or f"edit.{op}.{len(self._first)}"
        self._first.append(helper.make_node(op, inputs, [name], name=f"node.{name}", **attributes))
        return name

    def put_first(self) -> None:
        """Put the new nodes in front of all others."""
        others = [NodeProto.FromString(n.SerializeToString()) for n in self.graph.node]
        del self.graph.node[:]
        self.graph.node.extend([*self._first, *others])
        self._first = []

    def nodes(self, op: str) -> list[NodeProto]:
        return [n for n in self.graph.node if n.op_type == op]

    def remove(self, field: str, names: set[str]) -> None:
        values = getattr(self.graph, field)
        kept = [v for v in values if v.name not in names]
        del values[:]
        values.extend(kept)

    def add_input(self, name: str, dtype: int, shape: list[int | str]) -> str:
        self.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
        return name


def make_original(config: OriginalConfig) -> ModelProto:
    """The decoder as exported."""
    edit = Editor(_common(config))
    growing = config.cache == "concat"
    edit.remove("input", {"write_indices", "nonpad_kv_seqlen"})
    tokens = "embed" if config.embedded else "input_ids"
    length = edit.op("Shape", [tokens], start=1, end=2)
    if growing:
        past = edit.op("Shape", ["key_cache.0"], start=2, end=3)
        edit.add_input("attention_mask", TensorProto.INT64, ["batch", "total"])
        for value in (*edit.graph.input, *edit.graph.output):
            if "_cache." in value.name:
                value.type.tensor_type.shape.dim[2].dim_param = "past" if value.name[0] != "u" else "total"
    else:
        edit.add_input("cur_len", TensorProto.INT64, [])
        past = edit.op("Unsqueeze", ["cur_len", edit.constant([0])])
    total = edit.op("Add", [past, length], "total_length")
    edit.graph.output.append(helper.make_tensor_value_info("total_length", TensorProto.INT64, [1]))
    if "attn_mask" not in {v.name for v in edit.graph.input}:
        keys = total if growing else edit.constant([config.decoder.capacity])
        mask = _mask(edit, past, total, keys, config.window)
        if growing:
            given = edit.op("Cast", ["attention_mask"], to=TensorProto.BOOL)
            mask = edit.op("And", [mask, edit.op("Unsqueeze", [given, edit.constant([1, 2])])])
        for node in edit.nodes("Attention"):
            node.input[3] = mask
    for node in edit.nodes("Attention"):
        del node.input[4:]
        kept = [a for a in node.attribute if a.name != "is_causal"]
        del node.attribute[:]
        node.attribute.extend(kept)
    edit.put_first()
    _write_as_exported(edit, growing, past, total)
    return _checked(edit.model)


def _mask(edit: Editor, past: str, total: str, keys: str, window: int | None) -> str:
    """Bool ``[1, 1, S, keys]``."""
    zero, one = edit.constant(0), edit.constant(1)

    def ramp(first: str, end: str, axis: int) -> str:
        bounds = [n if n == zero else edit.op("Squeeze", [n]) for n in (first, end)]
        return edit.op("Unsqueeze", [edit.op("Range", [*bounds, one]), edit.constant([axis])])

    query, key = ramp(past, total, 1), ramp(zero, keys, 0)
    visible = edit.op("LessOrEqual", [key, query])
    if window is not None:
        first = edit.op("Sub", [query, edit.constant(window)])
        visible = edit.op("And", [visible, edit.op("Greater", [key, first])])
    return edit.op("Unsqueeze", [visible, edit.constant([0, 1])])


def _write_as_exported(edit: Editor, growing: bool, past: str, total: str) -> None:
    end = edit.constant([2**31])
    axes = edit.constant([2])
    for node in edit.nodes("TensorScatter"):
        place = list(edit.graph.node).index(node)
        cache, update = node.input[:2]
        parts = [cache, update]
        if not growing:
            parts = [f"{cache}/before", update, f"{cache}/after"]
            for name, start, stop in ((parts[0], edit.constant([0]), past), (parts[2], total, end)):
                edit.graph.node.insert(place, helper.make_node("Slice", [cache, start, stop, axes], [name], name=name))
        del node.input[:]
        node.input.extend(parts)
        node.op_type = "Concat"
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("axis", 2))


def make_canonical(config: OriginalConfig) -> ModelProto:
    """What normalization would make of `make_original`: positions from the write indices."""
    edit = Editor(_common(config))
    edit.remove("input", {"position_ids"})
    tokens = "embed" if config.embedded else "input_ids"
    length = edit.op("Squeeze", [edit.op("Shape", [tokens], start=1, end=2)])
    new = edit.op("Range", [edit.constant(0), length, edit.constant(1)])
    first = edit.op("Unsqueeze", ["write_indices", edit.constant([1])])
    edit.op("Add", [first, new], "position_ids")
    edit.put_first()
    if config.window is not None and config.decoder.mode == "linear":
        edit.model.opset_import[0].version = 25
        for node in edit.nodes("Attention"):
            node.attribute.append(helper.make_attribute("left_window_size", config.window - 1))
    return _checked(edit.model)


def _common(config: OriginalConfig) -> ModelProto:
    batch = config.decoder.batch if config.batch is None else config.batch
    edit = Editor(make_decoder(replace(config.decoder, batch=batch)))
    if config.embedded:
        edit.remove("input", {"input_ids"})
        gather = next(n for n in edit.graph.node if n.output[0] == "embed")
        edit.graph.node.remove(gather)
        edit.add_input("embed", TensorProto.FLOAT, [batch, config.decoder.sequence, config.decoder.hidden])
    if config.extras:
        _add_extras(edit, config)
    return edit.model


def _add_extras(edit: Editor, config: OriginalConfig) -> None:
    """A state that the logits show and that every step changes, and a constant."""
    batch, hidden = config.decoder.batch, config.decoder.hidden
    edit.add_input("state", TensorProto.FLOAT, [batch, hidden])
    edit.add_input("bias", TensorProto.FLOAT, [batch, "n"])
    edit.add_input("flag", TensorProto.INT64, [])
    edit.graph.output.append(helper.make_tensor_value_info("flag_out", TensorProto.INT64, []))
    edit.op("Identity", ["flag"], "flag_out")
    edit.graph.output.append(helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [batch, hidden]))
    last = edit.graph.node[-1]
    shown = last.input[0]
    axis = edit.constant([1])
    edit.op("ReduceMean", ["embed", axis], "extra.mean", keepdims=0)
    edit.op("Mul", ["state", edit.constant(0.5, np.float32)], "extra.decayed")
    edit.op("Add", ["extra.decayed", "extra.mean"], "state_out")
    edit.op("ReduceSum", ["bias", axis], "extra.bias", keepdims=1)
    edit.op("Add", ["state_out", "extra.bias"], "extra.sum")
    edit.op("Unsqueeze", ["extra.sum", axis], "extra.rows")
    edit.op("Add", [shown, "extra.rows"], "extra.shown")
    new, edit._first = edit._first, []
    last.input[0] = "extra.shown"
    place = len(edit.graph.node) - 1
    for node in reversed(new):
        edit.graph.node.insert(place, node)


def _checked(model: ModelProto) -> ModelProto:
    onnx.checker.check_model(model, full_check=model.opset_import[0].version < 25)
    return model


def original_interface(model: ModelProto, cache: str) -> tuple[OriginalTensor, ...]:
    """`CachePlan.original` of `make_original`."""
    tensors = []
    for io, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            shape = tuple(d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim)
            role = _ROLES.get(value.name, OriginalRole.OTHER)
            axes = _AXES.get(role, ())
            if "_cache." in value.name:
                role = OriginalRole.GROWING_CACHE if cache == "concat" else OriginalRole.FIXED_CACHE
                rows = "capacity" if cache != "concat" else "past" if io == "input" else "total"
                axes = ("batch", "", rows)
            axes = (*axes, *[""] * (len(shape) - len(axes)))
            dtype = helper.tensor_dtype_to_string(value.type.tensor_type.elem_type).rpartition(".")[2].lower()
            tensors.append(OriginalTensor(value.name, io, role, dtype, shape, axes))
    return tuple(tensors)


def import_pair(
    folder: Path, config: OriginalConfig, mistake: Callable[[ModelProto], None] = lambda model: None
) -> ImportedModel:
    """The original as read, and the rewritten form of its canonical form, with a mistake in the latter.

    Args:
        folder: takes both files.
        config: of the pair.
        mistake: edits the canonical model.
    """
    original, canonical = make_original(config), make_canonical(config)
    mistake(canonical)
    onnx.checker.check_model(canonical)
    onnx.save(original, folder / "original.onnx")
    onnx.save(canonical, folder / "canonical.onnx")
    imported = import_model(folder / "canonical.onnx", PlanOptions())
    plan = replace(imported.plan, original=original_interface(original, config.cache))
    roles = {"embed": Role.TOKENS, "state": Role.STATE, "state_out": Role.STATE}
    roles["write_indices"] = Role.WRITE_INDICES  # of the right pair; a mistake may leave it as a position alone
    plan = replace(plan, tensors=tuple(replace(t, role=roles.get(t.name, t.role)) for t in plan.tensors))
    if config.extras:
        state = StateUpdate("state", "state_out", "float", ("batch", config.decoder.hidden), "replaced as a whole")
        plan = replace(plan, states=(state,))
    return ImportedModel(load_source(folder / "original.onnx"), plan, imported.model)


def entries() -> Iterator[Entry]:
    heads = DecoderConfig(form="heads-major", vocab=64, capacity=24)
    how: tuple[dict[str, Any], ...] = (
        {}, {"cache": "assign"}, {"window": 5}, {"embedded": True}, {"extras": True}, {"batch": 2},
    )  # fmt: skip
    yield from built("original", {str(h): (lambda h=h: make_original(OriginalConfig(heads, **h))) for h in how},
                     capacity=24)  # fmt: skip
