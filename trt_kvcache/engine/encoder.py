"""The encoder that is built as an engine beside its decoder's, and the lengths of its sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trt_kvcache.engine.manifest import Profile
from trt_kvcache.engine.options import BuildOptions
from trt_kvcache.engine.profiles import make_encoder_profile
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import CachePlan, Role, TensorRole

if TYPE_CHECKING:
    import onnx

    from trt_kvcache.importer.files.source import SourceModel

__all__ = ["EncoderJob", "find_job", "which_encoder"]


@dataclass(frozen=True)
class EncoderJob:
    """An encoder to build.

    Attributes:
        sources: files of the encoder; external data lie in the folder of the first.
        plan: the plan of the encoder.
        model: the model for TensorRT; taken out when it is sent, because it may be large.
        profile: the lengths of sources.
        vocab: token ids are 0 to ``vocab - 1``; None: the encoder takes no tokens, or no table of them is known.
        positions: length of the output for the longest source; None: unknown.
    """

    sources: tuple[SourceModel, ...]
    plan: CachePlan
    model: list[onnx.ModelProto]
    profile: Profile
    vocab: int | None
    positions: int | None


def which_encoder(model: Path, plan: CachePlan, build: BuildOptions) -> Path | None:
    """Return the path of the encoder for a decoder; None if there is no encoder, or `build` wants none.

    Args:
        model: path of the decoder.
        plan: plan of the decoder.
        build: names the encoder.

    Raises:
        OptionError: an encoder is named but does not exist, or the decoder takes nothing from one.
    """
    from trt_kvcache.importer.families.encoders.files import find_encoder, named_encoder

    if build.encoder == "none":
        return None
    constants = _constants(plan)
    named = None if build.encoder == "auto" else Path(build.encoder)
    path = find_encoder(model) if named is None else named_encoder(named)
    if not constants or path is None:
        if named is None:
            return None
        reason = f"there is none at {named}" if constants else f"{model} takes nothing from one"
        raise OptionError(f"--encoder names an encoder, and {reason}; leave it out")
    return path


def find_job(model: Path, plan: CachePlan, build: BuildOptions) -> EncoderJob | None:
    """Return the encoder to build; None if there is no encoder, or `build` wants none.

    Args:
        model: path of the decoder.
        plan: plan of the decoder.
        build: names the encoder and the length of its longest output.

    Raises:
        OptionError: see `which_encoder`; or the longest source is unknown, or longer than the encoder's table of
            positions.
        ModelError: the encoder cannot be used.
    """
    from trt_kvcache.importer.families.encoders.files import find_first_step
    from trt_kvcache.importer.families.encoders.model import import_encoder
    from trt_kvcache.importer.families.encoders.positions import check_positions, count_positions, most_ids

    path = which_encoder(model, plan, build)
    if path is None:
        return None
    first_step = find_first_step(path) or find_first_step(model)
    encoder = import_encoder(path, first_step, _constants(plan), plan.options)
    profile = make_encoder_profile(encoder.plan, build)
    fixed = {t.name: t.shape for t in encoder.plan.tensors if t.io == "input" and t.name not in profile.shapes}
    largest = {name: range_.max for name, range_ in profile.shapes.items()}
    shapes: dict[str, tuple[int, ...]] = {**fixed, **largest}  # type: ignore[dict-item]  # fixed ones are of ints
    check_positions(encoder.model, shapes)
    axes = {t.name: t.axes.index("encoder") for t in encoder.plan.tensors if t.io == "output" and "encoder" in t.axes}
    positions = count_positions(encoder.model, shapes, axes)
    return EncoderJob(encoder.sources, encoder.plan, [encoder.model], profile, most_ids(encoder.model), positions)


def _constants(plan: CachePlan) -> list[TensorRole]:
    """Return the decoder's inputs that an encoder computes."""
    return [t for t in plan.tensors if t.io == "input" and t.role is Role.CONSTANT]
