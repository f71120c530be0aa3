"""Compiles kernels with the NVRTC in a folder: ``compile_kernels.py FOLDER`` prints its version, and their names.

All of them where TRT_KVCACHE_EVERY_KERNEL is set, a quarter of a second each. Else those that hold every template of
the family (the largest kernel of each), and every way in which an entry function calls it. Always those that choose
tokens.
"""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trt_kvcache.plugins.choice import CHOICE_DTYPES, compile_choice
from trt_kvcache.plugins.compile import compile_kernel, nvrtc_version
from trt_kvcache.plugins.family import all_kernels
from trt_kvcache.plugins.spec import KernelConfig

ARCH = "sm_90"


def chosen() -> list[KernelConfig]:
    kernels = list(all_kernels())
    if os.environ.get("TRT_KVCACHE_EVERY_KERNEL"):
        return kernels
    every_template = [k for k in kernels if k.caches == 2 and k.length_type and k.errors]
    every_call = [k for k in kernels if (k.form, k.mode, k.quantization) == (kernels[0].form, kernels[0].mode, None)]
    return list({k.name: k for k in (*every_template, *every_call)}.values())


def main(folder: Path) -> None:
    # What is loaded already is what the bindings find, and what the library itself finds.
    for pattern in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
        (library,) = folder.glob(pattern)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda config: compile_kernel(config, ARCH, ptx=True), chosen())
        names = [kernel.name for kernel in (*made, *(compile_choice(dtype, ARCH) for dtype in CHOICE_DTYPES))]
    sys.stdout.write("\n".join(["NVRTC {}.{}".format(*nvrtc_version()), *names]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
