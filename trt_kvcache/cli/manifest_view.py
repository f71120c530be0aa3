"""A `Manifest` as text and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_kvcache.cli.grouping import group_rows
from trt_kvcache.cli.output import human_bytes, table

if TYPE_CHECKING:
    from rich.console import Console

    from trt_kvcache.engine.manifest import FileIdentity, Manifest

_FEW = 8  # tokens of a setting that are shown


def print_manifest(out: Console, manifest: Manifest) -> None:
    """Print the files, the backend, the options and the profiles of an engine, without the plan."""
    built_for = ", ".join(manifest.compute_capabilities) or "the backend's default"
    out.print(f"created by  {manifest.created_by}")
    out.print(f"backend     {manifest.backend} {manifest.backend_version}, compute capabilities: {built_for}")
    for title, file in [("engine", manifest.engine), *(("model", file) for file in manifest.model)]:
        out.print(f"{title:12}{file_text(file)}")
    if manifest.encoder is not None:
        out.print(f"encoder     {file_text(manifest.encoder)}")
    if manifest.proof is not None:
        out.print(f"proof       {file_text(manifest.proof)}")
    if manifest.is_encoder:
        out.print("encoder     of one source at a time")
    else:
        out.print(f"batch       up to {manifest.max_batch} sequences")
        out.print(f"chunk       up to {manifest.max_chunk} tokens per update")
        out.print(f"caches      {len(manifest.aliases)} with one buffer, {len(manifest.double_buffered)} with two")
    if manifest.generation:
        out.print(f"tokens      {', '.join(f'{name}={_few(tokens)}' for name, tokens in manifest.generation.items())}")
    given = {name: value for name, value in manifest.options.items() if value not in (None, "", False)}
    if given:
        out.print(f"options     {', '.join(f'{name}={value}' for name, value in given.items())}")
    print_profiles(out, manifest)


def _few(tokens: object) -> str:
    """A token id, or the first of several."""
    if not isinstance(tokens, list) or len(tokens) <= _FEW:
        return str(tokens)
    return f"{str(tokens[:_FEW])[:-1]}, ...] ({len(tokens)})"


def print_profiles(out: Console, manifest: Manifest) -> None:
    """Print one table of all profiles: the shapes of each input that has a dynamic dimension."""
    profiles_of: dict[tuple[str, ...], list[str]] = {}
    for profile in manifest.profiles:
        for name, shapes in profile.shapes.items():
            sizes = ("x".join(map(str, shape)) or "scalar" for shape in (shapes.min, shapes.opt, shapes.max))
            profiles_of.setdefault((name, *sizes), []).append(profile.name)
    if not profiles_of:
        return
    grid = table("input", "smallest", "typical", "largest", "profile", title="Profiles")
    for cells, _ in group_rows([(*row, ", ".join(names)) for row, names in profiles_of.items()], 1):
        grid.add_row(*cells)
    out.print()
    out.print(grid)


def file_text(file: FileIdentity) -> str:
    """Return a file's name, size and the start of its digest."""
    return f"{file.name}  {human_bytes(file.size)}  blake3 {file.blake3[:16]}"
