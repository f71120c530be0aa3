"""Engines of decoders that attend to what an encoder gives once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hybrids import cross_model, fixed_length, write

from trt_kvcache import BuildOptions, build_engine, plan_model
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import Role

HIDDEN = "encoder_hidden_states"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mask"), [(k, m) for k in ("keys", "hidden") for m in ("none", "ones", "bool")])
def test_axes_and_engine(tmp_path: Path, kind: str, mask: str) -> None:
    model = write(tmp_path / "m.onnx", cross_model(kind, mask))
    with pytest.raises(OptionError, match=r"give the most positions with max_encoder, such as max_encoder=1500"):
        build_engine(model, tmp_path / "m.engine", build=BuildOptions(max_batch=4))
    build = BuildOptions(max_batch=4, max_chunk=8, max_encoder=24, opt_encoder=6)
    manifest = build_engine(model, tmp_path / "m.engine", build=build)
    constants = {t.name: t.axes for t in plan_model(model).tensors if t.role is Role.CONSTANT}
    for profile in manifest.profiles:
        for name, axes in constants.items():
            axis, range_ = axes.index("encoder"), profile.shapes[name]
            assert (range_.min[axis], range_.opt[axis], range_.max[axis], range_.max[0]) == (1, 6, 24, 4)


@pytest.mark.slow
def test_shapes_given_by_name(tmp_path: Path) -> None:
    model = write(tmp_path / "m.onnx", cross_model("hidden"))
    shapes = {"min_shapes": {HIDDEN: (1, 24, 32)}, "opt_shapes": {HIDDEN: (4, 24, 32)}}
    manifest = build_engine(model, tmp_path / "m.engine", build=BuildOptions(max_batch=4, max_encoder=24, **shapes))
    assert {p.shapes[HIDDEN].min for p in manifest.profiles} == {(1, 24, 32)}
    with pytest.raises(OptionError, match=r"must be 24 \(from max_encoder\)"):
        build_engine(model, tmp_path / "m.engine", build=BuildOptions(max_encoder=24, max_shapes={HIDDEN: (1, 25, 32)}))


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    for given, words in (({}, "and none is given"), ({"max_encoder": 2}, "and it is 2")):
        with pytest.raises(OptionError, match=f"opt_encoder is 3, .* {words}"):
            BuildOptions(opt_encoder=3, **given)
    with pytest.raises(OptionError, match="max_encoder is given, and no input of the model is as long"):
        build_engine(
            write(tmp_path / "m.onnx", fixed_length()), tmp_path / "m.engine", build=BuildOptions(max_encoder=24)
        )
