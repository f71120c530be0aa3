"""The kernel compiled for the host: launches go in as numpy arrays, outputs come back."""

import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trt_kvcache.plugins.source import entry_source, family_source
from trt_kvcache.plugins.spec import KernelConfig, arguments

HERE = Path(__file__).resolve().parent / "plugins"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        inputs, scalars: in the kernel's order.
        shifts: bytes by which an input's address misses an alignment of 64.
        output_sizes: in bytes.
        aliases: for each output, the input whose buffer it is, or -1.
        backwards: the last thread of the last block comes first.
        blocks: run only these, of a grid that is too large for a loop.
        places: for tensors too large for a file, on the host: by input, its size and the offset of the given bytes,
            between zeros.
        windows: offset and number of the bytes that come back of each output; all of them if empty.
    """

    config: KernelConfig
    grid: int
    block: int
    inputs: Sequence[NDArray[np.generic]]
    shifts: Sequence[int]
    scalars: Sequence[int]
    output_sizes: Sequence[int]
    aliases: Sequence[int]
    output_shift: int = 0
    backwards: bool = False
    blocks: Sequence[int] = ()
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    windows: Sequence[tuple[int, int]] = ()

    @property
    def seen(self) -> Sequence[tuple[int, int]]:
        return self.windows or [(0, size) for size in self.output_sizes]


class HostKernels:
    """An executable with all kernels, or those that are asked for."""

    def __init__(self, folder: Path, configs: Iterable[KernelConfig], flags: Sequence[str]) -> None:
        self.folder = folder
        self.configs = {config.name: config for config in configs}
        self.order = {name: i for i, name in enumerate(self.configs)}
        self._program = compile_for_host(folder, "kernels", self._source(), flags)

    def _source(self) -> str:
        parts = [f'#include "{HERE}/host_shim.h"', family_source()]
        parts += [entry_source(config) for config in self.configs.values()]
        parts += [f'#line 1 "table"\n#include "{HERE}/host_main.h"', "const std::vector<Entry> ENTRIES = {"]
        for config in self.configs.values():
            args = arguments(config)
            values = [f"({_cast(name)})inputs[{i}]" for i, name in enumerate(args.inputs)]
            values += [f"scalars[{i}]" for i in range(len(args.scalars))]
            values += [f"({_cast(name)})outputs[{i}]" for i, name in enumerate(args.outputs)]
            parts.append(f"[](auto& inputs, auto& scalars, auto& outputs) {{ {config.name}({', '.join(values)}); }},")
        return "\n".join([*parts, "};\n"])

    def run(self, launches: Sequence[Launch]) -> list[list[Bytes]]:
        content = [struct.pack("q", len(launches))]
        for x in launches:
            entry = self.order[x.config.name]
            content.append(struct.pack("5q", entry, x.grid, x.block, x.backwards, len(x.inputs)))
            for i, (tensor, shift) in enumerate(zip(x.inputs, x.shifts, strict=True)):
                size, offset = x.places.get(i, (tensor.nbytes, 0))
                content += [struct.pack("4q", size, shift, offset, tensor.nbytes), tensor.tobytes()]
            content.append(struct.pack(f"{len(x.scalars) + 2}q", len(x.scalars), *x.scalars, len(x.output_sizes)))
            for size, alias, window in zip(x.output_sizes, x.aliases, x.seen, strict=True):
                content.append(struct.pack("5q", size, x.output_shift, alias, *window))
            blocks = x.blocks or range(x.grid)
            content.append(struct.pack(f"{len(blocks) + 1}q", len(blocks), *blocks))
        cases, results = self.folder / "cases", self.folder / "results"
        cases.write_bytes(b"".join(content))
        done = subprocess.run([self._program, cases, results], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[:4000]
        written = np.frombuffer(results.read_bytes(), np.uint8)
        sizes = [size for x in launches for _, size in x.seen]
        assert written.size == sum(sizes)
        pieces = iter(np.split(written, np.cumsum(sizes)[:-1]))
        return [[next(pieces) for _ in x.output_sizes] for x in launches]


def _cast(name: str) -> str:
    return "const float*" if name.startswith("scale") else "void*"


def compile_for_host(folder: Path, name: str, text: str, flags: Sequence[str]) -> Path:
    """The program that the compiler makes of a C++ text; without a warning, and with products and sums as they are."""
    source, program = folder / f"{name}.cpp", folder / name
    source.write_text(text)
    command = [str(compiler()), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += ["-Wno-comment", "-ffp-contract=off", *flags, str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return program


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def sanitizer_flags(folder: Path) -> list[str] | None:
    """The flags that turn the address and undefined-behavior sanitizers on, or None where they do not work."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    command = [str(compiler()), *flags, str(folder / "probe.cpp"), "-o", str(folder / "probe")]
    works = subprocess.run(command, capture_output=True).returncode == 0
    return flags if works and subprocess.run([folder / "probe"], capture_output=True).returncode == 0 else None
