"""Models beyond the usual decoder: what drives them, and what the report says about it."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import rewrite_model, verify_model
from trt_kvcache.compare.verify_report import VerifyReport
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer.steps.sessions import ReferenceSession

QKV = "float[B,4,S,16] q, float[B,2,S,16] k, float[B,2,S,16] v"
CACHES = "float[B,2,32,16] kc, float[B,2,32,16] vc"
OUTPUTS = "float[B,4,S,16] y, float[B,2,32,16] ko, float[B,2,32,16] vo"
UPDATES = """
    ko = TensorScatter<axis=-2>(kc, k, wi)
    vo = TensorScatter<axis=-2>(vc, v, wi)
"""
ATTEND = "y = Attention<is_causal=1>(q, ko, vo, , , , lens)"


def verify(folder: Path, text: str, opset: int = 24, domains: str = "") -> VerifyReport:
    """Verifies one graph in ONNX's text form."""
    model = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["" : {opset}{domains}]>\n{text}')
    for i, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{i}"
    onnx.save(model, folder / "m.onnx")
    report = verify_model(folder / "m.onnx")
    report.check()
    return report


def graph(inputs: str, body: str, outputs: str = OUTPUTS) -> str:
    return f"decoder ({QKV}, {CACHES}, {inputs}) => ({outputs}) {{ {body} }}"


@dataclass(frozen=True)
class Unusual:
    """A model in ONNX's text form.

    Attributes:
        text: the model.
        domains: that it imports.
        note: in the report.
    """

    text: str
    domains: str = ""
    note: str = ""


