"""Generates the CUDA source of a cache-update kernel: shared files, and one entry function for a configuration."""

from __future__ import annotations

from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import BLOCKS_PER_MULTIPROCESSOR, THREADS, VECTORS_PER_THREAD, KernelConfig, arguments
from trt_kvcache.resources import resource_dir

_FILES = ("rows.cuh", "convert.cuh", "cache_update.cu")

_TYPES = {
    "float16": "Type::FLOAT16",
    "bfloat16": "Type::BFLOAT16",
    "float": "Type::FLOAT32",
    "int8": "Type::INT8",
    "float8e4m3fn": "Type::FLOAT8E4M3FN",
}


def kernel_source(config: KernelConfig) -> str:
    """Return the CUDA C++ source of one kernel without includes. Its entry function is ``config.name``."""
    return family_source() + "\n" + entry_source(config)


def family_source() -> str:
    """Return the CUDA C++ source that all cache-update kernels share."""
    constants = {"THREADS": THREADS, "BLOCKS": BLOCKS_PER_MULTIPROCESSOR, "IN_FLIGHT": VECTORS_PER_THREAD}
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    for name in _FILES:
        lines += [f'#line 1 "{name}"', (resource_dir("plugins") / name).read_text(encoding="utf-8")]
    return "\n".join(lines)


def entry_source(config: KernelConfig) -> str:
    """Return the CUDA C++ source of a kernel's entry function, whose arguments have TensorRT's order."""
    args, q = arguments(config), config.quantization
    types = dict.fromkeys((*args.inputs, *args.outputs), "const void*")
    types |= dict.fromkeys(args.scalars, "int") | dict.fromkeys(args.outputs, "void*")
    types |= {name: "const float*" for name in args.inputs if name.startswith("scale")}
    signature = ", ".join(f"{types[name]} {name}" for name in (*args.inputs, *args.scalars, *args.outputs))

    def chosen(name: str) -> str:
        return f"{name}_0" if config.caches == 1 else f"second ? {name}_1 : {name}_0"

    def flag(value: bool) -> str:
        return "true" if value else "false"

    kinds = (_TYPES[q.source], _TYPES[q.target]) if q else ("Type::BYTES", "Type::BYTES")
    lengths = "{lengths, length_bytes}" if config.length_type else "{nullptr, 0}"
    family = ", ".join((flag(config.form is UpdateForm.PACKED_NHD), flag(config.mode is UpdateMode.CIRCULAR), *kinds))
    return f"""#line 1 "{config.name}.cu"
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) {config.name}({signature}) {{
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    {"const bool second = block % 2 != 0;" if config.caches == 2 else ""}
    const Sizes sizes = {{batch, heads, capacity, length, {chosen("row_bytes")}}};
    const Tensors tensors = {{static_cast<const char*>({chosen("cache")}), static_cast<const char*>({chosen("update")}),
                             static_cast<char*>({chosen("present")}), {chosen("scale") if q else "nullptr"},
                             {"scale_step" if q else "0"}}};
    Update<Config<{family}>>(sizes, tensors, {{write_indices, index_bytes}}, {lengths}, block / {config.caches},
                             blocks / {config.caches}).run();
}}
"""
