"""Everything that NVRTC compiles here, listed and compiled before somebody waits for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from trt_kvcache.plugins.choice import CHOICE_DTYPES, ChoiceKernels, compile_choice
from trt_kvcache.plugins.compile import CompiledKernel, check_arch, compile_kernel
from trt_kvcache.plugins.family import all_kernels
from trt_kvcache.plugins.spec import KernelConfig

Kernels = KernelConfig | ChoiceKernels
"""One file of the cache on disk, or two: what engines carry, and what a session launches."""


def everything() -> tuple[Kernels, ...]:
    """The plugin's kernels, then those that choose tokens."""
    return (*all_kernels(), *map(ChoiceKernels, CHOICE_DTYPES))


def compile_ahead(
    chosen: Sequence[Kernels], archs: Sequence[str]
) -> Iterator[tuple[CompiledKernel, CompiledKernel | None]]:
    """Compile kernels for architectures, several at a time; yields cubin and PTX, architecture by architecture.

    There is no PTX of what a session launches by itself: it asks for the cubin.

    Raises:
        OptionError: NVRTC does not know an architecture; nothing was compiled.
        BackendError: NVRTC is not installed, or it failed.
    """
    for arch in archs:
        check_arch(arch)

    def compile_one(job: tuple[str, Kernels]) -> tuple[CompiledKernel, CompiledKernel | None]:
        arch, kernels = job
        if isinstance(kernels, ChoiceKernels):
            return compile_choice(kernels.logits, arch), None
        return compile_kernel(kernels, arch), compile_kernel(kernels, arch, ptx=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC works outside Python's lock
        yield from pool.map(compile_one, [(arch, kernels) for arch in archs for kernels in chosen])
