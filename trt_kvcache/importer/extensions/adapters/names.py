"""Find the modules of a checkpoint that products compute, by names that exporters keep.

weights    model.layers.0.self_attn.q_proj.weight_t, model.layers.0.attn.qkv_proj.MatMul.weight
nodes      /model/layers.0/self_attn/q_proj/MatMul
metadata   torch's exporter writes the path of modules at each node
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import ModelProto

__all__ = ["ModuleNames", "module_names"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_NO_MODULE = re.compile(
    r"(?:q?weight\w*|MatMul\w*|Gemm\w*|output_\d+|kernel|linear|matmul|addmm|t|[a-z]+_\d+|node_\w+|Transpose\w*|u?int\d+\[.*)?"
)
"""The last parts of a name that say how a product is computed, and not which module it is."""


@dataclass(frozen=True)
class ModuleNames:
    """Names of modules, by names of nodes."""

    scopes: Mapping[str, str]

    def of(self, weight: str, node: str) -> tuple[str, str] | None:
        """The module of a product, and the source of that name; None if unknown."""
        for name, by in ((weight, "its weight's name"), (node, "its node's name")):
            if (module := _module(name)) is not None:
                return module, by
        return (self.scopes[node], "torch's metadata") if node in self.scopes else None


def module_names(source: ModelProto) -> ModuleNames:
    """Read module names from an exported model."""
    scopes = {}
    for node in source.graph.node:
        text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
        if text and (module := _in_scopes(text)) is not None:
            scopes[node.name] = module
    return ModuleNames(scopes)


def _module(name: str) -> str | None:
    """Extract a module's name from the name of a weight or a node; None if it has none."""
    parts = [part for part in re.split(r"[./]+", name.removeprefix("trt_kvcache/")) if part]
    while parts and _NO_MODULE.fullmatch(parts[-1]):
        parts.pop()
    layered = any(part.isdecimal() for part in parts[1:-1])
    return ".".join(parts) if layered or parts[-1:] == ["lm_head"] else None


def _in_scopes(text: str) -> str | None:
    """The innermost module in a textual list of module paths; None if there is none."""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    names = [scope for scope in scopes if isinstance(scope, str)] if isinstance(scopes, list) else []
    return next((module for name in reversed(names[:-1]) if (module := _module(name)) is not None), None)
