"""Finds the outputs of an export that provide the constant inputs of its decoder, such as cross-attention keys.

encoder_hidden_states              the encoder's output [B, S_enc, H]
past_key_values.0.encoder.key ...  an output of the encoder or the first step with the matching present name
encoder_attention_mask             no output: the session gives ones, or the encoder's mask
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.cache_plan import TensorRole
from trt_kvcache.importer.families.torch_exports import take_first_branch as take_first_branch
from trt_kvcache.importer.protos import names_read, replace_field
from trt_kvcache.importer.simplify import drop_dead

HIDDEN, IDS, MASK = "encoder_hidden_states", "input_ids", "encoder_attention_mask"
"""Names that optimum gives to the inputs of a first step."""

_MASK = "mask"
_HIDDEN_NAMES = ("last_hidden_state", "hidden_states", HIDDEN)


@dataclass(frozen=True)
class EncoderParts:
    """The origins of a decoder's constant inputs: outputs of the encoder, masks, or outputs of the first step.

    Attributes:
        own: maps a constant to the encoder's output that provides it, both by name.
        hidden: name of the encoder's output ``[B, S_enc, H]``; empty if no constant needs it.
        masks: constants ``[B, S_enc]`` that say which positions of the source (encoder input) the decoder sees.
        rest: constants that the first step (decoder file without a past) must provide.
    """

    own: dict[str, str]
    hidden: str
    masks: tuple[TensorRole, ...]
    rest: tuple[TensorRole, ...]


def find_parts(constants: Sequence[TensorRole], outputs: Mapping[str, int], path: Path) -> EncoderParts:
    """Match an encoder's outputs to the decoder's constant inputs; `UnsupportedModelError` if its output is unclear."""
    masks = tuple(t for t in constants if _MASK in t.name and len(t.shape) == 2)
    own = {t.name: name for t in constants if (name := _among(outputs, t.name))}
    rest = [t for t in constants if t not in masks and t.name not in own]
    hidden = [t for t in rest if t.name == HIDDEN or len(t.shape) == 3]  # keys and values have rank 4
    rest = [t for t in rest if t not in hidden]
    output = _find_hidden(outputs, path) if hidden or rest or masks else ""
    return EncoderParts(own | {t.name: output for t in hidden}, output, masks, tuple(rest))


def find_later(rest: Sequence[TensorRole], names: Collection[str], encoder: Path, first: Path | None) -> dict[str, str]:
    """Map the constants in `rest` to outputs of the first step. Raise `UnsupportedModelError` if one has no output."""
    later = {t.name: name for t in rest if (name := _among(names, t.name))}
    if lacking := [t.name for t in rest if t.name not in later]:
        others = "and there is no decoder_model.onnx beside it" if first is None else f"and {first} does not, either"
        raise UnsupportedModelError(
            f"the decoder reads '{lacking[0]}', but {encoder} does not compute it, {others}; give it to the session as "
            "a constant"
        )
    return later


def present_names(constant: str) -> tuple[str, ...]:
    """Return the names that exporters give to the encoder's output for a constant input of the decoder."""
    return (constant, constant.replace("past_key_values", "present"), constant.replace("past", "present"))


def keep_outputs(graph: onnx.GraphProto, wanted: Collection[str]) -> list[str]:
    """Keep only the wanted outputs and the nodes that they need, in place. Return the wanted outputs that exist."""
    replace_field(graph.output, [v for v in graph.output if v.name in wanted])
    drop_dead(graph)
    read = {v.name for v in graph.output}.union(*map(names_read, graph.node)) - {t.name for t in graph.initializer}
    replace_field(graph.input, [v for v in graph.input if v.name in read])
    del graph.value_info[:]
    return [v.name for v in graph.output]


def _find_hidden(outputs: Mapping[str, int], path: Path) -> str:
    """Return the name of the encoder's output ``[B, S_enc, H]``. If several have rank 3, known names decide."""
    candidates = [name for name, rank in outputs.items() if rank == 3]
    named = [name for name in candidates if name in _HIDDEN_NAMES] or candidates
    if len(named) != 1:
        shown = ", ".join(f"'{name}' of rank {rank}" for name, rank in outputs.items())
        raise UnsupportedModelError(
            f"{path}: an encoder must have one output float [batch, length, width], but this model has {shown}"
        )
    return named[0]


def _among(outputs: Collection[str], constant: str) -> str | None:
    return next((name for name in present_names(constant) if name in outputs), None)
