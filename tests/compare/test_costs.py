"""The bytes of a decode step: by arithmetic from the plan, and counted in the networks that TensorRT's parser makes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from sample_plans import sample_plan
from stored import MODELS

from trt_kvcache.compare.costs import GPUS, StepCost, read_bandwidth, step_cost, usual_tokens
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import CachePlan, Route, StateUpdate

TOKENS = 10
EXPORTS = [
    "mobius/llama_dynamic_f32", "optimum/bloom", "mobius/gemma4_dynamic_f16", "optimum/llama_fp16",
    "optimum/llama", "optimum/t5", "ort-genai/qwen3vl_cpu_fp32", "torch/deepseek_v3_dynamic_eager",
    "torch/llama_dynamic_float16_sdpa_op24", "torch/qwen25vl_dynamic_float16_eager", "transformers/llama_dyn",
    "transformers/llama_dyn_op24",
]  # fmt: skip
"""Those that take any capacity."""
_BITS = {"FLOAT": 32, "HALF": 16, "BF16": 16, "INT64": 64, "INT32": 32, "INT8": 8, "UINT8": 8, "BOOL": 8, "INT4": 4}
_PARTS = ("SLICE", "GATHER", "SHAPE")  # read no more than they give


@dataclass
class _Traffic:
    plan: CachePlan
    network: Any
    written: dict[str, int]
    """Bytes that each layer writes, by what it gives."""
    given: dict[str, int]
    """Bytes of the inputs."""

    def read(self) -> int:
        """Bytes that all layers but updates read, and those that take parts of a tensor."""
        nodes = [n for n in self.network.nodes if n.op_type not in ("KV_CACHE_UPDATE", *_PARTS)]
        sizes = self.given | self.written
        return sum(sizes[name] for node in nodes for name in node.input if name is not None)

    def taken(self, kind: str) -> dict[str, int]:
        """Bytes that their readers take of what layers of a kind give, by its name: the most that one takes."""
        given = {n.output[0]: 0 for n in self.network.nodes if n.op_type == kind}
        for node in self.network.nodes:
            if (name := node.input[0] if node.input else None) in given and node.op_type in _PARTS:
                given[name] = max(given[name], self.written[node.output[0]])
                continue
            for name in {*node.input} & given.keys():
                given[name] = self.written[name]
        return given


def _traffic(name: str, capacity: int) -> _Traffic:
    """What the layers of a parsed network write in a step of one token after nine."""
    pytest.importorskip("tensorrt_rtx")
    from compare.network_faults import TRT, parsed, read

    from trt_kvcache.compare.decode import Piece
    from trt_kvcache.compare.numpy_network import Network, Node
    from trt_kvcache.compare.rewritten_model import Rewritten
    from trt_kvcache.compare.text_inputs import TextInputs
    from trt_kvcache.importer.interface import index_limits

    imported, content = read(MODELS / name / "model.onnx", capacity)
    made = parsed(imported, content)
    network, written = Network(made.network, TRT), dict[str, int]()

    def watch(node: Node, results: Sequence[np.ndarray]) -> None:
        for output, values, dtype in zip(node.output, results, node.dtypes, strict=True):
            written[output] = values.size * _BITS[dtype] // 8

    steps = Rewritten(imported.plan, TextInputs(imported.plan, index_limits(imported.model, imported.plan)))
    steps.start(1)
    steps.ends[0] = TOKENS - 1
    feeds = steps.feeds(Piece(1, (0,)))
    network.run(feeds, watch)
    return _Traffic(imported.plan, network, written, {name: values.nbytes for name, values in feeds.items()})


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXPORTS)
def test_nothing_but_the_updates_grows_with_the_capacity(name: str) -> None:
    """As many rows are in use: layers read and write as many bytes, whatever the caches could hold.

    T5's bias by distance is read for so many tokens only: 1024 times the size of a head.
    """
    small, large = _traffic(name, 4096), _traffic(name, 16384 if name == "optimum/t5" else 131072)
    updates = {n.output[0] for n in small.network.nodes if n.op_type == "KV_CACHE_UPDATE"}
    assert len(updates) == sum(cache.in_place for cache in small.plan.caches) > 0
    assert [n.output for n in small.network.nodes] == [n.output for n in large.network.nodes]
    constants = small.taken("CONSTANT")
    assert constants == large.taken("CONSTANT")  # a table of all rows is no cost, of which those in use are taken
    assert {n for n, size in large.written.items() if size != small.written[n]} - constants.keys() == updates
    assert small.read() == large.read()
    assert step_cost(small.plan, TOKENS) == step_cost(large.plan, TOKENS)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXPORTS)
def test_the_plan_counts_what_the_network_reads(name: str) -> None:
    traffic = _traffic(name, 64)
    cost = step_cost(traffic.plan, TOKENS)
    assert cost is not None
    weights = sum(traffic.taken("CONSTANT").values())
    assert abs(cost.weights - weights) <= 0.01 * weights  # the parser makes small constants of its own
    layers = {c.past: max(sum(c.past in a.caches for a in traffic.plan.attention), 1) for c in traffic.plan.caches}
    once = replace(
        traffic.plan, attention=tuple(a for a in traffic.plan.attention if all(layers[c] == 1 for c in a.caches))
    )
    counted = step_cost(once, TOKENS)
    assert counted is not None
    assert counted.rows == sum(traffic.taken("KV_CACHE_UPDATE").values())
    assert cost.rows >= counted.rows


def test_a_step_of_full_and_of_other_caches() -> None:
    """Two caches of 4 heads of 64 in float16: rows of 512 bytes."""
    plan = replace(sample_plan(1), weights=10**6)
    assert step_cost(plan, 100) == StepCost(100, 1, 10**6, 2 * 100 * 512, 2 * 512, 0)
    assert step_cost(plan, 100, 3) == StepCost(100, 3, 10**6, 3 * 2 * 100 * 512, 3 * 2 * 512, 0)
    assert step_cost(plan, 10**6) == step_cost(plan, 10**6, 1) == StepCost(10**6, 1, 10**6, 2 * 256 * 512, 2 * 512, 0)
    whole = step_cost(replace(plan, spans=()), 100)
    assert whole is not None
    assert whole.rows == 2 * 256 * 512
    twice = step_cost(replace(plan, attention=plan.attention * 2), 100)
    assert twice is not None
    assert twice.rows == 2 * 2 * 100 * 512
    copied = step_cost(replace(plan, caches=tuple(replace(c, route=Route.FUNCTIONAL) for c in plan.caches)), 100)
    assert copied == StepCost(100, 1, 10**6, 2 * (100 + 256) * 512, 2 * 256 * 512, 0)
    state = step_cost(replace(plan, states=(StateUpdate("a", "b", "float16", ("batch", 64, 4), ""),)), 100, 2)
    assert state is not None
    assert state.states == 2 * 2 * 64 * 4 * 2
    assert step_cost(replace(plan, weights=0), 100) is None


def test_the_limit_follows_from_the_bytes() -> None:
    cost = StepCost(1000, 2, 900, 80, 20, 0)
    assert (cost.total, cost.share) == (1000, 0.9)
    assert cost.limit(read_bandwidth("H100")) == 2 * 3350e9 / 1000
    assert usual_tokens(sample_plan(1)) == (256,)
    caches = tuple(replace(c, capacity=4096) for c in sample_plan(1).caches)
    assert usual_tokens(replace(sample_plan(1), caches=caches)) == (1024, 4096)


@pytest.mark.parametrize(
    ("text", "rate"), [("3350", 3350), ("0.5", 0.5), ("NVIDIA GeForce RTX 4090", 1008), ("l4", 300)]
)
def test_a_bandwidth_is_a_number_or_a_gpu(text: str, rate: float) -> None:
    assert read_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "", "H1000", "1e999"])
def test_another_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(
        OptionError, match=f"'{text}' is neither a number of GB/s such as 3350 nor one of {next(iter(GPUS))}"
    ):
        read_bandwidth(text)
