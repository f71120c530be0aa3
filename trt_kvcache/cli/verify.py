"""``trt-kvcache verify``: runs one decode with several forms of a model, and compares the logits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trt_kvcache.cli.flags import Flags, flags_of
from trt_kvcache.cli.options import HtmlOption, JsonOption, ModelArgument, PlanFlags, file_flag
from trt_kvcache.compare.verify_report import VerifyOptions

if TYPE_CHECKING:
    from rich.console import Console

    from trt_kvcache.compare.verify_report import VerifyReport
    from trt_kvcache.importer.cache_plan import PlanOptions


@flags_of(VerifyOptions)
class VerifyFlags(Flags):
    """The flags of a verification, one for each setting of `VerifyOptions`."""

    def options(self) -> VerifyOptions:
        """Return the `VerifyOptions` of the flags; raise `OptionError` if a value is illegal."""
        return VerifyOptions(**self.values())


def verify(
    model: ModelArgument,
    verification: VerifyFlags,
    flags: PlanFlags,
    rewritten: Annotated[
        Path | None, file_flag(metavar="FILE", help="Compare MODEL with this file that 'rewrite' wrote.")
    ] = None,
    as_exported: Annotated[
        bool, typer.Option("--as-exported", help="Compare MODEL, as exported, with the network that TensorRT parses.")
    ] = False,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Decode the same texts with each form of the model, from the export to TensorRT's network; compare the logits."""
    plan, options = flags.options_for(model), verification.options()
    from trt_kvcache import verify_model
    from trt_kvcache.cli.output import console, print_json
    from trt_kvcache.cli.summary import chosen_capacity, next_line, print_next
    from trt_kvcache.files import check_output

    if html is not None:
        check_output(html)
    if as_exported:
        console().print(parsed_as_exported(model, plan))
        return
    report = verify_model(model, plan, options, rewritten)
    if html is not None:
        from trt_kvcache.cli.pages import save_page, verify_page

        save_page(html, verify_page(model.absolute().name, report))
    if json:
        print_json(report)
    else:
        out = console()
        _print(out, model.absolute().name, report)
        if chosen := chosen_capacity(report.capacity, flags):
            out.print(f"capacity: {chosen}")
        if report.passed:
            print_next(out, next_line(model, flags, tensorrt=plan.target.value == "tensorrt", or_else=""))
    report.check()


def parsed_as_exported(model: Path, plan: PlanOptions) -> str:
    """Return a text that compares a model with the network that TensorRT's parser makes of it, without a rewrite.

    Raises `BackendError` if TensorRT's package is not installed.
    """
    from trt_kvcache.engine.parsing import parse_as_exported
    from trt_kvcache.errors import BuildError
    from trt_kvcache.importer import import_model

    try:
        title, found = parse_as_exported(import_model(model, plan.unquantized()))
    except BuildError as refusal:
        return f"refused: {refusal.message}"
    if found.note:
        return f"{title} takes it; not compared: {found.note}"
    if found.finding:
        by = "not finite, or of another size" if found.difference == float("inf") else f"{found.difference:.2g} off"
        return f"{title} takes it, and is WRONG: outputs are {by}"
    return f"{title} takes it, and is right within {found.difference:.1g}; it copies each cache in each step"


def _print(out: Console, model: str, report: VerifyReport) -> None:
    from trt_kvcache.cli.output import table

    out.print(f"{model}: {report.texts} texts of {report.positions} tokens in all")
    grid = table("station", "against", "steps", "largest difference", "allowed", "")
    for row in station_rows(report):
        grid.add_row(row[0], *row[2:])
    out.print("", grid, "", sep="\n")
    for station in report.stations:
        for text in filter(None, (station.failure, station.note)):
            out.print(f"{station.name}: {text}")
    for note in report.notes:
        out.print(f"note: {note}")
    if report.quality is not None:
        out.print(f"quality: {report.quality}")
    out.print("every station gives the numbers of the model as exported" if report.passed else "FAILED")


def station_rows(report: VerifyReport) -> list[tuple[str, ...]]:
    """Return a table row for each form of the model (station) in a verification: name, runtime, difference, verdict."""
    rows: list[tuple[str, ...]] = []
    for s in report.stations:
        if not s.compared:
            rows.append((s.name, "-", "-", "-", "-", "-", "not compared"))
            continue
        difference = "not comparable" if s.difference is None else f"{s.difference:.1e}"
        allowed = "-" if s.allowed is None else f"{s.allowed:.0e}"
        rows.append((s.name, s.ran_on, s.against, str(s.steps), difference, allowed, "ok" if s.passed else "FAILED"))
    return rows
