"""Sources of values, through more ways than anybody could walk one by one."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trt_kvcache.importer.normalize.evidence.reach import deciding


def test_searches_after_searches_take_no_time() -> None:
    """A mixture of experts searches in each layer what the layers before it found."""
    value = tokens = gs.Variable("tokens", "int64", [4])
    constant = gs.Variable("found", "int64", [4])
    gs.Node("NonZero", "constant", inputs=[gs.Constant("ones", np.ones(4))], outputs=[constant])
    for i in range(60):
        following = gs.Variable(f"value{i}", "int64", [4])
        gs.Node("CumSum", f"search{i}", inputs=[value, constant], outputs=[following])
        value = following
    found = deciding(value)
    assert found.positions == (tokens.name,)
    assert [node.name for node in found.searches] == [f"search{i}" for i in reversed(range(60))]
