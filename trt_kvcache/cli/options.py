"""Flags that several commands share: each is declared once, in a dataclass that makes the options of a station."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from trt_kvcache.cli.command import PLANNED
from trt_kvcache.errors import InvalidModelError, OptionError, TrtKvCacheError
from trt_kvcache.importer.capacity import USUAL
from trt_kvcache.importer.plan import (
    CacheDtype,
    CacheLayout,
    Fallback,
    LatentAttention,
    LogitPositions,
    PlanOptions,
    Sliding,
    Target,
)
from trt_kvcache.names import engine_named, is_model, model_named, runnable_named
from trt_kvcache.words import as_flags

run_flag = partial(typer.Option, rich_help_panel="How it runs")
_plan_flag = partial(typer.Option, rich_help_panel=PLANNED)

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="ONNX decoder with KV caches, or the folder of its export.",
        readable=False,
        callback=model_named,
    ),
]
RunnableArgument = Annotated[
    Path,
    typer.Argument(
        metavar="ENGINE|MODEL",
        help="An engine or its folder; or a model, on the CPU.",
        readable=False,
        callback=runnable_named,
    ),
]
EngineArgument = Annotated[
    Path, typer.Argument(metavar="ENGINE", help="Engine or its folder.", readable=False, callback=engine_named)
]
EmbeddingsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Embeddings of token ids, for a model that takes embeddings: .onnx, .npy or .safetensors[:TENSOR]. "
        "Default: the exporter's model beside it.",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="tokenizer.json or its folder. Default: the one beside the model.", readable=False
    ),
]
NameOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model name in the API. Default: the file's or folder's.")
]
QueueOption = Annotated[int, typer.Option(min=0, metavar="N", help="Most sequences that wait for a row.")]
AllOption = Annotated[bool, typer.Option("--all", help="One row per layer, nothing shortened.")]
TablesOption = Annotated[bool, typer.Option("--all", help="Every table, with a row for each group of layers.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page for a browser, too.", readable=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]


def bounded_on_cpu(model: Path) -> AbstractContextManager[None]:
    """While a model, and no engine, runs in this process: no more memory than is free now."""
    from trt_kvcache.machine import bounded_memory

    return bounded_memory() if model.suffix.lower() == ".onnx" or model.is_dir() else nullcontext()


class Switch(str, Enum):
    """``on`` or ``off``."""

    ON = "on"
    OFF = "off"


class Device(str, Enum):
    """The processor that a session runs on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Check(str, Enum):
    """The opens at which an engine is compared with its proof."""

    FIRST = "first"
    ALWAYS = "always"
    OFF = "off"


CheckOption = Annotated[
    Check,
    run_flag(
        help="Replay of an engine's proof. first: once for each GPU, driver and version of TensorRT, which leaves a "
        "receipt beside the engine."
    ),
]
DeviceOption = Annotated[Device, run_flag(help="auto: the device that the file is made for.")]


