"""Operators that ask for something that their bodies do not cover: refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from lowering import CONTRIB, Array, lowered, one_operator
from mixtures import Mixture
from onnx import TensorProto, helper

from trt_kvcache.errors import InvalidModelError, UnsupportedModelError

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


X, G = zeros(2, 3, 64), zeros(64)
ROTARY = {"x": X, "p": zeros(2, 3, dtype=np.int64), "cos": zeros(10, 8), "sin": zeros(10, 8)}
PLANES = ROTARY | {"p": zeros(3, 2, 3, dtype=np.int64)}
SECTIONS = {"mrope_section": [2, 3, 3], "mrope_layout": 1, "num_heads": 4}
WORDS = {name: zeros(2, 5, dtype=np.int32) for name in ("ids", "mask", "places")} | {"w": X[0], "p": X[0]}
WEIGHTS = {"w": zeros(24, 2, 16, dtype=np.uint8), "s": zeros(24, 2)}
TABLE = {"t": zeros(24, 16, dtype=np.uint8), "s": zeros(24, 2)}
PASTS = {"pk": zeros(2, 2, 4, 16), "pv": zeros(2, 2, 4, 16)}
GROUPED = {"x": zeros(2, 1, 96)} | PASTS | {"n": zeros(2, dtype=np.int32), "t": zeros(1, dtype=np.int32)}
GROUPED |= {"h": zeros(2, 1, 32), "e": zeros(2, 0, 32)}
GROUPS = {"num_heads": 2, "kv_num_heads": 2}
HEADS = {"q": X, "k": X, "v": X, "m": zeros(2, 3, dtype=np.int32)}


def nbits(inputs: str = "x w s", **attrs: Any) -> onnx.ModelProto:
    attrs = {"K": 64, "N": 24, "bits": 4, "block_size": 32} | attrs
    feeds = {"x": X, "o": zeros(64, dtype=np.int32)}
    taken = {n: v for n, v in feeds.items() if n in inputs.split()}
    names = [n if n != "-" else "" for n in inputs.split()]
    return one_operator("MatMulNBits", taken, names, ["y"], WEIGHTS, **{k: v for k, v in attrs.items() if v})


def table(**attrs: Any) -> onnx.ModelProto:
    attrs = {"bits": 4, "block_size": 16, "quantize_axis": 1} | attrs
    ids = {"i": zeros(2, 3, dtype=np.int64)}
    return one_operator("GatherBlockQuantized", ids, ["t", "i", "s"], ["y"], TABLE, **{"kind": FLOAT, **attrs})


def plain(op: str, feeds: dict[str, Array], inputs: str = "", outputs: str = "y", **attrs: Any) -> onnx.ModelProto:
    names = [n if n != "-" else "" for n in inputs.split()] or list(feeds)
    outs = [n if n != "-" else "" for n in outputs.split()]
    return one_operator(op, {n: v for n, v in feeds.items() if n in names}, names, outs, **attrs)


def grouped(inputs: str = "x - - pk pv n t", outputs: str = "y k2 v2", **attrs: Any) -> onnx.ModelProto:
    feeds = GROUPED | {name: zeros(2) for name in inputs.split() if name not in {*GROUPED, "-"}}
    return plain("GroupQueryAttention", feeds, inputs, outputs, **GROUPS | attrs)


def heads(inputs: str = "q k v", outputs: str = "y", **attrs: Any) -> onnx.ModelProto:
    feeds = HEADS | PASTS | {name: zeros(2) for name in inputs.split() if name not in {*HEADS, *PASTS, "-"}}
    return plain("MultiHeadAttention", feeds, inputs, outputs, **{"num_heads": 4} | attrs)


def edited(model: onnx.ModelProto, edit: Callable[[onnx.ModelProto], None]) -> onnx.ModelProto:
    edit(model)
    return model


def unknown(name: str) -> Callable[[onnx.ModelProto], None]:
    """Takes the shape of an input away."""

    def edit(model: onnx.ModelProto) -> None:
        value = next(v for v in model.graph.input if v.name == name)
        value.type.tensor_type.ClearField("shape")

    return edit


def computed(model: onnx.ModelProto) -> None:
    """Lets the graph compute the weights of a mixture."""
    node = model.graph.node[0]
    model.graph.node.insert(0, helper.make_node("Neg", [node.input[2]], ["negated"]))
    model.graph.node[1].input[2] = "negated"


def with_input(index: int) -> Callable[[onnx.ModelProto], None]:
    """Gives a mixture one more input, which is its first weight; or takes one away, if it has it."""

    def edit(model: onnx.ModelProto) -> None:
        node = model.graph.node[0]
        taken = index < len(node.input)
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = "" if taken else node.input[2]

    return edit


def of_shape(name: str, *shape: int) -> Callable[[onnx.ModelProto], None]:
    """Gives a weight of a mixture another shape, by the operator's name for it."""

    def edit(model: onnx.ModelProto) -> None:
        case = FOUR if model.graph.node[0].op_type == "QMoE" else MIXTURE
        index = [*(ZEROS if "zero" in name else case).weights()[0]].index(name)
        tensor = model.graph.initializer[index]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(shape, dtype), tensor.name))

    return edit


