"""Hooks of MkDocs for pages outside `docs/` (README.md, CHANGELOG.md, commands, Python), and for links out of it.

Links to other files of the repository become plain text, because the site does not have them.
"""

from __future__ import annotations

import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

import trt_kvcache
from trt_kvcache.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
_PAGES = {"README.md": "about.md", "CHANGELOG.md": "changelog.md"}
_NAMES = re.compile(r"<!-- all names of ([\w.]+) -->")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in _PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "cli.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    sources = {page: source for source, page in _PAGES.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def turned(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        there = _PAGES.get(path, path.removeprefix("docs/"))
        return f"[{text}]({there}{anchor})" if files.get_file_from_path(there) else text

    return _LINK.sub(turned, _NAMES.sub(names_of, markdown))


def names_of(module: re.Match[str]) -> str:
    """Return directives for the public names of a module, except those of `trt_kvcache` itself."""
    names = [name for name in import_module(module[1]).__all__ if name not in trt_kvcache.__all__]
    return "\n\n".join(f"::: {module[1]}.{name}" for name in names)


def commands() -> str:
    """Return the page of commands, in Markdown, without the list of commands, which cuts their texts."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="trt-kvcache")
    text = get_docs_for_click(obj=command, ctx=context, name="trt-kvcache", title="Commands")
    return re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text)