@dataclass(frozen=True)
class SessionPlanFlags:
    """Flags that plan a model for a session on the CPU."""

    capacity: Annotated[
        int | None,
        _plan_flag(
            "--capacity",
            "-c",
            min=1,
            metavar="TOKENS",
            help="Tokens per sequence, for caches that grow or have a symbolic length. Default: those of the model's "
            f"longest text, at most {USUAL}; generate takes more if its texts need them.",
        ),
    ] = None
    sliding: Annotated[
        Sliding,
        _plan_flag(
            help="For attention that sees only a window. circular: caches hold the window and one update, not the text."
        ),
    ] = Sliding.LINEAR
    window_chunk: Annotated[
        int | None,
        _plan_flag(
            min=1,
            metavar="TOKENS",
            help=f"With --sliding circular: longest update in a step. Default: {PlanOptions().window_chunk}.",
        ),
    ] = None
    latent_attention: Annotated[
        LatentAttention,
        _plan_flag(
            help="For caches that hold latents (MLA). absorbed: for decoding. expanded: for steps of several hundred "
            "tokens."
        ),
    ] = LatentAttention.ABSORBED
    logits: Annotated[
        LogitPositions,
        _plan_flag(
            help="last: logits of as many of a step's last positions as the caller asks for; prefill needs one. all: "
            "as exported."
        ),
    ] = LogitPositions.LAST
    cache_dtype: Annotated[
        CacheDtype | None,
        _plan_flag(help="Quantize the rows of float caches, with a scale for each row and head. fp8: TensorRT only."),
    ] = None
    calibrate: Annotated[
        Path | None,
        _plan_flag(
            metavar="FILE",
            help="With --cache-dtype: one scale for each cache, from a run over these prompts on the CPU. A text in "
            "each line; .jsonl: a text, a list of token ids, or an object with one of them as its prompt.",
            readable=False,
        ),
    ] = None
    config: Annotated[
        Path | None,
        _plan_flag(metavar="YAML", help="Name patterns for roles, tried before the shipped ones.", readable=False),
    ] = None
    lora_rank: Annotated[
        int | None,
        _plan_flag(
            min=1,
            metavar="N",
            help="Take adapters (LoRA) of up to this rank as inputs; each sequence chooses one. Default: that of the "
            "adapters that are given.",
        ),
    ] = None
    lora_slots: Annotated[int, _plan_flag(min=1, metavar="N", help="Adapters that a step may choose from.")] = (
        PlanOptions().lora_slots
    )
    lora_targets: Annotated[
        str,
        _plan_flag(metavar="NAME,...|all", help="Modules that adapters may change, such as q_proj,v_proj."),
    ] = "all"
    checkpoint: Annotated[
        Path | None,
        _plan_flag(
            metavar="FOLDER",
            help="For adapters: the checkpoint that the model was exported from, where names in the model do not say "
            "which product is which module.",
            readable=False,
        ),
    ] = None
    check_seconds: Annotated[
        int,
        _plan_flag(min=1, metavar="SECONDS", help="Processor time for the check of the rewritten model."),
    ] = PlanOptions().check_seconds
    check_memory: Annotated[
        int,
        _plan_flag(min=1, metavar="GIB", help="Address space that this check may use."),
    ] = PlanOptions().check_memory
    recheck: Annotated[
        bool,
        _plan_flag("--recheck", help="Check again what an earlier check found equal."),
    ] = False

    def options(self) -> PlanOptions:
        """Return the `PlanOptions` that the flags ask for.

        Raises:
            OptionError: a flag has no effect without another.
        """
        if self.window_chunk is not None and self.sliding is not Sliding.CIRCULAR:
            raise OptionError(
                f"--window-chunk {self.window_chunk} has no effect without --sliding circular; add that, or leave "
                "--window-chunk out"
            )
        if self.calibrate is not None and self.cache_dtype is None:
            raise OptionError(
                f"--calibrate {self.calibrate} has no effect without --cache-dtype; add that, or leave --calibrate out"
            )
        given = {name: value for name, value in given_flags(self).items() if name not in ("calibrate", "adapter")}
        return PlanOptions(**given)

    def options_for(self, model: Path) -> PlanOptions:
        """Return the `PlanOptions` for a model. A missing file is an error here, before the slow imports.

        Raises:
            OptionError: a flag has no effect without another.
            InvalidModelError: there is no such file.
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
        """Return the `PlanOptions` for a model; None for an engine.

        Raises:
            OptionError: flags are given for an engine, which was planned when it was built; or one has no effect
                without another.
            InvalidModelError: there is no such model.
        """
        if is_model(path):
            return self.options_for(path)
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if given:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise OptionError(
                f"{flags} {'plans' if len(given) == 1 else 'plan'} a model, and {path} is taken for an engine, which "
                "was planned when it was built; leave it out, or give the .onnx file"
            )
        return None

    def session_options(self, path: Path) -> dict[str, Any]:
        """Return the keyword arguments for `DecodeSession.open`: none if no flag is given.

        Raises:
            OptionError, InvalidModelError: see `options_for_file`.
        """
        options = self.options_for_file(path)
        return {} if self == SessionPlanFlags() else {"plan_options": options}


@dataclass(frozen=True)
class BuildPlanFlags(SessionPlanFlags):
    """Flags that plan a model for a build, which follows the builder in everything else."""

    cache_layout: Annotated[
        CacheLayout,
        _plan_flag(
            help="auto: sequence-major caches become [B, N, S_max, H] in the engine. preserve: caches keep their byte "
            "order."
        ),
    ] = CacheLayout.AUTO
    attention_span: Annotated[Switch, _plan_flag(help="Attend to the active rows only, not to the capacity.")] = (
        Switch.ON
    )
    adapter: Annotated[
        list[str] | None,
        _plan_flag(
            metavar="FOLDER",
            help="Take adapters such as this one, which peft wrote: its rank and modules; repeatable.",
        ),
    ] = None
    fallback: Annotated[
        Fallback,
        _plan_flag(
            help="For updates that TensorRT's own layer does not support. contract: native; correct only if no update "
            "crosses the end of the ring. functional: plain operators, not in place."
        ),
    ] = Fallback.AUTO

    def options(self) -> PlanOptions:
        """See `SessionPlanFlags.options`; adapters that are given say what the model has to take."""
        options = super().options()
        if not self.adapter:
            return options
        from trt_kvcache.runtime.adapters import for_adapters, given_adapters

        return for_adapters(options, given_adapters(named_folders(self.adapter, "--adapter")))


@dataclass(frozen=True)
class TensorRTPlanFlags(BuildPlanFlags):
    """Flags that plan a model for TensorRT, which need not be installed."""

    packed_native: Annotated[Switch, _plan_flag(help="off for TensorRT 10.15 and 10.16.")] = Switch.ON


@dataclass(frozen=True)
class PlanFlags(TensorRTPlanFlags):
    """Flags that plan a model for a builder, which need not be installed."""

    target: Annotated[Target, _plan_flag(help="The builder to plan for; need not be installed.")] = Target.TENSORRT_RTX


def named_folders(given: list[str], flag: str) -> dict[str, Path]:
    """Return folders by name, of ``NAME=FOLDER`` or of a folder that says its name.

    Raises:
        OptionError: a name comes twice, or there is none.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, is_named, folder = text.partition("=")
        path = Path(folder if is_named else text)
        name = name if is_named else path.resolve().name
        if not name or not str(path) or name in found:
            raise OptionError(f"{flag} {text!r}: give NAME=FOLDER, and each name once")
        found[name] = path
    return found


def given_flags(flags: Any) -> dict[str, Any]:
    """Return the flags that have a value, by name: enums as their text, switches as bools."""

    def plain(value: Any) -> Any:
        if isinstance(value, Switch):
            return value is Switch.ON
        return value.value if isinstance(value, Enum) else value

    return {name: plain(value) for name, value in vars(flags).items() if value not in (None, [])}


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes every field of its dataclasses as a flag.

    Args:
        command: a function whose parameters are annotated for typer, or with a dataclass whose fields are.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind):
            groups[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            parameters += [
                inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
                for f in fields(kind)
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def run(context: typer.Context, **values: Any) -> None:
        try:
            made = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
            command(**values, **made)
        except TrtKvCacheError as error:
            error.args = (as_flags(error.message, _flags_of(context)),)
            raise

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _flags_of(context: typer.Context) -> dict[str, tuple[str, str | None]]:
    """The long flags of a command, by argument: each with the one that says no, or None where it takes a value."""
    found: dict[str, tuple[str, str | None]] = {}
    for option in context.command.params:
        if option.param_type_name == "option":
            no = max(option.secondary_opts, key=len, default="")
            found[str(option.name)] = (max(option.opts, key=len), no if getattr(option, "is_flag", False) else None)
    return found
