"""Runs the encoder of an encoder-decoder: it takes audio, images or text, and returns the decoder's constants.

The encoder runs once for each sequence, without padding: on the decoder's GPU (`trt.encoder_engine`) or on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import OptionError, PromptError, TrtKvCacheError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import Role, TensorRole
from trt_kvcache.importer.families.encoders.encoder_files import find_encoder, find_first_step, named_encoder
from trt_kvcache.importer.families.encoders.outputs import (
    HIDDEN,
    IDS,
    MASK,
    find_later,
    find_parts,
    keep_outputs,
    present_names,
    take_first_branch,
)
from trt_kvcache.importer.files.source import load_source
from trt_kvcache.runtime.encoders.source_reader import SourceInput, SourceReader
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.ort.calls import input_dtype, open_on_cpu
from trt_kvcache.runtime.runner import Runner


class Encoder(Protocol):
    """The interface of encoders: an encoder computes the constants that a decoder reads in all steps.

    Attributes:
        where: text such as ``"encoder on the CPU"``; empty if the encoder runs on the decoder's device.
    """

    where: str

    def encode(self, source: Sequence[int] | Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's constants for one sequence: arrays ``[1, ...]`` by input name, in the decoder's dtypes.

        Args:
            source: token ids ``[S]``; or arrays by input name, ``[1, ...]`` or without the first axis. A missing mask
                becomes all ones.

        Raises:
            PromptError: an input is missing, unknown, or of another dtype or shape than the encoder takes.
            SessionError: the encoder failed.
        """


def open_encoder(file: Path | None, model: Path, runner: Runner, guard: Guard) -> Encoder:
    """Open the encoder of a model, from `file` (engine, model or its folder) or, if None, from the decoder's folder.

    Raises:
        OptionError: the model takes no inputs from an encoder, or there is no encoder.
        ModelError, ManifestError, BackendError, SessionError: the encoder cannot be used. If the encoder's engine
            exists, but cannot be opened, there is no fallback to the CPU: a server would become slow without notice.
    """
    constants = [t for t in runner.plan.tensors if t.io == "input" and t.role is Role.CONSTANT]
    if not constants:
        raise OptionError(f"{model} takes no inputs from an encoder; leave sources out, and give prompts")
    is_engine = file is not None and file.is_file() and file.suffix.lower() != ".onnx"
    if runner.home is None and is_engine:
        raise OptionError(f"{file} looks like an engine, but {model} runs on the CPU; give the encoder's .onnx file")
    missing = ""
    if runner.home is not None and (file is None or is_engine):
        from trt_kvcache.runtime.trt.encoder_engine import TensorRTEncoder, engine_beside
        from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

        assert isinstance(runner, TensorRTRunner)
        engine, missing = (file, "") if file is not None else engine_beside(model, runner)
        if engine is not None:
            try:
                return TensorRTEncoder(engine, runner, constants, guard)
            except TrtKvCacheError as error:
                own = find_encoder(model)
                if own is None or "--encoder" in error.message:
                    raise
                way_out = f"or give {own} as --encoder, so that the encoder runs on the CPU"
                raise type(error)(f"{error.message}; {way_out}") from error
    path = find_encoder(model) if file is None else named_encoder(file)
    if path is None:
        raise OptionError(
            f"there is no encoder {f'beside {model}' if file is None else f'at {file}'}, such as "
            "encoder_model.onnx; name it with --encoder, or give its output as constants"
        )
    if missing:
        warnings.warn(f"the encoder {path} runs on the CPU: {missing}", RuntimeWarning, stacklevel=2)
    where = "" if runner.home is None else "encoder on the CPU"
    first_step = find_first_step(path) or find_first_step(model)
    return OnnxEncoder(path, first_step, constants, where)


