"""TensorRT's parsed networks in NumPy: layers against ONNX Runtime, exports against themselves, and planted faults."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("tensorrt_rtx")

from cases import decoder_attention
from compare.network_faults import LOGGER, TRT, parsed, plant, read
from decoders import DecoderConfig, make_decoder
from harness import Feeds
from plugin_reference import feeds_of, reference

from trt_kvcache.cli.verify import parsed_as_exported
from trt_kvcache.compare import network_comparison as comparing
from trt_kvcache.compare.differences import share_between
from trt_kvcache.compare.network_comparison import LIMIT
from trt_kvcache.compare.numpy_network import Network, UnknownLayerError
from trt_kvcache.cpu import UnfusedSession
from trt_kvcache.errors import BuildError
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.plugins.operators import OPERATORS, Operator

MODELS = Path(__file__).parents[1] / "models"
EXPORTS = {
    "mobius/gemma4_dynamic_f16": 64, "mobius/llama_static_f16_onnxstd": None, "optimum/bloom": 64,
    "optimum/llama_fp16": 64, "optimum/t5": 64, "ort-genai/llama_cpu_fp32": 64,
    "plain-torch/index_put_batch_dynamo_op18": None, "plain-torch/onehot_mul_dynamo_op24": None,
    "torch/deepseek_v3_dynamic_eager": 64, "torch/gemma3_rolled_sdpa": None, "torch/llama_static_wrap_op24": None,
    "torch/qwen25vl_dynamic_float16_eager": 64, "transformers/llama_dyn_op24": 64, "transformers/llama_static": 64,
}  # fmt: skip

rng = np.random.default_rng(0)


def _model(nodes: list[Any], inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    def value(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(name, kind, ["n", *array.shape[1:]] if array.ndim else [])

    outputs = [onnx.ValueInfoProto(name=name) for name in nodes[-1].output if name]
    graph = helper.make_graph(
        nodes, "g", [value(n, a) for n, a in inputs.items()], outputs,
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def _floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


_ALIVE: list[Any] = []  # builders and parsers: they live as long as their networks


def _network(model: onnx.ModelProto) -> Any:
    builder = TRT.Builder(LOGGER)
    network = builder.create_network(0)
    parser = TRT.OnnxParser(network, LOGGER)
    _ALIVE.extend((builder, parser))
    assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
    return network


# ruff: noqa: E501
node = helper.make_node
CASES: dict[str, tuple[list[Any], dict[str, np.ndarray], dict[str, np.ndarray]]] = {
    "slice, backwards": ([node("Slice", ["x", "s", "e", "a", "d"], ["y"])], {"x": _floats(2, 9)},
                         {"s": _ints(-2), "e": _ints(-8), "a": _ints(1), "d": _ints(-2)}),
    "pad, constant": ([node("Pad", ["x", "p", "v"], ["y"])], {"x": _floats(2, 5)},
                      {"p": _ints(0, 2, 0, 1), "v": np.float32(7).reshape(())}),
    "pad, reflect": ([node("Pad", ["x", "p"], ["y"], mode="reflect")], {"x": _floats(2, 5)}, {"p": _ints(0, 2, 0, 3)}),
    "pad, edge": ([node("Pad", ["x", "p"], ["y"], mode="edge")], {"x": _floats(2, 5)}, {"p": _ints(0, 2, 0, 3)}),
    "gather": ([node("Gather", ["x", "i"], ["y"], axis=1)], {"x": _floats(2, 5, 3)}, {"i": _ints(4, 0, -1)}),
    "gather elements": ([node("GatherElements", ["x", "i"], ["y"], axis=1)], {"x": _floats(2, 5)},
                        {"i": np.array([[1, 0, 4], [2, 2, -1]])}),
    "gather nd": ([node("GatherND", ["x", "i"], ["y"])], {"x": _floats(2, 5, 3)}, {"i": np.array([[1, 4], [0, 2]])}),
    "gather nd, batch": ([node("GatherND", ["x", "i"], ["y"], batch_dims=1)], {"x": _floats(2, 5, 3)},
                         {"i": np.array([[[1], [4]], [[0], [2]]])}),
    "scatter nd": ([node("ScatterND", ["x", "i", "u"], ["y"])], {"x": _floats(2, 5, 3), "u": _floats(2, 3)},
                   {"i": np.array([[1, 4], [0, 2]])}),
    "scatter elements": ([node("ScatterElements", ["x", "i", "u"], ["y"], axis=1)],
                         {"x": _floats(2, 5), "u": _floats(2, 2)}, {"i": np.array([[1, 0], [2, 4]])}),
    "top k": ([node("TopK", ["x", "k"], ["y", "i"], axis=1)], {"x": _floats(2, 9)}, {"k": _ints(3)}),
    "top k, smallest": ([node("TopK", ["x", "k"], ["y", "i"], axis=1, largest=0)], {"x": _floats(2, 9)}, {"k": _ints(3)}),
    "cumsum": ([node("CumSum", ["x", "a"], ["y"], exclusive=1, reverse=1)], {"x": _floats(2, 9)}, {"a": _ints(1)[0]}),
    "one hot": ([node("OneHot", ["x", "d", "v"], ["y"], axis=1)], {"x": np.array([[1, 0], [3, 2]])},
                {"d": _ints(4), "v": np.array([0, 5], np.float32)}),
    "conv": ([node("Conv", ["x", "w", "b"], ["y"], group=2, dilations=[2], strides=[2], pads=[3, 1])],
             {"x": _floats(2, 4, 11)}, {"w": _floats(6, 2, 3), "b": _floats(6)}),
    "conv, 2-D": ([node("Conv", ["x", "w"], ["y"], pads=[1, 0, 0, 1])], {"x": _floats(2, 3, 6, 5)}, {"w": _floats(4, 3, 2, 3)}),
    "layer norm": ([node("LayerNormalization", ["x", "w", "b"], ["y"], epsilon=0.1)], {"x": _floats(2, 3, 8)},
                   {"w": _floats(8), "b": _floats(8)}),
    "rms norm": ([node("RMSNormalization", ["x", "w"], ["y"], epsilon=0.1)], {"x": _floats(2, 3, 8)}, {"w": _floats(8)}),
    "softmax, first axis": ([node("Softmax", ["x"], ["y"], axis=1)], {"x": _floats(2, 3, 8)}, {}),
    "reduce": ([node("ReduceL2", ["x", "a"], ["y"], keepdims=0)], {"x": _floats(2, 3, 8)}, {"a": _ints(1, 2)}),
    "mod": ([node("Mod", ["x", "d"], ["y"])], {"x": np.array([[7, -7, 6]])}, {"d": _ints(4)}),
    "integer division": ([node("Div", ["x", "d"], ["y"])], {"x": np.array([[7, -7, 6]])}, {"d": _ints(4)}),
    "cast to whole": ([node("Cast", ["x"], ["y"], to=TensorProto.INT64)], {"x": np.array([[1.7, -1.7]], np.float32)}, {}),
    "trilu": ([node("Trilu", ["x", "k"], ["y"], upper=0)], {"x": _floats(2, 4, 4)}, {"k": np.array(1)}),
    "einsum": ([node("Einsum", ["x", "w"], ["y"], equation="bij,jk->bik")], {"x": _floats(2, 3, 4)}, {"w": _floats(4, 5)}),
    "rotary": ([node("RotaryEmbedding", ["x", "c", "s", "p"], ["y"])], {"x": _floats(2, 2, 3, 8), "p": np.array([[0, 1, 2], [5, 6, 7]])},
               {"c": _floats(9, 4), "s": _floats(9, 4)}),
    "rotary, interleaved": ([node("RotaryEmbedding", ["x", "c", "s", "p"], ["y"], interleaved=1)],
                            {"x": _floats(2, 2, 3, 8), "p": np.array([[0, 1, 2], [5, 6, 7]])},
                            {"c": _floats(9, 4), "s": _floats(9, 4)}),
    "quantize, int8": ([node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
                       {"x": _floats(2, 8)}, {"s": np.float32(0.02).reshape(()), "z": np.int8(0).reshape(())}),
    "dequantize, axis": ([node("DequantizeLinear", ["w", "s"], ["d"], axis=1), node("MatMul", ["x", "d"], ["y"])],
                         {"x": _floats(2, 4)}, {"w": rng.integers(-90, 90, (4, 5), np.int8), "s": np.abs(_floats(5))}),
    "dequantize, blocks": ([node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=2), node("MatMul", ["x", "d"], ["y"])],
                           {"x": _floats(2, 4)}, {"w": rng.integers(-90, 90, (4, 5), np.int8), "s": np.abs(_floats(2, 5))}),
    "matmul, vector": ([node("MatMul", ["x", "w"], ["y"])], {"x": _floats(2, 4)}, {"w": _floats(4)}),
    "gelu": ([node("Gelu", ["x"], ["y"], approximate="tanh")], {"x": _floats(2, 4)}, {}),
    "softplus": ([node("Softplus", ["x"], ["y"])], {"x": 40 * _floats(2, 4)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_layer_gives_what_onnx_runtime_gives(name: str) -> None:
    model = _model(*CASES[name])
    feeds = CASES[name][1]
    network = _network(model)
    given = Network(network, TRT).run(feeds)
    wanted = UnfusedSession(model).run(feeds)
    for output, values in wanted.items():
        assert given[output].dtype == values.dtype
        np.testing.assert_allclose(given[output], values, rtol=2e-6, atol=2e-6)


def test_a_layer_of_another_kind_is_named() -> None:
    model = _model([node("MaxPool", ["x"], ["y"], kernel_shape=[2])], {"x": _floats(2, 3, 6)}, {})
    network = _network(model)
    with pytest.raises(UnknownLayerError, match="has the type POOLING, which NumPy cannot compute here"):
        Network(network, TRT)


class OneLayer:
    """A parsed network of one layer of this project's plugin, as full TensorRT shows it."""

    num_layers = 1

    def __init__(self, operator: Operator, feeds: Feeds) -> None:
        kinds = {"int8": TRT.DataType.INT8, "int32": TRT.DataType.INT32, "int64": TRT.DataType.INT64}
        kinds |= {"float16": TRT.DataType.HALF, "float32": TRT.DataType.FLOAT}
        inputs = [SimpleNamespace(name=n, dtype=kinds[str(v.dtype)]) for n, v in feeds.items()]
        outputs = [SimpleNamespace(name=name, dtype=TRT.DataType.INT8) for name in operator.outputs]
        self.num_inputs, self.num_outputs = len(inputs), len(outputs)
        self.get_input, self.get_output = inputs.__getitem__, outputs.__getitem__
        layer = SimpleNamespace(name="update", type=SimpleNamespace(name="PLUGIN_V3"), **vars(self))
        self.get_layer = [layer].__getitem__


