"""Models that break rules, ask for any memory or time, or point out of their folder."""

import random
from collections.abc import Callable
from pathlib import Path

import onnx
from decoders import DecoderConfig, write_decoder
from foreign_decoders import make_foreign
from hostile.files import CONTROL, NUMBERS, damaged
from mutations import Mutator
from onnx import ModelProto, TensorProto, helper

SMALL = DecoderConfig(layers=1, hidden=32, query_heads=2, kv_heads=1, head_size=16, vocab=64, capacity=16)
_SIZES = [number for number in NUMBERS if isinstance(number, int) and -(2**63) <= number < 2**63]
_PLACES = ("../out", "/etc/passwd", "a/../../b", "", "\0", "model.onnx", ".", CONTROL, "..\\out", "\u0661")
_DIGITS = ("0_0", "\u0660", " 0", "+0", "-1", "1e3", "0x0", "9" * 5000, str(2**63), "")


def write_model(path: Path, rng: random.Random) -> None:
    """A right model of a random form; weights lie outside of some."""
    if rng.random() < 0.5:
        write_decoder(path, SMALL, external_threshold=rng.choice([None, 256]))
    else:
        proto = make_foreign(rng.choice(["concat", "past-attention", "gqa", "scatter"]), SMALL)
        outside = rng.random() < 0.5
        onnx.save(proto, path, save_as_external_data=outside, location=f"{path.name}.data", size_threshold=256)


def before_logits(proto: ModelProto, op: str, inputs: list[str], **attributes: object) -> None:
    """Let the logits depend on a float scalar that `op` makes."""
    logits = next(v.name for v in proto.graph.output if "logits" in v.name)
    for node in proto.graph.node:
        node.output[:] = ["plain_logits" if name == logits else name for name in node.output]
    proto.graph.node.extend(
        [
            helper.make_node(op, inputs, ["hostile"], name="hostile", **attributes),
            helper.make_node("ReduceMax", ["hostile"], ["hostile_number"], name="hostile_number", keepdims=0),
            helper.make_node("Add", ["plain_logits", "hostile_number"], [logits], name="hostile_add"),
        ]
    )


def _constant(proto: ModelProto, name: str, kind: int, shape: list[int], values: list[float]) -> str:
    proto.graph.initializer.append(helper.make_tensor(name, kind, shape, values))
    return name


def terabytes(proto: ModelProto, rng: random.Random) -> None:
    """A tensor of any size on the way to the logits, which nothing but a run shows."""
    size = rng.choice([2**33, 2**40, 2**62])
    shape = _constant(proto, "hostile_shape", TensorProto.INT64, [2], [1, size])
    before_logits(proto, "ConstantOfShape", [shape])


def endless(proto: ModelProto, rng: random.Random) -> None:
    """A loop without an end on the way to the logits."""
    _loop(proto, _constant(proto, "hostile_turns", TensorProto.INT64, [], [1 << 60]))


TRIGGER = [63] * 7
"""The one prompt at which a model of `endless_at` does not end."""


def endless_at(proto: ModelProto, rng: random.Random) -> None:
    """The same for one prompt, which no check meets by chance."""
    tokens = next(v.name for v in proto.graph.input if v.name == "input_ids")
    wanted = _constant(proto, "hostile_sum", TensorProto.INT64, [], [sum(TRIGGER)])
    turns = _constant(proto, "hostile_turns", TensorProto.INT64, [], [1 << 60])
    none = _constant(proto, "hostile_none", TensorProto.INT64, [], [0])
    proto.graph.node.extend(
        [
            helper.make_node("ReduceSum", [tokens], ["sum"], keepdims=0),
            helper.make_node("Equal", ["sum", wanted], ["triggered"]),
            helper.make_node("Where", ["triggered", turns, none], ["turns"]),
        ]
    )
    _loop(proto, "turns")


def _loop(proto: ModelProto, turns: str) -> None:
    go = _constant(proto, "hostile_go", TensorProto.BOOL, [], [True])
    start = _constant(proto, "hostile_start", TensorProto.FLOAT, [], [0.0])
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["went"]), helper.make_node("Add", ["x", "x"], ["y"])],
        "body",
        [value("turn", TensorProto.INT64, []), value("on", TensorProto.BOOL, []), value("x", TensorProto.FLOAT, [])],
        [value("went", TensorProto.BOOL, []), value("y", TensorProto.FLOAT, [])],
    )
    before_logits(proto, "Loop", [turns, go, start], body=body)


