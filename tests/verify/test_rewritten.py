"""Files that `rewrite_model` wrote: verified against their source, never planned, and no authority on anything."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from decoders import DecoderConfig, write_decoder
from onnx import ModelProto, NodeProto, helper, numpy_helper
from plain_graphs import plain_model

from trt_kvcache import DecodeSession, build_engine, plan_model, rewrite_model, verify_model
from trt_kvcache.compare.verify_report import VerifyOptions, VerifyReport
from trt_kvcache.errors import InvalidModelError, OptionError, TrtKvCacheError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CacheLayout, PlanOptions

CONFIG = DecoderConfig(form="heads-major")
SHORT = VerifyOptions(batch=2, tokens=2)


def _written(folder: Path, options: PlanOptions | None = None, config: DecoderConfig = CONFIG) -> tuple[Path, Path]:
    """A model, and its rewritten form in another folder."""
    source, made = write_decoder(folder / "m.onnx", config), folder / "made" / "out.onnx"
    made.parent.mkdir()
    rewrite_model(source, made, options or PlanOptions())
    return source, made


def _verify(source: Path, made: Path) -> VerifyReport:
    return verify_model(source, verify=SHORT, rewritten=made)


def _edit(path: Path, edit: Callable[[ModelProto], None]) -> None:
    model = onnx.load(path)
    edit(model)
    onnx.save(model, path)


def _edit_record(path: Path, edit: Callable[[dict[str, object]], None]) -> None:
    model = onnx.load(path)
    (entry,) = model.metadata_props
    record = json.loads(entry.value)
    edit(record)
    entry.value = json.dumps(record)
    onnx.save(model, path)


def _swap_presents(model: ModelProto) -> None:
    names = {"updated_key_cache.0": "updated_value_cache.0", "updated_value_cache.0": "updated_key_cache.0"}
    for node in model.graph.node:
        for field in (node.input, node.output):
            for place, name in enumerate(field):
                field[place] = names.get(name, name)


def _shift_lengths(model: ModelProto) -> None:
    """Each query of the first attention sees one key less."""
    node = next(n for n in model.graph.node if "nonpad_kv_seqlen" in n.input)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    model.graph.node.insert(0, helper.make_node("Sub", ["nonpad_kv_seqlen", "one"], ["fewer"], "fewer"))
    inputs = ["fewer" if name == "nonpad_kv_seqlen" else name for name in node.input]
    del node.input[:]
    node.input.extend(inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_one_passes(tmp_path: Path, dtype: str) -> None:
    options = PlanOptions(cache_layout=CacheLayout.PRESERVE)
    source, made = _written(tmp_path, options, replace(CONFIG, dtype=dtype))
    report = _verify(source, made)
    report.check()
    assert [s.name for s in report.stations if s.compared] == ["rewritten"]


@pytest.mark.slow
def test_each_has_data_of_its_own(tmp_path: Path) -> None:
    source, _ = _written(tmp_path)
    onnx.save(onnx.load(source), source, save_as_external_data=True, location="m.data", size_threshold=64)
    made = tmp_path / "made" / "again.onnx"
    rewrite_model(source, made)
    (tmp_path / "made" / "m.data").write_bytes((tmp_path / "m.data").read_bytes())
    _verify(source, made).check()
    data = np.fromfile(tmp_path / "made" / "m.data", np.float32)
    (data * 1.01).tofile(tmp_path / "made" / "m.data")
    report = _verify(source, made)
    assert not report.passed


@pytest.mark.parametrize("mistake", [_swap_presents, _shift_lengths])
def test_a_changed_one_fails(tmp_path: Path, mistake: Callable[[ModelProto], None]) -> None:
    source, made = _written(tmp_path)
    _edit(made, mistake)
    report = _verify(source, made)
    assert not report.passed
    assert "logits differ by" in report.stations[0].failure


def _swapped_caches(plan: dict[str, Any]) -> None:
    """Keys are values, and values keys."""
    first, second = plan["caches"][:2]
    first["present"], second["present"] = second["present"], first["present"]


def _swapped_roles(plan: dict[str, Any]) -> None:
    """Where tokens are written is taken for how many are valid."""
    roles = {"write_indices": "valid_lengths", "valid_lengths": "write_indices"}
    for tensor in plan["tensors"]:
        tensor["role"] = roles.get(tensor["role"], tensor["role"])


def _longer(plan: dict[str, Any]) -> None:
    for cache in plan["caches"]:
        cache["capacity"] *= 2


def _routed(plan: dict[str, Any]) -> None:
    for cache in plan["caches"]:
        cache["route"] = "functional"


@pytest.mark.few(2)
@pytest.mark.parametrize("key", ["trt_kvcache.plan", "trt_kvcache.options"])
@pytest.mark.parametrize("forge", [_swapped_caches, _swapped_roles, _longer, _routed])
def test_a_plan_in_a_file_is_no_authority(tmp_path: Path, forge: Callable[[dict[str, Any]], None], key: str) -> None:
    """Neither beside the original's graph, nor in a rewritten file, which is not planned at all."""
    source, made = _written(tmp_path)
    plan = json.loads(msgspec.json.encode(plan_model(source)))
    forge(plan)

    def carry(model: ModelProto) -> None:
        del model.metadata_props[:]
        model.metadata_props.add(key=key, value=json.dumps(plan))

    for path in (source, made):
        _edit(path, carry)
        for use in (plan_model, lambda path: build_engine(path, tmp_path / "e.engine"), DecodeSession.open):
            with pytest.raises(UnsupportedModelError, match=r"was rewritten by trt_kvcache already.*rewritten"):
                use(path)


