"""A graph without the nodes that nobody needs, in order: as GraphSurgeon makes it."""

import random
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
from stored import MODELS

from trt_kvcache.importer.graph import tidy

STORED = sorted(MODELS.rglob("*.onnx"))


@pytest.mark.few(6)
@pytest.mark.parametrize("path", STORED, ids=lambda path: str(path.relative_to(MODELS)))
@pytest.mark.parametrize("sort", [True, False])
def test_it_is_what_graphsurgeon_makes(path: Path, sort: bool) -> None:
    """Nodes come in any order, and no output needs some of them."""
    model, rng = onnx.load(path, load_external_data=False), random.Random(0)
    nodes, outputs = list(model.graph.node), list(model.graph.output)
    rng.shuffle(nodes)
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend(nodes)
    model.graph.output.extend(rng.sample(outputs[1:], len(outputs) // 2))
    ours, theirs = tidy(gs.import_onnx(model), sort=sort), gs.import_onnx(model).cleanup()
    theirs = theirs.toposort() if sort else theirs
    assert len(theirs.nodes) < len(nodes)
    assert [node.name for node in ours.nodes] == [node.name for node in theirs.nodes]
    assert [tensor.name for tensor in ours.inputs] == [tensor.name for tensor in theirs.inputs]
    assert list(ours.tensors()) == list(theirs.tensors())


def test_a_cycle_is_an_error_of_graphsurgeon() -> None:
    one, two = gs.Variable("one"), gs.Variable("two")
    nodes = [gs.Node("Neg", inputs=[one], outputs=[two]), gs.Node("Abs", inputs=[two], outputs=[one])]
    with pytest.raises(Exception, match="Cycle detected"):
        tidy(gs.Graph(nodes=nodes, outputs=[one]))