def _size(proto: ModelProto, rng: random.Random) -> None:
    infos = [v for v in (*proto.graph.input, *proto.graph.output) if v.type.tensor_type.shape.dim]
    dim = rng.choice(rng.choice(infos).type.tensor_type.shape.dim)
    if rng.random() < 0.7:
        dim.dim_value = rng.choice(_SIZES)
    else:
        dim.dim_param = rng.choice(["", CONTROL, "x" * 10_000, "batch"])


def _batch(proto: ModelProto, rng: random.Random) -> None:
    size = rng.choice([2**62, 2**31, 2**40, 0])
    for info in (*proto.graph.input, *proto.graph.output):
        dims = info.type.tensor_type.shape.dim
        if len(dims):
            dims[0].dim_value = size


def _weight(proto: ModelProto, rng: random.Random) -> None:
    tensor = rng.choice(proto.graph.initializer)
    way = rng.randrange(4)
    if way == 0:
        tensor.dims[:] = [rng.choice(_SIZES) for _ in tensor.dims]
    elif way == 1:
        tensor.data_type = rng.choice([0, 8, 16, 17, 23, 99])
    elif way == 2:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    else:
        tensor.data_location = TensorProto.EXTERNAL


def _location(proto: ModelProto, rng: random.Random) -> None:
    outside = [t for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    tensor = rng.choice(outside or [*proto.graph.initializer])
    tensor.data_location = TensorProto.EXTERNAL
    keys = {"location": _PLACES, "offset": _DIGITS, "length": _DIGITS, "checksum": _DIGITS, "evil": _PLACES}
    for key in rng.sample([*keys], rng.choice([1, 2])):
        kept = [(e.key, e.value) for e in tensor.external_data if e.key != key]
        del tensor.external_data[:]
        for name, text in (*kept, (key, rng.choice(keys[key]))):
            tensor.external_data.add(key=name, value=text)


def _name(proto: ModelProto, rng: random.Random) -> None:
    holder = rng.choice([*proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer])
    holder.name = rng.choice([CONTROL, "", "x" * 100_000, proto.graph.input[0].name, "\ufeff", "a b"])


def _type(proto: ModelProto, rng: random.Random) -> None:
    info = rng.choice([*proto.graph.input, *proto.graph.output])
    way, kind = rng.randrange(5), info.type
    inner = onnx.TypeProto()
    inner.CopyFrom(kind)
    if way == 0:
        kind.tensor_type.elem_type = rng.choice([0, 8, 16, 23, 99])
    elif way == 1:
        kind.optional_type.elem_type.CopyFrom(inner)
    elif way == 2:
        kind.sequence_type.elem_type.CopyFrom(inner)
    elif way == 3:
        kind.sparse_tensor_type.elem_type = 1
    else:
        info.ClearField("type")


def _optional(proto: ModelProto, rng: random.Random) -> None:
    """Optional values inside of the graph."""
    node = rng.choice([n for n in proto.graph.node if n.input and n.input[0]])
    at = [*proto.graph.node].index(node)
    made = [helper.make_node("Optional", [node.input[0]], ["optional"], name="optional")]
    if rng.random() < 0.7:
        made.append(helper.make_node("OptionalGetElement", ["optional"], ["element"], name="element"))
    if rng.random() < 0.5:
        info = proto.graph.value_info.add(name="optional")
        info.type.optional_type.elem_type.tensor_type.elem_type = 1
    node.input[0] = made[-1].output[0]
    for new in reversed(made):
        proto.graph.node.insert(at, new)


def _attribute(proto: ModelProto, rng: random.Random) -> None:
    node = rng.choice([n for n in proto.graph.node if n.attribute] or [*proto.graph.node])
    if node.attribute:
        attribute = rng.choice(node.attribute)
        attribute.i, attribute.f = rng.choice(_SIZES), rng.choice([0.0, float("nan"), float("inf"), 1e38])
        attribute.ints[:] = [rng.choice(_SIZES) for _ in attribute.ints]
        if rng.random() < 0.3:
            attribute.type = rng.randrange(15)
        if rng.random() < 0.3:
            attribute.ref_attr_name = "evil"


def _nested(proto: ModelProto, rng: random.Random) -> None:
    go = _constant(proto, "hostile_if", TensorProto.BOOL, [], [True])
    body = helper.make_graph(
        [helper.make_node("Constant", [], ["deep"], value=helper.make_tensor("v", TensorProto.FLOAT, [], [0.0]))],
        "deep",
        [],
        [helper.make_tensor_value_info("deep", TensorProto.FLOAT, [])],
    )
    for depth in range(rng.choice([5, 12, 25])):
        name = f"deep_{depth}"
        other = body if depth < 5 else _zero(name)  # both: twice the size each time
        node = helper.make_node("If", [go], [name], name=name, then_branch=body, else_branch=other)
        body = helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [])])
    before_logits(proto, "If", [go], then_branch=body, else_branch=body)