def declared(index: int, *shape: int) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        name = model.graph.input[index].name
        model.graph.input[index].CopyFrom(helper.make_tensor_value_info(name, FLOAT, shape))

    return edit


MIXTURE, FOUR = Mixture(), Mixture(bits=4)
ZEROS = Mixture(bits=4, zeros=True)
REFUSED: dict[str, Callable[[], onnx.ModelProto]] = {
    "MatMulBnb4 'node_y' computes with quantized weights": lambda: plain("MatMulBnb4", {"x": X}),
    "PagedAttention 'node_y' keeps its cache in pages": lambda: plain("PagedAttention", {"x": X}),
    "DecoderMaskedMultiHeadAttention 'node_y' keeps its keys": lambda: plain("DecoderMaskedMultiHeadAttention", HEADS),
    "SkipSimplifiedLayerNormalization 'node_y' has the output 'mean'": lambda: plain(
        "SkipSimplifiedLayerNormalization", {"x": X, "s": X, "g": G}, outputs="y mean"
    ),
    "SimplifiedLayerNormalization 'node_y' has the output 'inverse'": lambda: plain(
        "SimplifiedLayerNormalization", {"x": X, "g": G}, outputs="y i"
    ),
    "EmbedLayerNormalization 'node_y' is a fusion of ONNX Runtime's optimizer": lambda: plain(
        "EmbedLayerNormalization", WORDS | {"g": G, "b": G}, "ids - w p - g b", kind=FLOAT
    ),
    "CausalConvWithState.* no past": lambda: plain("CausalConvWithState", {"x": zeros(2, 6, 5), "w": zeros(6, 1, 4)}),
    "FusedMatMul.*rank is unknown: export the model with shapes": lambda: edited(
        plain("FusedMatMul", {"a": X[0], "b": X}, transA=1), unknown("a")
    ),
    "RotaryEmbedding 'node_y' has scale=2.0": lambda: plain("RotaryEmbedding", ROTARY, scale=2.0),
    "RotaryEmbedding 'node_y' has is_packed": lambda: plain("RotaryEmbedding", ROTARY, is_packed_batching=1),
    "RotaryEmbedding 'node_y' reads 'p', whose rank": lambda: edited(plain("RotaryEmbedding", ROTARY), unknown("p")),
    "RotaryEmbedding 'node_y.*' rotates rows of 64 values, which is no multiple of the head size 18": lambda: plain(
        "RotaryEmbedding", ROTARY | {"cos": zeros(10, 9)}
    ),
    "mrope_layout=2.*; the importer supports sections of three planes": lambda: plain(
        "MRotaryEmbedding", PLANES, **SECTIONS | {"mrope_layout": 2}
    ),
    r"mrope_section=\[9, -4, 3\]": lambda: plain(
        "MRotaryEmbedding", PLANES, **SECTIONS | {"mrope_section": [9, -4, 3]}
    ),
    "sections of 7 columns, but cos and sin caches of 8": lambda: plain(
        "MRotaryEmbedding", PLANES, **SECTIONS | {"mrope_section": [2, 2, 3]}
    ),
    r"positions \[2, 2, 3\]": lambda: plain(
        "MRotaryEmbedding", PLANES | {"p": zeros(2, 2, 3, dtype=np.int64)}, **SECTIONS
    ),
    "has weights of 2 bits; the importer supports 4 and 8": lambda: nbits(bits=2),
    "layout of one kind of GPU": lambda: nbits(weight_prepacked=1),
    r"weight 'w' \[24, 2, 16\] as b \(768 bytes cannot be \[24, 128\]": lambda: nbits(K=128),
    "has no K, N, block_size or scales": lambda: nbits(K=0),
    "g_idx": lambda: nbits("x w s - o"),
    "has the float 'x' as b; this input must be a weight of the model, of type uint8": lambda: nbits("x x s"),
    "has 2 bits, axes": lambda: table(bits=2),
    "has 8 bits, axes": lambda: table(bits=8),
    r"axes \(1, 1\)": lambda: table(gather_axis=1),
    r"axes \(0, 0\)": lambda: table(quantize_axis=0),
    "for blocks of 32; the importer supports rows": lambda: table(block_size=32),
    "has no past_key and past_value": lambda: grouped("x - - - - n t", "y"),
    "num_heads=2, kv_num_heads=0": lambda: grouped(kv_num_heads=0),
    "has the sinks 'z'": lambda: grouped("x - - pk pv n t - - - - z"),
    "has quantized caches": lambda: grouped(k_quant_type="PER_TENSOR"),
    "returns its scores .qk_output": lambda: grouped(outputs="y k2 v2 qk", qk_output=1),
    "another layer, and has head_sink or smooth_softmax": lambda: grouped("h e e pk pv n t", smooth_softmax=1),
    "reads the cache of another layer, and has causal=0": lambda: grouped("h e e pk pv n t", causal=0),
    "another layer, and has sliding_window_cache": lambda: grouped("h e e pk pv n t", sliding_window_cache=1),
    "is packed, with heads of size 5; but its past has heads of size 16. .* length 0": lambda: grouped(
        "h - - pk pv n t"
    ),
    "do_rotary=1, but no cos_cache": lambda: grouped(do_rotary=1),
    "reads past_sequence_length or cache_indirection": lambda: heads("q k v - - - pk pv z", "y k2 v2"),
    "returns its scores .qk.": lambda: heads("q k v - - - pk pv", "y k2 v2 qk"),
    "has packed inputs": lambda: heads("q"),
    "returns the present 'k2', but has no past": lambda: heads(outputs="y k2 v2"),
    "has a padding mask 'm' .* and no past": lambda: heads("q k v - m"),
    r"has a padding mask 'z' \[2\] and past": lambda: heads("q k v - z - pk pv", "y k2 v2"),
    "use_sparse_mixer=1; the importer supports 0": lambda: MIXTURE.model(use_sparse_mixer=1),
    "quant_type='fp4'; the importer supports int: export the model with integer": lambda: FOUR.model(quant_type="fp4"),
    "weights_prepacked=1; the importer supports -1 or 0: export the model for": lambda: FOUR.model(weights_prepacked=1),
    "has foo=3; the importer supports no such attribute": lambda: MIXTURE.model(foo=3),
    "activation 'geglu' with swiglu_fusion=1; the importer supports relu, gelu": lambda: MIXTURE.model(
        activation_type="geglu"
    ),
    "activation 'swiglu' with swiglu_fusion=0": lambda: MIXTURE.model(swiglu_fusion=0),
    "activation 'silu' with swiglu_fusion=1": lambda: FOUR.model(activation_type="silu"),
    "swiglu_limit=-1.0; the limit must not be negative": lambda: MIXTURE.model(swiglu_limit=-1.0),
    "chooses 7 of 6 experts": lambda: MIXTURE.model(k=7),
    "experts of 2 bits": lambda: FOUR.model(expert_weight_bits=2),
    "fc1, fc2, fc3: 4, 8, 4": lambda: FOUR.model(fc2_expert_weight_bits=8),
    "MoE 'node_y' has fc3": lambda: edited(MIXTURE.model(), with_input(6)),
    "QMoE 'node_y' has fc3": lambda: edited(FOUR.model(), with_input(8)),
    "QMoE 'node_y' has 15 inputs": lambda: edited(FOUR.model(), with_input(14)),
    "does not have all of the inputs x, logits, fc1, fc2, scales1, scales2": lambda: edited(
        FOUR.model(), with_input(3)
    ),
    "must be a weight of the model": lambda: edited(FOUR.model(), computed),
    r"has fc2 .* \[6, 32, 32\]; its shape must be \[6, 64, 16\]: .*prepacked=0": lambda: edited(
        FOUR.model(), of_shape("fc2_experts_weights", 6, 32, 32)
    ),
    r"has scales1 .* \[6, 64\]": lambda: edited(FOUR.model(), of_shape("fc1_scales", 6, 64)),
    r"has bias2 .* \[6, 32\]": lambda: edited(MIXTURE.model(), of_shape("fc2_experts_bias", 6, 32)),
    r"has zero_points2 .* \[6, 64, 2\]; its shape must be \[6, 64, 1\]": lambda: edited(
        ZEROS.model(), of_shape("fc2_zero_points", 6, 64, 2)
    ),
    r"reads 'logits' \[1, 3, 6\]; the logits must be \[T, 6\]": lambda: edited(MIXTURE.model(), declared(1, 1, 3, 6)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_by_name(words: str) -> None:
    with pytest.raises((UnsupportedModelError, InvalidModelError), match=words) as caught:
        lowered(REFUSED[words]())
    assert "'node_y" in str(caught.value)
    assert CONTRIB in str(caught.value) or isinstance(caught.value, InvalidModelError)