@pytest.mark.parametrize("edit", [lambda model: None, _swap_presents, _shift_lengths])
def test_without_its_record_one_is_planned_as_what_it_is(tmp_path: Path, edit: Callable[[ModelProto], None]) -> None:
    """The record has no part in it; this one has spans, which hide the sizes of heads."""
    _, made = _written(tmp_path)
    _edit(made, lambda model: (edit(model), model.ClearField("metadata_props"))[0])
    with pytest.raises(TrtKvCacheError, match="head size or type of Attention"):
        plan_model(made)


def test_forged_options_make_another_model(tmp_path: Path) -> None:
    source, made = _written(tmp_path)
    _edit_record(made, lambda record: record.update(logits="all"))
    with pytest.raises(InvalidModelError, match="'logits_span' is .* but missing in a rewrite of"):
        _verify(source, made)


@pytest.mark.slow
def test_definitions_of_its_own_are_refused(tmp_path: Path) -> None:
    """The CPU runs what the file defines, TensorRT the plugin of the same name."""
    plain = plain_model(3, ("ring",))
    source, made = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(plain.model, source)
    rewrite_model(source, made, plain.options)
    _verify(source, made).check()

    def edit(model: ModelProto) -> None:
        first: NodeProto = model.functions[0].node[0]
        first.name += "/other"

    _edit(made, edit)
    with pytest.raises(InvalidModelError, match=r"out\.onnx: the function KVCacheUpdateCircularPair differs from"):
        _verify(source, made)


def test_no_record_is_refused(tmp_path: Path) -> None:
    source, made = _written(tmp_path)
    with pytest.raises(InvalidModelError, match="the file does not record the options"):
        _verify(source, source)
    _edit_record(made, lambda record: record.update(logits=7))
    with pytest.raises(InvalidModelError, match="its record of options cannot be read"):
        _verify(source, made)


@pytest.mark.slow
def test_another_interface_is_refused(tmp_path: Path) -> None:
    _, made = _written(tmp_path)
    other = write_decoder(tmp_path / "other.onnx", replace(CONFIG, kv_heads=4))
    with pytest.raises(InvalidModelError, match=r"out\.onnx: input 'key_cache\.0' is float.*other\.onnx"):
        _verify(other, made)
    _edit(made, lambda model: model.graph.output[0].type.tensor_type.shape.dim[0].Clear())
    with pytest.raises(InvalidModelError, match="output 'logits' is"):
        _verify(tmp_path / "m.onnx", made)


@pytest.mark.slow
def test_options_of_the_caller_must_agree(tmp_path: Path) -> None:
    source, made = _written(tmp_path, PlanOptions(attention_span=False))
    _verify(source, made).check()
    with pytest.raises(OptionError, match="was rewritten with cache_layout auto, but the option now is preserve"):
        verify_model(source, PlanOptions(cache_layout=CacheLayout.PRESERVE), SHORT, made)
