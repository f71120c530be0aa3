"""Runs with the real bindings (see real_bindings.py): builds a model for TensorRT, and prints what was said about it.

There is no builder behind the bindings, so the build ends in an error; the question says which GPU to stand in for, if
any.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

from trt_kvcache.engine import build, worker
from trt_kvcache.engine.backend import Backend
from trt_kvcache.engine.protocol import Job
from trt_kvcache.errors import TrtKvCacheError
from trt_kvcache.importer import import_model
from trt_kvcache.importer.plan import PlanOptions, Target
from trt_kvcache.plugins import embed


def main() -> None:
    question = json.load(sys.stdin)
    answer: dict[str, object] = {}
    if "gpu" not in question:
        backend = Backend(Target.TENSORRT, question["version"])
        with mock.patch.object(build, "choose_backend", return_value=backend):
            try:
                build.build_engine(question["model"], question["engine"])
            except TrtKvCacheError as error:
                answer = {"kind": type(error).__name__, "error": str(error)}
    else:
        import tensorrt as trt

        plan = import_model(question["model"], PlanOptions(target=Target.TENSORRT)).plan
        job = Job(Target.TENSORRT, "TensorRT", "", "", plan, (), build.BuildOptions(**question.get("build", {})))
        arch, driver = question["gpu"]
        with mock.patch.object(embed, "this_gpu", return_value=(arch, tuple(driver))):
            try:
                worker._register_plugins(trt, job)
            except TrtKvCacheError as error:
                answer = {"kind": type(error).__name__, "error": str(error)}
        registry = trt.get_plugin_registry()
        answer["registered"] = registry.get_creator("KVCacheUpdateCircular", "1", "trt_kvcache") is not None
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
