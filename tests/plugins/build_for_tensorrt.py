"""Runs with the real bindings (see real_bindings.py): builds a model for TensorRT, and prints what was said about it.

There is no builder behind the bindings, so the build ends in an error; the question says which GPU to stand in for, if
any.
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from trt_kvcache.engine import builder, engine_build
from trt_kvcache.engine.backend import Backend
from trt_kvcache.engine.build_process import Job
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.cache_plan import PlanOptions, Target
from trt_kvcache.plugins import embed


def without_nvrtc() -> AbstractContextManager[object]:
    """NVRTC as it is where the library is missing."""
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    return mock.patch.object(nvrtc, "nvrtcVersion", side_effect=DynamicLibNotFoundError("libnvrtc.so not found"))


def main() -> None:
    question = json.load(sys.stdin)
    answer: dict[str, object] = {}
    if "gpu" not in question:
        backend = Backend(Target.TENSORRT, question["version"])
        with mock.patch.object(engine_build, "choose_backend", return_value=backend):
            try:
                engine_build.build_engine(question["model"], question["engine"])
            except TrtKvCacheError as error:
                answer = {"kind": type(error).__name__, "error": str(error)}
    else:
        import tensorrt as trt

        options = PlanOptions(target=Target.TENSORRT, packed_native=False)
        plan = import_model(question["model"], options).plan
        job = Job(
            Target.TENSORRT, "TensorRT", "", "", "", plan, (), engine_build.BuildOptions(**question.get("build", {}))
        )
        arch, driver = question["gpu"]
        lack = without_nvrtc() if question.get("lacks") else nullcontext()
        with mock.patch.object(embed, "this_gpu", return_value=(arch, tuple(driver))), lack:
            try:
                builder._register_plugins(trt, job)
            except TrtKvCacheError as error:
                answer = {"kind": type(error).__name__, "error": str(error)}
        registry = trt.get_plugin_registry()
        answer["registered"] = registry.get_creator("KVCacheUpdateCircular", "1", "trt_kvcache") is not None
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