@pytest.mark.parametrize("name", OPERATORS)
def test_a_layer_of_the_plugin_gives_what_its_reference_gives(name: str) -> None:
    """On a stand-in: TensorRT for RTX has no plugins."""
    operator, drawn = OPERATORS[name], np.random.default_rng(list(name.encode()))
    for trial in range(24):
        feeds = feeds_of(operator, drawn, trial)
        given = Network(OneLayer(operator, feeds), TRT, {"present_0": operator}).run(feeds)
        for output, values in reference(operator, feeds).items():
            np.testing.assert_array_equal(given[output], values, err_msg=f"{output} of trial {trial}")


def test_a_layer_of_another_plugin_is_named() -> None:
    operator = OPERATORS["KVCacheUpdate"]
    network = OneLayer(operator, feeds_of(operator, rng, 0))
    with pytest.raises(UnknownLayerError, match="'update' of TensorRT's network has the type PLUGIN_V3"):
        Network(network, TRT)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_the_same_after_the_parser(name: str) -> None:
    imported, content = read(MODELS / name / "model.onnx", EXPORTS[name])
    result = parsed(imported, content).compare()
    assert (result.finding, result.note) == ("", "")
    assert result.steps >= 3
    assert result.difference < LIMIT / 3


FAULTY = ("ort-genai/llama_cpu_fp32", "mobius/llama_static_f16_onnxstd", "optimum/llama_fp16")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_seen_and_its_layer_named(name: str) -> None:
    model = read(MODELS / name / "model.onnx", EXPORTS.get(name))
    faults = [fault for seed in range(14) if (fault := plant(*model, seed)) is not None]
    assert sum(fault.changes for fault in faults) >= 5
    assert [fault for fault in faults if fault.changes and not fault.seen] == []
    assert [fault for fault in faults if fault.seen and fault.changes and not fault.named] == []


