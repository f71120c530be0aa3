"""The models of `promises.txt` are taken and right, and no other model of the corpus is wrong; `net.py` runs them all.

Right: verified, the original and the rewritten model give the same numbers over a decode.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import exporter_matrix
import net
import onnx
import pytest
from corpus import Entry, entries
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_kvcache import PlanOptions, plan_model, rewrite_model
from trt_kvcache.importer.protos import iter_tensors

ENTRIES = entries()
PROMISES = net.promises()
PROMISED = [e for e in ENTRIES if e[0] in PROMISES.models]
STORED = [e for e in PROMISED if e[0].startswith("stored/")]
BUILT = [e for e in PROMISED if not e[0].startswith("stored/")]
OTHERS = [e for e in ENTRIES if e[0] not in PROMISES.models]


@pytest.mark.few(8)
@pytest.mark.parametrize("entry", STORED, ids=lambda entry: entry[0])
def test_a_promised_export_is_taken_and_right(entry: Entry) -> None:
    assert net.broken(net.treat(entry, verify=True), PROMISES.models, verified=True) == ""


@pytest.mark.few(12)
@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry[0])
def test_a_promised_model_is_taken_and_right(entry: Entry) -> None:
    assert net.broken(net.treat(entry, verify=True), PROMISES.models, verified=True) == ""


@pytest.mark.few(18)
@pytest.mark.parametrize("entry", OTHERS, ids=lambda entry: entry[0])
def test_no_other_model_is_wrong(entry: Entry) -> None:
    outcome = net.treat(entry, verify=True)
    assert outcome.word in (net.REFUSED, net.TAKEN, net.EQUAL), outcome


def test_promised_models_are_in_the_corpus() -> None:
    keys = [entry[0] for entry in ENTRIES]
    assert len(keys) == len(set(keys))
    assert PROMISES.models.keys() <= set(keys)
    assert len(PROMISES.models) > 300


def test_promised_cells_are_measured() -> None:
    results = exporter_matrix.load()
    for exporter, families in PROMISES.cells.items():
        for family in families:
            assert results[exporter][family]["outcome"] == "yes", (exporter, family)


def outcome(word: str, in_place: bool = True) -> net.Outcome:
    return net.Outcome("concat/plain", word, "facts", in_place, "reason")


@pytest.mark.parametrize(
    ("found", "promised", "fault"),
    [
        (outcome(net.EQUAL), {"concat/plain": False}, ""),
        (outcome(net.EQUAL, in_place=False), {"concat/plain": True}, ""),
        (outcome(net.EQUAL, in_place=False), {"concat/plain": False}, "promised in place, and copied: facts"),
        (outcome(net.TAKEN), {"concat/plain": False}, "promised, and not verified: reason"),
        (outcome(net.REFUSED), {"concat/plain": False}, "promised, and refused: facts"),
        (outcome(net.REFUSED), {}, ""),
        (outcome(net.TAKEN, in_place=False), {}, ""),
        (outcome(net.WRONG), {}, "wrong: reason"),
        (outcome(net.TRACE), {}, "trace: reason"),
    ],
)
def test_a_broken_promise_is_named(found: net.Outcome, promised: dict[str, bool], fault: str) -> None:
    assert net.broken(found, promised, verified=True) == fault


PLAIN = [e for e in ENTRIES if e[0].startswith(("concat/", "slopes/", "sinks/"))]
FAMILIES = {e[0].partition("/")[0]: e for e in PROMISED}


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
    inside = net.treat(entry, verify=False)
    path = save_outside(form(onnx.load(make(tmp_path))), tmp_path / "model.onnx")
    outside = net.treat((key, lambda folder: path, options), verify=False)
    assert outside.word == inside.word
    if inside.word == net.TAKEN:
        assert outside.facts == inside.facts


def of(key: str) -> Entry:
    (found,) = [entry for entry in ENTRIES if entry[0] == key]
    return found


def test_a_run_is_saved_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, make, options = of("concat/plain")
    saved = str(tmp_path / "before.txt")
    monkeypatch.setattr(net, "entries", lambda *_: [(key, make, options)])
    monkeypatch.setattr("sys.argv", ["net.py", "--only", key, "--save", saved])
    assert net.main() == 0
    assert capsys.readouterr().out.startswith("1 taken; 0 promises broken")
    monkeypatch.setattr("sys.argv", ["net.py", "--only", key, "--against", saved])
    monkeypatch.setattr(net, "entries", lambda *_: [(key, make, options | {"capacity": 25})])
    assert net.main() == 0
    what, old, new, _ = capsys.readouterr().out.splitlines()
    assert what == "concat/plain: differs"
    assert old.startswith("- 2 x linear padded native float [batch, 2, 24, 4]")
    assert new.startswith("+ 2 x linear padded native float [batch, 2, 25, 4]")
    monkeypatch.setattr(net, "entries", lambda *_: [(key, make, options | {"capacity": 0})])
    assert net.main() == 0
    assert capsys.readouterr().out.startswith("concat/plain: became refused\n")


def test_a_refused_promise_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key, make, options = of("foreign/concat")
    monkeypatch.setattr(net, "entries", lambda *_: [(key, make, options | {"capacity": 0})])
    monkeypatch.setattr("sys.argv", ["net.py", "--only", "foreign/concat*"])
    assert net.main() == 1
    gone, refused, _ = capsys.readouterr().out.splitlines()
    assert gone == "foreign/concat-attention: promised, and no model of the corpus"
    assert refused.startswith("foreign/concat: promised, and refused: OptionError: ")
