"""Compiles every kernel that there is for one architecture, and prints the reports as a JSON list.

    compile_kernels.py ARCH [FOLDER]

FOLDER holds the NVRTC to use; its version goes to stderr.
"""

import ctypes
import sys
from pathlib import Path

from kernel_cases import all_kernels

from trt_kvcache.cli.output import print_json
from trt_kvcache.plugins.ahead import compile_ahead
from trt_kvcache.plugins.choice import CHOICE_DTYPES, ChoiceKernels
from trt_kvcache.plugins.compile import nvrtc_version


def main(arch: str, *folders: str) -> None:
    for folder in folders:
        # The bindings find the library that is loaded already, and the library itself does.
        for pattern in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
            (library,) = Path(folder).glob(pattern)
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.stderr.write("NVRTC {}.{}\n".format(*nvrtc_version()))
    print_json(list(compile_ahead([*all_kernels(), *map(ChoiceKernels, CHOICE_DTYPES)], [arch])))


if __name__ == "__main__":
    main(*sys.argv[1:])
