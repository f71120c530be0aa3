"""What a decoder attends beside its own text: roles, axes, profiles and engines of encoder-decoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from concat_graphs import Build, Decoder, make_decoder
from graphs import Graph, attention_model
from hybrids import cross_logits, cross_model, encoder_constants, write
from onnx import TensorProto

from trt_kvcache import BuildOptions, DecodeSession, PlanOptions, build_engine, plan_model, verify_model
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import CachePlan, Role

KEYS = tuple(f"past_key_values.{layer}.encoder.{part}" for layer in "ab" for part in ("key", "value"))
FORMS = {
    ("keys", "none"): KEYS,
    ("keys", "ones"): ("encoder_attention_mask", *KEYS),
    ("keys", "bool"): ("heard", *KEYS),
    ("hidden", "none"): ("encoder_hidden_states",),
    ("hidden", "ones"): ("encoder_attention_mask", "encoder_hidden_states"),
    ("hidden", "bool"): ("heard", "encoder_hidden_states"),
}


def constants(plan: CachePlan) -> dict[str, tuple[str, ...]]:
    return {t.name: t.axes for t in plan.tensors if t.role is Role.CONSTANT}


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "mask"), FORMS)
def test_roles_axes_and_engine(tmp_path: Path, kind: str, mask: str) -> None:
    model = write(tmp_path / "m.onnx", cross_model(kind, mask))
    plan = plan_model(model)
    found = constants(plan)
    assert tuple(found) == FORMS[kind, mask]
    assert all(axes[0] == "batch" and set(axes[1:]) <= {"encoder", ""} and "encoder" in axes for axes in found.values())
    assert plan.tensor(Role.MASK) is None  # the encoder's mask is none of the text
    assert [c.past for c in plan.caches] == [f"past.{layer}.{part}" for layer in "ab" for part in ("key", "value")]

    with pytest.raises(OptionError, match=r"give the most positions with --max-encoder, such as --max-encoder 1500"):
        build_engine(model, tmp_path / "m.engine", build=BuildOptions(max_batch=4))
    build = BuildOptions(max_batch=4, max_chunk=8, max_encoder=24, opt_encoder=6)
    manifest = build_engine(model, tmp_path / "m.engine", build=build)
    assert manifest.aliases == {c.present: c.past for c in plan.caches}
    for profile in manifest.profiles:
        for name, axes in found.items():
            axis, range_ = axes.index("encoder"), profile.shapes[name]
            assert (range_.min[axis], range_.opt[axis], range_.max[axis]) == (1, 6, 24)
            assert range_.max[0] == 4


def test_sequences_counted_by_a_symbol_of_each_input(tmp_path: Path) -> None:
    """As torch.export has them where nothing says that they are one."""
    decoder = Decoder(layers=2)

    def attend(g: Build, query: str, keys: str, values: str) -> str:
        layer = sum(f"encoder_{n}.key" in {i.name for i in g.inputs} for n in range(2))
        shape = [decoder.heads, f"length_{layer}", decoder.size]
        heard = g.input(f"encoder_{layer}.key", TensorProto.FLOAT, ["batch", *shape])
        said = g.input(f"encoder_{layer}.value", TensorProto.FLOAT, [f"sequences_{layer}", *shape])
        batch = g.node("Shape", [g.tokens], start=0, end=1)
        sizes = [g.constant([decoder.heads]), g.constant([-1]), g.constant([decoder.size])]
        flat = g.node("Concat", [g.node("Mul", [batch, sizes[0]]), *sizes[1:]], axis=0)
        said = g.node("Reshape", [g.node("Reshape", [said, flat]), g.node("Concat", [batch, *sizes], axis=0)])
        scores = g.node("MatMul", [query, g.node("Transpose", [heard], perm=[0, 1, 3, 2])])
        crossed = g.node("MatMul", [g.node("Softmax", [scores], axis=-1), said])
        return g.node("Add", [decoder.attend(g, query, keys, values), crossed])

    path = write(tmp_path / "m.onnx", make_decoder(replace(decoder, attend=attend)))
    options = PlanOptions(capacity=24)
    plan = plan_model(path, options)
    assert {axes[0] for axes in constants(plan).values()} == {"batch"}
    assert len(plan.caches) == 4
    verify_model(path, options).check()


def test_shapes_given_by_name(tmp_path: Path) -> None:
    model = write(tmp_path / "m.onnx", cross_model("hidden"))
    name = "encoder_hidden_states"
    build = BuildOptions(max_batch=4, max_encoder=24, min_shapes={name: (1, 24, 32)}, opt_shapes={name: (4, 24, 32)})
    manifest = build_engine(model, tmp_path / "m.engine", build=build)
    assert {p.shapes[name].min for p in manifest.profiles} == {(1, 24, 32)}
    with pytest.raises(OptionError, match=r"must be 24 \(from --max-encoder\)"):
        build_engine(model, tmp_path / "m.engine", build=BuildOptions(max_encoder=24, max_shapes={name: (1, 25, 32)}))


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="opt_encoder is 3, .* and none is given"):
        BuildOptions(opt_encoder=3)
    with pytest.raises(OptionError, match="opt_encoder is 3, .* and it is 2"):
        BuildOptions(opt_encoder=3, max_encoder=2)
    model = cross_model("hidden")
    dims = next(i for i in model.graph.input if i.name == "encoder_hidden_states").type.tensor_type.shape.dim
    dims[1].dim_value = 9
    path = write(tmp_path / "m.onnx", model)
    assert constants(plan_model(path)) == {"encoder_hidden_states": ("batch", "", "")}
    with pytest.raises(OptionError, match="--max-encoder is given, and no input of the model is as long"):
        build_engine(path, tmp_path / "m.engine", build=BuildOptions(max_encoder=24))


def test_decomposed_cross_attention(tmp_path: Path) -> None:
    """MatMul, Softmax, MatMul over the encoder's output; its mask, added to the scores, is known by its name."""
    model = cross_model("hidden", "ones")
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Attention" or len(node.input) > 4:
            nodes.append(node)
            continue
        q, k, v, seen = node.input
        name = node.output[0]
        low = onnx.helper.make_node("Where", [seen, "zero", "low"], [f"{name}.bias"], name=f"{name}.bias")
        nodes += [
            onnx.helper.make_node("Transpose", [k], [f"{name}.k"], perm=[0, 1, 3, 2], name=f"{name}.k"),
            onnx.helper.make_node("MatMul", [q, f"{name}.k"], [f"{name}.qk"], name=f"{name}.qk"), low,
            onnx.helper.make_node("Add", [f"{name}.qk", f"{name}.bias"], [f"{name}.s"], name=f"{name}.s"),
            onnx.helper.make_node("Softmax", [f"{name}.s"], [f"{name}.p"], axis=-1, name=f"{name}.p"),
            onnx.helper.make_node("MatMul", [f"{name}.p", v], [name], name=name),
        ]  # fmt: skip
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for name, value in (("zero", 0.0), ("low", -1e4)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    plan = plan_model(write(tmp_path / "m.onnx", model))
    assert constants(plan) == {
        "encoder_hidden_states": ("batch", "encoder", ""), "encoder_attention_mask": ("batch", "encoder"),
    }  # fmt: skip


def test_without_caches_nothing_is_given_once(tmp_path: Path) -> None:
    plan = plan_model(write(tmp_path / "m.onnx", attention_model()))
    assert constants(plan) == {}


def test_self_attention_without_a_cache_is_no_cross_attention(tmp_path: Path) -> None:
    """Embeddings that go into queries and keys alike are the text."""
    graph = Graph()
    shape = ["B", 2, "S", 8]
    x = graph.input("inputs_embeds", TensorProto.FLOAT, shape)
    graph.input("past", TensorProto.FLOAT, ["B", 2, 16, 8])
    graph.input("write_indices", TensorProto.INT64, ["B"])
    graph.node("TensorScatter", ["past", x, "write_indices"], "present", axis=2)
    y = graph.node("Attention", [x, "present", "present"], is_causal=1)
    graph.node("Attention", [y, x, x], "out", is_causal=1)
    graph.output("present", TensorProto.FLOAT, ["B", 2, 16, 8])
    graph.output("out", TensorProto.FLOAT, shape)
    assert constants(plan_model(write(tmp_path / "m.onnx", graph.model()))) == {}


@pytest.mark.parametrize("picked", [False, True])
def test_logits_declared_for_one_token(tmp_path: Path, picked: bool) -> None:
    """A traced step says one token, the graph computes all; unless it picks one."""
    model = cross_model("hidden")
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    if picked:
        head = next(node for node in model.graph.node if node.output[0] == "logits")
        ends = [onnx.numpy_helper.from_array(np.array([v]), n) for n, v in (("from", -1), ("to", 2**31), ("axis", 1))]
        model.graph.initializer.extend(ends)
        last = onnx.helper.make_node("Slice", [head.input[0], "from", "to", "axis"], ["last"], name="last")
        model.graph.node.insert(len(model.graph.node) - 1, last)
        model.graph.node[-1].input[0] = "last"
    path = write(tmp_path / "m.onnx", model)
    logits = plan_model(path).tensor(Role.LOGITS, "output")
    assert logits is not None
    assert (logits.shape, logits.axes) == (
        (("batch", 1, 61), ("batch", "", "")) if picked else (("batch", "logits_span", 61), ("batch", "kept", ""))
    )
    with DecodeSession.open(path) as session:
        slot = session.cache.acquire(constants=encoder_constants("hidden", "none", 6, 0))
        found = session.update({slot: [5, 9, 3]})[slot][-1]
    wanted = cross_logits([5, 9, 3], "none", 6, 0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())


def test_a_position_table_as_long_as_the_vocabulary(tmp_path: Path) -> None:
    """Two tables of one size: which input is which, the names say."""
    model = cross_model("hidden")
    for table in model.graph.initializer:
        if list(table.dims) == [64, 32]:
            table.CopyFrom(onnx.numpy_helper.from_array(np.zeros((61, 32), np.float32), table.name))
    roles = {t.name: t.role for t in plan_model(write(tmp_path / "m.onnx", model)).tensors}
    assert (roles["input_ids"], roles["position_ids"]) == (Role.TOKENS, Role.POSITIONS)
