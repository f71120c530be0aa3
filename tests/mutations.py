"""Random changes to the meaning of a decoder, small enough that it still looks like the decoder it was.

A mutated model is its own specification: whatever it computes is what its rewritten form must compute, unless the
importer refuses it. `mutation_trials` says which.
"""

import collections
import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

os.environ["TRT_KVCACHE_VERDICTS"] = "off"  # each trial is checked

_SMALL = 64  # elements of a constant that says something about the structure
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16}
_INTEGERS = {TensorProto.INT64, TensorProto.INT32}
_RELATIVES = (
    ("LessOrEqual", "Less", "Greater", "GreaterOrEqual", "Equal"), ("And", "Or", "Xor"), ("Add", "Sub", "Mul"),
    ("Mul", "Add"), ("Div", "Mul"), ("Min", "Max"), ("Softmax", "LogSoftmax", "Identity"), ("Cos", "Sin"),
    ("Tanh", "Sigmoid", "Identity"), ("Not", "Identity"), ("Sigmoid", "Tanh"), ("Neg", "Identity", "Abs"),
    ("Squeeze", "Unsqueeze"),
)  # fmt: skip


_DEFAULTS: dict[str, list[tuple[str, int | float | str]]] = {
    "ai.onnx": [("is_causal", 1), ("scale", 0.3), ("softcap", 2.0)],
    "com.microsoft": [
        ("local_window_size", 3), ("mask_filter_value", -2.0), ("scale", 0.3), ("softcap", 2.0), ("do_rotary", 1),
        ("rotary_interleaved", 1), ("unidirectional", 1), ("smooth_softmax", 1), ("no_norm", 1),
    ],
    "ScatterND": [("reduction", r) for r in ("add", "mul", "max", "none")],
    "ScatterElements": [("reduction", r) for r in ("add", "mul", "max", "none")] + [("axis", 1)],
    "TensorScatter": [("mode", "circular"), ("mode", "linear"), ("axis", 1)],
    "CumSum": [("exclusive", 1), ("reverse", 1)], "Trilu": [("upper", 0)], "Softmax": [("axis", 2)],
    "Gather": [("axis", 1)], "Shape": [("start", 1), ("end", 2)], "Reshape": [("allowzero", 1)],
}  # fmt: skip


class UnsuitableError(Exception):
    """The model has nothing that this mutation could change."""


Type = tuple[int, tuple[int | str, ...] | None]
"""Element type, and the shape where it is known."""


def alike(one: Type | None, two: Type | None) -> bool:
    """Same element type and rank."""
    return one is not None and two is not None and (one[0], _rank(one)) == (two[0], _rank(two)) and _rank(one) >= 0


def _rank(kind: Type) -> int:
    return -1 if kind[1] is None else len(kind[1])


