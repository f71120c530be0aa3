"""Opens the runner of a model (CPU) or engine (GPU), its tokenizer, and its default settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_kvcache.arguments import as_options, as_path, as_whole, shown
from trt_kvcache.engine.engine_folder import sampling_beside
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.model_paths import engine_in, is_model
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.settings import changed
from trt_kvcache.runtime.runner import Runner


@dataclass(frozen=True)
class Unread:
    """Takes the place of a tokenizer that is missing or cannot be read. `why` is the reason, for messages."""

    why: str


def find_tokenizer(model: Path) -> Any:
    """Return the tokenizer in the folder of a model or engine; an `Unread` if there is no usable one."""
    file = (model if model.is_dir() else model.parent) / "tokenizer.json"
    if not file.is_file():
        return Unread(f"there is no {file}")
    from trt_kvcache.runtime.text.tokenizer import Tokenizer

    try:
        return Tokenizer.load(file)
    except OptionError as error:  # token ids work without it
        return Unread(error.message)


def default_config(model: Path, tokenizer: Any) -> GenerationConfig:
    """Return the default config of a session: greedy, with the end tokens of the model's files, else of `tokenizer`.

    Raises `OptionError` or `ManifestError` if a file or the manifest is unreadable.
    """
    config = GenerationConfig.for_model(model)
    return config if config.eos_token_ids else ended_by(config, tokenizer)


USUAL_SAMPLING = {"temperature": 0.8, "min_p": 0.05}
"""The sampling for models whose files recommend none. With temperature 1 and no other limit, unlikely tokens derail
small models.
"""


def default_sampling(model: Path) -> dict[str, Any]:
    """Return the sampling settings for servers and chats, from the model's ``generation_config.json``.

    If there are none, return `USUAL_SAMPLING`. Raises `OptionError` if the file is unreadable or has a bad value.
    """
    said = sampling_beside(model)
    try:
        changed(GenerationConfig(), said)
    except OptionError as error:
        folder = model if model.is_dir() else model.parent
        raise OptionError(f"{folder / 'generation_config.json'}: {error.message}") from None
    return said or dict(USUAL_SAMPLING)


def ended_by(config: GenerationConfig, tokenizer: Any) -> GenerationConfig:
    """Return `config` with the tokenizer's end token as ``eos_token_id``; unchanged if the tokenizer has none."""
    end = getattr(tokenizer, "eos_token_id", None)
    return replace(config, eos_token_id=end) if isinstance(end, int) else config


@dataclass(frozen=True)
class Schedule:
    """Settings for many sequences in one session: how they share steps and batch rows of the caches.

    Attributes:
        max_sequences: most sequences at a time, at least `max_batch` of the session. Sequences that are not generating
            move to host memory when another sequence needs a batch row. Running sequences keep their rows; new ones
            wait. None: new sequences wait for a row, and nothing is offloaded.
        prefix_cache: bytes of host memory for cache rows of earlier texts. New texts with the same beginning reuse
            them, in blocks of 32 tokens; `KVCache.prefix_stats` counts them. None: no prefix cache.
        prefill_budget: most prompt tokens in a step in which other sequences generate. A small budget makes prompts
            wait; a large one makes generating sequences wait. None: 16 on the CPU, 256 on a GPU. Models whose tokens
            see later tokens of their step ignore it: they write every prompt in one step.

    Raises:
        OptionError: `prefill_budget` is less than 1.
    """

    max_sequences: int | None = None
    prefix_cache: int | None = None
    prefill_budget: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_budget is not None and as_whole(self.prefill_budget, "prefill_budget") < 1:
            raise OptionError(f"prefill_budget is {self.prefill_budget}; it must be at least 1 token")

    def check(self, max_batch: int) -> None:
        """Raise `OptionError` if `max_sequences` is smaller than `max_batch` of the session."""
        most = self.max_sequences
        if most is not None and as_whole(most, "max_sequences") < max_batch:
            raise OptionError(
                f"max_sequences is {most}, less than max_batch, which is {max_batch}; give a larger max_sequences, "
                "or a smaller max_batch"
            )


