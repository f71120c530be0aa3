"""One query tensor under two attentions kills TensorRT for RTX 1.7.1's builder: a reason to lower the second."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import sys
    sys.path[:0] = {paths}
    import trt
    from graphs import Graph
    from onnx import TensorProto
    half, graph = TensorProto.FLOAT16, Graph()
    query = graph.input("query", half, ["B", 4, "S", 16])
    other = graph.input("other", half, ["B", 4, "S", 16])
    for i, read in enumerate([query, query if {shared} else other]):
        key = graph.input(f"key_{{i}}", half, ["B", 2, 16, 16])
        value = graph.input(f"value_{{i}}", half, ["B", 2, 16, 16])
        graph.node("Attention", [read, key, value], f"y_{{i}}", scale={scale} if i else 0.25)
        graph.output(f"y_{{i}}", half, ["B", 4, "S", 16])
    print(trt.build(graph.model()))
    """
)


@pytest.mark.few(2)
@pytest.mark.parametrize(("shared", "scale"), [(True, 0.25), (True, 0.5), (False, 0.25)])
def test_shared_query_kills_the_builder(shared, scale):
    paths = [path for path in sys.path if path]
    code = SCRIPT.format(paths=paths, shared=shared, scale=scale)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if shared and scale == 0.25:
        assert done.returncode == -signal.SIGSEGV, done.stdout + done.stderr
    else:
        assert done.stdout.strip().endswith("built"), done.stdout + done.stderr