def types_of(model: ModelProto) -> dict[str, Type]:
    """The type of every named tensor."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types: dict[str, Type] = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor = value.type.tensor_type
        shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim) if tensor.HasField("shape") else None
        types[value.name] = (tensor.elem_type, shape)
    return types | {t.name: (t.data_type, tuple(t.dims)) for t in graph.initializer}


class Mutator:
    """One model, and random changes to it.

    Args:
        model: changed in place.
        seed: of every choice.
        kinds: names of the changes to choose from; none: all.
    """

    def __init__(self, model: ModelProto, seed: int, kinds: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self.model = model
        self.graph: GraphProto = model.graph
        self.types = types_of(model)
        self._distance = self._distances()
        self._made = 0
        self._kinds = {kind: weight for kind, weight in _KINDS.items() if not kinds or kind.__name__ in kinds}

    def mutate(self) -> str:
        """Makes one change, now and then two; returns what was done."""
        done: list[str] = []
        wanted = 2 if self.random.random() < 0.15 else 1
        while len(done) < wanted:
            kind = self.random.choices(list(self._kinds), weights=list(self._kinds.values()))[0]
            try:
                with np.errstate(all="ignore"):
                    done.append(f"{kind.__name__}: {kind(self)}")
            except UnsuitableError:
                continue
        return "; ".join(done)

    def node(self, fits: Callable[[NodeProto], bool]) -> NodeProto:
        """A node, the more likely the nearer to a cache, a mask or positions."""
        nodes = [n for n in self.graph.node if fits(n)]
        if not nodes:
            raise UnsuitableError
        return self.random.choices(nodes, weights=[(1 + self._distance.get(n.output[0], 8)) ** -1.5 for n in nodes])[0]

    def use(self, fits: Callable[[str], bool]) -> tuple[NodeProto, int]:
        node = self.node(lambda n: any(name and fits(name) for name in n.input))
        return node, self.random.choice([i for i, name in enumerate(node.input) if name and fits(name)])

    def name(self) -> str:
        self._made += 1
        return f"mutated_{self._made}"

    def constant(self, value: np.ndarray) -> str:
        name = self.name()
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        self.types[name] = (helper.np_dtype_to_tensor_dtype(value.dtype), tuple(value.shape))
        return name

    def insert(self, before: NodeProto, op: str, inputs: Sequence[str], **attributes: object) -> str:
        """A new node in front of another; returns its output."""
        name = self.name()
        place = next(i for i, n in enumerate(self.graph.node) if n is before or n.output == before.output)
        self.graph.node.insert(place, helper.make_node(op, list(inputs), [name], name=f"node_{name}", **attributes))
        self.types[name] = self.types.get(inputs[0], (0, None))
        return name

    def small_constants(self) -> dict[str, TensorProto]:
        """Constants that may say something about the structure, by name."""
        found = {t.name: t for t in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type == "Constant":
                found.update((node.output[0], a.t) for a in node.attribute if a.HasField("t"))
        small = {n: t for n, t in found.items() if int(np.prod(t.dims)) <= _SMALL}
        return {n: t for n, t in small.items() if t.data_location != TensorProto.EXTERNAL and np.prod(t.dims)}

    def available(self, node: NodeProto) -> list[str]:
        names = [v.name for v in self.graph.input] + [t.name for t in self.graph.initializer]
        for other in self.graph.node:
            if other is node or other.output == node.output:
                break
            names += [n for n in other.output if n]
        return list(dict.fromkeys(names))

    def caches(self) -> list[str]:
        """Graph inputs that hold keys or values."""
        shapes = {v.name: self.types[v.name] for v in self.graph.input}
        return [n for n, (kind, shape) in shapes.items() if kind in _FLOATS and shape and len(shape) >= 3]

    def _distances(self) -> dict[str, int]:
        """The number of nodes between each node and a cache, a mask, positions or attention; by its first output."""
        constants = {t.name for t in self.graph.initializer}
        seen = {v.name for v in self.graph.input if "ids" not in v.name or "position" in v.name} - constants
        seen |= {v.name for v in self.graph.output if v.name != "logits"}
        distances: dict[str, int] = {}
        for distance in range(8):
            reached: set[str] = set()
            for node in self.graph.node:
                names = {n for n in (*node.input, *node.output) if n} - constants
                if names & seen or (not distance and "Attention" in node.op_type):
                    distances.setdefault(node.output[0], distance)
                    reached |= names
            seen |= reached
        return distances


def constant(m: Mutator) -> str:
    """Another number in a small constant, for one of its readers."""
    small = m.small_constants()
    node, index = m.use(lambda name: name in small)
    value = np.array(numpy_helper.to_array(small[node.input[index]]))
    place = tuple(m.random.randrange(d) for d in value.shape)
    old = value[place]
    if value.dtype == bool:
        value[place] = not old
    elif value.dtype.kind in "iu":
        value[place] = m.random.choice([old + 1, old - 1, old + 2, 0, 1, -1, old * 2, -old, old // 2])
    elif value.dtype.kind == "f":
        with np.errstate(all="ignore"):
            choices = [old * 2, old / 2, -old, old + 1, 0, old * 1.01, old * 0.9, -1, 3]
            value[place] = m.random.choice(choices + [-np.inf, -1e4, -900] * (value.size == 1))
    else:
        raise UnsuitableError
    if np.array_equal(value[place], old):
        raise UnsuitableError
    name, node.input[index] = node.input[index], m.constant(value)
    return f"input {index} ({name}) of {label(node)} from {old} to {value[place]} at {place}"


def attribute(m: Mutator) -> str:
    node = m.node(lambda n: n.op_type != "Constant" and any(a.type in (1, 2, 6, 7) for a in n.attribute))
    changed = m.random.choice([a for a in node.attribute if a.type in (1, 2, 6, 7)])
    old = helper.get_attribute_value(changed)
    if changed.type == 1:
        changed.f = m.random.choice([old * 2, old / 2, old * 1.1, 0.0, 1.0, -old, old + 5])
    elif changed.type == 2:
        changed.i = m.random.choice([old + 1, old - 1, 0, 1, -1, 1 - old, 2, 4, 5])
    else:
        values = list(old)
        i, j = (m.random.randrange(len(values)) for _ in "ij")
        if i != j:
            values[i], values[j] = values[j], values[i]
        else:
            values[i] += m.random.choice([1, -1])
        del changed.floats[:], changed.ints[:]
        (changed.ints if changed.type == 7 else changed.floats).extend(values)
    new = helper.get_attribute_value(changed)
    if old == new:
        raise UnsuitableError
    return f"{changed.name} of {label(node)} from {old} to {new}"


def new_attribute(m: Mutator) -> str:
    """An attribute in place of its default."""
    node = m.node(lambda n: "Attention" in n.op_type or n.op_type in _DEFAULTS)
    choices = _DEFAULTS.get(node.op_type, _DEFAULTS[node.domain or "ai.onnx"])
    name, value = m.random.choice(choices)
    if any(a.name == name and (a.type != 3 or a.s.decode() == value) for a in node.attribute):
        raise UnsuitableError
    others = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*others, helper.make_attribute(name, value)])
    return f"{name}={value} of {label(node)}"


def swap(m: Mutator) -> str:
    """Two inputs of one node in each other's place."""
    node = m.node(lambda n: len({name for name in n.input if name}) > 1)
    given = [i for i, name in enumerate(node.input) if name]
    pairs = [(i, j) for i in given for j in given if i < j and node.input[i] != node.input[j]]
    similar = [(i, j) for i, j in pairs if alike(m.types.get(node.input[i]), m.types.get(node.input[j]))]
    i, j = m.random.choice(similar or pairs)
    node.input[i], node.input[j] = node.input[j], node.input[i]
    return f"inputs {i} and {j} of {label(node)}"


