"""``trt-kvcache verify``: original against rewritten model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.flags import Flags, flags_of
from trt_kvcache.cli.options import AllOption, HtmlOption, JsonOption, ModelArgument, PlanFlags
from trt_kvcache.verify import VerifyOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from trt_kvcache.verify import VerifyReport


@flags_of(VerifyOptions)
class VerifyFlags(Flags):
    """Flags of a verification; see `VerifyOptions`."""

    def options(self) -> VerifyOptions:
        """Return the `VerifyOptions` that the flags ask for.

        Raises:
            OptionError: a value is illegal.
        """
        return VerifyOptions(**self.values())


def verify(
    model: ModelArgument,
    verification: VerifyFlags,
    flags: PlanFlags,
    rewritten: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare MODEL with this file, which 'rewrite' wrote of it.", readable=False),
    ] = None,
    every_row: AllOption = False,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Run the original and the rewritten model side by side on ONNX Runtime over a decode; fail where they differ."""
    plan, options = flags.options_for(model), verification.options()
    from trt_kvcache import verify_model
    from trt_kvcache.cli.output import console, print_json
    from trt_kvcache.cli.summary import chosen_capacity, next_line, print_next
    from trt_kvcache.files import check_output

    if html is not None:
        check_output(html)
    report = verify_model(model, plan, options, rewritten)
    if html is not None:
        from trt_kvcache.cli.pages import save_page, verify_page

        save_page(html, verify_page(model.absolute().name, report))
    if json:
        print_json(report)
    else:
        out = console()
        _print(out, model.absolute().name, report, every_row=every_row)
        if chosen := chosen_capacity(report.capacity, flags):
            out.print(f"capacity: {chosen}")
        if report.passed:
            print_next(out, next_line(model, flags, tensorrt=plan.target.value == "tensorrt", or_else=""))
    report.check()


def _print(out: Console, model: str, report: VerifyReport, *, every_row: bool) -> None:
    from trt_kvcache.cli.output import table

    engines = report.original_engine
    if report.rewritten_engine != report.original_engine:
        engines += f" and {report.rewritten_engine}"
    runs = sum(max(1, len(step.spans), len(step.kept)) for step in report.steps)
    out.print(f"{model}: original against rewritten on {engines}, {len(report.steps)} steps, {runs} runs")
    grid = table("output", "role", "dtype", "largest difference", "of its scale", "allowed", "")
    for row in output_rows(report, every_row=every_row):
        grid.add_row(*row)
    out.print()
    out.print(grid)
    out.print()
    for note in report.notes:
        out.print(f"note: {note}")
    if report.divergence is not None:
        out.print(f"{report.divergence}\n")
    out.print("the rewritten model gives the original's numbers" if report.passed else "FAILED")


def output_rows(report: VerifyReport, *, every_row: bool = False) -> list[tuple[str, ...]]:
    """Return name, role, dtype, differences, tolerance and verdict of the outputs, those of layers as one."""
    from trt_kvcache.cli.grouping import group_rows

    rows = []
    keys = [(o.name, o.role, o.dtype, f"{o.tolerance:.1g}", str(o.passed)) for o in report.outputs]
    for row, members in [(key, [at]) for at, key in enumerate(keys)] if every_row else group_rows(keys, 1):
        outputs = [report.outputs[at] for at in members]
        verdict = "FAILED" if not outputs[0].passed else "same bits" if all(o.exact for o in outputs) else "ok"
        absolute, relative = _largest(o.max_absolute for o in outputs), _largest(o.max_relative for o in outputs)
        rows.append((*row[:3], absolute, relative, row[3], verdict))
    return rows


def _largest(differences: Iterable[float | None]) -> str:
    known = list(differences)
    return "not comparable" if None in known else f"{max(d for d in known if d is not None):.2g}"
