"""Prints the short answers of commands: at most 20 labeled lines of 80 columns, and the next command."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache.cli.options import SessionPlanFlags
from trt_kvcache.cli.output import console, group_rows, human_bytes, shape_text, wrapped
from trt_kvcache.cli.plan_view import adapters_text, bytes_of, cost_line, dtype_text, shared_caches
from trt_kvcache.engine.backend import can_build
from trt_kvcache.importer.cache_plan import CachePlan, CacheUpdate, Mask, Target, UpdateForm, UpdateMode
from trt_kvcache.model_paths import folder_of, is_model

if TYPE_CHECKING:
    from rich.console import Console


Lines = list[tuple[str, str]]

_MOST = 20
_FEW = 2
_NEXT = 2  # lines of the next command
_LABEL = 11


def print_lines(out: Console, title: str, lines: Lines) -> None:
    """Print a title and labeled lines. Together with the next command they take at most 20 lines of 80 columns.

    If there is too little room, texts are cut, and some lines labeled ``note`` are left out. A line with an empty
    label continues the one before it.
    """
    width = max(out.width, 40) - _LABEL
    head = wrapped(title, out.width)
    for most in (3, 2, 1):
        folded = [(label, _shorten(wrapped(text, width), most)) for label, text in lines]
        left = _MOST - _NEXT - len(head) - sum(len(parts) for label, parts in folded if label != "note") - 1
        if left >= 0:
            break
    shown, hidden = [], 0
    for label, parts in folded:
        if label == "note":
            hidden += len(parts) > left
            if len(parts) > left:
                continue
            left -= len(parts)
        shown.append((label, parts))
    if hidden:
        shown.append(("note", [f"{hidden} more (--all)"]))
    for line in head:
        out.print(line)
    for label, parts in shown:
        for at, part in enumerate(parts):
            out.print(f"{label if at == 0 else '':{_LABEL}}{part}")


def _shorten(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{lines[most - 1][:-4] or lines[most - 1][:1]} ..."]


def print_next(out: Console, command: str) -> None:
    """Print the next command for the user, if there is one, on one line that can be copied."""
    if command:
        out.print(f"{'next':{_LABEL}}{command}", soft_wrap=True)


def use_line(path: Path, flags: Any = None, leave: Sequence[str] = ()) -> str:
    """Return the `generate` command for a model or engine; with token ids as prompt if its folder has no tokenizer.

    `flags` is a dataclass with the flags that the user gave; the command leaves out the fields named in `leave`.
    """
    prompt = ("--prompt", "Hello") if (folder_of(path) / "tokenizer.json").is_file() else ("--tokens", "1,2,3")
    return command_line("generate", path, *prompt, flags=flags, leave=leave)


def tell_next(path: Path, command: str, flags: SessionPlanFlags) -> None:
    """Print to stderr the command that comes next, if stderr is a terminal.

    For an engine, this is `command`. For a model, it is the build command, if this machine can build and the proposed
    engine does not exist yet.
    """
    if sys.stderr.isatty():
        planned = command_line(command, path, flags=flags)
        if not is_model(path):
            line = command_line(command, path)
        elif (engine := Path(_engine_name(path))).exists():
            line = command_line(command, f"{engine}/")
        else:
            line = next_line(path, flags, or_else=planned)
        print_next(console(sys.stderr), line)


def command_line(command: str, *arguments: str | Path, flags: Any = None, leave: Sequence[str] = ()) -> str:
    """Return a command quoted for a shell, with the flags that differ from their defaults.

    `flags` is a dataclass with the flags that the user gave; the command leaves out the fields named in `leave`.
    """
    words = ["trt-kvcache", command, *map(str, arguments)]
    for field in fields(flags) if flags is not None else ():
        value = getattr(flags, field.name)
        if value != field.default and field.name not in leave:
            for one in value if isinstance(value, list) else [value]:
                words.append(f"--{field.name.replace('_', '-')}")
                words += [] if one is True else [str(getattr(one, "value", one))]
    return shlex.join(words)


def next_line(
    model: Path, flags: SessionPlanFlags, max_batch: int = 1, *, tensorrt: bool = False, or_else: str | None = None
) -> str:
    """Return the command that follows a plan: `build`; or `or_else` (None: generate) if this machine cannot build.

    `tensorrt`: the plan is for TensorRT, not TensorRT for RTX. `max_batch` is the batch size of the memory estimate.
    """
    if not can_build(Target.TENSORRT if tensorrt else None):
        known = {field.name for field in fields(SessionPlanFlags)}
        leave = [field.name for field in fields(flags) if field.name not in known]
        return use_line(model, flags, leave) if or_else is None else or_else
    more = ["--backend", "tensorrt"] if tensorrt else []
    more += ["--max-batch", str(max_batch)] if max_batch > 1 else []
    planned = ("target", "packed_native", "recheck")
    return command_line("build", model, "-o", f"{_engine_name(model)}/", *more, flags=flags, leave=planned)


def _engine_name(model: Path) -> str:
    whole = model.absolute()
    return f"{whole.stem if model.suffix == '.onnx' else whole.name}-engine"


def plan_lines(
    plan: CachePlan, batch: int, *, built: bool = False, chosen: str = "", bandwidth: float | None = None
) -> Lines:
    """Return labeled lines about a plan: caches, attention, bytes of a step, changes for the caller, memory, advice.

    `batch` is the batch size of the memory estimate; `chosen` is from `chosen_capacity`. `built`: the plan is that of
    an engine, so advice on the export is left out. `cost_line` is added for an engine, or if `bandwidth` (of a GPU's
    memory, in GB/s) is given.
    """
    lines = _labelled("caches", _cache_lines(plan, names=not built))
    if plan.states:
        lines.append(("states", f"{len(plan.states)} in two buffers: {plan.states[0].reason}"))
    kinds = Counter((node.kind.value, node.reason) for node in plan.attention)  # in the order of their first layers
    lines += _labelled("attention", [f"{n} {kind}: {reason}" for (kind, reason), n in list(kinds.items())[:_FEW]])
    if (shared := shared_caches(plan)) is not None:
        lines.append(("", shared))
    if plan.attention:
        lines.append(("steps", _steps(plan)))
    if plan.changes and not built:
        lines.append(("interface", f"{len(plan.changes)} inputs and outputs change for the caller (--all)"))
    if plan.caches:
        lines.append(("memory", _memory(plan, batch)))
    if (built or bandwidth is not None) and (cost := cost_line(plan, batch, bandwidth)):
        lines.append(("traffic", cost))
    if chosen:
        lines.append(("capacity", chosen))
    if plan.adapters is not None:
        lines.append(("adapters", adapters_text(plan)))
    if not built:
        lines += _labelled("advice", advice(plan))
        lines.append(("refused", "nothing"))
    inlined = [f"inlined: {', '.join(plan.inlined)}"] if plan.inlined else []
    return [*lines, *(("note", note) for note in (*inlined, *plan.notes))]


def chosen_capacity(capacity: int | None, flags: SessionPlanFlags) -> str:
    """Return a text that names the default capacity; empty if a flag gives the capacity or the model fixes it."""
    return "" if capacity is None or flags.capacity is not None else f"{capacity} tokens (default; --capacity)"


def advice(plan: CachePlan) -> list[str]:
    """Return texts about what the user can change in the export to make the engine smaller or faster."""
    said = []
    if plan.options.cache_dtype is None and any(cache.dtype == "float" for cache in plan.caches):
        said.append("export in float16 or bfloat16: float32 caches take twice the memory")
    masks = {mask.mask for mask in plan.masks if mask.mask}
    if len(masks) > 1 and len(masks) == len(plan.attention):
        said.append("export with one mask for all layers: each layer computes its own in every step")
    windows = {mask.name: mask for mask in plan.masks if mask.left_window >= 0}
    masks_of: dict[str, list[Mask | None]] = {}
    for name, mask in ((name, windows.get(node.mask or "")) for node in plan.attention for name in node.caches):
        masks_of.setdefault(name, []).append(mask)
    read = [(c.capacity, masks_of[c.past]) for c in plan.caches if c.mode is UpdateMode.LINEAR and c.past in masks_of]
    if saved := sum(all(m and size > 2 * (m.left_window + 1) for m in layers) for size, layers in read):
        said.append(f"--sliding circular: {saved} caches would hold their window, not the whole text")
    return said


def _labelled(label: str, texts: Iterable[str]) -> Lines:
    return [(label if at == 0 else "", text) for at, text in enumerate(texts)]


def _cache_lines(plan: CachePlan, *, names: bool) -> list[str]:
    alike: dict[tuple[str, str], list[CacheUpdate]] = {}
    for cache in plan.caches:
        alike.setdefault((cache.route.value, cache.reason), []).append(cache)
    said = []
    for (route, reason), caches in list(alike.items())[:_FEW]:
        said.append(f"{len(caches)} {route}: {reason}")
        if names:
            layers = [row[0] for row, _ in group_rows([(c.past,) for c in caches], 1)]
            forms = list(dict.fromkeys(_form(cache) for cache in caches))
            said.append(f"{_several(layers)}: {_several(forms)}")
    if len(alike) > _FEW:
        said.append(f"{len(alike) - _FEW} more kinds (--all)")
    return said


def _form(cache: CacheUpdate) -> str:
    mode = "" if cache.mode is UpdateMode.LINEAR else f"{cache.mode.value} "
    packed = "packed " if cache.form is UpdateForm.PACKED_NHD else ""
    return f"{mode}{packed}{dtype_text(cache)} {shape_text(cache.physical_shape)} from {cache.idiom}"


def _several(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 2} more" if len(texts) > 2 else ""
    return ", ".join(texts[:2]) + more


def _steps(plan: CachePlan) -> str:
    rows = "the rows in use" if plan.spans else "the whole capacity"
    logits = "of the last positions" if plan.logits_span is not None else "as exported"
    return f"attend to {rows}; logits {logits}"


def _memory(plan: CachePlan, batch: int) -> str:
    sequence, total = bytes_of(plan, batch)
    capacities = {cache.capacity for cache in plan.caches if cache.mode is UpdateMode.LINEAR}
    tokens = f" of {capacities.pop()} tokens" if len(capacities) == 1 else ""
    return f"{human_bytes(sequence)} per sequence{tokens}, {human_bytes(total)} for a batch of {batch}"
