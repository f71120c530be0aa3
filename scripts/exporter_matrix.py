"""Makes the tables of exporters and architectures: each export is planned, verified and built.

    python scripts/exporter_matrix.py                     print the tables of the stored results
    python scripts/exporter_matrix.py --write             put them into docs/exporters-tables.md, between the markers
    python scripts/exporter_matrix.py --measure           export, plan, verify and build, and store the results
    python scripts/exporter_matrix.py --measure --families    the same for the second table
    python scripts/exporter_matrix.py --measure --from X  the same with exports that lie in X/EXPORTER/ARCHITECTURE
    python scripts/exporter_matrix.py --measure --twins   compare exporters with transformers, for the third

The first table has every exporter over a few architectures, the second one many families over a few exporters, the
third one small twins of checkpoints, compared with transformers. `--python` names the interpreter with an exporter's
packages; an exporter without packages keeps its stored results.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trt_kvcache import CachePlan

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "exporters-tables.md"
RESULTS = ROOT / "tests" / "exporters" / "results.json"
BEGIN, END = "<!-- exporters:begin -->", "<!-- exporters:end -->"
FAMILIES_BEGIN, FAMILIES_END = "<!-- families:begin -->", "<!-- families:end -->"
TWINS = RESULTS.with_name("twins.json")
TWINS_BEGIN, TWINS_END = "<!-- twins:begin -->", "<!-- twins:end -->"
ORDER = ("mobius", "genai", "torch")
"""Exporters of `trt-kvcache export`, as `auto` tries them."""
CAPACITY = 64
POSITIONS = 1500
"""Positions of an encoder's output. Whisper's encoder always gives this number; its build refuses less."""
_EXPORTS = ROOT / "tests" / "exporters" / "exports.py"
_EXPORT_SECONDS = 900
_EXPORT_FAILED = "export: "

sys.path.insert(0, str(ROOT / "tests"))

from exporters import families  # noqa: E402 - after its folder is known
from exporters.checkpoints import ARCHITECTURES, architecture_of  # noqa: E402
from exporters.exports import EXPORTERS, UNAVAILABLE  # noqa: E402
from readme_block import replace_block  # noqa: E402

Result = dict[str, str]
"""`outcome`: ``"yes"``, ``"copied"`` (right, but not in place) or ``"no"``; `idiom`; `reason` if it is not yes."""


def take(model: Path, folder: Path) -> Result:
    """Plan, verify and build one model, with the engine in `folder`."""
    from trt_kvcache import BuildOptions, build_engine, verify_model
    from trt_kvcache.importer.cache_plan import Route

    stage = "plan"
    try:
        plan = _plan(model)
        stage = "verify"
        verify_model(model, plan.options).check()
        stage = "build"
        encoder = POSITIONS if any("encoder" in t.axes for t in plan.tensors) else None
        build = BuildOptions(max_batch=2, max_encoder=encoder)
        manifest = build_engine(model, folder / "model.engine", options=plan.options, build=build)
    except Exception as error:  # noqa: BLE001 - a bug, too, is what came of it
        return {"outcome": "no", "idiom": "", "reason": f"{stage}: {str(error).removeprefix(f'{model}: ')}"}
    idioms = ", ".join(sorted({c.idiom for c in plan.caches}))
    copied = [c.past for c in plan.caches if c.route is not Route.NATIVE or c.past not in manifest.aliases.values()]
    if copied:
        return {"outcome": "copied", "idiom": idioms, "reason": f"not in place: {', '.join(copied)}"}
    return {"outcome": "yes", "idiom": idioms, "reason": ""}


def _plan(model: Path) -> CachePlan:
    from trt_kvcache import PlanOptions, plan_model
    from trt_kvcache.errors import OptionError

    try:
        return plan_model(model)
    except OptionError:
        return plan_model(model, PlanOptions(capacity=CAPACITY))


def measure(python: str, source: Path | None, exporters: list[str], archs: list[str]) -> None:
    """Measure every export, and store each result at once."""
    for exporter in exporters:
        if source is None and (reason := _missing(python, exporter)):
            print(f"kept: {reason}", file=sys.stderr)
            continue
        for arch in archs:
            if (exporter, arch) in UNAVAILABLE:
                continue
            with TemporaryDirectory() as name:
                result = _one(python, exporter, arch, source, Path(name))
            if result is None:
                print(f"{exporter} {arch}: kept", file=sys.stderr)
                continue
            print(f"{exporter} {arch}: {' '.join(v for v in result.values() if v)}", file=sys.stderr)
            stored = load()
            stored[exporter] = {**stored.get(exporter, {}), arch: result}
            RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _missing(python: str, exporter: str) -> str:
    code = f"from exporters.exports import missing; print(missing({exporter!r}) or '')"
    done = subprocess.run([python, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _one(python: str, exporter: str, arch: str, source: Path | None, folder: Path) -> Result | None:
    if source is not None:
        found = source / exporter / arch
        folders = (found, found / "decoder")
        names = ("model.onnx", "decoder_with_past_model.onnx", "decode.onnx", "decoder.onnx")
        model = next((f / name for f in folders for name in names if (f / name).is_file()), None)
        return None if model is None else take(model, folder)
    command = [python, str(_EXPORTS), exporter, arch, str(folder / "export")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_EXPORT_SECONDS)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"outcome": "no", "idiom": "", "reason": f"{_EXPORT_FAILED}{last}"}
    return take(Path(done.stdout.strip().splitlines()[-1]), folder)


def measure_twins(python: str, exporters: list[str], names: list[str], dtype: str) -> None:
    """Let each exporter export the twin of each checkpoint, compare the twin, and store the result."""
    from trt_kvcache.export.interpreter import Interpreter
    from trt_kvcache.export.run import EXPORTERS as RUN
    from trt_kvcache.export.run import fill, installed
    from trt_kvcache.export.twins import Twin

    there = [name for name in exporters if name in installed(python)]
    write = (
        f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'tests')!r}); import exporters.checkpoints as c; "
        "c.write(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    with Interpreter(python, [module for name in there for module in RUN[name].modules]) as interpreter:
        for arch in names:
            with TemporaryDirectory() as name:
                folder = Path(name)
                code, said = interpreter.run(["-c", write, arch, str(folder / "given")], "checkpoint")
                if code:
                    raise RuntimeError(f"{arch}: {said}")
                twin = Twin(folder / "given", folder, lambda words, seconds: interpreter.run(words, "twin", seconds))
                for exporter in there:

                    def export(checkpoint: Path, made: Path, seconds: float, exporter: str = exporter) -> None:
                        words = RUN[exporter].command(str(checkpoint), str(made), dtype, False)
                        fill(checkpoint, made, lambda: interpreter.run(words, exporter, seconds))

                    verdict = twin.judge(exporter, export)
                    left = twin.settings(exporter, verdict) if verdict.is_right is False else []
                    outcome = {True: "right", False: "wrong", None: "-"}[verdict.is_right]
                    outcome = "refused" if "is refused" in verdict.said else outcome
                    reason = f"leaves out {' or '.join(left)}" if left else verdict.said.replace(f"{folder}/", "")
                    print(f"{exporter} {arch}: {outcome} {reason}", file=sys.stderr)
                    stored = load_twins()
                    stored[arch] = {**stored.get(arch, {}), exporter: {"outcome": outcome, "reason": reason}}
                    TWINS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def twin_names() -> list[str]:
    names = [*ARCHITECTURES, *families.FAMILIES, *families.SETTINGS]
    return sorted(name for name in names if not architecture_of(name).encoder_decoder)


def load_twins() -> dict[str, dict[str, Result]]:
    stored: dict[str, dict[str, Result]] = json.loads(TWINS.read_text(encoding="utf-8")) if TWINS.exists() else {}
    return stored


def twins_table(results: dict[str, dict[str, Result]]) -> str:
    lines = ["", f"| checkpoint | {' | '.join(f'`{e}`' for e in ORDER)} | `auto` |", f"|{' --- |' * (len(ORDER) + 2)}"]
    reasons: dict[str, int] = {}
    for name in twin_names():
        found, cells = results.get(name, {}), []
        for exporter in ORDER:
            result = found.get(exporter, {"outcome": "?", "reason": ""})
            reason = _short(result["reason"], name) if result["outcome"] in ("wrong", "refused") else ""
            if "logits differ" in reason:
                reason = "computes other logits; no single ignored setting explains them"
            number = reasons.setdefault(reason, len(reasons) + 1) if reason else None
            cells.append(result["outcome"] if number is None else f"{result['outcome']} ({number})")
        taken = next((e for e in ORDER if found.get(e, {}).get("outcome") == "right"), "none")
        lines.append(f"| {name} | {' | '.join(cells)} | {taken} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def load() -> dict[str, dict[str, Result]]:
    stored: dict[str, dict[str, Result]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return stored


def cell(results: dict[str, dict[str, Result]], exporter: str, arch: str) -> tuple[str, str]:
    """Return the words of a cell, and the reason if it is not plain yes."""
    if reason := UNAVAILABLE.get((exporter, arch)):
        return "-", reason
    result = results.get(exporter, {}).get(arch)
    if result is None:
        return "?", "not measured yet"
    if exporter == "mobius-dynamic" and load_twins().get(arch, {}).get("mobius", {}).get("outcome") == "wrong":
        return "wrong", "the engine computes what the export computes; the export differs from transformers: last table"
    return result["outcome"], result["reason"]


def table(results: dict[str, dict[str, Result]]) -> str:
    lines = ["", f"| exporter | {' | '.join(ARCHITECTURES)} | caches |", f"|{' --- |' * (len(ARCHITECTURES) + 2)}"]
    reasons: dict[str, int] = {}
    for exporter in EXPORTERS:
        cells = []
        for arch in ARCHITECTURES:
            text, reason = cell(results, exporter, arch)
            number = reasons.setdefault(_short(reason, arch), len(reasons) + 1) if reason else None
            cells.append(text if number is None else f"{text} ({number})")
        lines.append(f"| `{exporter}` | {' | '.join(cells)} | {_idioms(results.get(exporter, {}))} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def families_table(results: dict[str, dict[str, Result]]) -> str:
    lines = ["", f"| family | {' | '.join(f'`{e}`' for e in families.EXPORTERS)} |"]
    lines.append(f"|{' --- |' * (len(families.EXPORTERS) + 1)}")
    reasons: dict[str, int] = {}
    for family in families.FAMILIES:
        cells = []
        for exporter in families.EXPORTERS:
            text, reason = cell(results, exporter, family)
            if reason.startswith(_EXPORT_FAILED):
                text, reason = "-", ""
            number = reasons.setdefault(_short(reason, family), len(reasons) + 1) if reason else None
            cells.append(text if number is None else f"{text} ({number})")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def _idioms(results: dict[str, Result]) -> str:
    measured = (results[arch]["idiom"] for arch in ARCHITECTURES if arch in results)
    found = {idiom for idioms in measured for idiom in idioms.split(", ") if idiom}
    return ", ".join(sorted(found))


def _short(reason: str, arch: str) -> str:
    """Return a reason as one line of Markdown, without the architecture's name, so that equal reasons are equal."""
    return " ".join(_words(re.sub(rf"\b{arch}\b", "this one", reason).replace("|", "/")))


