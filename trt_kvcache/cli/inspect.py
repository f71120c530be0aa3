"""``trt-kvcache inspect``: compares a built engine with its manifest."""

from __future__ import annotations

from trt_kvcache.cli.options import BandwidthOption, EngineArgument, HtmlOption, JsonOption, TablesOption


def inspect(
    engine: EngineArgument,
    bandwidth: BandwidthOption = None,
    tables: TablesOption = False,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Show an engine's manifest and check the engine: its hash, and with a GPU its inputs, outputs and aliases."""
    from trt_kvcache import inspect_engine
    from trt_kvcache.cli.output import console, print_json
    from trt_kvcache.cli.plan_view import batch_of, manifest_lines, print_manifest, print_plan
    from trt_kvcache.cli.summary import plan_lines, print_lines, print_next, use_line
    from trt_kvcache.engine.backend import driver_present

    report = inspect_engine(engine)
    manifest = report.manifest
    batch = batch_of(manifest.plan, manifest.max_batch)
    checked = "hash: ok. "
    if report.view is None:
        checked += f"Not opened: {report.not_opened}"
    else:
        checked += "Opened: inputs, outputs, profiles and aliases as the manifest says"
    facts = plan_lines(manifest.plan, batch, built=True, bandwidth=bandwidth)
    lines = [*manifest_lines(manifest), *facts, ("checked", checked)]
    if html is not None:
        from trt_kvcache.cli.pages import inspect_page, save_page

        save_page(html, inspect_page(report, lines))
    if json:
        print_json(report)
        return
    out = console()
    if tables:
        print_manifest(out, manifest)
        out.print()
        print_plan(out, "plan", manifest.plan, batch, bandwidth)
        out.print(f"\n{'checked':11}{checked}")
    else:
        print_lines(out, f"{engine.name}: {manifest.plan.in_place_text}", lines)
    if not manifest.is_encoder:
        print_next(out, use_line(engine) if driver_present() else "trt-kvcache doctor")