MODELS = {
    "absent write indices": Unusual(
        graph("int64[B] lens", f"ko = TensorScatter<axis=-2>(kc, k) vo = TensorScatter<axis=-2>(vc, v) {ATTEND}")
    ),
    "a circular cache that cannot wrap": Unusual(
        graph(
            "int64[B] wi, int64[B] lens",
            f"""ko = TensorScatter<axis=-2, mode="circular">(kc, k, wi) vo = TensorScatter<axis=-2>(vc, v, wi)
                {ATTEND}""",
        )
    ),
    "quantized caches": Unusual(
        f"""decoder ({QKV}, int8[B,2,32,16] kc, int8[B,2,32,16] vc, int64[B] wi, int64[B] lens)
                => (float[B,4,S,16] y, int8[B,2,32,16] ko, int8[B,2,32,16] vo) {{
            s = Constant<value = float {{0.05}}>()
            kq = QuantizeLinear<output_dtype=3>(k, s)
            vq = QuantizeLinear<output_dtype=3>(v, s)
            ko = TensorScatter<axis=-2>(kc, kq, wi)
            vo = TensorScatter<axis=-2>(vc, vq, wi)
            kf = DequantizeLinear(ko, s)
            vf = DequantizeLinear(vo, s)
            y = Attention<is_causal=1>(q, kf, vf, , , , lens)
        }}"""
    ),
    "chained updates": Unusual(
        graph(
            "int64[B] wi, int64[B] wi2, int64[B] lens",
            f"""once = TensorScatter<axis=-2>(kc, k, wi) ko = TensorScatter<axis=-2>(once, v, wi2)
                vo = TensorScatter<axis=-2>(vc, v, wi) {ATTEND}""",
        )
    ),
    "a mask without queries": Unusual(
        graph(
            "int64[B] wi, int64[B] lens, int64[B,32] attention_mask",
            f"""{UPDATES} visible = Cast<to=9>(attention_mask) axes = Constant<value = int64[2] {{1, 2}}>()
                mask = Unsqueeze(visible, axes) y = Attention<is_causal=1>(q, ko, vo, mask, , , lens)""",
        )
    ),
    "a mask of any length": Unusual(
        graph("int64[B] wi, bool[B,1,S,K] mask", f"{UPDATES} y = Attention(q, ko, vo, mask)")
    ),
    "write indices of lengths": Unusual(
        graph("int64[B] lens", f"s = Shape<start=2, end=3>(q) wi = Sub(lens, s) {UPDATES} {ATTEND}")
    ),
    "lengths of write indices": Unusual(
        graph("int64[B] wi", f"s = Shape<start=2, end=3>(q) lens = Add(wi, s) {UPDATES} {ATTEND}")
    ),
    "one write index for the batch": Unusual(
        graph("int64 start, int64[B] lens", f"b = Shape<start=0, end=1>(q) wi = Expand(start, b) {UPDATES} {ATTEND}")
    ),
    "a cache that is no output": Unusual(
        graph("int64[B] wi, int64[B] lens", f"{UPDATES} {ATTEND}", "float[B,4,S,16] y, float[B,2,32,16] vo")
    ),
    "unused rows that are read": Unusual(
        """cache_only (float[B,16,S,3,4] u, float[B,16,20,3,4] c, int64[B] wi)
                => (float[B,16,20,3,4] o, float[B,16,20,3,4] doubled) {
            o = TensorScatter<axis=2>(c, u, wi)
            doubled = Add(o, o)
        }""",
        note="reads cache rows that were never written",
    ),
    "packed updates": Unusual(
        """decoder (int64[T] input_ids, float[B,4,1,16] q, float[B,2,32,16] kc, float[B,2,32,16] vc, int64[B] wi,
                    int32[B1] cumulative, int64[B] lens)
                => (float[B,4,1,16] y, float[B,2,32,16] ko, float[B,2,32,16] vo)
            <float[8,32] table = {VALUES}> {
            rows = Gather(table, input_ids)
            heads = Constant<value = int64[3] {-1, 2, 16}>()
            k = Reshape(rows, heads)
            v = Neg(k)
            ko = trt.TRT_KVCacheUpdate<update_form="packed_nhd">(kc, k, wi, cumulative)
            vo = trt.TRT_KVCacheUpdate<update_form="packed_nhd">(vc, v, wi, cumulative)
            y = Attention<is_causal=1>(q, ko, vo, , , , lens)
        }""".replace("VALUES", ",".join(map(str, np.linspace(-1, 1, 256)))),
        domains=', "trt" : 1',
    ),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", MODELS)
def test_a_block_of_a_model_is_compared(tmp_path: Path, name: str) -> None:
    given = MODELS[name]
    report = verify(tmp_path, given.text, domains=given.domains)
    assert [s.name for s in report.stations if s.compared][:1] == ["rewritten"]
    assert report.stations[0].difference < 1e-5
    assert given.note in " ".join(report.notes)


def test_caches_that_no_caller_carries_are_no_decode(tmp_path: Path) -> None:
    text = """decoder (float[B,2,S,16] k, float[B,2,32,16] c, int64[B] wi) => (float[B,2,32,16] o) {
        doubled = Add(c, c)
        o = TensorScatter<axis=-2>(doubled, k, wi)
    }"""
    with pytest.raises(OptionError, match=r"step \(the cache .doubled. is not an input of the model\): there is no"):
        verify(tmp_path, text)


def test_a_rewritten_model_has_no_original_here(tmp_path: Path) -> None:
    rewrite_model(write_decoder(tmp_path / "m.onnx", DecoderConfig()), tmp_path / "rewritten.onnx")
    with pytest.raises(UnsupportedModelError, match="give the model that it was made from"):
        verify_model(tmp_path / "rewritten.onnx")


def test_numbers_that_are_not_finite_warn_nobody(tmp_path: Path) -> None:
    text = '<ir_version: 11, opset_import: ["" : 24]> g (float[n] x) => (float[n] y) { y = Div(x, x) }'
    model = onnx.parser.parse_model(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = ReferenceSession(model).run({"x": np.zeros(2, np.float32)}).values()
    assert np.isnan(found).all()
