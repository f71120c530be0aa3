"""Models beyond the usual decoder: what drives them, and what the report says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from graphs import Graph
from needs import ORT_VERSION
from onnx import TensorProto

from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import plan_model, rewrite_model
from trt_kvcache.verify import VerifyReport, sessions, verify_model
from trt_kvcache.verify.sessions import EngineError, OrtSession

QKV = "float[B,4,S,16] q, float[B,2,S,16] k, float[B,2,S,16] v"
CACHES = "float[B,2,32,16] kc, float[B,2,32,16] vc"
OUTPUTS = "float[B,4,S,16] y, float[B,2,32,16] ko, float[B,2,32,16] vo"
UPDATES = """
    ko = TensorScatter<axis=-2>(kc, k, wi)
    vo = TensorScatter<axis=-2>(vc, v, wi)
"""


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


def episodes(report: VerifyReport) -> set[str]:
    return {step.episode for step in report.steps}


def test_absent_write_indices_always_start_at_row_zero(tmp_path: Path) -> None:
    body = """
        ko = TensorScatter<axis=-2>(kc, k)
        vo = TensorScatter<axis=-2>(vc, v)
        y = Attention<is_causal=1>(q, ko, vo, , , , lens)
    """
    report = verify(tmp_path, graph("int64[B] lens", body))
    assert {start for step in report.steps for start in step.starts} == {0}
    assert len(report.steps) > 3


def test_global_and_sliding_window_layers(tmp_path: Path) -> None:
    report = verify(
        tmp_path,
        """decoder (float[B,4,1,16] q, float[B,2,1,16] k, float[B,2,1,16] v, float[B,2,16,16] kc0,
                    float[B,2,16,16] vc0, float[B,2,64,16] kc1, float[B,2,64,16] vc1, int64[B] wi,
                    int64[B] local_len, int64[B] global_len)
                => (float[B,4,1,16] y, float[B,2,16,16] ko0, float[B,2,16,16] vo0, float[B,2,64,16] ko1,
                    float[B,2,64,16] vo1) {
            ko0 = TensorScatter<axis=-2, mode="circular">(kc0, k, wi)
            vo0 = TensorScatter<axis=-2, mode="circular">(vc0, v, wi)
            x = Attention(q, ko0, vo0, , , , local_len)
            ko1 = TensorScatter<axis=-2>(kc1, k, wi)
            vo1 = TensorScatter<axis=-2>(vc1, v, wi)
            y = Attention(x, ko1, vo1, , , , global_len)
        }""",
    )
    wrap = [step for step in report.steps if step.episode == "wrap"]
    assert min(min(step.starts) for step in wrap) < 16 < max(max(step.valid) for step in wrap) <= 64
    assert report.garbage == 1e30


def test_a_circular_cache_that_cannot_wrap_is_noted(tmp_path: Path) -> None:
    body = """
        ko = TensorScatter<axis=-2, mode="circular">(kc, k, wi)
        vo = TensorScatter<axis=-2>(vc, v, wi)
        y = Attention<is_causal=1>(q, ko, vo, , , , lens)
    """
    report = verify(tmp_path, graph("int64[B] wi, int64[B] lens", body))
    assert "circular caches of 32 rows did not wrap" in " ".join(report.notes)


def test_quantized_caches(tmp_path: Path) -> None:
    report = verify(
        tmp_path,
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
        }}""",
    )
    assert report.garbage == 127