def rewire(m: Mutator) -> str:
    """Another tensor of the same type as an input."""
    node, index = m.use(lambda name: m.types.get(name, (0, None))[1] is not None)
    kind = m.types[node.input[index]]
    others = [n for n in m.available(node) if n != node.input[index] and alike(m.types.get(n), kind)]
    same = [n for n in others if m.types[n] == kind]
    if not others:
        raise UnsuitableError
    old, node.input[index] = node.input[index], m.random.choice(same if same and m.random.random() < 0.8 else others)
    return f"input {index} of {label(node)} from {old} to {node.input[index]}"


def relative(m: Mutator) -> str:
    families = [(op, [o for o in family if o != op]) for family in _RELATIVES for op in family]
    node = m.node(lambda n: any(n.op_type == op for op, _ in families))
    old = node.op_type
    node.op_type = m.random.choice([o for op, others in families if op == old for o in others])
    if node.op_type == "Identity":
        del node.attribute[:], node.input[1:]
    return f"{old} to {label(node)}"


def bypass(m: Mutator) -> str:
    """One of a node's inputs in place of its output."""
    node = m.node(lambda n: any(alike(m.types.get(i), m.types.get(n.output[0])) for i in n.input if i))
    output = node.output[0]
    source = m.random.choice([i for i in node.input if i and alike(m.types.get(i), m.types.get(output))])
    text = label(node)
    node.CopyFrom(helper.make_node("Identity", [source], list(node.output[:1]), name=node.name))
    return f"{text} becomes {source}"


