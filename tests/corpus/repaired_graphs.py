"""Models of tools that ONNX forbids: repaired, or refused by name; and states beside a cache, in ONNX text."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from onnx import TensorProto, helper, numpy_helper, parser

from corpus import Entry, built

SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)
Edit = Callable[[onnx.ModelProto], object]


def no_import(model: onnx.ModelProto) -> None:
    imports = [entry for entry in model.opset_import if entry.domain != "com.microsoft"]
    assert len(imports) < len(model.opset_import)
    del model.opset_import[:]
    model.opset_import.extend(imports)


def scalars_for_lists(model: onnx.ModelProto) -> set[str]:
    """Let, in place, operators read a scalar where they read a list of one number; which operators."""
    lists = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.dims == [1]}
    found = set()
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if place and name in lists and node.op_type not in ("Gather", "Equal", "Where"):
                node.input[place] = f"{name}/scalar"
                found.add(node.op_type)
    for name, tensor in lists.items():
        values = numpy_helper.to_array(tensor)
        model.graph.initializer.append(numpy_helper.from_array(values.reshape(()), f"{name}/scalar"))
    return found


def other_rank(model: onnx.ModelProto) -> None:
    """onnxruntime-genai states a wrong rank of constants, which ONNX Runtime's optimizer makes initializers."""
    name = next(t.name for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.dims == [1])
    model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))


def stated_again(model: onnx.ModelProto) -> None:
    """ONNX Runtime's converter to float16 states outputs once more, without shapes."""
    for value in (*model.graph.output, *model.graph.input):
        model.graph.value_info.add(name=value.name).type.tensor_type.elem_type = value.type.tensor_type.elem_type


def stated_elsewhere(model: onnx.ModelProto) -> None:
    """The outputs without their shapes, and these stated as of tensors inside."""
    model.graph.value_info.extend(model.graph.output)
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()


def constant_outputs(model: onnx.ModelProto) -> None:
    """Outputs that no step computes, as constant folding leaves them."""
    for rank in range(5):
        table = numpy_helper.from_array(np.ones([4, 2, 3, 1][:rank], np.float32))
        table.name = f"table_{rank}"
        model.graph.initializer.append(table)
        model.graph.output.append(helper.make_tensor_value_info(table.name, TensorProto.FLOAT, table.dims))


def foreign(form: str, edit: Edit) -> onnx.ModelProto:
    model = make_foreign(form, SMALL)
    edit(model)
    return model


def beside_a_cache(inputs: str, outputs: str, nodes: str, constants: str = "") -> onnx.ModelProto:
    """A cache that a step writes, so that there is something to plan, beside a graph in ONNX text."""
    return parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 24]>
        graph ({inputs}, float[B,2,8,4] cache, float[B,2,S,4] row, int64[B] write_indices)
            => ({outputs}, float[B,2,8,4] cache_out) <{constants}> {{
            {nodes}
            cache_out = TensorScatter <axis = 2> (cache, row, write_indices)
        }}""")


BRANCH = "() => (float[B,4]"
BESIDE: dict[str, tuple[str, ...]] = {
    "repaired/scalars_in_a_body": (
        "float[B,4] x, bool choice", "float[B,4] y",
        f"""y = If (choice) <
            then_branch = most {BRANCH} made) {{ made = ReduceMax <keepdims = 1> (x, zero) }},
            else_branch = total {BRANCH} made) {{ made = ReduceSum <keepdims = 1> (x, zero) }}>""",
        "int64 zero = {0}",
    ),
    "repaired/cycle": ("float[4] x", "float[4] b", "[node_a] a = Add (x, b)  [node_b] b = Relu (a)"),
    "repaired/other_domain": ("float[4] x", "float[4] y", "[node_y] y = own.Own (x)"),
    # The last token, as RWKV keeps it: the next value does not depend on the one before.
    "state/replaced, named otherwise": (
        "float[B,4] x, float[B,4] past_tokens", "float[B,4] y, float[B,4] new_shift",
        "y = Add (x, past_tokens)  new_shift = Neg (x)",
    ),
    "state/two inputs, one output": (
        "float[B,4] state_a, float[B,4] state_b", "float[B,4] u", "both = Add (state_a, state_b)  u = Tanh (both)"
    ),
    "state/grows": ("float[B,P] past_x", "float[B,P] present_x", "present_x = Add (past_x, past_x)"),
}  # fmt: skip
# Element types that contradict each other, as converters to float16 leave them.
WRONG_TYPES = {
    # onnxconverter-common: the result of a Cast that stayed, stated as what the rest became.
    "stated_otherwise": """graph (float16[B,4] h) => (float16[B,4] y) <float16[B,4] cast> {
        [node_cast] cast = Cast <to = 1> (h)  [node_y] y = Add (cast, h) }""",
    # NVIDIA ModelOpt's PTQ of a file that was float16 already.
    "quantized": """graph (float16[B,4] h, float[B,4] f) => (float16[B,4] y) <float scale = {0.1}, int8 zero = {0}> {
        small = QuantizeLinear (f, scale, zero)  wide = DequantizeLinear (small, scale)
        [node_y] y = Add (h, wide) }""",
    # onnxruntime.transformers.optimizer over optimum-onnx' Llama in float16.
    "fused": """graph (float16[B,2,S,8] x, int64[B,S] positions) => (float16[B,2,S,8] y)
        <float[1,4] cos = {1, 1, 1, 1}, float[1,4] sin = {1, 1, 1, 1}> {
        [node_y] y = com.microsoft.RotaryEmbedding (x, positions, cos, sin) }""",
}


def text(graph: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 11, opset_import: ["" : 24, "com.microsoft" : 1]> {graph}')


def entries() -> Iterator[Entry]:
    edits: dict[str, tuple[str, Edit]] = {
        "no import": ("gqa", no_import),
        **{edit.__name__: ("concat", edit)
           for edit in (scalars_for_lists, other_rank, constant_outputs, stated_again, stated_elsewhere)},
    }  # fmt: skip
    yield from built("repaired", {n: partial(foreign, *how) for n, how in edits.items()}, capacity=16)
    for key, parts in BESIDE.items():
        group, _, name = key.partition("/")
        yield from built(group, {name: partial(beside_a_cache, *parts)})
    yield from built("wrong types", {name: partial(text, graph) for name, graph in WRONG_TYPES.items()})
