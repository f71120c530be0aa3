"""``trt-kvcache plan``: shows what a build would do."""

from __future__ import annotations

from typing import Annotated

import typer

from trt_kvcache.cli.options import BandwidthOption, HtmlOption, JsonOption, ModelArgument, PlanFlags, TablesOption


def plan(
    model: ModelArgument,
    flags: PlanFlags,
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch size for the memory estimate.")] = 1,
    bandwidth: BandwidthOption = None,
    tables: TablesOption = False,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a build will do to every cache and every attention, without doing it."""
    options = flags.options_for(model)
    from trt_kvcache import plan_model
    from trt_kvcache.cli.output import console, print_json, print_warnings
    from trt_kvcache.cli.plan_view import batch_of, plan_data, print_plan
    from trt_kvcache.cli.summary import chosen_capacity, next_line, plan_lines, print_lines, print_next
    from trt_kvcache.files import check_output
    from trt_kvcache.model_paths import is_report
    from trt_kvcache.runtime.step_inputs import why_no_session

    if html is not None:
        check_output(html)
    reported = is_report(model)
    if reported:
        from trt_kvcache.importer.files.stripped import recorded_options, unpacked

        if flags == PlanFlags():
            options = recorded_options(model)
        with unpacked(model) as path:
            result = plan_model(path, options)
    else:
        result = plan_model(model, options)
    batch, name = batch_of(result, max_batch), model.absolute().name
    tensorrt = result.options.target.value == "tensorrt"
    no_session, chosen = why_no_session(result), chosen_capacity(result.options.capacity, flags)
    command = next_line(
        model, flags, max_batch if batch == max_batch else 1, tensorrt=tensorrt, or_else="" if no_session else None
    )
    if html is not None:
        from trt_kvcache.cli.pages import plan_page, save_page

        save_page(html, plan_page(name, result, batch, command, chosen))
    if json:
        print_json({**plan_data(result, batch, bandwidth), "no_session": no_session})
    else:
        out = console()
        if tables:
            print_plan(out, name, result, batch, bandwidth)
            out.print()
            for text in filter(
                None, (chosen and f"capacity: {chosen}", no_session and f"sessions: none, {no_session}")
            ):
                out.print(f"{text}\n")
        else:
            title = f"{name}: {result.in_place_text} (opset {result.opset}, target {result.options.target.value})"
            lines = plan_lines(result, batch, chosen=chosen, bandwidth=bandwidth)
            print_lines(out, title, [*lines, ("sessions", f"none: {no_session}")] if no_session else lines)
        if not reported:  # a report has no model to build
            print_next(out, command)
    print_warnings(result.warnings)
