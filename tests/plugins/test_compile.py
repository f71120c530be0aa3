"""Kernels compiled by NVRTC, with no GPU and no driver: architectures, no spills, the disk cache."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_cases import all_kernels
from needs import needs_nvrtc

from trt_kvcache.errors import BackendError, OptionError
from trt_kvcache.plugins import compile as compiling
from trt_kvcache.plugins.compile import compile_kernel, nvrtc_version
from trt_kvcache.plugins.spec import KernelConfig, Quantization

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KERNELS = tuple(all_kernels())

PLAIN = KernelConfig(16)


pytestmark = needs_nvrtc


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def check(config: KernelConfig, arch: str) -> None:
    use = compile_kernel(config, arch).resources
    assert (use.stack_bytes, use.spill_store_bytes, use.spill_load_bytes) == (0, 0, 0), (config.name, arch, use)
    assert use.registers <= 128, (config.name, arch, use)
    assert use.occupancy is not None
    assert use.occupancy >= 0.25, (config.name, arch, use)


@pytest.mark.few(4)
# A third of a second each.
@pytest.mark.parametrize("arch", ARCHS)
def test_one_kernel_compiles_without_local_memory(arch: str) -> None:
    check(KERNELS[ARCHS.index(arch) * 10 + 3], arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_without_local_memory(arch: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, KERNELS, [arch] * len(KERNELS)))


@pytest.mark.parametrize("target", ["int8", "float8e4m3fn"])
def test_the_driver_cannot_round_other_than_the_host(target: str) -> None:
    """PTX's products and sums without a rounding of their own may be fused by who compiles it for the GPU."""
    config = KernelConfig(8, quantization=Quantization("bfloat16", target))  # type: ignore[arg-type]
    text = compile_kernel(config, "sm_80", ptx=True).code.decode()
    assert "mul.rn.f32" in text
    assert not re.findall(r"\b(?:mul|add|sub|div|rcp)\.f32", text)
    assert ".ftz" not in text


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_compiled_again(folder: Path, damage: str) -> None:
    first = compile_kernel(PLAIN, "sm_80")
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    kept.write_bytes({"cut": whole[:middle], "flipped": flipped, "empty": b""}[damage])
    again = compile_kernel(PLAIN, "sm_80")
    assert again.code == first.code
    assert len(kept.read_bytes()) > middle
    assert compile_kernel(PLAIN, "sm_80") == again, "the file is whole again"


def test_the_compilers_log_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "kernel_source", lambda config: "no program")
    with pytest.raises(BackendError, match=rf"NVRTC_ERROR_COMPILATION: kernel {PLAIN.name} with .*sm_80.*error"):
        compile_kernel(PLAIN, "sm_80")


def test_code_that_the_driver_is_too_old_for_is_refused() -> None:
    major, minor = nvrtc_version()
    with pytest.raises(
        OptionError, match=rf"a cubin .* needs a driver for CUDA {major}, but .* for CUDA {major - 1}\.9:"
    ):
        compile_kernel(PLAIN, "sm_80", driver=(major - 1, 9))
    older = rf"install an older nvidia-cuda-nvrtc \({major - 1}\.9\.\*\), or a newer driver"
    with pytest.raises(OptionError, match=rf"PTX .* needs a driver for CUDA {major}\.{minor}, but .*: {older}"):
        compile_kernel(PLAIN, "sm_80", ptx=True, driver=(major - 1, 9))
    assert compile_kernel(PLAIN, "sm_80", ptx=True, driver=(major, minor)).code
    assert compile_kernel(PLAIN, "sm_80", driver=(major, 0)).code


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    def absent() -> None:
        raise DynamicLibNotFoundError("libnvrtc.so not found")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    with pytest.raises(BackendError, match=r"NVRTC.*pip install 'trt-kvcache\[plugin\]'"):
        nvrtc_version()


# The kernels compiled by the oldest NVRTC that the extra ``plugin`` admits; the other tests use the newest.


ROOT = Path(__file__).parents[2]
OLDEST = "13.0.88"


def test_it_is_the_oldest() -> None:
    assert '\nplugin = ["nvidia-cuda-nvrtc>=13,<14"]\n' in (ROOT / "pyproject.toml").read_text()
    assert f"nvrtc={OLDEST}\n" in (ROOT / "scripts" / "bindings").read_text()
