"""The corpus: every model that the tests plan, verify, build, or see refused.

A family is a module here; its `entries` give a name, a builder and the options of the plan for each model. Those in
`promises.txt` are taken and right, any other is refused or right. Nothing is built before it is asked for.
"""

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx

Make = Callable[[Path], Path]
"""Writes a model to a folder, or gives the path of one that is there."""
Entry = tuple[str, Make, dict[str, Any]]
"""Key, model, and options of the plan."""
Builders = dict[str, Callable[[], onnx.ModelProto]]

FAMILIES = (
    "stored_exports", "layer_graphs", "concat_graphs", "attention_forms", "window_graphs", "foreign_tools",
    "block_graphs", "canonical_models", "hybrids", "cases", "onnx_cases", "odd_steps", "overflow_graphs",
    "plain_graphs", "scatter_graphs", "edited_exports", "route_graphs",
)  # fmt: skip


def entries(only: str = "*", families: Sequence[str] = FAMILIES) -> list[Entry]:
    """All models, or those whose keys match."""
    found: Iterator[Entry] = (entry for name in families for entry in import_module(name).entries())
    return [entry for entry in found if fnmatch.fnmatch(entry[0], only)]


def built(group: str, models: Builders, **options: Any) -> Iterator[Entry]:
    """Models that are built in code, each called `group`/name."""
    for name, build in models.items():

        def make(folder: Path, build: Callable[[], onnx.ModelProto] = build) -> Path:
            onnx.save(build(), folder / "model.onnx")
            return folder / "model.onnx"

        yield f"{group}/{name}", make, options
