"""Fresh exports, end to end: exported now, planned, verified, built. Exporters that are not installed are skipped.

`tests/exporters/exports.py` says what each exporter cannot export, and REFUSED below what the importer refuses and why.
"""

from __future__ import annotations

import re

import pytest
from exporters.checkpoints import ARCHITECTURES
from exporters.exports import CAPACITY, EXPORTERS, UNAVAILABLE, export, missing

from trt_kvcache import BuildOptions, PlanOptions, build_engine, plan_model, verify_model
from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.plan import Route

REFUSED: dict[tuple[str, str], str] = {
    ("transformers-static-op20", "t5"): "relative position bias beside the caller's own mask",
}
CASES = [(e, a) for e in EXPORTERS for a in ARCHITECTURES if (e, a) not in UNAVAILABLE]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # exporters warn of their own dependencies
@pytest.mark.parametrize(("exporter", "arch"), CASES)
def test_from_export_to_engine(exporter, arch, tmp_path):
    if reason := missing(exporter):
        pytest.skip(reason)
    path = export(exporter, arch, tmp_path / "export")
    options = PlanOptions(capacity=CAPACITY)
    if (exporter, arch) in REFUSED:
        with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED[exporter, arch])):
            plan_model(path, options)
        return
    plan = plan_model(path, options)
    assert len(plan.caches) == 4, "two layers, keys and values"
    assert {c.route for c in plan.caches} == {Route.NATIVE}
    verify_model(path, options).check()
    # As many positions as Whisper's encoder makes of every source: optimum's lies beside, and fewer are refused.
    open_ = {a for t in plan.tensors for a, d in zip(t.axes, t.shape, strict=True) if isinstance(d, str)}
    build = BuildOptions(max_encoder=1500) if "encoder" in open_ else BuildOptions()
    manifest = build_engine(path, tmp_path / "model.engine", options=options, build=build)
    assert manifest.aliases == {c.present: c.past for c in plan.caches}