def _words(text: str) -> Iterator[str]:
    length = 0
    for word in text.split():
        length += len(word) + 1
        if length > 260:
            yield "..."
            return
        yield word


def replaced(text: str) -> str:
    """Return `text` with the tables between the markers; raise `ValueError` if a marker is missing."""
    results = load()
    text = replace_block(text, BEGIN, END, table(results))
    text = replace_block(text, FAMILIES_BEGIN, FAMILIES_END, families_table(results))
    return replace_block(text, TWINS_BEGIN, TWINS_END, twins_table(load_twins()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="take exports through plan, verify and build")
    parser.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="exports that were made already")
    choices = sorted({*EXPORTERS, *ORDER})
    parser.add_argument("--exporter", action="append", default=[], choices=choices, help="only this one")
    names = sorted({**ARCHITECTURES, **families.FAMILIES, **families.SETTINGS})
    parser.add_argument("--arch", action="append", default=[], choices=names, help="only this one")
    parser.add_argument("--families", action="store_true", help="measure those of the second table")
    parser.add_argument("--twins", action="store_true", help="measure those of the third table")
    parser.add_argument("--dtype", default="float16", help="of the exports of twins")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that exports")
    parser.add_argument("--write", action="store_true", help="update docs/exporters-tables.md")
    given = parser.parse_args()
    if given.measure and given.twins:
        measure_twins(given.python, given.exporter or [*ORDER], given.arch or twin_names(), given.dtype)
    elif given.measure:
        exporters, archs = [*EXPORTERS], [*ARCHITECTURES]
        if given.families:
            exporters, archs = [*families.EXPORTERS], [*families.FAMILIES]
        measure(given.python, given.source, given.exporter or exporters, given.arch or archs)
    if given.write:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    elif not given.measure:
        print(table(load()), families_table(load()), twins_table(load_twins()), sep="\n")


if __name__ == "__main__":
    main()
