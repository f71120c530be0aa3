"""Stored exports that were changed: caches cast to another type, other names of batches, other attributes."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto, helper
from stored import edited
from stored_exports import options

from corpus import Entry

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
HALF = (
    "optimum/llama_fp16", "mobius/llama_dynamic_f16_onnxstd", "ort-genai/llama_trtrtx_fp16",
    "torch/llama_dynamic_float16_sdpa", "torch/llama_static_wrap_op20",
)  # fmt: skip


def keep_io_types(model: ModelProto, *, each: bool = False) -> None:
    """Casts around everything; with `each`, every reader has one of its own, as onnxconverter-common writes them."""
    before, after = [], []
    for value in (v for v in model.graph.input if v.type.tensor_type.elem_type == FLOAT16):
        value.type.tensor_type.elem_type = FLOAT
        for number, node in enumerate(n for n in model.graph.node if value.name in n.input):
            inner = f"{value.name}_cast_{number if each else 0}"
            node.input[:] = [inner if name == value.name else name for name in node.input]
            if each or not number:
                before.append(helper.make_node("Cast", [value.name], [inner], inner, to=FLOAT16))
    for value in (v for v in model.graph.output if v.type.tensor_type.elem_type == FLOAT16):
        value.type.tensor_type.elem_type = FLOAT
        inner = f"{value.name}_uncast"
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == value.name else name for name in names]
        after.append(helper.make_node("Cast", [inner], [value.name], inner, to=FLOAT))
    nodes = [*before, *model.graph.node, *after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def batches_by_operator(model: ModelProto) -> None:
    """TorchScript's exporter gives the first axis of each output a name of its own."""
    for value in model.graph.output:
        dims = value.type.tensor_type.shape.dim
        if len(dims) > 2 and dims[0].dim_param:
            dims[0].dim_param = f"Where{value.name}_dim_0"


def attribute(model: ModelProto, op: str, name: str, value: float) -> None:
    for node in (n for n in model.graph.node if n.op_type == op):
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])


STATIC, GROWING, GENAI = "mobius/llama_static_f32", "mobius/llama_dynamic_f32", "ort-genai/llama_cpu_fp32"
FLAGS = (
    (STATIC, "Attention", "is_causal"), (GROWING, "Attention", "is_causal"),
    (GROWING, "RotaryEmbedding", "interleaved"), (GENAI, "GroupQueryAttention", "do_rotary"),
    (GENAI, "GroupQueryAttention", "rotary_interleaved"),
)  # fmt: skip
FACTORS = ((STATIC, "Attention"), (GROWING, "Attention"), ("torch/llama_static_wrap_op24", "Attention"),
           (GENAI, "GroupQueryAttention"))  # fmt: skip
Edit = Callable[[ModelProto], Any]
EDITS: dict[str, tuple[str, Edit]] = {
    **{f"io types {'each ' * each}{name}": (name, partial(keep_io_types, each=each))
       for name in HALF for each in (False, True)},
    **{f"batches by operator {name}": (name, batches_by_operator) for name in (
        "plain-torch/where_dynamo_op18", "plain-torch/onehot_mul_dynamo_op24", "transformers/llama_static",
        "torch/gemma3_rolled_sdpa", "optimum/llama")},
    **{f"{name}=5 {source}": (source, partial(attribute, op=op, name=name, value=5)) for source, op, name in FLAGS},
    **{f"{name}=-0.5 {source}": (source, partial(attribute, op=op, name=name, value=-0.5))
       for source, op in FACTORS for name in ("scale", "softcap")},
}  # fmt: skip


def entries() -> Iterator[Entry]:
    for name, (source, edit) in EDITS.items():

        def make(folder: Path, source: str = source, edit: Edit = edit) -> Path:
            return edited(source, folder, edit)

        yield f"edited/{name}", make, options(source)
