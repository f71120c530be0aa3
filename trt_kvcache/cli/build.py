"""``trt-kvcache build``: builds the engine and its manifest."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.flags import Flags, flags_of
from trt_kvcache.cli.options import BuildPlanFlags, JsonOption, ModelArgument
from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.errors import OptionError

if TYPE_CHECKING:
    from trt_kvcache.engine.manifest import Manifest


@flags_of(BuildOptions)
class BuildFlags(Flags):
    """The flags of a build: one flag for each setting of `BuildOptions`."""

    def options(self) -> BuildOptions:
        """Return the `BuildOptions` of the flags; raise `OptionError` if a value is illegal."""
        if self.decode_weights == "own" and self.max_batch is not None and self.max_batch > 1:
            raise OptionError(
                f"--decode-weights own is for a batch of one, and --max-batch is {self.max_batch}; leave one out"
            )
        return BuildOptions(**self.values())


def build(
    model: ModelArgument,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="ENGINE|FOLDER/",
            help="File of the engine; or a folder, with a slash at the end, which also gets the tokenizer.",
        ),
    ],
    engine: BuildFlags,
    flags: BuildPlanFlags,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print TensorRT's log on stderr.")] = False,
    json: JsonOption = False,
) -> None:
    """Build an engine whose caches are updated in place, and write it together with its manifest."""
    plan, options = flags.options_for(model), engine.options()
    if verbose and options.log is None:
        options = replace(options, log="-")
    from trt_kvcache import build_engine
    from trt_kvcache.cli.output import print_json, print_warnings
    from trt_kvcache.cli.summary import chosen_capacity
    from trt_kvcache.runtime.step_inputs import why_no_session

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
    from trt_kvcache.engine.engine_folder import TEXTS
    from trt_kvcache.model_paths import engine_in

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
        out.print(f"{proof}: its proof: checked once on each GPU before first use")
    if manifest.encoder is not None:
        encoder, encoder_size = beside(manifest.encoder.name), human_bytes(manifest.encoder.size)
        out.print(f"{encoder}: {encoder_size}, the engine of its encoder; its manifest: {encoder.name}.json")
    if output.is_dir():
        texts = [path.name for path in sorted(output.iterdir()) if path.name in TEXTS]
        out.print(f"{output}: files for texts: {', '.join(texts) or 'none'}")
    if manifest.network:
        out.print(f"TensorRT's network: {manifest.network}")
    out.print(
        f"{plan.in_place_text}; cache memory: {human_bytes(sequence)} per sequence, "
        f"{human_bytes(total)} for a batch of {batch}"
    )
    if chosen:
        out.print(f"capacity: {chosen}")
    print_next(out, use_line(output) if driver_present() else command_line("inspect", output))