@pytest.mark.parametrize(("attributes", "far"), [({}, 0.3), ({"is_causal": 1}, 0.3)])
def test_what_the_parser_drops_shows_in_numbers(attributes: dict[str, int], far: float) -> None:
    """TensorRT's parser drops `nonpad_kv_seqlen`, and takes causality from the first key on, without a word."""
    model = decoder_attention(dtype=TensorProto.FLOAT, **attributes)
    sizes = {"B": 2, "S": 1}
    feeds = {
        i.name: _floats(*[d.dim_value or sizes[d.dim_param] for d in i.type.tensor_type.shape.dim])
        for i in model.graph.input
    }
    feeds |= {"write_indices": _ints(4, 6), "nonpad_kv_seqlen": _ints(5, 7)}
    given, wanted = Network(_network(model), TRT).run(feeds), UnfusedSession(model).run(feeds)
    assert share_between(wanted["present_key"], given["present_key"]) == 0
    assert share_between(wanted["output"], given["output"]) > far
    feeds["nonpad_kv_seqlen"] = _ints(16, 16)
    if not attributes:  # nothing to drop
        given, wanted = Network(_network(model), TRT).run(feeds), UnfusedSession(model).run(feeds)
        assert share_between(wanted["output"], given["output"]) < LIMIT


