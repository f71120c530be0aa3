"""From `BuildOptions` and profiles to TensorRT's builder configuration, through Polygraphy's loaders."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from trt_kvcache.engine.options import CURRENT
from trt_kvcache.engine.protocol import Job
from trt_kvcache.errors import BuildError
from trt_kvcache.files import atomic_file
from trt_kvcache.importer.plan import Target


def create_config(trt: Any, builder: Any, network: Any, job: Job, monitor: Any) -> Any:
    """The configuration for this job.

    Raises:
        BuildError: Polygraphy or TensorRT refuses it.
    """
    from polygraphy.backend.trt import CreateConfig
    from polygraphy.backend.trt import Profile as TrtProfile
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL  # it reports by exception
    build = job.build
    profiles = []
    for profile in job.profiles:
        shapes = TrtProfile()
        for name, range_ in profile.shapes.items():
            shapes.add(name, min=range_.min, opt=range_.opt, max=range_.max)
        profiles.append(shapes)
    common: dict[str, Any] = {
        "profiles": profiles,
        "profiling_verbosity": getattr(trt.ProfilingVerbosity, build.profiling_verbosity.upper().replace("-", "_")),
        "memory_pool_limits": None if build.workspace is None else {trt.MemoryPoolType.WORKSPACE: build.workspace},
        "refittable": build.refit,
        "strip_plan": build.strip_plan,
        "version_compatible": build.version_compatible,
        "builder_optimization_level": build.opt_level,
        "load_timing_cache": build.timing_cache,
        "progress_monitor": monitor,
    }
    if job.target is Target.TENSORRT_RTX:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        here = build.compute_capabilities == (CURRENT,)
        capabilities = [] if here else [(int(c[2:-1]), int(c[-1])) for c in build.compute_capabilities]
        loader = CreateConfigRTX(compute_capabilities=capabilities or None, use_gpu=here, **common)
    else:
        loader = CreateConfig(tf32=True, **common)  # TensorRT's own default, which Polygraphy turns off here only
    try:
        with warnings.catch_warnings():
            # Polygraphy sets an empty timing cache on every builder; for TensorRT for RTX that is deprecated.
            warnings.filterwarnings("ignore", "Use Deprecated in TensorRT-RTX", DeprecationWarning)
            config = loader(builder, network)
    except PolygraphyException as error:
        raise BuildError(f"{job.title} cannot be configured: {' '.join(str(error).split())}") from error
    if job.target is Target.TENSORRT_RTX:
        import tensorrt_rtx

        # Otherwise engines with large tensors may allocate while they run, and cannot become CUDA graphs (its header).
        config.set_flag(tensorrt_rtx.BuilderFlag.REQUIRE_USER_ALLOCATION)
    elif build.declare_aliases:
        # Marked as a preview since 10.3; without it TensorRT refuses plugins that declare an alias.
        import tensorrt

        config.set_preview_feature(tensorrt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    return config


def save_timing_cache(config: Any, path: Path) -> None:
    """Write the kernel times that were read and measured, for the next build.

    Raises:
        OutputError: the file cannot be written.
    """
    with atomic_file(path) as file:
        file.write(config.get_timing_cache().serialize())