def inserted(m: Mutator) -> str:
    """One more node in front of an input."""
    node, index = m.use(lambda name: bool(m.types.get(name, (0, None))[0]) and name not in m.small_constants())
    name = node.input[index]
    kind, shape = m.types[name]
    rank = len(shape or ())
    choices: list[tuple[str, list[float], dict[str, object]]] = [("Identity", [], {})]
    if kind in _FLOATS:
        choices += [("Mul", [v], {}) for v in (1, 1.05, -1, 2)] + [("Add", [v], {}) for v in (0, 0.1)]
        choices += [("Neg", [], {}), ("Cast", [], {"to": kind}), ("Round", [], {}), ("Abs", [], {})]
        choices += [("Cast", [], {"to": to}) for to in (TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32)]
        choices += [("Clip", [-0.5, 0.5], {}), ("Tanh", [], {}), ("Max", [0], {}), ("Min", [0], {})]
    if kind in _INTEGERS:
        choices += [(op, [v], {}) for op in ("Add", "Sub", "Mul", "Min", "Max", "Mod", "Div") for v in (0, 1, 2, 7)]
        choices += [("Clip", [1, 8], {}), ("Neg", [], {}), ("Cast", [], {"to": TensorProto.FLOAT})]
    if kind == TensorProto.BOOL:
        choices += [("Not", [], {})]
    if rank > 1:
        perm = list(range(rank))
        i, j = m.random.sample(range(rank), 2)
        perm[i], perm[j] = perm[j], perm[i]
        choices += [("Transpose", [], {"perm": perm})] * 3
    op, numbers, attributes = m.random.choice(choices)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    made = m.insert(node, op, [name, *(m.constant(np.asarray(v, dtype)) for v in numbers)], **attributes)
    if op == "Transpose" and m.random.random() < 0.4:
        made = m.insert(node, op, [made], **attributes)
    if op == "Cast" and attributes["to"] != kind:
        made = m.insert(node, op, [made], to=kind)
    node.input[index] = made
    return f"{op} {numbers or attributes or ''} before input {index} ({name}) of {label(node)}"


def outputs_swapped(m: Mutator) -> str:
    """Two outputs of the graph under each other's name, or one cache given back for two."""
    groups = collections.defaultdict(list)
    for value in m.graph.output:
        groups[m.types[value.name]].append(value.name)
    named = [names for names in groups.values() if len(names) > 1]
    if not named:
        raise UnsuitableError
    one, two = m.random.sample(m.random.choice(named), 2)
    if m.random.random() < 0.5:
        _rename(m, {one: two, two: one})
        return f"{one} and {two}"
    hidden = m.name()
    _rename(m, {two: hidden})
    m.graph.node.append(helper.make_node("Identity", [one], [two], name=f"node_{hidden}"))
    return f"{two} is {one}"


def _rename(m: Mutator, names: dict[str, str]) -> None:
    inputs = {v.name for v in m.graph.input}
    if inputs & names.keys():
        raise UnsuitableError
    for node in m.graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(n, n) for n in field]


def one_cache(m: Mutator) -> str:
    """One cache read in place of another: everywhere, or by one reader."""
    old, new = m.random.sample([*m.caches(), "", ""], 2)
    readers = [(n, i) for n in m.graph.node for i, name in enumerate(n.input) if name and name == old]
    if not readers or not new:
        raise UnsuitableError
    for node, index in readers if m.random.random() < 0.3 else [m.random.choice(readers)]:
        node.input[index] = new
    return f"{new} for {old}"


