"""``trt-kvcache report``: writes a copy of a model without weights and private names, to show why it is refused."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trt_kvcache.cli.options import ModelArgument, PlanFlags, output_flag

if TYPE_CHECKING:
    from onnx import ModelProto

    from trt_kvcache.importer.cache_plan import PlanOptions

_QUOTED = re.compile(r"'([^']*)'")


def report(
    model: ModelArgument,
    flags: PlanFlags,
    output: Annotated[Path, output_flag(metavar="FILE", help="Zip file for the report.")],
) -> None:
    """Write a report for the maintainers: the graph without weights and names, its plan or the error, and versions."""
    options = flags.options_for(model)
    import msgspec

    from trt_kvcache import diagnose
    from trt_kvcache.cli.output import console, human_bytes
    from trt_kvcache.cli.summary import command_line, print_lines, print_next
    from trt_kvcache.files import check_output
    from trt_kvcache.importer.files.source import load_source
    from trt_kvcache.importer.files.stripped import pack, strip

    check_output(output)
    source = load_source(model, first_step=True, config=options.config)
    wanted = outcome(source.path, options)
    for keep_tables in (False, True):
        stripped, names, tables = strip(source, keep_tables=keep_tables)
        repeated = _outcome_of(stripped, source.path.parent, options)
        if same := _alike(repeated) == _alike(wanted):
            break
    told = {key: _anonymous(value, names, model) if isinstance(value, str) else value for key, value in wanted.items()}
    said = {
        "outcome": repeated if same else told,
        "again": same,
        "options": msgspec.to_builtins(options),
        "producer": f"{source.proto.producer_name} {source.proto.producer_version}".strip(),
        "doctor": msgspec.to_builtins(diagnose()),
    }
    pack(output, stripped, source.path.parent, said)
    shown = said["outcome"]
    lines = [
        ("outcome", shown.get("message") or f"planned: {shown['in_place']}"),
        (
            "again",
            "the graph without weights gives the same"
            if same
            else "the graph without weights gives another one: say in your report how the model was made",
        ),
        ("names", "those of inputs, outputs, functions and operators are in it; all others are numbers"),
        ("weights", f"none, but {tables} tables of at most 16,384 floats, which the plan reads" if tables else "none"),
        ("look", f"unzip -l {output}; read report.json and config.json before you send it"),
    ]
    out = console()
    print_lines(out, f"{output}: {human_bytes(output.stat().st_size)}", lines)
    print_next(out, command_line("plan", output))


def outcome(path: Path, options: PlanOptions) -> dict[str, Any]:
    """Plan a model. Return the plan, the error that refuses the model, or the stack trace of a bug, as plain data."""
    from trt_kvcache import plan_model
    from trt_kvcache.cli.plan_view import plan_data
    from trt_kvcache.errors import TrtKvCacheError

    try:
        plan = plan_model(path, options)
    except TrtKvCacheError as error:
        return {"kind": type(error).__name__, "message": _without_path(error.message, path)}
    except Exception as error:  # noqa: BLE001 - reports are also for bugs
        frames = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(
            error.__traceback__)]  # fmt: skip
        message = _without_path(" ".join(str(error).split()), path)
        return {"kind": type(error).__name__, "message": f"bug: {message}", "trace": frames}
    return {"kind": "plan", "in_place": plan.in_place_text, "plan": plan_data(plan, 1)}


def _outcome_of(model: ModelProto, folder: Path, options: PlanOptions) -> dict[str, Any]:
    """Plan the model without weights, as the maintainer will, and return the plan, the refusal or the trace."""
    import tempfile

    from trt_kvcache.importer.files.stripped import pack, unpacked

    with tempfile.TemporaryDirectory(prefix="trt-kvcache-report-") as name:
        packed = Path(name) / "report.zip"
        pack(packed, model, folder, {})
        with unpacked(packed) as path:
            return outcome(path, options)


def _without_path(message: str, path: Path) -> str:
    return message.replace(str(path), "MODEL").replace(str(path.parent), "FOLDER")


def _alike(result: dict[str, Any]) -> Any:
    """Return the outcome (plan, refusal or trace) without names, and without numbers that depend on weights."""
    if result["kind"] == "plan":
        plan = result["plan"]
        caches = [(c["past"], c["route"], c["physical_shape"]) for c in plan["caches"]]
        return caches, [node["kind"] for node in plan["attention"]], len(plan["changes"])
    return result["kind"], re.sub(r"-?\d[\d.]*(e-?\d+)?", "#", _QUOTED.sub("''", result["message"]))


def _anonymous(message: str, names: dict[str, str], model: Path) -> str:
    return _QUOTED.sub(lambda quoted: f"'{names.get(quoted[1], '...')}'", _without_path(message, model))