def test_a_model_that_is_too_large_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "free_memory", lambda: 1 << 10)
    result = parsed(*read(MODELS / "ort-genai/llama_cpu_fp32/model.onnx", 64)).compare()
    assert "weights in float32" in result.note
    assert "are free" in str(result)
    result.check()


def test_a_finding_is_an_error_that_says_what_to_do() -> None:
    result = comparing.NetworkComparison(1, 1.0, "'logits' differs")
    with pytest.raises(
        BuildError, match="'logits' differs; an engine built from it would give wrong numbers; try another"
    ):
        result.check()


def test_shares() -> None:
    one = np.array([1.0, -4.0, 1e4], np.float32)
    assert share_between(one, one) == 0
    assert share_between(one, one + np.array([0, 0.4, 0], np.float32)) == pytest.approx(0.1)
    assert share_between(one, one[:2]) == np.inf
    assert share_between(one, np.array([1, np.nan, 1e4], np.float32)) == np.inf
    assert share_between(np.array([1, 2]), np.array([1, 3])) == np.inf
    codes = np.zeros(2000, np.int8)
    moved = codes.copy()
    moved[0] = 1
    assert share_between(codes, moved) == 0
    assert share_between(codes, moved * 2) == np.inf


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "optimum/llama",
            r"TensorRT for RTX \S+ takes it, and is right within \de-07; it copies each cache in each step",
        ),
        ("mobius/llama_dynamic_f32", r"refused: TensorRT for RTX \S+ cannot parse .* Attention nodes with one output"),
    ],
)
def test_what_the_parser_makes_of_an_export_as_it_is(name: str, words: str) -> None:
    text = parsed_as_exported(MODELS / name / "model.onnx", PlanOptions(capacity=64))
    assert re.match(words, text), text


def test_a_network_that_is_wrong_as_exported_is_said(tmp_path: Path) -> None:
    """Attention with valid lengths and one output: the parser takes it, and drops the lengths."""
    model = make_decoder(DecoderConfig(form="heads-major", sequence=1))
    for attention in (n for n in model.graph.node if n.op_type == "Attention"):
        del attention.output[1:]
        kept = [a for a in attention.attribute if a.name != "is_causal"]  # a single query sees all valid keys
        del attention.attribute[:]
        attention.attribute.extend(kept)
    onnx.save(model, tmp_path / "model.onnx")
    text = parsed_as_exported(tmp_path / "model.onnx", PlanOptions())
    assert re.search(r"takes it, and is WRONG: outputs are \S+ off", text), text
