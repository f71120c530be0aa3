"""Each model of the corpus is planned or refused, and verified, as the record says; `net.py` compares all at once.

Verified: the original and the rewritten model give the same numbers over a decode.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import net
import onnx
import pytest
from corpus import Entry, entries
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_kvcache.importer import plan_model, rewrite_model
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.importer.protos import iter_tensors

ENTRIES = entries()
STORED = [e for e in ENTRIES if e[0].startswith("stored/")]
BUILT = [e for e in ENTRIES if not e[0].startswith("stored/")]
RECORD = net.load()
ELSEWHERE = ("node/", "case/")
"""Begin the keys of models that `conformance` verifies."""


@pytest.mark.few(8)
@pytest.mark.parametrize("entry", STORED, ids=lambda entry: entry[0])
def test_an_export_is_the_recorded_one(entry: Entry) -> None:
    """If this fails on purpose: ``python tests/net.py --verify --write PATTERN``."""
    check_recorded(entry)


@pytest.mark.few(18)
@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry[0])
def test_a_model_in_code_is_the_recorded_one(entry: Entry) -> None:
    check_recorded(entry)


def check_recorded(entry: Entry) -> None:
    key = entry[0]
    facts, verdict = RECORD[key]
    verdict = "" if key.startswith(ELSEWHERE) else verdict
    assert net.treat(entry, verify=bool(verdict)) == (key, facts, verdict)


def test_nearly_all_verdicts_are_equal() -> None:
    """The others give nothing but caches, or hold several in one tensor, and so do not decode by themselves."""
    verdicts = [verdict for key, (_, verdict) in RECORD.items() if verdict and not key.startswith(ELSEWHERE)]
    assert verdicts.count("equal") > 0.85 * len(verdicts)
    assert not [verdict for verdict in verdicts if verdict.startswith("VerificationError")]


TAKEN = [e for e in ENTRIES if not net.is_error(RECORD[e[0]][0])]
READ = ("sinks/in another order than their weight",)
"""Sinks whose numbers the plan must read, which it does where they lie inside of the model."""
PLAIN = [e for e in TAKEN if e[0].startswith(("concat/", "slopes/", "sinks/")) and e[0] not in READ]
FAMILIES = {e[0].partition("/")[0]: e for e in TAKEN}


@pytest.mark.slow
@pytest.mark.parametrize("entry", FAMILIES.values(), ids=lambda entry: entry[0])
def test_a_plan_is_the_dry_run_of_a_rewrite(entry: Entry, tmp_path: Path) -> None:
    """The same plan; its bytes are the same each time, and the source's stay."""
    _, make, given = entry
    (tmp_path / "made").mkdir()
    path, options = make(tmp_path), PlanOptions(**given)
    before = path.read_bytes()
    plan = plan_model(path, options)
    outputs = [tmp_path / "made" / name for name in ("one.onnx", "two.onnx")]
    assert [rewrite_model(path, output, options) for output in outputs] == [plan, plan]
    one, two = (output.read_bytes() for output in outputs)
    assert one.replace(b"one.onnx", b"two.onnx") == two
    assert path.read_bytes() == before
    inputs = [v.name for v in onnx.load(outputs[0], load_external_data=False).graph.input]
    assert [c.past for c in plan.caches if c.past in inputs] == [
        n for n in inputs if n in {c.past for c in plan.caches}
    ]


SHAPES = 100
"""Bytes of the smallest integers that optimum-onnx puts outside: shapes and axes stay."""


def as_constants(model: ModelProto) -> ModelProto:
    """The model with Constants in the place of its initializers, as torch's TorchScript exporter writes buffers."""
    made = deepcopy(model)
    nodes = [helper.make_node("Constant", [], [t.name], f"at_{t.name}", value=t) for t in model.graph.initializer]
    del made.graph.node[:], made.graph.initializer[:]
    made.graph.node.extend([*nodes, *model.graph.node])
    return made


def save_outside(model: ModelProto, path: Path) -> Path:
    """Write a model with all of its floats, and integers from `SHAPES` bytes on, in ``<path>_data``.

    Args:
        model: whose data are inside. Changed.
        path: of the file.
    """
    parts: list[bytes] = []
    for tensor in iter_tensors(model):
        value = numpy_helper.to_array(tensor)
        if value.size < 2 or (value.dtype.kind in "iub" and value.nbytes < SHAPES):
            continue
        raw = numpy_helper.from_array(value).raw_data
        entries = {"location": f"{path.name}_data", "offset": str(sum(map(len, parts))), "length": str(len(raw))}
        parts.append(raw)
        tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in entries.items():
            tensor.external_data.add(key=key, value=entry)
    (path.parent / f"{path.name}_data").write_bytes(b"".join(parts))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("form", [lambda model: model, as_constants], ids=["initializers", "constants"])
@pytest.mark.parametrize("entry", PLAIN, ids=lambda entry: entry[0])
def test_a_plan_does_not_depend_on_where_numbers_lie(
    entry: Entry, form: Callable[[ModelProto], ModelProto], tmp_path: Path
) -> None:
    key, make, options = entry
    path = save_outside(form(onnx.load(make(tmp_path))), tmp_path / "model.onnx")
    assert net.treat((key, lambda folder: path, options), verify=False)[1] == RECORD[key][0]


def test_models_are_the_recorded_ones() -> None:
    keys = [entry[0] for entry in ENTRIES]
    assert len(keys) == len(set(keys))
    assert set(keys) == RECORD.keys()


def of(key: str) -> Entry:
    (found,) = [entry for entry in ENTRIES if entry[0] == key]
    return found


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key, make, options = of("concat/plain")
    monkeypatch.setattr(net, "entries", lambda *_: [(key, make, options | {"capacity": 25})])
    monkeypatch.setattr("sys.argv", ["net.py", "--only", key])
    assert net.main() == 1
    old, new, count = capsys.readouterr().out.splitlines()
    assert old.startswith("- concat/plain: 2 x linear padded native float [batch, 2, 24, 4]")
    assert new.startswith("+ concat/plain: 2 x linear padded native float [batch, 2, 25, 4]")
    assert count.startswith("1 models, 1 differ (0 in being taken)")


def test_one_pattern_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "RECORD", tmp_path / "net.txt")
    net.dump(dict.fromkeys(("concat/plain", "concat/gone", "other/one"), ("old", "equal")))
    monkeypatch.setattr(net, "entries", lambda *_: [of("concat/plain")])
    monkeypatch.setattr("sys.argv", ["net.py", "--write", "concat/*"])
    assert net.main() == 0
    written = net.load()
    assert written.keys() == {"concat/plain", "other/one"}
    assert written["other/one"] == ("old", "equal")
    assert "decomposed" in written["concat/plain"][0]