def test_chained_updates_of_one_cache(tmp_path: Path) -> None:
    body = """
        once = TensorScatter<axis=-2>(kc, k, wi)
        ko = TensorScatter<axis=-2>(once, v, wi2)
        vo = TensorScatter<axis=-2>(vc, v, wi)
        y = Attention<is_causal=1>(q, ko, vo, , , , lens)
    """
    report = verify(tmp_path, graph("int64[B] wi, int64[B] wi2, int64[B] lens", body))
    assert report.garbage == 1e30  # the chain was followed: garbage lies in unused rows only


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("window", ["left_window_size=6", "left_window_size=6, right_window_size=2"])
def test_windows_where_onnx_runtime_knows_them_and_where_not(
    tmp_path: Path, window: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1.32 on it does; before, the original runs on the reference evaluator."""

    class Older(OrtSession):
        def __init__(self, model: Path | onnx.ModelProto, *given: Any) -> None:
            graph = (onnx.load(model) if isinstance(model, Path) else model).graph
            if any(a.name == "left_window_size" for node in graph.node for a in node.attribute):
                raise EngineError("Unrecognized attribute: left_window_size")
            super().__init__(model, *given)

    if refused:
        monkeypatch.setattr(sessions, "OrtSession", Older)
    body = f"{UPDATES} y = Attention<is_causal=1, {window}>(q, ko, vo, , , , lens)"
    report = verify(tmp_path, graph("int64[B] wi, int64[B] lens", body), opset=25)
    assert report.rewritten_engine.startswith("ONNX Runtime")
    if refused or ORT_VERSION < (1, 32):
        assert report.original_engine.startswith("ONNX reference evaluator")
        assert "Unrecognized attribute: left_window_size" in report.notes[0]
    else:
        assert report.original_engine.startswith("ONNX Runtime")
        assert report.notes == ()


def test_short_masks_run_the_original_on_the_reference_evaluator(tmp_path: Path) -> None:
    report = verify(tmp_path, graph("int64[B] wi, bool[B,1,S,20] mask", f"{UPDATES} y = Attention(q, ko, vo, mask)"))
    assert report.original_engine.startswith("ONNX reference evaluator")
    assert report.rewritten_engine.startswith("ONNX Runtime")


def test_masks_without_queries_are_expanded_for_onnx_runtime(tmp_path: Path) -> None:
    body = f"""{UPDATES}
        visible = Cast<to=9>(attention_mask)
        axes = Constant<value = int64[2] {{1, 2}}>()
        mask = Unsqueeze(visible, axes)
        y = Attention<is_causal=1>(q, ko, vo, mask, , , lens)
    """
    report = verify(tmp_path, graph("int64[B] wi, int64[B] lens, int64[B,32] attention_mask", body))
    assert report.original_engine.startswith("ONNX Runtime")
    assert any("were expanded for it" in note for note in report.notes)


def test_masks_of_any_length_get_the_capacity(tmp_path: Path) -> None:
    verify(tmp_path, graph("int64[B] wi, bool[B,1,S,K] mask", f"{UPDATES} y = Attention(q, ko, vo, mask)"))


def test_write_indices_computed_from_lengths(tmp_path: Path) -> None:
    body = f"""
        s = Shape<start=2, end=3>(q)
        wi = Sub(lens, s)
        {UPDATES}
        y = Attention<is_causal=1>(q, ko, vo, , , , lens)
    """
    report = verify(tmp_path, graph("int64[B] lens", body))
    assert episodes(report) == {"decode", "full", "padded"}
    assert any("no 'short' step" in note and "is negative" in note for note in report.notes)


def test_lengths_computed_from_write_indices(tmp_path: Path) -> None:
    body = f"""
        s = Shape<start=2, end=3>(q)
        lens = Add(wi, s)
        {UPDATES}
        y = Attention<is_causal=1>(q, ko, vo, , , , lens)
    """
    report = verify(tmp_path, graph("int64[B] wi", body))
    assert episodes(report) == {"decode", "full"}
    assert report.garbage == 1e30


def test_one_write_index_for_the_batch(tmp_path: Path) -> None:
    body = f"""
        b = Shape<start=0, end=1>(q)
        wi = Expand(start, b)
        {UPDATES}
        y = Attention<is_causal=1>(q, ko, vo, , , , lens)
    """
    report = verify(tmp_path, graph("int64 start, int64[B] lens", body))
    assert all(len(set(step.starts)) == 1 for step in report.steps)
    assert any("all rows start together" in note for note in report.notes)


def test_a_cache_that_is_not_an_output(tmp_path: Path) -> None:
    body = f"{UPDATES} y = Attention<is_causal=1>(q, ko, vo, , , , lens)"
    report = verify(tmp_path, graph("int64[B] wi, int64[B] lens", body, "float[B,4,S,16] y, float[B,2,32,16] vo"))
    assert {o.name for o in report.outputs} == {"y", "vo"}


def test_an_original_that_reads_unused_rows_gets_small_garbage(tmp_path: Path) -> None:
    report = verify(
        tmp_path,
        """cache_only (float[B,16,S,3,4] u, float[B,16,20,3,4] c, int64[B] wi)
                => (float[B,16,20,3,4] o, float[B,16,20,3,4] doubled) {
            o = TensorScatter<axis=2>(c, u, wi)
            doubled = Add(o, o)
        }""",
    )
    assert report.garbage == 1
    assert any("reads cache rows that were never written" in note for note in report.notes)


def test_caches_that_no_caller_carries_are_no_decode(tmp_path: Path) -> None:
    text = """decoder (float[B,2,S,16] k, float[B,2,32,16] c, int64[B] wi) => (float[B,2,32,16] o) {
        doubled = Add(c, c)
        o = TensorScatter<axis=-2>(doubled, k, wi)
    }"""
    with pytest.raises(OptionError, match=r"written \(the cache .doubled. is not an input of the model\): there is no"):
        verify(tmp_path, text)


def test_packed_updates_run_by_their_definition(tmp_path: Path) -> None:
    report = verify(
        tmp_path,
        """decoder (int64[T] input_ids, float[B,4,1,16] q, float[B,2,32,16] kc, float[B,2,32,16] vc, int64[B] wi,
                    int32[B1] cumulative, int64[B] lens)
                => (float[B,4,1,16] y, float[B,2,32,16] ko, float[B,2,32,16] vo)
            <float[8,32] table> {
            rows = Gather(table, input_ids)
            heads = Constant<value = int64[3] {-1, 2, 16}>()
            k = Reshape(rows, heads)
            v = Neg(k)
            ko = trt.TRT_KVCacheUpdate<update_form="packed_nhd">(kc, k, wi, cumulative)
            vo = trt.TRT_KVCacheUpdate<update_form="packed_nhd">(vc, v, wi, cumulative)
            y = Attention<is_causal=1>(q, ko, vo, , , , lens)
        }""".replace("<float[8,32] table>", f"<float[8,32] table = {{{','.join(map(str, np.linspace(-1, 1, 256)))}}}>"),
        domains=', "trt" : 1',
    )
    assert any("packed updates" in note for note in report.notes)
    assert max(max(step.valid) for step in report.steps) == 32


def test_fixed_updates_that_fit_no_circular_cache_are_refused(tmp_path):
    # Two caches with different fixed updates: the longer one fits before no wrap of the other.
    graph = Graph()
    for name, capacity, length in (("a", 64, 32), ("b", 16, 8)):
        past = graph.input(f"past_{name}", TensorProto.FLOAT, [2, 2, capacity, 4])
        update = graph.input(f"update_{name}", TensorProto.FLOAT, [2, 2, length, 4])
        where = graph.input(f"where_{name}", TensorProto.INT64, [2])
        graph.node("TensorScatter", [past, update, where], f"present_{name}", mode="circular")
        graph.output(f"present_{name}", TensorProto.FLOAT, [2, 2, capacity, 4])
    path = tmp_path / "m.onnx"
    onnx.save(graph.model(), path)
    with pytest.raises(UnsupportedModelError, match=r"'past_b' holds 16 rows, and the model's updates are fixed at 32"):
        plan_model(path)


@pytest.mark.parametrize("mask", ["float", "bool"])
def test_masks_beside_a_causal_frontier_from_zero(mask, tmp_path):
    # Without lengths the first query sees the first key only, whatever the mask adds to it.
    path = write_decoder(tmp_path / "m.onnx", DecoderConfig(form="heads-major", mask=mask, lengths=False))
    verify_model(path).check()


def test_a_rewritten_model_has_no_original_here(tmp_path: Path) -> None:
    rewrite_model(write_decoder(tmp_path / "m.onnx", DecoderConfig()), tmp_path / "rewritten.onnx")
    with pytest.raises(UnsupportedModelError, match="verify the model that it was made from"):
        verify_model(tmp_path / "rewritten.onnx")
