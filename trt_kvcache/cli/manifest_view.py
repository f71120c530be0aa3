"""Shows a `Manifest` as text and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trt_kvcache.cli.grouping import group_rows
from trt_kvcache.cli.output import human_bytes
from trt_kvcache.cli.plan_view import Part, print_parts

if TYPE_CHECKING:
    from rich.console import Console

    from trt_kvcache.engine.manifest import Manifest
    from trt_kvcache.files import FileIdentity

_FEW = 8  # tokens of a setting that are shown


def print_manifest(out: Console, manifest: Manifest) -> None:
    """Print the files, the backend, the options and the profiles of an engine, without the plan."""
    for label, text in (("created by", manifest.created_by), *manifest_lines(manifest)):
        out.print(f"{label:12}{text}")
    options = {name: value for name, value in manifest.options.items() if value not in (None, "", False)}
    if options:
        out.print(f"options     {', '.join(f'{name}={value}' for name, value in options.items())}")
    print_parts(out, profile_parts(manifest))


def manifest_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the files, the backend and the limits of an engine, each with a label."""
    built_for = ", ".join(manifest.compute_capabilities) or "the backend's default"
    lines = [("backend", f"{manifest.backend} {manifest.backend_version}, compute capabilities: {built_for}")]
    files = {"engine": manifest.engine, "encoder": manifest.encoder, "proof": manifest.proof}
    lines += [(label, file_text(file)) for label, file in files.items() if file is not None]
    if manifest.no_proof:
        lines.append(("proof", f"none: {manifest.no_proof}"))
    if len(manifest.model) == 1:
        lines.append(("model", file_text(manifest.model[0])))
    elif manifest.model:
        size = human_bytes(sum(file.size for file in manifest.model))
        lines.append(("model", f"{manifest.model[0].name} and {len(manifest.model) - 1} more files, {size}"))
    if manifest.is_encoder:
        lines.append(("encoder", "of one source at a time"))
    else:
        lines.append(("limits", f"{manifest.max_batch} sequences, {manifest.max_chunk} tokens per update"))
    if manifest.generation:
        tokens = ", ".join(f"{name}={_few(tokens)}" for name, tokens in manifest.generation.items())
        lines.append(("tokens", tokens))
    return lines


def _few(tokens: object) -> str:
    """Return a token id, or the first of several, as text."""
    if not isinstance(tokens, list) or len(tokens) <= _FEW:
        return str(tokens)
    return f"{str(tokens[:_FEW])[:-1]}, ...] ({len(tokens)})"


def profile_parts(manifest: Manifest) -> Iterator[Part]:
    """Yield one table of all profiles: the shapes of each input that has a dynamic dimension."""
    profiles_of: dict[tuple[str, ...], list[str]] = {}
    for profile in manifest.profiles:
        for name, shapes in profile.shapes.items():
            sizes = ("x".join(map(str, shape)) or "scalar" for shape in (shapes.min, shapes.opt, shapes.max))
            profiles_of.setdefault((name, *sizes), []).append(profile.name)
    rows = [cells for cells, _ in group_rows([(*row, ", ".join(names)) for row, names in profiles_of.items()], 1)]
    if rows:
        yield Part("Profiles", ("input", "smallest", "typical", "largest", "profile"), rows, ())


def file_text(file: FileIdentity) -> str:
    """Return a file's name, size and the start of its digest."""
    return f"{file.name}  {human_bytes(file.size)}  blake3 {file.blake3[:16]}"
