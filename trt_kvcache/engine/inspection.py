"""Compares a built engine with its manifest."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_kvcache.arguments import as_path
from trt_kvcache.engine.callbacks import make_recorder, native_logger
from trt_kvcache.engine.diagnosis import find_gpus
from trt_kvcache.engine.manifest import Manifest, Profile, ShapeRange, check_engine, load_manifest
from trt_kvcache.errors import ManifestError
from trt_kvcache.importer.cache_plan import Route, TensorRole
from trt_kvcache.model_paths import engine_in

# Names of TensorRT's DataType that differ from ONNX's by more than case.
_DTYPES = {"half": "float16", "bf16": "bfloat16", "fp8": "float8e4m3fn", "fp4": "float4e2m1"}


@dataclass(frozen=True)
class EngineTensor:
    """One input or output of the engine; -1 in `shape` is a dynamic size."""

    name: str
    io: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineView:
    """The inputs, outputs, aliases and profiles that an opened engine reports.

    Attributes:
        aliases: maps each output to the input with the same buffer. TensorRT reports only aliases of its own layers,
            not of plugins.
        profiles: for each profile, the range of shapes of each input.
    """

    tensors: tuple[EngineTensor, ...]
    aliases: dict[str, str]
    profiles: tuple[dict[str, ShapeRange], ...]


@dataclass(frozen=True)
class EngineReport:
    """The result of inspecting an engine: its manifest, whose hash agrees, and what the engine itself reports.

    Attributes:
        view: what the opened engine reports, in agreement with `manifest`. None if the engine was not opened.
        not_opened: the reason why the engine was not opened; empty if it was.
    """

    engine: str
    manifest: Manifest
    view: EngineView | None
    not_opened: str


def inspect_engine(engine: str | Path) -> EngineReport:
    """Check an engine's hash against its manifest. With a GPU, open the engine, and compare its facts, too.

    Args:
        engine: path of the engine, with its manifest ``<engine>.json`` beside it; or path of its folder.

    Raises:
        ManifestError: the manifest is missing, unreadable, of an unknown schema or of another engine; or the opened
            engine has other inputs, outputs, profiles or aliases than the manifest says.
    """
    path = engine_in(as_path(engine, "engine"))
    manifest = load_manifest(path)
    check_engine(manifest, path)
    view, not_opened = _open(path, manifest.backend)
    if view is not None and (differences := reconcile(manifest, view)):
        raise ManifestError(
            f"{path}: the engine and its manifest differ: {'; '.join(differences)}. Do not run it: build it again"
        )
    return EngineReport(str(path), manifest, view, not_opened)


def reconcile(manifest: Manifest, view: EngineView) -> tuple[str, ...]:
    """Return a sentence for each difference between an engine and its manifest; empty if they agree."""
    return (
        *_compare_tensors(manifest.plan.tensors, view.tensors),
        *_compare_aliases(manifest, view.aliases),
        *_compare_profiles(manifest.profiles, view.profiles),
    )


def _compare_tensors(planned: tuple[TensorRole, ...], reported: tuple[EngineTensor, ...]) -> list[str]:
    expected = {(tensor.io, tensor.name): tensor for tensor in planned}
    actual = {(tensor.io, tensor.name): tensor for tensor in reported}
    differences = [f"{io} {name} is only in the manifest" for io, name in expected if (io, name) not in actual]
    differences += [f"{io} {name} is only in the engine" for io, name in actual if (io, name) not in expected]
    for tensor, plan in ((actual[key], expected[key]) for key in actual if key in expected):
        if tensor.dtype != plan.dtype:
            differences.append(
                f"{tensor.io} {tensor.name} is {tensor.dtype} in the engine, and {plan.dtype} in the manifest"
            )
        if not _same_shape(tensor, plan):
            shapes = f"{list(tensor.shape)} in the engine, and {list(plan.shape)}"
            differences.append(f"{tensor.io} {tensor.name} has the shape {shapes} in the manifest")
    return differences


def _same_shape(tensor: EngineTensor, plan: TensorRole) -> bool:
    """True if a shape agrees with the plan. A dynamic size of the plan, or of an output, agrees with every size."""
    return len(tensor.shape) == len(plan.shape) and all(
        actual == expected or not isinstance(expected, int) or (actual == -1 and tensor.io == "output")
        for actual, expected in zip(tensor.shape, plan.shape, strict=True)
    )


def _compare_aliases(manifest: Manifest, reported: dict[str, str]) -> list[str]:
    unreported = {cache.present for cache in manifest.plan.caches if cache.route is Route.PLUGIN}
    differences = []
    for present in sorted({*reported, *manifest.aliases}):
        actual, expected = reported.get(present), manifest.aliases.get(present)
        if actual != expected and not (actual is None and present in unreported):
            differences.append(
                f"{present} shares the buffer of {actual or 'nothing'} in the engine, and of "
                f"{expected or 'nothing'} in the manifest"
            )
    return differences


def _compare_profiles(planned: tuple[Profile, ...], reported: tuple[dict[str, ShapeRange], ...]) -> list[str]:
    if len(planned) != len(reported):
        return [f"the engine has {len(reported)} profiles, but the manifest has {len(planned)}"]
    return [
        f"profile {profile.name}: {name} is {shapes[name]} in the engine, and {expected} in the manifest"
        for profile, shapes in zip(planned, reported, strict=True)
        for name, expected in profile.shapes.items()
        if name in shapes and shapes[name] != expected
    ]


def _open(path: Path, backend: str) -> tuple[EngineView | None, str]:
    _, gpus, problem = find_gpus()
    if not gpus:
        return None, problem
    try:
        trt: Any = __import__({"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}[backend])
    except ImportError as error:
        return None, f"{backend} does not import: {error}"

    recorder = make_recorder(trt)
    runtime = trt.Runtime(native_logger(trt))
    runtime.error_recorder = recorder
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            return None, f"{backend} cannot open it on this {gpus[0].name}: {recorder.take()}"
        return view_of(engine), ""


def view_of(engine: Any) -> EngineView:
    """Return the inputs, outputs, aliases and profiles that an opened ``ICudaEngine`` reports."""
    tensors, aliases = [], {}
    for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
        io = engine.get_tensor_mode(name).name.lower()
        dtype = engine.get_tensor_dtype(name).name.lower()
        shape = tuple(engine.get_tensor_shape(name))
        tensors.append(EngineTensor(name, io, _DTYPES.get(dtype, dtype), shape))
        if io == "output" and (past := engine.get_aliased_input_tensor(name)):
            aliases[name] = past
    inputs = [tensor.name for tensor in tensors if tensor.io == "input"]
    profiles = tuple(
        {name: ShapeRange(*(tuple(shape) for shape in engine.get_tensor_profile_shape(name, index))) for name in inputs}
        for index in range(engine.num_optimization_profiles)
    )
    return EngineView(tuple(tensors), aliases, profiles)
