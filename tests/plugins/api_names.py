"""The project's uses of TensorRT, read from its sources: names, and for calls the number of arguments.

Sources are matched by file and by what an object is called there, so that a new use of a known object is seen without a
change here.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = {"trt", "tensorrt", "tensorrt_rtx", "module", "self._trt.module", "trt.module"}
"""What the module is called."""

OBJECTS = {
    "trt_kvcache/engine/builder.py": {
        "builder": "Builder", "parser": "OnnxParser", "error": "ParserError", "config": "IBuilderConfig",
        "network": "INetworkDefinition", "layer": "ILayer", "tensor": "ITensor",
        "attention_layer": "IAttentionInputLayer", "attention_layer.attention": "IAttention",
    },
    "trt_kvcache/engine/callbacks.py": {},
    "trt_kvcache/engine/inspection.py": {"engine": "ICudaEngine", "runtime": "Runtime"},
    "trt_kvcache/engine/diagnosis.py": {},
    "trt_kvcache/runtime/trt/*.py": {
        "engine": "ICudaEngine", "runtime": "Runtime", "self._context": "IExecutionContext",
        "context": "IExecutionContext", "self._trt.engine": "ICudaEngine", "trt.engine": "ICudaEngine",
        "config": "IRuntimeConfig", "self._config": "IRuntimeConfig",
    },
    "plugins/*.py": {"trtp": "plugin"},
    "scripts/gpu_steps.py": {
        "builder": "Builder", "network": "INetworkDefinition", "layer": "IAttention", "config": "IBuilderConfig",
        "runtime": "Runtime", "engine": "ICudaEngine", "context": "IExecutionContext",
    },
    "examples/own_loop.py": {
        "self.runtime": "Runtime", "self.engine": "ICudaEngine", "self.context": "IExecutionContext",
    },
}  # fmt: skip
"""By file: names of objects, and their classes."""

OURS = {
    "IExecutionContext": {"enqueue", "lend", "let_go", "output_shape", "prepare"},  # our own context around TensorRT's
    "ParserError": {"strerror"},
    "ICudaEngine": {"name", "parent", "stat", "unlink", "with_name", "with_suffix"},  # paths
    "module": {"check", "engine", "module", "rtx", "title"},  # our own TensorRT object
}
"""What is not TensorRT's under these names."""

RTX_ONLY = {
    "IRuntimeConfig.create_runtime_cache", "IRuntimeConfig.set_runtime_cache", "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy", "Runtime.get_engine_validity",
    "BuilderFlag.REQUIRE_USER_ALLOCATION", "EngineInvalidityDiagnostics", "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy", "ComputeCapability", "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}  # fmt: skip
"""What the sources ask of TensorRT for RTX alone."""

SINCE_11 = {"INetworkDefinition.add_attention_v2", "CausalMaskKind", "IAttention.key_value_lengths"}
"""What the sources do without on TensorRT 10."""

FULL_ONLY = {"LayerType.PLUGIN_V3", "PreviewFeature.ALIASED_PLUGIN_IO_10_03", "get_plugin_registry"}
"""What the sources ask of TensorRT alone."""


@dataclass(frozen=True)
class Use:
    """``name`` is dotted, from the module on; `arguments` counts those of a call, -1 where it is none."""

    file: str
    line: int
    name: str
    arguments: int


def uses() -> list[Use]:
    """Every use, in every file of `OBJECTS`."""
    return [use for pattern, objects in OBJECTS.items() for path in ROOT.glob(pattern) for use in _file(path, objects)]


def _file(path: Path, objects: dict[str, str]) -> Iterator[Use]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = {id(node.func): len(node.args) + len(node.keywords) for node in called}
    starred = {id(node.func) for node in called if any(isinstance(a, ast.Starred) for a in node.args)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        dotted = _dotted(node) if isinstance(node, ast.Attribute) else None
        if dotted is None:
            continue
        receiver, _, attribute = dotted.rpartition(".")
        count = -1 if id(node) in starred else calls.get(id(node), -1)
        if (kind := objects.get(receiver)) is not None:
            if attribute not in OURS.get(kind, ()) and not attribute.startswith("__"):
                yield Use(path.name, node.lineno, f"{kind}.{attribute}", count)
        elif id(node) not in inner:
            module = next((m for m in sorted(MODULES, key=len, reverse=True) if dotted.startswith(m + ".")), None)
            rest = dotted[len(module) + 1 :] if module else ""
            if rest and rest.split(".")[0] not in OURS["module"] and not rest.endswith("__init__"):
                yield Use(path.name, node.lineno, rest, count if "." not in rest else -1)


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def problem(module: Any, use: Use) -> str:
    """The fault of a use on this TensorRT, or an empty string."""
    found = module
    for part in use.name.split("."):
        members = getattr(found, "__members__", {})
        if not hasattr(found, part) and part not in members:
            return "no such name"
        found = getattr(found, part, None) if part not in members else members[part]
    if use.arguments < 0 or isinstance(found, (type, property)):
        return ""
    lines = (found.__doc__ or "").splitlines()
    accepted = [_counts(line) for line in lines if re.search(r"\w\(self: .*\)( ->|$)", line)]
    if accepted and not any(least <= use.arguments <= most for least, most in accepted):
        return f"called with {use.arguments} arguments, takes {accepted}"
    return ""


def _counts(signature: str) -> tuple[int, int]:
    """Least and most arguments besides self, of a pybind11 signature."""
    depth, names, text = 0, [""], signature[signature.index("(") + 1 :]
    for char in text:
        if char == ")" and depth == 0:
            break
        depth += (char in "([{<") - (char in ")]}" or (char == ">" and not names[-1].endswith("-")))
        if char == "," and depth == 0:
            names.append("")
        else:
            names[-1] += char
    given = [n for n in names[1:] if n.strip() and n.strip() not in ("*", "/")]
    return sum(" = " not in n for n in given), len(given)
