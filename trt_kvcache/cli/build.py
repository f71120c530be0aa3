"""``trt-kvcache build``: the engine and its manifest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.options import BuildPlanFlags, JsonOption, ModelArgument, given_flags

if TYPE_CHECKING:
    from trt_kvcache.engine.manifest import Manifest
    from trt_kvcache.engine.options import BuildOptions

_size_flag = partial(typer.Option, rich_help_panel="What the engine must hold")
_build_flag = partial(typer.Option, rich_help_panel="How the engine is built")


_LEAST = 1 << 20  # bytes of scratch memory; a number without a unit means another unit


class BackendChoice(str, Enum):
    """The TensorRT package that builds the engine."""

    AUTO = "auto"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class DecodeWeights(str, Enum):
    """Weights of decode steps of one row: those of prefill, or their own."""

    AUTO = "auto"
    SHARED = "shared"
    OWN = "own"


class Refit(str, Enum):
    """Weights that can be set after the build."""

    NONE = "none"
    ANY = "any"
    IDENTICAL = "identical"


class Verbosity(str, Enum):
    """Detail in which an engine describes its layers."""

    NONE = "none"
    LAYER_NAMES_ONLY = "layer-names-only"
    DETAILED = "detailed"


@dataclass(frozen=True)
class BuildFlags:
    """Flags of a build; see `BuildOptions`."""

    max_batch: Annotated[
        int | None, _size_flag(min=1, metavar="N", help="Most sequences in a step. Default: the model's own, else 1.")
    ] = None
    max_chunk: Annotated[
        int | None,
        _size_flag(min=1, metavar="TOKENS", help="Longest update in a step. Default: the model's own, else 512."),
    ] = None
    max_logits: Annotated[
        int | None,
        _size_flag(
            min=1,
            metavar="N",
            help="Most positions with logits in a step, such as N for drafts of N - 1 tokens. Default: 16.",
        ),
    ] = None
    opt_batch: Annotated[
        int | None,
        _size_flag(min=1, metavar="N", help="Batch size that TensorRT chooses kernels for. Default: the largest."),
    ] = None
    max_encoder: Annotated[
        int | None,
        _size_flag(
            min=1,
            metavar="N",
            help="Longest output of an encoder, for models that attend one. Default: the longest output of the encoder "
            "that is built.",
        ),
    ] = None
    opt_encoder: Annotated[
        int | None,
        _size_flag(
            min=1,
            metavar="N",
            help="Length of the encoder's output that TensorRT chooses kernels for. Default: the longest.",
        ),
    ] = None
    encoder: Annotated[
        str,
        _size_flag(
            metavar="auto|none|FILE|DIR",
            help="The encoder that becomes an engine too. auto: the exporter's beside the model, if TensorRT takes it; "
            "otherwise it runs on the CPU.",
        ),
    ] = "auto"
    decode_weights: Annotated[
        DecodeWeights,
        _build_flag(
            help="For a batch of one: decode with the weights of prefill, or its own. auto: the smaller engine."
        ),
    ] = DecodeWeights.AUTO
    min_shapes: Annotated[
        str | None,
        _size_flag("--minShapes", metavar="NAME:1x2,...", help="Smallest shapes, for inputs of unknown role."),
    ] = None
    opt_shapes: Annotated[str | None, _size_flag("--optShapes", metavar="NAME:1x2,...", help="Typical shapes.")] = None
    max_shapes: Annotated[str | None, _size_flag("--maxShapes", metavar="NAME:1x2,...", help="Largest shapes.")] = None
    backend: Annotated[BackendChoice, _build_flag(help="auto: TensorRT with a GPU, else TensorRT for RTX.")] = (
        BackendChoice.AUTO
    )
    compute_capabilities: Annotated[
        str | None, _build_flag(metavar="sm80,sm89,...", help="GPUs to build for; current: the GPU of this machine.")
    ] = None
    workspace: Annotated[
        str | None, _build_flag(metavar="SIZE", help="Most scratch memory of the GPU, such as 4GiB.")
    ] = None
    opt_level: Annotated[int | None, _build_flag(min=0, max=5, help="TensorRT's optimization level.")] = None
    timing_cache: Annotated[
        Path | None,
        _build_flag(metavar="FILE", help="File of measured kernel times, read and written.", readable=False),
    ] = None
    version_compatible: Annotated[
        bool, _build_flag("--version-compatible", help="The engine runs on later TensorRT versions too.")
    ] = False
    declare_aliases: Annotated[
        bool,
        _build_flag(
            "--declare-aliases", help="Tell TensorRT which outputs of the plugin share a buffer with an input."
        ),
    ] = False
    strip_plan: Annotated[bool, _build_flag("--strip-plan", help="Leave the weights out of the engine.")] = False
    refit: Annotated[
        Refit,
        _build_flag(
            help="Weights can be set after the build: any, or identical ones alone, such as those that --strip-plan "
            "left out."
        ),
    ] = Refit.NONE
    profiling_verbosity: Annotated[Verbosity, _build_flag(help="Detail in which the engine describes its layers.")] = (
        Verbosity.LAYER_NAMES_ONLY
    )
    proof: Annotated[
        str,
        _build_flag(
            metavar="auto|off|STEPS",
            help="The decode of the original that the engine has to repeat where it runs. auto: unless it takes more "
            "than two minutes; STEPS: of so many steps, whatever they take.",
        ),
    ] = "auto"
    log: Annotated[
        Path | None, _build_flag(metavar="FILE", help="File for TensorRT's own log, in full.", readable=False)
    ] = None
    memory_check: Annotated[bool, _build_flag(help="Refuse a build that would not fit into this machine's memory.")] = (
        True
    )

    def options(self) -> BuildOptions:
        """Return the `BuildOptions` that the flags ask for.

        Raises:
            OptionError: a value is illegal.
        """
        from trt_kvcache import BuildOptions
        from trt_kvcache.engine.options import parse_shapes
        from trt_kvcache.errors import OptionError

        if self.decode_weights is DecodeWeights.OWN and self.max_batch is not None and self.max_batch > 1:
            raise OptionError(
                f"--decode-weights own is for a batch of one, and --max-batch is {self.max_batch}; leave one out"
            )
        parsers: dict[str, Callable[[str], object]] = {
            "min_shapes": parse_shapes, "opt_shapes": parse_shapes, "max_shapes": parse_shapes,
            "compute_capabilities": lambda text: text.split(","), "workspace": _workspace,
        }  # fmt: skip
        given = given_flags(self)
        for name in parsers.keys() & given.keys():
            text = given.pop(name)
            if text:
                given[name] = parsers[name](text)
        return BuildOptions(**given)


def _workspace(text: str) -> int:
    from trt_kvcache.engine.options import parse_bytes
    from trt_kvcache.errors import OptionError

    size = parse_bytes(text)
    if size < _LEAST:
        raise OptionError(f"--workspace {text} is {size} bytes, and no kernel does with that; give a unit, as in 4GiB")
    return size


def build(
    model: ModelArgument,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="ENGINE|FOLDER/",
            help="A file; or a folder, which ends with a slash and gets the tokenizer, too.",
        ),
    ],
    engine: BuildFlags,
    flags: BuildPlanFlags,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="TensorRT's own log on stderr.")] = False,
    json: JsonOption = False,
) -> None:
    """Build an engine whose caches are updated in place, and its manifest beside it."""
    plan, options = flags.options_for(model), engine.options()
    if verbose and options.log is None:
        options = replace(options, log="-")
    from trt_kvcache import build_engine
    from trt_kvcache.cli.output import print_json, print_warnings
    from trt_kvcache.cli.summary import chosen_capacity
    from trt_kvcache.runtime.usable import why_no_session

    start = time.perf_counter()
    manifest = build_engine(model, output, options=plan, build=options)
    seconds = time.perf_counter() - start
    no_session = why_no_session(manifest.plan)
    unused = (f"no session runs this engine: {no_session}",) if no_session else ()
    print_warnings((*manifest.plan.warnings, *manifest.warnings, *unused))
    if json:
        print_json(manifest)
    else:
        _print(Path(output), manifest, seconds, chosen_capacity(manifest.plan.options.capacity, flags))


def _print(output: Path, manifest: Manifest, seconds: float, chosen: str) -> None:
    from trt_kvcache.cli.output import console, human_bytes
    from trt_kvcache.cli.plan_view import batch_of, bytes_of
    from trt_kvcache.cli.summary import command_line, print_next, use_line
    from trt_kvcache.engine.backend import driver_present
    from trt_kvcache.engine.folder import TEXTS
    from trt_kvcache.names import engine_in

    out = console()
    plan = manifest.plan
    batch = batch_of(plan, manifest.max_batch)
    sequence, total = bytes_of(plan, batch)
    size = human_bytes(manifest.engine.size)
    beside = engine_in(output).with_name
    out.print(f"{output}: {size}, built in {seconds:.1f} s with {manifest.backend} {manifest.backend_version}")
    out.print(f"{beside(manifest.engine.name + '.json')}: its manifest")
    if manifest.proof is not None:
        proof = beside(manifest.proof.name)
        out.print(f"{proof}: its proof, which it has to repeat on each GPU before it is used there")
    if manifest.encoder is not None:
        encoder, encoder_size = beside(manifest.encoder.name), human_bytes(manifest.encoder.size)
        out.print(f"{encoder}: {encoder_size}, the engine of its encoder; {encoder.name}.json: the manifest of that")
    if output.is_dir():
        texts = [path.name for path in sorted(output.iterdir()) if path.name in TEXTS]
        out.print(f"{output}: for texts: {', '.join(texts) or 'nothing beside the model'}")
    out.print(
        f"{plan.in_place_text}; cache memory: {human_bytes(sequence)} per sequence, "
        f"{human_bytes(total)} for a batch of {batch}"
    )
    if chosen:
        out.print(f"capacity: {chosen}")
    print_next(out, use_line(output) if driver_present() else command_line("inspect", output))
