"""Compiles the kernels of one model or engine before a build or a session needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import onnx

from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.importer.prepare import detach_weights
from trt_kvcache.plugins.choice import CHOICE_DTYPES, ChoiceKernels, compile_choice
from trt_kvcache.plugins.compile import CompiledKernel, check_compiler, compile_kernel
from trt_kvcache.plugins.operators import NAMESPACE, OPERATORS
from trt_kvcache.plugins.spec import KernelConfig

Kernels = KernelConfig | ChoiceKernels
"""Kernels of cache updates, which engines contain as PTX; or kernels that choose tokens, which sessions launch."""


@dataclass(frozen=True)
class KernelReport:
    """The resources of one kernel on one architecture. If a cubin holds several kernels: the largest values.

    `spill_bytes` and `stack_bytes` are bytes of local memory per thread; a kernel with nonzero numbers is slow.
    `ptx_bytes` is None for kernels that choose tokens, which a session loads as a cubin.
    """

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    occupancy: float | None
    cubin_bytes: int
    ptx_bytes: int | None


def update_kernels(model: onnx.ModelProto) -> tuple[KernelConfig, ...]:
    """Return the kernels of all cache updates in a rewritten model, each once, in the order of its nodes.

    Raises `OptionError` if no kernel supports the types of a node.
    """
    nodes = [node for node in model.graph.node if node.domain == NAMESPACE and node.op_type in OPERATORS]
    if not nodes:
        return ()
    graph = onnx.shape_inference.infer_shapes(detach_weights(model)[0]).graph
    types = {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    configs: dict[str, KernelConfig] = {}
    for node in nodes:
        operator = OPERATORS[node.op_type]
        names = [onnx.TensorProto.DataType.Name(types.get(name, 0)).lower() for name in node.input]
        config = operator.config(dict(zip(operator.inputs, names, strict=True)))
        configs.setdefault(config.name, config)
    return tuple(configs.values())


def choice_kernels(plan: CachePlan) -> tuple[ChoiceKernels, ...]:
    """Return the kernels that choose tokens on the GPU for a session; empty if no kernel supports the logits' type."""
    dtypes = {t.dtype for t in plan.tensors if t.io == "output" and t.role is Role.LOGITS}
    names = sorted("float32" if dtype == "float" else dtype for dtype in dtypes)
    return tuple(ChoiceKernels(name) for name in names if name in CHOICE_DTYPES)


def compile_ahead(chosen: Sequence[Kernels], archs: Sequence[str]) -> Iterator[KernelReport]:
    """Compile all kernels for each architecture in turn, several kernels at a time. Yield a report on each kernel.

    Raises `OptionError` if NVRTC does not know an architecture, and `BackendError` if NVRTC is missing or failed.
    """
    for arch in archs:
        check_compiler(arch)

    def compile_one(job: tuple[str, Kernels]) -> KernelReport:
        arch, kernels = job
        if isinstance(kernels, ChoiceKernels):
            return _report(compile_choice(kernels.logits, arch), None)
        return _report(compile_kernel(kernels, arch), compile_kernel(kernels, arch, ptx=True))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC runs without Python's lock, so threads compile in parallel
        yield from pool.map(compile_one, [(arch, kernels) for arch in archs for kernels in chosen])


def _report(cubin: CompiledKernel, ptx: CompiledKernel | None) -> KernelReport:
    use = cubin.resources
    spills = use.spill_store_bytes + use.spill_load_bytes
    sizes = len(cubin.code), None if ptx is None else len(ptx.code)
    return KernelReport(cubin.name, cubin.arch, use.registers, spills, use.stack_bytes, use.occupancy, *sizes)
