"""Opens the runner of a file: an engine runs on a GPU, a model on the CPU."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_kvcache.arguments import as_options, as_path, shown
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.plan import PlanOptions
from trt_kvcache.model_paths import engine_in, is_model
from trt_kvcache.runtime.runner import Runner
from trt_kvcache.runtime.sidecar import find_tokenizer

__all__ = ["open_runner", "open_tokenizer"]

CHECKS = ("first", "always", "off")
_DEVICES = ("auto", "cpu", "cuda")


def open_runner(
    path: str | os.PathLike[str],
    device: str,
    options: Mapping[str, Any],
    check: str = "first",
    *,
    default_capacity: int | None = None,
) -> Runner:
    """Open an ``.onnx`` file or its folder with ONNX Runtime; an engine or its folder on a GPU.

    Args:
        path: path of the file.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        options: options of the runner; the runner chooses options that are None.
        check: when to compare an engine with its proof: ``"first"``, ``"always"`` or ``"off"``; see
            `trt_kvcache.runtime.check`.
        default_capacity: capacity of caches that grow, if the options have no ``capacity``; None: the importer's
            default.

    Raises:
        OptionError: the file cannot run on that device, or the runner has no such option.
        VerificationError: the engine's results on this GPU differ from its proof.
        ModelError, ManifestError, BackendError, SessionError: the file cannot be used here.
    """
    if not isinstance(check, str) or check not in CHECKS:
        raise OptionError(f"check is {shown(check)}; it must be one of {', '.join(CHECKS)}")
    if not isinstance(device, str) or device not in _DEVICES:
        raise OptionError(f"device is {shown(device)}; it must be one of {', '.join(_DEVICES)}")
    path = as_path(path, "path")
    path = engine_in(path)
    model = is_model(path)
    if model and device == "cuda":
        raise OptionError(
            f"{path} is a model, and a GPU runs engines; write one with 'trt-kvcache build' and open that"
        )
    if not model and device == "cpu":
        raise OptionError(f"{path} is taken for an engine, and the CPU runs models; open the .onnx file instead")
    settings = {name: value for name, value in options.items() if value is not None}
    if model:
        from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner

        _check(OnnxRuntimeRunner, settings, {"options": "plan_options"}, "a model on the CPU", ("capacity",))
        plan_options = as_options(settings.pop("plan_options", PlanOptions()), PlanOptions, "plan_options")
        if "capacity" in settings:
            plan_options = replace(plan_options, capacity=settings.pop("capacity"))
        return OnnxRuntimeRunner(path, plan_options, default_capacity=default_capacity, **settings)
    from trt_kvcache.runtime.check import prove
    from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

    _check(TensorRTRunner, settings, {"device": "gpu"}, "an engine on a GPU")
    if "gpu" in settings:
        settings["device"] = settings.pop("gpu")
    prove(path, check, settings)
    return TensorRTRunner(path, **settings)


def open_tokenizer(tokenizer: str | os.PathLike[str] | Any, model: Path) -> Any:
    """Read a ``tokenizer.json``: the named one; for None, the one beside the model. False: no tokenizer.

    Other objects are returned unchanged.
    """
    if tokenizer is None or tokenizer is False:
        return None if tokenizer is False else find_tokenizer(model)
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    from trt_kvcache.runtime.text.tokenizer import Tokenizer

    return Tokenizer.load(as_path(tokenizer, "tokenizer"))


def _check(
    runner: type, settings: Mapping[str, Any], renamed: Mapping[str, str], what: str, more: Sequence[str] = ()
) -> None:
    known = [*more, *(renamed.get(name, name) for name in list(inspect.signature(runner).parameters)[1:])]
    for name in settings:
        if name not in known:
            raise OptionError(f"{name!r} is no option of {what}; options are {', '.join(known)}")
