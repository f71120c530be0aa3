"""From options to TensorRT's configuration.

Full TensorRT needs a GPU even to make a builder. Its side is tested with a module `tensorrt` that is TensorRT for RTX
under another name: the same classes, flags and Polygraphy loaders, though not the same builder behind them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import BuildOptions, build_engine
from trt_kvcache.child import _ROOT
from trt_kvcache.engine.backend import Backend
from trt_kvcache.engine.manifest import check_engine
from trt_kvcache.errors import BuildError
from trt_kvcache.importer.cache_plan import Target

CONFIGURE = """
import json, os, sys, warnings
os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
import tensorrt_rtx as trt
from pathlib import Path
from sample_plans import sample_plan
from trt_kvcache.engine.builder import create_config, save_timing_cache
from trt_kvcache.engine.manifest import Profile, ShapeRange
from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.build_process import Job
from trt_kvcache.importer.cache_plan import Target

warnings.simplefilter("error")
target, cache = Target(sys.argv[1]), sys.argv[2]
full = target is Target.TENSORRT
build = BuildOptions(
    workspace=1 << 20, strip_plan=True, refit="any" if full else "identical", profiling_verbosity="detailed",
    opt_level=4 if full else None, timing_cache=cache if full else None, version_compatible=full,
    compute_capabilities=() if full else ("sm89", "sm120"),
)
profile = Profile("decode", {"x": ShapeRange((1, 2), (2, 2), (4, 2))})
job = Job(target, "TensorRT", "m.onnx", "m.tmp", "m.engine", sample_plan(1), (profile, profile), build)
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
network.add_input("x", trt.float32, (-1, 2))
config = create_config(trt, builder, network, job, None)
if full:
    warnings.simplefilter("ignore")
    save_timing_cache(config, Path(cache))
print(json.dumps({
    "flags": [f.name for f in (trt.BuilderFlag.REFIT, trt.BuilderFlag.REFIT_IDENTICAL, trt.BuilderFlag.STRIP_PLAN,
                               trt.BuilderFlag.VERSION_COMPATIBLE, trt.BuilderFlag.TF32) if config.get_flag(f)],
    "level": config.builder_optimization_level,
    "workspace": config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE),
    "verbosity": config.profiling_verbosity.name,
    "profiles": config.num_optimization_profiles,
    "capabilities": [config.get_compute_capability(i).name for i in range(config.num_compute_capabilities)],
}))
"""


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_every_option_arrives(tmp_path: Path, target: str) -> None:
    root = _ROOT
    cache = tmp_path / "kernels.cache"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root / 'tests')!r})\n{CONFIGURE}"]
    done = subprocess.run([*command, target, cache], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    full = target == "tensorrt"
    assert found == {
        "flags": [
            "REFIT" if full else "REFIT_IDENTICAL",
            "STRIP_PLAN",
            *(["VERSION_COMPATIBLE"] if full else []),
            "TF32",
        ],
        "level": 4 if full else 3,
        "workspace": 1 << 20,
        "verbosity": "DETAILED",
        "profiles": 2,
        "capabilities": [] if full else ["SM89", "SM120"],
    }
    assert cache.exists() == full
    if full:
        assert cache.stat().st_size > 0


@pytest.fixture
def full_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT for RTX under the name of TensorRT, here and in the build process."""
    package = tmp_path / "stand-in"
    package.mkdir()
    (package / "tensorrt.py").write_text("import sys, tensorrt_rtx\nsys.modules['tensorrt'] = tensorrt_rtx\n")
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setattr(
        "trt_kvcache.engine.engine_build.choose_backend", lambda _: Backend(Target.TENSORRT, "11.4.0.106")
    )


@pytest.mark.slow
@pytest.mark.usefixtures("full_tensorrt")
def test_the_build_takes_the_module_of_its_backend(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    build = BuildOptions(timing_cache=str(tmp_path / "kernels.cache"), opt_level=2)
    manifest = build_engine(model, tmp_path / "model.engine", build=build)
    check_engine(manifest, tmp_path / "model.engine")
    assert manifest.backend == "tensorrt"
    assert manifest.plan.options.target is Target.TENSORRT
    assert (tmp_path / "kernels.cache").stat().st_size > 0


def test_a_backend_that_does_not_import_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trt_kvcache.engine.engine_build.choose_backend", lambda _: Backend(Target.TENSORRT, "11.4.0.106")
    )
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    with pytest.raises(BuildError, match="tensorrt is installed but cannot be imported: No module named 'tensorrt'"):
        build_engine(model, tmp_path / "model.engine")
