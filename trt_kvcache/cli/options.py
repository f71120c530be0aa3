"""Flags that several commands share, in dataclasses that convert flags to API options."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trt_kvcache.cli.command import PLANNED
from trt_kvcache.cli.flags import Flags, flags_of
from trt_kvcache.compare.costs import read_bandwidth
from trt_kvcache.errors import InvalidModelError, OptionError
from trt_kvcache.importer.cache_plan import PlanOptions, Sliding
from trt_kvcache.model_paths import engine_named, is_model, model_named, runnable_named

# With `readable`, typer itself would refuse a file, with its own message.
file_argument, file_flag = partial(typer.Argument, readable=False), partial(typer.Option, readable=False)
output_flag = partial(file_flag, "--output", "-o")
run_flag = partial(file_flag, rich_help_panel="How it runs")
_plan_flag = partial(file_flag, rich_help_panel=PLANNED)

ModelArgument = Annotated[
    Path,
    file_argument(
        metavar="MODEL", help="ONNX decoder with KV caches, or the folder of its export.", callback=model_named
    ),
]
RunnableArgument = Annotated[
    Path,
    file_argument(
        metavar="ENGINE|MODEL", help="Engine or its folder; or a model, which runs on the CPU.", callback=runnable_named
    ),
]
EngineArgument = Annotated[Path, file_argument(metavar="ENGINE", help="Engine or its folder.", callback=engine_named)]
EmbeddingsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Embeddings of token ids, for a model that takes embeddings: .onnx, .npy or .safetensors[:TENSOR]. "
        "Default: the exporter's model beside it.",
    ),
]
TokenizerOption = Annotated[
    Path | None, file_flag(metavar="FILE", help="tokenizer.json or its folder. Default: the one beside the model.")
]
NameOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model name in the API. Default: the file's or folder's.")
]
QueueOption = Annotated[int, typer.Option(min=0, metavar="N", help="How many sequences may wait for a free row.")]
AllOption = Annotated[bool, typer.Option("--all", help="Show one row per layer.")]
TablesOption = Annotated[bool, typer.Option("--all", help="Show all tables, with one row for each group of layers.")]
BandwidthOption = Annotated[
    float | None,
    typer.Option(
        metavar="GB/s|GPU",
        parser=read_bandwidth,
        help="Show the limit in tokens per second for this memory: its GB/s, or the name of a GPU such as H100.",
    ),
]
HtmlOption = Annotated[Path | None, file_flag("--html", metavar="FILE", help="Also write a page for a browser.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only on stdout.")]


def bounded_on_cpu(model: Path) -> AbstractContextManager[None]:
    """Return a context that limits a model on the CPU to the memory that is free now; it does not limit an engine."""
    from trt_kvcache.machine import bounded_memory

    return bounded_memory() if model.suffix.lower() == ".onnx" or model.is_dir() else nullcontext()


CheckOption = Annotated[
    Literal["first", "always", "off"],
    run_flag(
        help="When to replay an engine's proof (a recorded decode) and compare. first: once for each GPU, driver and "
        "version of TensorRT; a file beside the engine (.passed_check) records it."
    ),
]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], run_flag(help="auto: a GPU for engines, the CPU for models.")]


_FOR_BUILDS = ("cache_layout", "attention_span", "fallback")


@flags_of(PlanOptions, leave=(*_FOR_BUILDS, "packed_native", "target"), unset=("window_chunk",), group=PLANNED)
class SessionPlanFlags(Flags):
    """The flags that plan a model for a session on the CPU."""

    calibrate: Annotated[
        Path | None,
        _plan_flag(
            metavar="FILE",
            help="With --cache-dtype: compute one scale for each cache from these prompts, on the CPU. Each line has a "
            "text; in a .jsonl file: a text, a list of token ids, or an object with one of them as its prompt.",
        ),
    ] = None

    def options(self) -> PlanOptions:
        """Return the `PlanOptions` of the flags; raise `OptionError` if a flag needs another flag."""
        if self.window_chunk is not None and self.sliding is not Sliding.CIRCULAR:
            raise OptionError(
                f"--window-chunk {self.window_chunk} has no effect without --sliding circular; add that, or leave "
                "--window-chunk out"
            )
        if self.calibrate is not None and self.cache_dtype is None:
            raise OptionError(
                f"--calibrate {self.calibrate} has no effect without --cache-dtype; add that, or leave --calibrate out"
            )
        return PlanOptions(**self.values("calibrate", "adapter"))

    def options_for(self, model: Path) -> PlanOptions:
        """Return the `PlanOptions` of the flags for a model.

        Raises:
            OptionError: a flag has no effect without another flag.
            InvalidModelError: the model does not exist; found here, before slow imports.
            TrtKvCacheError: see `calibrate_caches`.
        """
        options = self.options()
        if not model.exists():
            raise InvalidModelError(f"{model}: no such file; give the path of an .onnx file")
        if self.calibrate is None:
            return options
        from trt_kvcache.cli.prompts import read_prompts

        prompts = read_prompts(self.calibrate, "--calibrate")
        from trt_kvcache.runtime.calibration import calibrate_caches

        with bounded_on_cpu(model):
            return replace(options, cache_ranges=calibrate_caches(model, prompts, options))

    def options_for_file(self, path: Path) -> PlanOptions | None:
        """Return the `PlanOptions` of the flags if `path` is a model; None if it is an engine.

        Raises what `options_for` raises; also `OptionError` if flags are given for an engine, which is planned already.
        """
        if is_model(path):
            return self.options_for(path)
        if names := [f.name for f in fields(self) if getattr(self, f.name) != f.default]:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
            raise OptionError(
                f"only a model takes {flags}, and {path} looks like an engine, which was planned when it was built; "
                f"give the .onnx file, or leave out {flags}"
            )
        return None

    def session_options(self, path: Path) -> dict[str, Any]:
        """Return the flags as keyword arguments of `DecodeSession.open`; raise what `options_for_file` raises."""
        options = self.options_for_file(path)
        return {} if self == SessionPlanFlags() else {"plan_options": options}


@flags_of(PlanOptions, *_FOR_BUILDS, group=PLANNED)
class BuildPlanFlags(SessionPlanFlags):
    """The flags that plan a model for a build. The builder determines all other options of the plan."""

    adapter: Annotated[
        list[str] | None,
        _plan_flag(
            metavar="FOLDER",
            help="Accept adapters (LoRA) with the rank and modules of this one, which peft wrote; repeatable.",
        ),
    ] = None

    def options(self) -> PlanOptions:
        """Return the `PlanOptions` of the flags, with rank and modules of the given adapters."""
        options = super().options()
        if not self.adapter:
            return options
        from trt_kvcache.runtime.adapters import adapter_folders, for_adapters

        return for_adapters(options, adapter_folders(named_folders(self.adapter, "--adapter")))


@flags_of(PlanOptions, "packed_native", group=PLANNED)
class TensorRTPlanFlags(BuildPlanFlags):
    """Flags that plan a model for TensorRT, which need not be installed."""


@flags_of(PlanOptions, "target", group=PLANNED)
class PlanFlags(TensorRTPlanFlags):
    """The flags that plan a model. One of them chooses the builder, which need not be installed."""


def named_folders(values: list[str], flag: str) -> dict[str, Path]:
    """Return folders by name, for ``NAME=FOLDER`` or ``FOLDER``; raise `OptionError` for a missing or double name."""
    folders: dict[str, Path] = {}
    for text in values:
        name, is_named, folder = text.partition("=")
        path = Path(folder if is_named else text)
        name = name if is_named else path.resolve().name
        if not name or not str(path) or name in folders:
            raise OptionError(f"{flag} {text!r}: give NAME=FOLDER, and each name once")
        folders[name] = path
    return folders
