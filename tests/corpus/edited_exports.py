"""Stored exports that were changed: caches cast to another type, what mutations found once, and mutations at random."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from mutation_trials import mutant
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from stored import edited
from stored_exports import TESTS, options

from corpus import Entry

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
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


def in_bfloat16(model: ModelProto) -> None:
    """Everything of float16 in bfloat16 instead."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == FLOAT16:
            value.type.tensor_type.elem_type = BFLOAT16
    tensors = [a.t for node in model.graph.node for a in node.attribute if a.type == AttributeProto.TENSOR]
    for tensor in (t for t in (*model.graph.initializer, *tensors) if t.data_type == FLOAT16):
        values = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(helper.make_tensor(tensor.name, BFLOAT16, values.shape, values.tobytes(), raw=True))
    for attribute in (a for node in model.graph.node for a in node.attribute if a.name == "to" and a.i == FLOAT16):
        attribute.i = BFLOAT16


def keep_pasts(model: ModelProto, taken: int) -> None:
    """Casts after the inputs alone, which are of another type than what they come from."""
    kept = {v.type.tensor_type.elem_type for v in model.graph.output} & {FLOAT16, BFLOAT16}
    (kind,) = kept
    for value in [v for v in model.graph.input if v.type.tensor_type.elem_type == kind]:
        value.type.tensor_type.elem_type = taken
        inner = f"{value.name}_cast"
        for node in model.graph.node:
            node.input[:] = [inner if name == value.name else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Cast", [value.name], [inner], inner, to=kind))


def keep_pasts_of(model: ModelProto, kept: str, taken: int) -> None:
    if kept == "bfloat16":
        in_bfloat16(model)
    keep_pasts(model, taken)


def read_wide(model: ModelProto) -> None:
    keep_io_types(model)
    model.graph.node.append(helper.make_node("Neg", ["past_key_values.0.key"], ["seen"], "look"))
    model.graph.output.append(helper.make_tensor_value_info("seen", FLOAT, ["b", "n", "p", "d"]))


def other_types(model: ModelProto) -> None:
    keep_io_types(model, each=True)
    node = next(n for n in model.graph.node if n.op_type == "Cast" and n.input[0] == "past_key_values.0.key")
    model.graph.node.insert(0, helper.make_node("Cast", [node.input[0]], ["double"], "twice", to=TensorProto.DOUBLE))
    model.graph.node.append(helper.make_node("Shape", ["double"], ["size"], "size"))
    model.graph.output.append(helper.make_tensor_value_info("size", TensorProto.INT64, [4]))


def written_wide(model: ModelProto) -> None:
    keep_io_types(model)
    model.graph.node.append(helper.make_node("Neg", ["present.0.key"], ["seen"], "look"))
    model.graph.output.append(helper.make_tensor_value_info("seen", FLOAT, ["b", "n", "p", "d"]))


def given_twice(model: ModelProto, to: int) -> None:
    keep_io_types(model)
    model.graph.node.append(helper.make_node("Cast", ["present.0.key_uncast"], ["again"], "again", to=to))
    model.graph.output.append(helper.make_tensor_value_info("again", to, ["b", "n", "p", "d"]))


def narrow(model: ModelProto) -> None:
    """onnxconverter-common leaves what reads such an output in float32."""
    write = next(node for node in model.graph.node if node.output[0] == "k_cache_out")
    names = [*write.input[1:], "k_cache_out"]
    write.input[1:], write.output[0] = [f"{name}_narrow" for name in names[:2]], "k_cache_narrow_out"
    for name in names[:2]:
        model.graph.node.append(helper.make_node("Cast", [name], [f"{name}_narrow"], f"narrow {name}", to=FLOAT16))
    model.graph.node.append(helper.make_node("Cast", ["k_cache_narrow_out"], names[2:], "wide", to=FLOAT))


def mask_transposed(model: ModelProto) -> None:
    where = next(n for n in model.graph.node if n.op_type == "Where")
    model.graph.node.insert(0, helper.make_node("Transpose", ["mask"], ["turned"], perm=[0, 1, 3, 2]))
    where.input[0] = "turned"


def no_permutation(model: ModelProto) -> None:
    for node in model.graph.node:
        if node.name == "node_transpose":
            node.attribute[0].ints[:] = [1, 2, 1, 3]


def numbers_as_queries(model: ModelProto) -> None:
    attention = next(n for n in model.graph.node if n.op_type == "Attention")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 64), np.int64), "numbers"))
    attention.input[0] = "numbers"


def two_positions(model: ModelProto) -> None:
    value = next(v for v in model.graph.input if v.name == "position_ids")
    value.type.tensor_type.shape.dim[1].dim_value = 2


def two_keys_in_the_mask(model: ModelProto) -> None:
    value = next(v for v in model.graph.input if v.name == "mask")
    value.type.tensor_type.shape.dim[3].dim_value = 2


def divided_by_sine(model: ModelProto) -> None:
    """At position 0 keys are infinite, which the guard of the softmax hides in the original."""
    next(n for n in model.graph.node if n.name == "/model/layers.0/self_attn/Mul_3").op_type = "Div"


def attribute(model: ModelProto, op: str, name: str, value: float) -> None:
    for node in (n for n in model.graph.node if n.op_type == op):
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])


PAIR = ("optimum/llama_fp16", "torch/llama_static_wrap_op20")
TYPES = (("float16", FLOAT), ("bfloat16", FLOAT), ("bfloat16", FLOAT16), ("float16", BFLOAT16))
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
    **{f"pasts, {kept} as {taken} {name}": (name, partial(keep_pasts_of, kept=kept, taken=taken))
       for name in PAIR for kept, taken in TYPES},
    **{edit.__name__: (PAIR[0], edit) for edit in (read_wide, other_types, written_wide)},
    **{f"given twice as {to}": (PAIR[0], partial(given_twice, to=to)) for to in (FLOAT, FLOAT16)},
    **{edit.__name__: (f"plain-torch/{name}", edit) for edit, name in (
        (narrow, "where_dynamo_op18"), (two_keys_in_the_mask, "index_put_batch_dynamo_op18"),
        (mask_transposed, "scatter_dynamo_op18"), (no_permutation, "onehot_mul_dynamo_op24"))},
    **{edit.__name__: ("optimum/llama", edit) for edit in (two_positions, divided_by_sine)},
    **{f"batches by operator {name}": (name, batches_by_operator) for name in (
        "plain-torch/where_dynamo_op18", "plain-torch/onehot_mul_dynamo_op24", "transformers/llama_static",
        "torch/gemma3_rolled_sdpa", "optimum/llama")},
    "numbers as queries": (STATIC, numbers_as_queries),
    **{f"{name}=5 {source}": (source, partial(attribute, op=op, name=name, value=5)) for source, op, name in FLAGS},
    **{f"{name}=-0.5 {source}": (source, partial(attribute, op=op, name=name, value=-0.5))
       for source, op in FACTORS for name in ("scale", "softcap")},
}  # fmt: skip


MUTATED = ("optimum/llama", "mobius/llama_static_f32", "torch/llama_static_wrap_op24")


def entries() -> Iterator[Entry]:
    for name, (source, edit) in EDITS.items():

        def make(folder: Path, source: str = source, edit: Edit = edit) -> Path:
            return edited(source, folder, edit)

        yield f"edited/{name}", make, options(source)
    for name in MUTATED:
        for seed in range(40):

            def mutate(folder: Path, source: Path = TESTS / "models" / name / "model.onnx", seed: int = seed) -> Path:
                return mutant(source, folder, seed)[0]

            yield f"mutant/{name}/{seed}", mutate, options(name)
