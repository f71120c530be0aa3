import sys
import types

import msgspec
import pytest
from commands import invoke

from trt_kvcache.engine import diagnosis
from trt_kvcache.engine.diagnosis import Diagnosis, Gpu, diagnose, find_gpus
from trt_kvcache.importer.cache_plan import Route


def available(diagnosis: Diagnosis) -> dict[tuple[Route, str], bool]:
    return {(route.route, route.form): route.available for route in diagnosis.routes}


def test_no_driver_is_said_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver
    from cuda.pathfinder import DynamicLibNotFoundError

    def missing(_: int) -> None:
        raise DynamicLibNotFoundError("no libcuda")

    monkeypatch.setattr("cuda.bindings.driver.cuInit", missing)
    assert find_gpus() == (None, (), "no NVIDIA driver is installed")
    failed = driver.CUresult.CUDA_ERROR_NO_DEVICE
    monkeypatch.setattr(driver, "cuInit", lambda _: (failed,))
    assert find_gpus()[2] == "no NVIDIA driver that works: CUDA_ERROR_NO_DEVICE from the CUDA driver"
    assert any("an NVIDIA GPU and its driver" in line for line in diagnose().advice)


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute
    ok = driver.CUresult.CUDA_SUCCESS
    numbers = {
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 8,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 9,
    }
    answers = {
        "cuInit": lambda _: (ok,),
        "cuDriverGetVersion": lambda: (ok, 13020),
        "cuDeviceGetCount": lambda: (ok, 1),
        "cuDeviceGet": lambda index: (ok, index),
        "cuDeviceGetName": lambda length, _: (ok, b"NVIDIA L4".ljust(length, b"\0")),
        "cuDeviceGetAttribute": lambda which, _: (ok, numbers[which]),
        "cuDeviceTotalMem": lambda _: (ok, 24 << 30),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, answer)
    assert find_gpus() == ("13.2", (Gpu("NVIDIA L4", "8.9", 24 << 30),), "")
    result = invoke("doctor", code=None)
    assert "GPU: NVIDIA L4, compute capability 8.9, 24.0 GiB, driver for CUDA 13.2" in result.stdout
    assert "newer NVIDIA driver" not in result.stdout
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (ok, 12080))
    result = invoke("doctor", code=None)
    assert "a newer NVIDIA driver: this one is for CUDA 12.8, and tensorrt-rtx-cu13 needs 13" in result.stdout


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    diagnosis = diagnose()
    assert not any(available(diagnosis).values())
    assert "pip install 'trt-kvcache[rtx]'" in " ".join(diagnosis.advice)


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_version", lambda package: None if package == "nvidia-cuda-nvrtc" else "1.0")
    (line,) = (line for line in diagnose().advice if "nvrtc" in line)
    assert line.startswith("pip install 'trt-kvcache[plugin]': nvidia-cuda-nvrtc, compiles the kernels that run")


def test_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libnvinfer.so.10: cannot open\nshared object file")

    monkeypatch.setattr(diagnosis.importlib, "import_module", broken)
    assert {b.problem for b in diagnose().backends} == {"libnvinfer.so.10: cannot open shared object file"}


def test_an_old_tensorrt_has_no_native_route(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.SimpleNamespace(__version__="10.14.1", INetworkDefinition=type("N", (), {"add_plugin_v3": None}))
    monkeypatch.setitem(sys.modules, "tensorrt", old)  # type: ignore[arg-type]
    diagnosis = diagnose()
    backend = {b.name: b for b in diagnosis.backends}["tensorrt"]
    assert (backend.version, backend.native, backend.packed_native, backend.plugins) == ("10.14.1", False, False, True)
    assert any("tensorrt>=10.15" in line for line in diagnosis.advice)


@pytest.mark.parametrize(("capability", "nvrtc", "plugins", "expected"), [
    ("8.9", "13.0.88", True, []),
    ("12.1", "13.5.37", False, []),
    ("8.9", "13.5.37", True, ["pip install 'nvidia-cuda-nvrtc==13.0.*': NVRTC"]),
    ("7.5", "13.0.88", True, ["build --compute-capabilities sm75: engines for all GPUs do not run on the Fake"]),
    ("9.0", None, True,
     ["build --backend tensorrt, or try --compute-capabilities current: TensorRT for RTX is not "
      "made for the Fake (compute capability 9.0)"]),
])  # fmt: skip
def test_what_a_gpu_and_its_driver_need(
    capability: str, nvrtc: str | None, plugins: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"nvidia-cuda-nvrtc": nvrtc}
    full = types.SimpleNamespace(
        __version__="11.4.0", IKVCacheUpdateLayer=types.SimpleNamespace(update_form=None),
        INetworkDefinition=type("N", (), {"add_plugin_v3": None} if plugins else {}),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "tensorrt", full)  # type: ignore[arg-type]
    monkeypatch.setattr(diagnosis, "_version", lambda package: versions.get(package, "1.0"))
    monkeypatch.setattr(diagnosis, "find_gpus", lambda: ("13.0", (diagnosis.Gpu("Fake", capability, 1 << 30),), ""))
    found = [line for line in diagnose().advice if "[plugin]" not in line]
    assert len(found) == len(expected)
    assert all(line.startswith(words) for line, words in zip(found, expected, strict=True)), found


def test_the_command_prints_tables_and_json() -> None:
    text = invoke("doctor")
    for part in ("tensorrt-rtx", "native", "packed", "functional", "TensorRT for RTX takes no plugins"):
        assert part in text.stdout
    data = invoke("doctor", "--json", code=None)
    assert msgspec.json.decode(data.stdout, type=Diagnosis) == diagnose()
