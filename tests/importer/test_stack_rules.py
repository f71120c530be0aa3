"""What operators do to each of several caches in one tensor, against what they do to the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from trt_kvcache.importer.extensions.stacked_caches.operators import RULES, read_pieces
from trt_kvcache.importer.extensions.stacked_caches.pieces import Pieces, UnsplittableError
from trt_kvcache.importer.graph import export_inferred, small_constant

SIZES = (4, 2, 6, 3)
MAY_FAIL = ("Reshape", "ScatterElements")  # where sizes are mixed, or not all are written


def model_of(node: onnx.NodeProto, constants: dict[str, Any], shape: list[Any], more: list[onnx.NodeProto]) -> Any:
    whole = helper.make_tensor_value_info("whole", TensorProto.FLOAT, shape)
    weights = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    made = [
        helper.make_value_info(name, helper.make_tensor_type_proto(TensorProto.FLOAT, None)) for name in node.output
    ]
    graph = helper.make_graph([*more, node], "rule", [whole], made, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def run(model: onnx.ModelProto, feed: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))


def check(node: onnx.NodeProto, constants: dict[str, Any], axis: int, known: str, *more: onnx.NodeProto) -> None:
    """Split a node that reads `whole` along an axis, and compare with what it gives of all."""
    shape = [n if i == axis or known == "all" else {"names": f"d{i}", "none": None}[known] for i, n in enumerate(SIZES)]
    model = model_of(node, constants, shape, list(more))
    values = np.arange(np.prod(SIZES), dtype=np.float32).reshape(SIZES)
    try:
        wanted = run(model, {"whole": values})
    except Exception:  # noqa: BLE001 - sizes that do not fit each other
        assume(False)
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))
    outputs = list(graph.outputs)
    rest = [d for i, d in enumerate(shape) if i != axis]
    pieces = [gs.Variable(f"piece{i}", np.float32, rest) for i in range(SIZES[axis])]
    at = Pieces(graph, small_constant, RULES)
    at.follow([(graph.inputs[0], axis)])
    at.stack(graph.inputs[0], axis, pieces)
    found: list[tuple[int, list[gs.Tensor]] | None] = []
    try:
        read_pieces(at)
        for output in outputs:
            held = [a for a in range(at.rank(output) or 0) if at.is_held(output, a)]
            found.append((held[0], at.all(output, held[0])) if held else None)
    except UnsplittableError:
        assert node.op_type in MAY_FAIL
        return
    whole = graph.inputs[0]
    graph.inputs = pieces
    graph.outputs = [t for output, f in zip(outputs, found, strict=True) for t in ([output] if f is None else f[1])]
    copies = [gs.Variable(f"copy{i}", t.dtype or np.float32) for i, t in enumerate(graph.outputs)]
    for source, target in zip(graph.outputs, copies, strict=True):
        graph.nodes.append(gs.Node("Identity", f"{target.name}/node", {}, [source], [target]))
    graph.outputs = copies
    graph.cleanup(remove_unused_graph_inputs=True).toposort()
    if whole.outputs:  # as a whole: `levels` refuses it
        assert node.op_type in MAY_FAIL
        return
    split = export_inferred(graph)
    read = {v.name for v in split.graph.input}
    given_pieces = {p.name: np.take(values, i, axis) for i, p in enumerate(pieces) if p.name in read}
    got = iter(run(split, given_pieces) if copies else [])
    for result, f in zip(wanted, found, strict=True):
        if f is not None and not f[1]:
            assert result.shape[f[0]] == 0
            continue
        made = next(got) if f is None else np.stack([next(got) for _ in f[1]], f[0])
        np.testing.assert_array_equal(made, result)


axes = st.integers(0, 3)
knowledge = st.sampled_from(["all", "names", "none"])
quick = settings(deadline=None, max_examples=120)


@quick
@given(axes, knowledge, st.permutations(range(4)))
def test_transposes(axis: int, known: str, perm: list[int]) -> None:
    check(helper.make_node("Transpose", ["whole"], ["out"], "t", perm=perm), {}, axis, known)


@quick
@given(st.data())
def test_reshapes(data: st.DataObject) -> None:
    """Into any sizes, some of them copied by 0, one of them left open; the same sizes in another order, too."""
    axis, known = data.draw(axes), data.draw(knowledge)
    sizes = list(SIZES)
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(sizes) - 1))
        way = data.draw(st.sampled_from(["split", "merge", "swap"]))
        if way == "split":
            first = data.draw(st.sampled_from([n for n in (1, 2, 3) if sizes[place] % n == 0]))
            sizes[place : place + 1] = [first, sizes[place] // first]
        elif place:
            pair = sizes[place - 1 : place + 1]
            sizes[place - 1 : place + 1] = [pair[0] * pair[1]] if way == "merge" else pair[::-1]
    target = [0 if i < 4 and n == SIZES[i] and data.draw(st.booleans()) else n for i, n in enumerate(sizes)]
    if data.draw(st.booleans()):
        target[data.draw(st.integers(0, len(target) - 1))] = -1
    node = helper.make_node("Reshape", ["whole", "target"], ["out"], "r")
    check(node, {"target": np.array(target)}, axis, known)


@quick
@given(axes, knowledge, st.permutations(range(4)))
def test_reshapes_to_computed_sizes(axis: int, known: str, order: list[int]) -> None:
    """As the tensor would be if it were transposed: nothing says that sizes without names are others."""
    shape = helper.make_node("Shape", ["whole"], ["shape"], "s")
    swap = helper.make_node("Gather", ["shape", "order"], ["target"], "g")
    node = helper.make_node("Reshape", ["whole", "target"], ["out"], "r")
    check(node, {"order": np.array(order)}, axis, known, shape, swap)


@quick
@given(axes, knowledge, axes, st.lists(st.integers(-7, 7), min_size=2, max_size=2), st.sampled_from([1, 2, -1, -2]))
def test_slices(axis: int, known: str, along: int, bounds: list[int], step: int) -> None:
    given_ = {"start": [bounds[0]], "end": [bounds[1]], "axes": [along - 4], "steps": [step]}
    node = helper.make_node("Slice", ["whole", *given_], ["out"], "s")
    check(node, {name: np.array(v) for name, v in given_.items()}, axis, known)


@quick
@given(axes, knowledge, axes, st.one_of(st.integers(-2, 1), st.lists(st.integers(-2, 1), min_size=1, max_size=3)))
def test_gathers(axis: int, known: str, along: int, index: Any) -> None:
    check(helper.make_node("Gather", ["whole", "i"], ["out"], "g", axis=along), {"i": np.array(index)}, axis, known)


@quick
@given(axes, knowledge, axes, st.sampled_from([1, 2, 3]))
def test_splits(axis: int, known: str, along: int, count: int) -> None:
    outputs = [f"out{i}" for i in range(count)]
    check(helper.make_node("Split", ["whole"], outputs, "s", axis=along, num_outputs=count), {}, axis, known)


@pytest.mark.parametrize("known", ["all", "names", "none"])
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("op", ["Add", "Mul", "Where", "Concat", "Unsqueeze", "Identity"])
def test_others(op: str, axis: int, known: str) -> None:
    row = np.linspace(1, 2, SIZES[3], dtype=np.float32)
    for other in (row, np.ones((SIZES[1], 1, 1), np.float32), np.full(SIZES, 2, np.float32), np.float32(3)):
        inputs = {"Where": ["c", "whole", "b"], "Unsqueeze": ["whole", "a"], "Identity": ["whole"]}
        node = helper.make_node(
            op, inputs.get(op, ["whole", "b"]), ["out"], "n", **({"axis": 1} if op == "Concat" else {})
        )
        used = {"b": other, "c": np.array([True, False, True]), "a": np.array([0, -1])}
        if op == "Concat" and other.ndim < 4:
            continue
        check(node, {k: v for k, v in used.items() if k in node.input}, axis, known)


@quick
@given(axes, knowledge, st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_scatter_nd(axis: int, known: str, columns: int, rows: int, seed: int) -> None:
    """One piece is written where the index names its axis, all are otherwise."""
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(max(n, rows))[:rows] % n for n in SIZES[:columns]], -1)
    if axis < columns:
        index[:, axis] = rng.integers(-SIZES[axis], SIZES[axis])
    assume(len({*map(tuple, index)}) == rows)
    updates = -1 - rng.random((rows, *SIZES[columns:]), np.float32)
    node = helper.make_node("ScatterND", ["whole", "i", "u"], ["out"], "n")
    check(node, {"i": index, "u": updates}, axis, known)


@quick
@given(axes, knowledge, axes, st.integers(0, 99))
def test_scatter_elements(axis: int, known: str, along: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [1 if i == along else n for i, n in enumerate(SIZES)]
    index = rng.integers(-SIZES[along], SIZES[along], [1] * 4 if along == axis else sizes) * np.ones(sizes, np.int64)
    node = helper.make_node("ScatterElements", ["whole", "i", "u"], ["out"], "n", axis=along)
    check(node, {"i": index, "u": -1 - rng.random(sizes, np.float32)}, axis, known)


@quick
@given(st.data())
def test_what_tensors_were_joined_of(data: st.DataObject) -> None:
    """Along every axis: what was joined there, or cut out of the whole."""
    known, axis, count = data.draw(knowledge), data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    shape = [{"all": n, "names": f"d{i}", "none": None}[known] for i, n in enumerate(SIZES[1:])]
    inputs = [helper.make_tensor_value_info(f"in{i}", TensorProto.FLOAT, shape) for i in range(count)]
    nodes = [helper.make_node("Unsqueeze", [v.name, "axis"], [f"row{i}"]) for i, v in enumerate(inputs)]
    nodes.append(helper.make_node("Concat", [f"row{i}" for i in range(count)], ["whole"], axis=axis))
    sizes = [*SIZES[1 : axis + 1], count, *SIZES[axis + 1 :]]
    constants: dict[str, Any] = {"axis": [axis]}
    match data.draw(st.sampled_from(["none", "turn", "merge", "split", "again", "cut"])):
        case "none":
            nodes.append(helper.make_node("Identity", ["whole"], ["out"]))
        case "turn":
            perm = data.draw(st.permutations(range(4)))
            nodes.append(helper.make_node("Transpose", ["whole"], ["out"], perm=perm))
        case "merge":
            place = data.draw(st.integers(0, 2))
            constants["target"] = [*sizes[:place], sizes[place] * sizes[place + 1], *sizes[place + 2 :]]
            nodes.append(helper.make_node("Reshape", ["whole", "target"], ["out"]))
        case "split":
            constants["target"] = [n for size in sizes for n in ((2, size // 2) if size == 6 else (size,))]
            nodes.append(helper.make_node("Reshape", ["whole", "target"], ["out"]))
        case "again":
            nodes.append(helper.make_node("Concat", ["whole", "whole"], ["out"], axis=data.draw(st.integers(0, 3))))
        case "cut":
            along, step = data.draw(st.integers(-4, 3)), data.draw(st.sampled_from([-2, -1, 1, 2]))
            start, end = (data.draw(st.integers(-9, 9)) for _ in range(2))
            constants |= {"start": [start], "end": [end], "along": [along], "step": [step]}
            nodes.append(helper.make_node("Slice", ["whole", "start", "end", "along", "step"], ["out"]))
    weights = [numpy_helper.from_array(np.array(v), name) for name, v in constants.items()]
    output = helper.make_value_info("out", helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    made = helper.make_graph(nodes, "joined", inputs, [output], weights)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    feed = {v.name: np.random.default_rng(i).random(SIZES[1:], np.float32) for i, v in enumerate(inputs)}
    (wanted,) = run(model, feed)
    assume(wanted.size)
    for along in range(wanted.ndim):
        graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))
        at = Pieces(graph, small_constant, RULES)
        whole = graph.outputs[0]
        graph.outputs = []
        try:
            parts = [at.piece(whole, along, i) for i in range(wanted.shape[along])]
        except UnsplittableError:  # nothing says how long the axis is
            continue
        for i, piece in enumerate(parts):
            copy = gs.Variable(f"copy{i}", np.float32)
            graph.nodes.append(gs.Node("Identity", f"copy{i}/node", {}, [piece], [copy]))
            graph.outputs.append(copy)
        got = run(export_inferred(graph.cleanup(remove_unused_graph_inputs=False).toposort()), feed)
        np.testing.assert_array_equal(np.stack(got, along), wanted)