class OnnxEncoder:
    """Runs an encoder on the CPU with ONNX Runtime; implements `Encoder`.

    In some exports, the cross-attention's keys and values come from a separate model for the decoder's first step
    (`first_step`), which then runs after the encoder. Raises `InvalidModelError` or `UnsupportedModelError` if a model
    cannot run, or its outputs do not match the decoder's inputs.
    """

    def __init__(self, path: Path, first_step: Path | None, constants: Sequence[TensorRole], where: str = "") -> None:
        self.where = where
        self._session = open_on_cpu(str(path), path, BY_HAND, spinning=False)
        inputs = self._session.inputs
        self._reader = SourceReader(path, [SourceInput(v.name, input_dtype(v), tuple(v.shape)) for v in inputs])
        self._constants = list(constants)
        ranks = {v.name: len(v.shape) for v in self._session.outputs}
        self._parts = parts = find_parts(constants, ranks, path)
        names = {name for t in parts.rest for name in present_names(t.name)}
        self._first = FirstStep(first_step, names) if parts.rest and first_step is not None else None
        later = [] if self._first is None else self._first.outputs
        self._later = find_later(parts.rest, later, path, first_step)

    def encode(self, source: Sequence[int] | Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's inputs from the encoder, for one sequence; see `Encoder.encode`."""
        feed, parts = self._reader.read(source), self._parts
        ids = feed.get(IDS)
        if ids is not None and ids.dtype.kind in "iu" and (wrong := ids[ids < 0].tolist()):
            # Gather would count negative ids from the end of a table.
            raise PromptError(f"'{IDS}' has the token id {wrong[0]}; ids count from 0")
        names = list(dict.fromkeys([*parts.own.values(), *([parts.hidden] if parts.hidden else [])]))
        outputs = dict(zip(names, self._session.run(names, feed), strict=True))
        constants = {name: outputs[output] for name, output in parts.own.items()}
        if self._first is not None:
            later = dict(zip(self._first.outputs, self._first.run(outputs[parts.hidden]), strict=True))
            constants |= {name: later[output] for name, output in self._later.items()}
        for tensor in parts.masks:
            constants[tensor.name] = self._reader.mask(feed, outputs[parts.hidden].shape[1])
        return {t.name: constants[t.name].astype(array_dtype(t.dtype), copy=False) for t in self._constants}


BY_HAND = "run it yourself, and give what the decoder takes as constants"
"""The advice in messages about a model that should run before a decoder, but cannot."""
Array = np.ndarray[Any, np.dtype[Any]]


class FirstStep:
    """Computes a decoder's cross-attention keys and values, with a part of the model for the decoder's first step.

    `wanted` names the outputs to compute; names that the model lacks are left out. Raises `InvalidModelError` or
    `UnsupportedModelError` if the file cannot run, or these outputs need inputs other than token ids, the encoder's
    output and a mask.
    """

    def __init__(self, path: Path, wanted: Collection[str]) -> None:
        self.path = path
        model = load_source(path, first_step=True).proto
        take_first_branch(model.graph)
        self.outputs = keep_outputs(model.graph, wanted)
        if unknown := [v.name for v in model.graph.input if v.name not in (IDS, HIDDEN, MASK)]:
            raise UnsupportedModelError(
                f"{path}: the encoder's keys and values depend on '{unknown[0]}'; they may depend only on {IDS}, "
                f"{HIDDEN} and {MASK}: compute the keys and values yourself, and give them as constants"
            )
        self._session = open_on_cpu(model, path, BY_HAND, spinning=False)
        self._inputs = {v.name: input_dtype(v) for v in self._session.inputs}
        self._tried = False

    def run(self, hidden: Array) -> list[Array]:
        """Return the keys and values for an encoder's output `hidden`, float ``[1, S_enc, H]``.

        Raises `UnsupportedModelError` if the results depend on the decoder's tokens, `SessionError` if the run failed.
        """
        outputs = self._run(hidden, 0)
        if not self._tried:
            if not all(map(np.array_equal, outputs, self._run(hidden, 1))):
                raise UnsupportedModelError(
                    f"{self.path}: the encoder's keys and values depend on the text; they may depend only on the "
                    "encoder's output: compute the keys and values yourself, and give them as constants"
                )
            self._tried = True
        return outputs

    def _run(self, hidden: Array, token: int) -> list[Array]:
        values = {IDS: np.array([[token]]), HIDDEN: hidden, MASK: np.ones(hidden.shape[:2])}
        feed = {name: np.ascontiguousarray(values[name], dtype) for name, dtype in self._inputs.items()}
        return self._session.run(self.outputs, feed)
