"""The encoder of a decoder: what was heard, seen or is to be translated goes in, the decoder's constants come out.

It runs on the CPU with ONNX Runtime, once for each sequence, without padding. What the decoder takes for each sequence
comes from three places:

    encoder_hidden_states              the encoder's output
    past_key_values.0.encoder.key ...  the encoder, under the name of what is present; else the first step's model
    encoder_attention_mask             ones, as many as the encoder's output has positions, or the encoder's own mask
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.errors import OptionError, PromptError, UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, Role, TensorRole
from trt_kvcache.runtime.dtypes import array_dtype
from trt_kvcache.runtime.encoder_files import find_encoder, find_first_step
from trt_kvcache.runtime.first_step import BY_HAND, HIDDEN, FirstStep
from trt_kvcache.runtime.ort_calls import input_dtype, open_on_cpu, run_on_cpu, type_name

__all__ = ["Encoder", "Source", "open_encoder"]

Array = np.ndarray[Any, np.dtype[Any]]
Source = str | Sequence[int] | Mapping[str, Any]
"""What an encoder reads: a text, its token ids, or arrays by the names of the encoder's inputs."""

_MASK = "mask"
_IDS = "input_ids"


def open_encoder(given: Path | None, model: Path, plan: CachePlan) -> Encoder:
    """The encoder of a model.

    Args:
        given: its file, or the folder that it lies in; None: it lies beside `model`.
        model: path of the decoder or engine.
        plan: of the decoder.

    Raises:
        OptionError: the model takes nothing of an encoder, or none is there.
        ModelError: it cannot be used.
    """
    constants = [t for t in plan.tensors if t.io == "input" and t.role is Role.CONSTANT]
    if not constants:
        raise OptionError(f"{model} takes nothing from an encoder; leave sources out, and give prompts")
    path = given if given is not None and given.is_file() else find_encoder(given or model)
    if path is None:
        raise OptionError(
            f"there is no encoder beside {given or model}, such as encoder_model.onnx; name it with encoder= or "
            "--encoder, or give what it makes as constants"
        )
    return Encoder(path, find_first_step(path) or find_first_step(model), constants)