def past_for_present(m: Mutator) -> str:
    """A cache read before it is updated, or at another place on its way."""
    outputs = {v.name for v in m.graph.output}
    node, index = m.use(lambda name: name in outputs)
    old = node.input[index]
    near = set(m.available(node)) & {*m.caches(), *outputs} - {old}
    near = {n for n in near if m.types[n][0] == m.types[old][0]}
    if not near:
        raise UnsuitableError
    node.input[index] = m.random.choice(sorted(near))
    return f"{node.input[index]} for {old} as input {index} of {label(node)}"


def extra_reader(m: Mutator) -> str:
    """Something that was hidden shows: an intermediate as an output, or added to the logits."""
    node = m.node(lambda n: m.types.get(n.output[0], (0, None))[1] is not None and n.op_type != "Constant")
    pool = [*node.input, *node.output, *m.caches()]
    shown = m.random.choice([n for n in pool if m.types.get(n, (0, None))[0]] or [node.output[0]])
    kind, shape = m.types[shown]
    logits = next((v.name for v in m.graph.output if v.name not in m.caches() and "present" not in v.name), None)
    if logits is None:
        raise UnsuitableError
    style = m.random.choice(["output", "number", "shape"])
    if not shape or (len(shape) < 2 and style != "number"):  # sizes of a batch: each row of it runs by itself
        raise UnsuitableError
    if style == "output":
        name = m.name()
        m.graph.node.append(helper.make_node("Identity", [shown], [name], name=f"node_{name}"))
        m.graph.output.append(helper.make_tensor_value_info(name, kind, shape))
        return f"{shown} as an output"
    if style == "number" and shape[0] != (m.types[logits][1] or (None,))[0]:
        raise UnsuitableError
    hidden = m.name()
    _rename(m, {logits: hidden})
    value = hidden if shown == logits else shown
    # One number of each row of a batch: rows that mix have no meaning where each has its own length.
    if style == "shape":
        steps = [("Shape", None), ("Cast", None), ("Gather", [m.random.randrange(1, len(shape))])]
    else:
        steps = [("Cast", None), ("Reshape", [0, 1, -1]), ("Gather", [-1])]

    for op, number in steps:
        place = {"axis": 0 if style == "shape" else 2} if op == "Gather" else {}
        attributes = {"to": m.types[logits][0]} if op == "Cast" else place
        extra = [] if number is None else [m.constant(np.array(number, np.int64))]
        name = m.name()
        m.graph.node.append(helper.make_node(op, [value, *extra], [name], name=f"node_{name}", **attributes))
        value = name
    m.graph.node.append(helper.make_node("Add", [hidden, value], [logits], name=f"node_{value}_add"))
    return f"{style} of {shown} added to {logits}"


def symbol(m: Mutator) -> str:
    """Another symbol or size in the declared shape of an input."""
    dims = [d for v in m.graph.input for d in v.type.tensor_type.shape.dim]
    value = m.random.choice([v for v in m.graph.input if v.type.tensor_type.shape.dim])
    index, dim = m.random.choice(list(enumerate(value.type.tensor_type.shape.dim)))
    old = dim.dim_param or dim.dim_value
    new = m.random.choice([d.dim_param or d.dim_value for d in dims] + ["fresh", 1, 2])
    if new == old:
        raise UnsuitableError
    dim.Clear()
    setattr(dim, "dim_param" if isinstance(new, str) else "dim_value", new)
    return f"axis {index} of {value.name} from {old} to {new}"


_KINDS = {
    constant: 5, attribute: 3, new_attribute: 1, swap: 3, rewire: 5, relative: 3, bypass: 2, inserted: 5,
    outputs_swapped: 0.7, one_cache: 0.7, past_for_present: 1.5, extra_reader: 1, symbol: 0.7,
}  # fmt: skip


def label(node: NodeProto) -> str:
    return f"{node.op_type} '{node.name or node.output[0]}'"
