"""Models of tools that ONNX forbids: repaired, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from onnx import TensorProto, helper, numpy_helper, parser
from state_graphs import beside_a_cache

from corpus import Entry, built

SMALL = DecoderConfig(layers=1, hidden=32, vocab=32, query_heads=2, kv_heads=1, head_size=16, capacity=16, positions=32)
Edit = Callable[[onnx.ModelProto], object]


def shuffled(model: onnx.ModelProto, seed: int) -> None:
    """The nodes in another order."""
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    random.Random(seed).shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


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


BRANCH = "() => (float[B,4]"
BESIDE: dict[str, tuple[str, ...]] = {
    # The tensors that an If reads are named in its bodies only, those nested in these too.
    "later_in_a_body": (
        "float[B,4] x, bool choice", "float[B,4] y",
        f"""y = If (choice) <
            then_branch = outer {BRANCH} picked) {{ picked = If (choice) <
                then_branch = a {BRANCH} minus) {{ minus = Neg (late) }},
                else_branch = b {BRANCH} minus) {{ minus = Neg (late) }}> }},
            else_branch = plain {BRANCH} kept) {{ kept = Abs (x) }}>
        late = Relu (x)""",
    ),
    "scalars_in_a_body": (
        "float[B,4] x, bool choice", "float[B,4] y",
        f"""y = If (choice) <
            then_branch = most {BRANCH} made) {{ made = ReduceMax <keepdims = 1> (x, zero) }},
            else_branch = total {BRANCH} made) {{ made = ReduceSum <keepdims = 1> (x, zero) }}>""",
        "int64 zero = {0}",
    ),
    "cycle": ("float[4] x", "float[4] b", "[node_a] a = Add (x, b)  [node_b] b = Relu (a)"),
    "other_domain": ("float[4] x", "float[4] y", "[node_y] y = own.Own (x)"),
    # Where has a bool, Pow and CastLike two types, LayerNormalization may have two.
    "types_of_their_own": (
        "float16[B,4] h, float[B,4] f", "float[B,4] y",
        "positive = Greater (f, f)  power = Pow (f, h)  like = CastLike (h, f)  y = Where (positive, power, like)",
    ),
}  # fmt: skip
# Element types that contradict each other, as converters to float16 leave them.
WRONG_TYPES = {
    # onnxconverter-common: the result of a Cast that stayed, stated as what the rest became.
    "stated_otherwise": """graph (float16[B,4] h) => (float16[B,4] y) <float16[B,4] cast> {
        [node_cast] cast = Cast <to = 1> (h)  [node_y] y = Add (cast, h) }""",
    "mixed": "graph (float16[B,4] h, float[B,4] f) => (float16[B,4] y) { [node_y] y = Add (h, f) }",
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
        **{f"any order {seed}": ("concat", partial(shuffled, seed=seed)) for seed in range(2)},
        "no import": ("gqa", no_import),
        **{edit.__name__: ("concat", edit) for edit in (scalars_for_lists, other_rank, constant_outputs)},
        **{f"{edit.__name__} {form}": (form, edit)
           for edit in (stated_again, stated_elsewhere) for form in ("concat", "gqa")},
    }  # fmt: skip
    yield from built("repaired", {n: partial(foreign, *how) for n, how in edits.items()}, capacity=16)
    yield from built("repaired", {name: partial(beside_a_cache, *parts) for name, parts in BESIDE.items()})
    yield from built("wrong types", {name: partial(text, graph) for name, graph in WRONG_TYPES.items()})
