"""The check of models of real sizes: few rows and columns, with random weights. Weights here are holes in a file."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from concat_graphs import Build, Decoder, make_decoder
from decoders import DecoderConfig
from foreign_decoders import make_foreign
from large import write_large
from mixtures import Mixture
from onnx import TensorProto, helper, numpy_helper
from verify import mistakes as m

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer import ImportedModel, pipeline, plan_model, rewrite_model
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.importer.check import check_rewrite, checker
from trt_kvcache.importer.check.models import pair_models
from trt_kvcache.importer.check.region import find_regions
from trt_kvcache.importer.check.shrunk_weights import bytes_read
from trt_kvcache.importer.interface import index_limits
from trt_kvcache.importer.steps.sessions import exact_experts

PLAN = PlanOptions(capacity=24)
MODELS = Path(__file__).parents[2] / "models"
SMALL = DecoderConfig(layers=1, hidden=53, positions=67, vocab=61, query_heads=4, kv_heads=2, head_size=16)
ROWS = 262_151
HEAD = {53: 1024, 106: 128, 61: ROWS, 67: 4096}  # 134 MB of 4 bits


def quantized(folder: Path, sizes: dict[int, int] = HEAD, block: int = 32) -> Path:
    """A decoder with products of 4 bits, as onnxruntime-genai writes it."""
    return write_large(make_foreign("gqa", SMALL), sizes, folder, block=block)


def unchecked(path: Path) -> ImportedModel:
    source = pipeline.load_source(path)
    _, plan, model = pipeline._rewrite(source, PLAN)
    return ImportedModel(source, plan, model)


def verdicts(imported: ImportedModel, model: onnx.ModelProto, join: str) -> list[checker.Verdict]:
    """Those of regions that make a tensor."""
    flat, folder = pipeline.prepare(imported.source.proto, PLAN), imported.source.path.parent
    plan = imported.plan
    limits = index_limits(model, plan)
    regions = [r for r in find_regions(pair_models(flat.reference, model, plan)) if join in r.joins]
    with exact_experts():
        judge = checker._Judge(plan, limits, flat.weights, folder, thorough=False)
        return [judge.verdict(region) for region in regions]


def of_head(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    """A node of the last product."""
    return next(n for n in model.graph.node if n.op_type == op and "logits" in n.output[0])


def middle(change: Callable[[Any], None]) -> m.Mistake:
    """Other zero points."""

    def edit(model: onnx.ModelProto) -> None:
        name = of_head(model, "DequantizeLinear").input[2]
        tensor = next(t for t in model.graph.initializer if t.name == name)
        values = np.frombuffer(tensor.raw_data, np.uint8).copy()
        change(values)
        tensor.raw_data = values.tobytes()

    return edit


def every_zero_point(values: Any) -> None:
    values[:] = 0x77


def one_zero_point(values: Any) -> None:
    values[-3] = 0x87


def after(node: onnx.NodeProto, model: onnx.ModelProto, *chain: tuple[str, list[str], dict[str, Any]]) -> None:
    result = node.output[0]
    node.output[0] = last = f"{result}/right"
    place = [n.output[0] for n in model.graph.node].index(last) + 1
    for number, (op, more, attributes) in enumerate(chain):
        name = result if number == len(chain) - 1 else f"{result}/wrong_{number}"
        model.graph.node.insert(place + number, helper.make_node(op, [last, *more], [name], **attributes))
        last = name


def transposed_block(model: onnx.ModelProto) -> None:
    """Numbers of two halves of a block change places."""
    apart, whole = (m.constant(model, shape, np.int64) for shape in ([0, 32, 2, 16], [0, 1024]))
    after(
        of_head(model, "DequantizeLinear"), model,
        ("Reshape", [apart], {}), ("Transpose", [], {"perm": [0, 1, 3, 2]}), ("Reshape", [whole], {}),
    )  # fmt: skip


def scales_of_the_other_axis(model: onnx.ModelProto) -> None:
    """Scales lie as if blocks came before rows."""
    node = of_head(model, "DequantizeLinear")
    shape = m.constant(model, [32, ROWS], np.int64)
    turned = [helper.make_node("Reshape", [node.input[1], shape], ["turned/a"]),
              helper.make_node("Transpose", ["turned/a"], ["turned/b"], perm=[1, 0])]  # fmt: skip
    node.input[1] = "turned/b"
    place = list(model.graph.node).index(node)
    for made in reversed(turned):
        model.graph.node.insert(place, made)


def scales_of_other_blocks(model: onnx.ModelProto) -> None:
    node = of_head(model, "DequantizeLinear")
    order = m.constant(model, [1, 0, *range(2, 32)], np.int64)
    model.graph.node.insert(0, helper.make_node("Gather", [node.input[1], order], ["other/scales"], axis=1))
    node.input[1] = "other/scales"


def zero_points_added(model: onnx.ModelProto) -> None:
    of_head(model, "Sub").op_type = "Add"


def no_zero_points(model: onnx.ModelProto) -> None:
    node = of_head(model, "Sub")
    node.op_type = "Identity"
    del node.input[1:]


def weights_of_another_product(model: onnx.ModelProto) -> None:
    """The last product reads the scales in another place of the file."""
    name = of_head(model, "DequantizeLinear").input[1]
    tensor = next(t for t in model.graph.initializer if t.name == name)
    next(e for e in tensor.external_data if e.key == "offset").value = "0"


FAULTS = (
    middle(every_zero_point), middle(one_zero_point), transposed_block, scales_of_the_other_axis,
    scales_of_other_blocks, zero_points_added, no_zero_points, weights_of_another_product,
)  # fmt: skip


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    return unchecked(quantized(tmp_path_factory.mktemp("head")))


def test_a_large_product_of_4_bits_is_compared(head: ImportedModel) -> None:
    assert [(v.answer, v.why) for v in verdicts(head, head.model, "logits")] == [("equal", "")]


@pytest.mark.parametrize("fault", FAULTS, ids=range(len(FAULTS)))
def test_a_fault_in_a_large_product_is_refused(head: ImportedModel, fault: m.Mistake) -> None:
    wrong = deepcopy(head.model)
    fault(wrong)
    found = verdicts(head, wrong, "logits")
    assert [v.answer for v in found] != ["equal"]


def test_the_message_names_what_differs(head: ImportedModel) -> None:
    wrong = deepcopy(head.model)
    no_zero_points(wrong)
    flat = pipeline.prepare(head.source.proto, PLAN)
    with pytest.raises(UnsupportedModelError, match="around 'logits' the rewritten model does not compute the same"):
        check_rewrite(flat.reference, wrong, head.plan, flat.weights, head.source.path.parent)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts with its sizes; `block` 0: one scale for each row."""

    experts: int
    k: int
    hidden: int
    inner: int
    bits: int = 4
    block: int = 32
    zeros: bool = False

    def after(self, g: Build, x: str) -> str:
        """Where the mixture goes, at the end of a decoder whose width is another one."""
        wide = g.MatMul(x, g.weight(16, self.hidden))
        g.MatMul(g.Reshape(wide, [-1, self.hidden]), g.weight(self.hidden, self.experts), out="router")
        return g.MatMul(g.Identity(wide, out="mixed"), g.weight(self.hidden, 16))

    def put(self, model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.output[0] == "mixed")
        inputs = [node.input[0], "router"]
        zeros = []
        for shape in ((2 * self.inner, self.hidden), (self.hidden, self.inner)):
            by_row = (self.experts, shape[0], *((-(-shape[1] // self.block),) if self.block else ()))
            made = {"weights": (TensorProto.FLOAT, (self.experts, *shape))}
            if self.bits:
                made = {
                    "weights": (TensorProto.UINT8, (self.experts, shape[0], shape[1] * self.bits // 8)),
                    "scales": (TensorProto.FLOAT, by_row),
                    "zeros": (TensorProto.UINT8, (*by_row[:-1], -(-by_row[-1] * self.bits // 8))),
                }
            for what, (kind, dims) in made.items():
                name = f"experts/{what}/{len(inputs)}"
                model.graph.initializer.append(TensorProto(name=name, data_type=kind, dims=dims))
                (zeros if what == "zeros" else inputs).append(name)
            inputs.append("")
        inputs += ["", "", "", *zeros] if self.zeros else []
        mixture = Mixture(self.experts, self.k, self.hidden, self.inner, self.bits, self.block)
        attributes = mixture.attributes
        node.CopyFrom(helper.make_node(mixture.op, inputs, ["mixed"], "mixture", domain="com.microsoft", **attributes))
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


EXPERTS = {
    "gpt-oss-20b": Experts(32, 4, 2880, 2880),
    "gpt-oss-20b, zero points": Experts(32, 4, 2880, 2880, zeros=True),
    "qwen3-30b-a3b": Experts(128, 8, 2048, 768),
    "qwen3-235b-a22b": Experts(128, 8, 4096, 1536, zeros=True),
    "mixtral-8x7b": Experts(8, 2, 4096, 14336, block=128),
    "mixtral-8x7b, floats": Experts(8, 2, 4096, 14336, bits=0),
    "scales by row": Experts(64, 6, 2048, 1408, block=0),
    "8 bits": Experts(60, 4, 2048, 1408, bits=8, block=64),
}


FAST = ("gpt-oss-20b", "qwen3-30b-a3b")


def mixture(experts: Experts, folder: Path) -> ImportedModel:
    model = make_decoder(Decoder(after=experts.after, opset=21))
    experts.put(model)
    return unchecked(write_large(model, {}, folder))


def fault_of_scales(model: onnx.ModelProto) -> None:
    """Scales of a block are those of the next one; of a row those of the next one."""
    node = next(n for n in model.graph.node if n.op_type == "Gather" and "factors" in n.output[0])
    shape = next(t.dims for t in model.graph.initializer if t.name == node.input[0])
    axis = 1 if shape[2] == 1 else 2
    order = m.constant(model, np.roll(np.arange(shape[axis]), 1), np.int64)
    model.graph.node.insert(0, helper.make_node("Gather", [node.input[0], order], ["rolled"], axis=axis))
    node.input[0] = "rolled"


def fault_of_experts(model: onnx.ModelProto) -> None:
    """Weights are not transposed, but read in another order."""
    node = next(n for n in model.graph.node if n.op_type == "MatMul" and "inner" in n.output[0])
    m.insert(model, node, 1, "Neg")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in EXPERTS])
def test_large_mixtures_are_compared(name: str, tmp_path: Path) -> None:
    imported = mixture(EXPERTS[name], tmp_path)
    assert [(v.answer, v.why) for v in verdicts(imported, imported.model, "mixed")] == [("equal", "")]
    faults = [fault_of_experts, *([fault_of_scales] if EXPERTS[name].bits else [])]
    for fault in faults:
        wrong = deepcopy(imported.model)
        fault(wrong)
        found = verdicts(imported, wrong, "mixed")
        assert "equal" not in {v.answer for v in found}, fault


def test_what_was_not_compared_stands_in_the_plan(tmp_path: Path) -> None:
    """Blocks of 128 columns do not fit into 2,880, and no smaller sizes are alike."""
    path = mixture(Experts(32, 4, 2880, 2880, block=128), tmp_path).source.path
    (note,) = [n for n in plan_model(path, PLAN).notes if "not compared" in n]
    assert note == (
        "these parts were not compared with the original, because the weights are too large to read, and no "
        "smaller sizes fit together: 'mixed'"
    )


def test_a_large_weight_in_the_file_itself_is_no_trace(tmp_path: Path) -> None:
    """A single file with a head of 300,000 rows in 4 bits: 9.6 MB."""
    model = make_foreign("gqa", SMALL)
    table = next(t for t in model.graph.initializer if t.name == "embed.weight")
    table.CopyFrom(numpy_helper.from_array(np.zeros((59, 53), np.float32), table.name))
    path = write_large(model, HEAD | {53: 64, 61: 300_000}, tmp_path, block=32, inside=True)
    assert plan_model(path, PLAN).caches


def test_shapes_that_a_guarded_attention_takes_of_the_embedded_tokens(tmp_path: Path) -> None:
    """optimum-onnx: batch and length are those of the embedded tokens, whose table is 268 MB here."""
    path = write_large(onnx.load(MODELS / "optimum" / "llama" / "model.onnx"), {256: 1 << 20}, tmp_path)
    imported = unchecked(path)
    pair = pair_models(pipeline.prepare(imported.source.proto, PLAN).reference, imported.model, imported.plan)
    assert all(bytes_read(region.models) < 1 << 16 for region in find_regions(pair))


FORMS = {"optimum": ("concat", 0), "torch": ("concat-attention", 0), "torch, static": ("scatter", 0),
         "mobius": ("past-attention", 0), "mobius, 4 bits": ("past-attention", 32), "genai": ("gqa", 0),
         "genai, 4 bits": ("gqa", 32)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_decoders_of_a_billion_parameters(name: str, tmp_path: Path) -> None:
    """Llama 3.2 1B, as exporters write it."""
    form, block = FORMS[name]
    small = replace(SMALL, layers=16, query_heads=32, kv_heads=8, head_size=64, capacity=512)
    sizes = {53: 2048, 106: 8192, 61: 128_256, 67: 131_072}
    path = write_large(make_foreign(form, small), sizes, tmp_path, block=block)
    plan = rewrite_model(path, tmp_path / "rewritten.onnx", PlanOptions(capacity=512, check_seconds=900))
    assert len(plan.caches) == 32
    assert not any("not compared" in note for note in plan.notes)
