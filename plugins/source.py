"""The text of a kernel: the shared files, and one entry function for a configuration."""

from __future__ import annotations

from trt_kvcache.importer.plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import THREADS, VECTORS_PER_THREAD, KernelConfig, arguments
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
    """Return one CUDA C++ translation unit, without includes, whose entry function is ``config.name``."""
    return family_source() + "\n" + entry_source(config)


def family_source() -> str:
    """Return the text that all entry functions share."""
    lines = [f"constexpr int THREADS = {THREADS};", f"constexpr int IN_FLIGHT = {VECTORS_PER_THREAD};", ""]
    for name in _FILES:
        lines += [f'#line 1 "{name}"', (resource_dir("plugins") / name).read_text(encoding="utf-8")]
    return "\n".join(lines)


def entry_source(config: KernelConfig) -> str:
    """Return the entry function of one configuration: its arguments in TensorRT's order, handed to the family."""
    args, q = arguments(config), config.quantization
    types = dict.fromkeys((*args.inputs, *args.outputs), "const void*")
    types |= dict.fromkeys(args.scalars, "int") | {"errors": "int*"}
    types |= {name: "void*" for name in args.outputs if name.startswith("present")}
    types |= {name: "const float*" for name in args.inputs if name.startswith("scale")}
    signature = ", ".join(f"{types[name]} {name}" for name in (*args.inputs, *args.scalars, *args.outputs))

    def chosen(name: str) -> str:
        return f"{name}_0" if config.caches == 1 else f"second ? {name}_1 : {name}_0"

    def flag(value: bool) -> str:
        return "true" if value else "false"

    return f"""#line 1 "{config.name}.cu"
struct {config.name}_config {{
    static constexpr bool PACKED = {flag(config.form is UpdateForm.PACKED_NHD)};
    static constexpr bool CIRCULAR = {flag(config.mode is UpdateMode.CIRCULAR)};
    static constexpr Type SOURCE = {_TYPES[q.source] if q else "Type::BYTES"};
    static constexpr Type TARGET = {_TYPES[q.target] if q else "Type::BYTES"};
}};

extern "C" __global__ void __launch_bounds__(THREADS) {config.name}({signature}) {{
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const bool second = {"block % 2 != 0" if config.caches == 2 else "false"};
    const Sizes sizes = {{batch, heads, capacity, length, {chosen("row_bytes")}}};
    const Tensors tensors = {{static_cast<const char*>({chosen("cache")}), static_cast<const char*>({chosen("update")}),
                             static_cast<char*>({chosen("present")}), {chosen("scale") if q else "nullptr"},
                             {"scale_step" if q else "0"}}};
    const Update<{config.name}_config> update(sizes, tensors, {{write_indices, index_bytes}},
                                              {"{lengths, length_bytes}" if config.length_type else "{nullptr, 0}"},
                                              block / {config.caches}, blocks / {config.caches});
    update.run();
    {"if (block == 0) update.flag(errors);" if config.errors else ""}
}}
"""
