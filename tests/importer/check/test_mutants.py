"""Faults at random, in rewritten models and in the check's own cutting: what the check takes has the same numbers."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import mutation_trials
import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from mutation_cuts import CAPACITY, Pair, exposed, trial
from mutation_trials import VERIFY, judge
from onnx import ModelProto, NodeProto
from stored import MODELS, edited
from verify import mistakes as m

from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions

QUICK = replace(VERIFY, batch=2, tokens=2)


@pytest.fixture(scope="module")
def stored() -> Callable[[str], Pair]:
    """Models from exporters, each read once."""
    return cache(lambda name: Pair(MODELS / name / "model.onnx", PlanOptions(capacity=CAPACITY)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair") / "model.onnx"
    onnx.save(make_decoder(Decoder(layers=2)), path)
    return Pair(path, PlanOptions(capacity=CAPACITY))


def _maker(model: ModelProto, name: str) -> NodeProto:
    return next(n for n in model.graph.node if name in n.output)


def no_first_epsilon(model: ModelProto, norm: int = 0) -> None:
    """A norm adds no epsilon to the mean of squares."""
    root = m.nodes(model, "Sqrt")[norm]
    constants = {t.name for t in model.graph.initializer}
    root.input[0] = next(n for n in _maker(model, root.input[0]).input if n not in constants)


def no_last_epsilon(model: ModelProto) -> None:
    no_first_epsilon(model, -1)


def ends_of_two_axes(model: ModelProto) -> None:
    """The Slice to the last positions gets ends for two axes; NumPy leaves out the second."""
    size = _maker(model, m.nodes(model, "Slice")[-1].input[2])
    m.set_attribute(size, "end", 4)


def size_of_minus_two(model: ModelProto) -> None:
    """The Reshape after the last attention gets a size of -2, which NumPy takes for -1."""
    sizes = _maker(model, m.nodes(model, "Reshape")[-1].input[1])
    sizes.input[len(sizes.input) - 1] = m.constant(model, [-2])


@pytest.mark.parametrize("fault", [no_first_epsilon, no_last_epsilon, ends_of_two_axes, size_of_minus_two])
@pytest.mark.parametrize("source", ["optimum/llama", "transformers/llama_dyn"])
def test_faults_that_numbers_of_size_one_or_numpy_hide(
    stored: Callable[[str], Pair], source: str, fault: m.Mistake
) -> None:
    wrong = deepcopy(stored(source).imported.model)
    fault(wrong)
    assert stored(source).passes(wrong)


@pytest.mark.slow
def test_faults_of_a_rewritten_model(pair: Pair) -> None:
    """Whatever the check takes has the same numbers."""
    words = Counter(trial(pair, seed)[0] for seed in range(3))
    assert not words["wrong"]
    assert words["refused"]


@pytest.mark.slow
def test_faults_in_the_cutting(pair: Pair) -> None:
    """The whole models show faults that a wrong cut hides; faults that the right one takes are none."""
    found = Counter(exposed(pair, seed)[1] for seed in range(10))
    assert not found["missed"]
    assert found["whole models"]


@pytest.mark.slow
def test_other_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "torch/llama_static_wrap_op24"
    rewritten = import_model(MODELS / source / "model.onnx")

    def scaled(model: ModelProto) -> None:
        attributes = (a for n in model.graph.node if n.op_type == "Attention" for a in n.attribute)
        next(a for a in attributes if a.name == "scale").f *= 2

    path = edited(source, tmp_path, scaled)
    assert judge(path, PlanOptions(), QUICK) == ("equal", "")
    monkeypatch.setattr(mutation_trials, "import_model", lambda *a: replace(import_model(*a), model=rewritten.model))
    assert judge(path, PlanOptions(), QUICK)[0] == "wrong"