class Encoder:
    """An encoder, and what makes constants of its output.

    Args:
        path: of the encoder's model.
        first_step: of the first step's model, for decoders whose encoder does not make keys and values itself.
        constants: what the decoder takes.

    Raises:
        InvalidModelError, UnsupportedModelError: a model cannot be run, or makes something else than the decoder takes.
    """

    def __init__(self, path: Path, first_step: Path | None, constants: Sequence[TensorRole]) -> None:
        self._path = path
        self._session = open_on_cpu(str(path), path, BY_HAND, spinning=False)
        self._inputs = {v.name: v for v in self._session.get_inputs()}
        made = [v.name for v in self._session.get_outputs()]
        self._constants = list(constants)
        self._masks = [t for t in constants if _MASK in t.name and len(t.shape) == 2]
        self._own = {t.name: name for t in constants if (name := _among(made, t.name))}
        rest = [t for t in constants if t not in self._masks and t.name not in self._own]
        hidden = [t for t in rest if t.name == HIDDEN or len(t.shape) == 3]  # keys and values have heads
        rest = [t for t in rest if t not in hidden]
        self._hidden = self._find_hidden() if hidden or rest or self._masks else ""
        self._own |= {t.name: self._hidden for t in hidden}
        names = {name for t in rest for name in _present_names(t.name)}
        self._first = FirstStep(first_step, names) if rest and first_step is not None else None
        self._later = self._find_later(rest)

    @property
    def takes(self) -> str:
        """What goes in, in words."""
        return ", ".join(map(_describe, self._inputs.values()))

    def encode(self, source: Sequence[int] | Mapping[str, Any]) -> dict[str, Array]:
        """What the decoder takes for one sequence.

        Args:
            source: token ids ``[S]``; or arrays by name of the input, ``[1, ...]`` or without that axis. A mask that is
                left out is all ones.

        Returns:
            Arrays ``[1, ...]`` in the decoder's dtypes by the names of its inputs.

        Raises:
            PromptError: an input is missing, unknown, or of another dtype or shape than the encoder takes.
            SessionError: the encoder failed.
        """
        feed = self._feed(source if isinstance(source, Mapping) else {_IDS: np.asarray(source)})
        names = list(dict.fromkeys([*self._own.values(), *([self._hidden] if self._hidden else [])]))
        made = dict(zip(names, run_on_cpu(self._session, self._path, names, feed), strict=True))
        found = {name: made[output] for name, output in self._own.items()}
        if self._first is not None:
            later = dict(zip(self._first.outputs, self._first.run(made[self._hidden]), strict=True))
            found |= {name: later[output] for name, output in self._later.items()}
        for tensor in self._masks:
            found[tensor.name] = self._mask(feed, made[self._hidden].shape[1])
        return {t.name: found[t.name].astype(array_dtype(t.dtype), copy=False) for t in self._constants}

    # --- what it is

    def _find_hidden(self) -> str:
        """The encoder's output ``[B, S, H]``, by name if there are several."""
        found = [v for v in self._session.get_outputs() if len(v.shape) == 3]
        named = [v for v in found if v.name in ("last_hidden_state", "hidden_states", HIDDEN)] or found
        if len(named) != 1:
            made = ", ".join(map(_describe, self._session.get_outputs()))
            raise UnsupportedModelError(f"{self._path}: an encoder gives float [batch, length, width]; it gives {made}")
        name: str = named[0].name
        return name

    def _find_later(self, rest: Sequence[TensorRole]) -> dict[str, str]:
        """What the first step gives, by the names of what the decoder takes."""
        made = [] if self._first is None else self._first.outputs
        later = {t.name: name for t in rest if (name := _among(made, t.name))}
        if lacking := [t.name for t in rest if t.name not in later]:
            others = (
                "and there is no decoder_model.onnx beside it"
                if self._first is None
                else f"nor does {self._first.path}"
            )
            raise UnsupportedModelError(
                f"the decoder takes '{lacking[0]}', which {self._path} does not give, {others}; give what it takes as "
                "constants"
            )
        return later

    # --- one sequence

    def _feed(self, given: Mapping[str, Any]) -> dict[str, Array]:
        """The encoder's inputs, checked, and masks of ones where they were left out."""
        if unknown := [name for name in given if name not in self._inputs]:
            raise PromptError(f"{unknown[0]!r} is no input of the encoder {self._path}, which takes {self.takes}")
        feed = {name: self._checked(self._inputs[name], value) for name, value in given.items()}
        sizes = {
            symbol: size
            for name, array in feed.items()
            for symbol, size in zip(self._inputs[name].shape, array.shape, strict=True)
            if isinstance(symbol, str)
        }
        for name, value in self._inputs.items():
            if name in feed:
                continue
            shape = [
                1 if axis == 0 else sizes.get(d) if isinstance(d, str) else d for axis, d in enumerate(value.shape)
            ]
            if _MASK not in name or None in shape:
                raise PromptError(f"the encoder {self._path} takes {self.takes}; '{name}' is missing")
            feed[name] = np.ones(shape, input_dtype(value))
        return feed

    def _checked(self, value: Any, given: Any) -> Array:
        array, dtype = np.asarray(given), input_dtype(value)
        array = array[np.newaxis] if array.ndim == len(value.shape) - 1 else array
        wanted = (1, *value.shape[1:])
        fits = array.ndim == len(wanted) and all(
            size == want if isinstance(want, int) else size >= 1 for size, want in zip(array.shape, wanted, strict=True)
        )
        if not fits or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise PromptError(
                f"'{value.name}' is {array.dtype} {list(np.shape(given))}, and the encoder takes {dtype} "
                f"{_shape(value)} for each sequence"
            )
        return np.ascontiguousarray(array, dtype)

    def _mask(self, feed: Mapping[str, Array], length: int) -> Array:
        """Which positions of the encoder's output the decoder sees."""
        given = [array for name, array in feed.items() if _MASK in name]
        fitting = [array for array in given if array.shape == (1, length)]
        if not fitting and not all(array.all() for array in given):
            raise PromptError(
                f"the encoder gives {length} positions, and its mask is {list(given[0].shape)} and not all ones: "
                "nothing says which of them the decoder is to see; leave out what is masked, or give what the decoder "
                "takes as constants"
            )
        return fitting[0] if fitting else np.ones((1, length), np.int64)


def _among(made: Sequence[str], constant: str) -> str | None:
    """The output that gives a constant."""
    return next((name for name in _present_names(constant) if name in made), None)


def _present_names(constant: str) -> tuple[str, ...]:
    """What exporters call an output that a past input takes."""
    return (constant, constant.replace("past_key_values", "present"), constant.replace("past", "present"))


def _describe(value: Any) -> str:
    return f"'{value.name}' ({type_name(value)} {_shape(value)})"


def _shape(value: Any) -> str:
    return f"[{', '.join(str(d) for d in (1, *value.shape[1:]))}]"
