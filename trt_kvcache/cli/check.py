"""``trt-kvcache check``: compares an engine on this machine's GPU with its proof (results recorded at the build)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trt_kvcache.cli.options import AllOption, EngineArgument, JsonOption, file_flag

if TYPE_CHECKING:
    from trt_kvcache.runtime.proof_check import CheckReport


def check(
    engine: EngineArgument,
    locate: Annotated[
        Path | None,
        file_flag(
            metavar="MODEL",
            help="If the engine is wrong: build its MODEL again with layers as outputs, and name the first layer "
            "that differs from ONNX Runtime.",
        ),
    ] = None,
    every_row: AllOption = False,
    json: JsonOption = False,
) -> None:
    """Replay the engine's proof on the GPU: the rewritten model's results in float32, recorded at the build.

    The build checked that the exported model gives the same logits in the first steps of the proof.
    """
    from trt_kvcache.cli.output import print_json
    from trt_kvcache.model_paths import engine_in
    from trt_kvcache.runtime.proof_check import check_engine_on_gpu

    engine = engine_in(engine)
    report = check_engine_on_gpu(engine, {})
    if locate is not None and not report.passed:
        from trt_kvcache.runtime.locate import with_layer

        report = with_layer(report, engine, locate)
    if json:
        print_json(report)
    else:
        _print(report, every_row=every_row)
    report.check()


def _print(report: CheckReport, *, every_row: bool) -> None:
    from trt_kvcache.cli.output import console, group_rows, table
    from trt_kvcache.cli.summary import print_next, use_line

    out = console()
    out.print(f"{report.engine}: {report.steps} steps on {report.ran_on}, driver {report.driver}")
    out.print(f"compared with the rewritten model on {report.recorded_on}")
    grid = table("output", "largest difference", "allowed", "on average", "allowed", "")
    disagrees = {f.output for f in report.findings}
    keys = [(o.output, "DISAGREES" if o.output in disagrees else "ok") for o in report.outputs]
    for row, members in [(key, [at]) for at, key in enumerate(keys)] if every_row else group_rows(keys, 1):
        worst = max((report.outputs[at] for at in members), key=lambda o: o.part)
        difference, allowed = worst.found, worst.allowed
        cells = ["not comparable", "", "", ""]
        if difference is not None:
            shares = (difference.largest, allowed.largest, difference.typical, allowed.typical)
            cells = [f"{share:.2g}" for share in shares]
        grid.add_row(row[0], *cells, row[1])
    out.print("", grid, "", sep="\n")
    for finding in report.findings:
        out.print(str(finding))
    for note in report.notes:
        out.print(f"note: {note}")
    if report.layer:
        out.print(report.layer)
    out.print(f"the engine gives the numbers of its proof: {report.passed_check}" if report.passed else "REFUSED")
    if report.passed:
        print_next(out, use_line(Path(report.engine)))