@dataclass(frozen=True)
class CpuOptions:
    """How ONNX Runtime runs a model.

    Attributes:
        threads: number of threads; None: one per core.
        default_capacity: tokens per sequence of a model with growing caches, if the caller gives no capacity. None: the
            maximum length in ``config.json`` in the model's folder, at most 4096.

    Raises:
        OptionError: `default_capacity` is less than 1.
    """

    threads: int | None = None
    default_capacity: int | None = None

    def __post_init__(self) -> None:
        if self.default_capacity is not None and as_whole(self.default_capacity, "default_capacity") < 1:
            raise OptionError(f"default_capacity is {self.default_capacity}; it must be at least 1 token")


@dataclass(frozen=True)
class GpuOptions:
    """How TensorRT runs an engine.

    Attributes:
        index: index of the GPU.
        cuda_graphs: record decode steps as CUDA graphs.
        kernel_cache: folder for kernels that TensorRT for RTX compiles; None: the engine's folder.
        bindings: objects that tests use instead of the Python modules of TensorRT and CUDA.
    """

    index: int = 0
    cuda_graphs: bool = True
    kernel_cache: str | os.PathLike[str] | None = None
    bindings: Any = None


CHECKS = ("first", "always", "off")
_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class RunnerOptions:
    """Options for opening a runner; the parameters of `DecodeSession.open` with the same names explain them."""

    device: str = "auto"
    check: str = "first"
    max_batch: int | None = None
    max_chunk: int | None = None
    capacity: int | None = None
    plan_options: PlanOptions | None = None
    cpu: CpuOptions | None = None
    gpu: GpuOptions | None = None

    def __post_init__(self) -> None:
        for name, choices in (("check", CHECKS), ("device", _DEVICES)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise OptionError(f"{name} is {shown(value)}; it must be one of {', '.join(choices)}")
        for name, kind in (("plan_options", PlanOptions), ("cpu", CpuOptions), ("gpu", GpuOptions)):
            if getattr(self, name) is not None:
                as_options(getattr(self, name), kind, name)


def open_runner(path: str | os.PathLike[str], options: RunnerOptions) -> Runner:
    """Open a model with ONNX Runtime, or an engine on a GPU; `DecodeSession.open` explains options and errors."""
    path = engine_in(as_path(path, "path"))
    model = is_model(path)
    if model and options.device == "cuda":
        raise OptionError(
            f"{path} is a model, but a GPU runs only engines; build an engine with 'trt-kvcache build', and open that"
        )
    if not model and options.device == "cpu":
        raise OptionError(f"{path} looks like an engine, but the CPU runs only models; open the .onnx file instead")
    foreign = ("gpu",) if model else ("cpu", "capacity", "plan_options")
    if given := [name for name in foreign if getattr(options, name) is not None]:
        kind, other = ("a model", "engines") if model else ("taken for an engine", "models")
        raise OptionError(f"{given[0]} is for {other}, and {path} is {kind}; leave it out")
    if model:
        from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner

        plan_options, cpu = options.plan_options or PlanOptions(), options.cpu or CpuOptions()
        if options.capacity is not None:
            plan_options = replace(plan_options, capacity=options.capacity)
        return OnnxRuntimeRunner(
            path, plan_options, max_batch=options.max_batch, max_chunk=options.max_chunk, threads=cpu.threads,
            default_capacity=cpu.default_capacity,
        )  # fmt: skip
    from trt_kvcache.runtime.proof_check import prove
    from trt_kvcache.runtime.trt.trt_runner import TensorRTRunner

    gpu = options.gpu or GpuOptions()
    settings: dict[str, Any] = {
        "max_batch": options.max_batch, "max_chunk": options.max_chunk, "device": gpu.index,
        "cuda_graphs": gpu.cuda_graphs, "kernel_cache": gpu.kernel_cache, "bindings": gpu.bindings,
    }  # fmt: skip
    settings = {name: value for name, value in settings.items() if value is not None}
    prove(path, options.check, settings)
    return TensorRTRunner(path, **settings)


def open_tokenizer(tokenizer: str | os.PathLike[str] | Any, model: Path) -> Any:
    """Return a session's tokenizer. `tokenizer`: an object; a path; None: from the model's folder; False: none."""
    if tokenizer is None:
        return find_tokenizer(model)
    if not isinstance(tokenizer, (str, os.PathLike)):
        return None if tokenizer is False else tokenizer
    from trt_kvcache.runtime.text.tokenizer import Tokenizer

    return Tokenizer.load(as_path(tokenizer, "tokenizer"))