def _zero(name: str) -> onnx.GraphProto:
    value = helper.make_tensor("v", TensorProto.FLOAT, [], [0.0])
    node = helper.make_node("Constant", [], [f"{name}_zero"], value=value)
    return helper.make_graph([node], name, [], [helper.make_tensor_value_info(f"{name}_zero", TensorProto.FLOAT, [])])


def _function(proto: ModelProto, rng: random.Random) -> None:
    """Functions that call themselves, or each other ever more often."""
    opset = [helper.make_opsetid("", 24), helper.make_opsetid("evil", 1)]
    proto.opset_import.append(helper.make_opsetid("evil", 1))
    if rng.random() < 0.5:
        calls = [helper.make_node("f", ["x"], ["y"], domain="evil")]
        proto.functions.append(helper.make_function("evil", "f", ["x"], ["y"], calls, opset))
        name = "f"
    else:
        proto.functions.append(
            helper.make_function("evil", "f0", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])], opset)
        )
        depth = rng.choice([3, 25])
        for level in range(1, depth):
            below = f"f{level - 1}"
            calls = [
                helper.make_node(below, ["x"], ["m"], domain="evil"),
                helper.make_node(below, ["m"], ["y"], domain="evil"),
            ]
            proto.functions.append(helper.make_function("evil", f"f{level}", ["x"], ["y"], calls, opset))
        name = f"f{depth - 1}"
    start = _constant(proto, "hostile_x", TensorProto.FLOAT, [], [0.0])
    before_logits(proto, name, [start], domain="evil")


def _order(proto: ModelProto, rng: random.Random) -> None:
    """A cycle, a value made twice, or one that nothing makes."""
    one, two = rng.choice(proto.graph.node), rng.choice(proto.graph.node)
    way = rng.randrange(3)
    if way == 0 and one.input:
        one.input[0] = two.output[0]
    elif way == 1:
        one.output[0] = two.output[0]
    elif one.input:
        one.input[0] = rng.choice(["nothing", CONTROL, ""])


def _metadata(proto: ModelProto, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 3])):
        key = rng.choice(["trt_kvcache", "trt_kvcache.plan", "trt_kvcache.options", CONTROL, "x"])
        proto.metadata_props.add(key=key, value=rng.choice(["{}", CONTROL, "[" * 10_000, "null", "x" * 100_000]))
    proto.producer_name, proto.graph.name = CONTROL, rng.choice(["", CONTROL])
    proto.ir_version = rng.choice([proto.ir_version, 0, 1, 2**40])


def _opset(proto: ModelProto, rng: random.Random) -> None:
    proto.opset_import[0].version = rng.choice([0, -1, 1, 7, 99, 2**40])
    if rng.random() < 0.3:
        proto.opset_import.add(domain=CONTROL, version=1)


def _meaning(proto: ModelProto, rng: random.Random) -> None:
    Mutator(proto, rng.randrange(2**31)).mutate()


EDITS: tuple[Callable[[ModelProto, random.Random], None], ...] = (
    terabytes, endless, endless_at, _size, _batch, _weight, _location, _name, _type, _optional, _attribute, _nested,
    _function, _order, _metadata, _opset, _meaning,
)  # fmt: skip


def spoil(path: Path, rng: random.Random) -> str:
    """Change a model file for the worse; returns in which way."""
    if rng.random() < 0.2:
        path.write_bytes(damaged(rng, path.read_bytes()))
        return "damaged"
    proto = onnx.load(path, load_external_data=False)
    edit = rng.choice(EDITS)
    edit(proto, rng)
    path.write_bytes(proto.SerializeToString())
    return edit.__name__.strip("_")
