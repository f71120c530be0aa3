"""TensorRT's runtime over a `Machine`: it enforces what TensorRT enforces, and really computes.

An engine file holds the rewritten ONNX model and the profiles; a step runs that model in ONNX Runtime, on the addresses
that were bound, when the stream is synchronized. What TensorRT refuses is refused the same way: False or None, and a
message to the logger. What would be undefined behaviour raises `BrokenRuleError`.

Enforced: the past and the present of one layer have one address; shapes lie within the selected profile; a profile is
selected, every tensor bound and every input shaped before a step; a switch of profiles drops shapes and keeps
addresses; addresses are multiples of 256; memory of a step is allocated, overlaps nothing and is large enough;
activation memory is the caller's, as TensorRT for RTX demands of engines that `build` writes, and becomes garbage; a
context is there until its steps have run; a context that a graph was recorded from is not changed; nothing new is
shaped while recording; engines are opened, and contexts made, while the GPU is current; there is one logger, TensorRT's
own; contexts and engines of TensorRT for RTX are taken apart only when nothing in Python hears of their errors any more
(`hung` of the module otherwise).
"""

from __future__ import annotations

import enum
import json
import re
import weakref
from collections.abc import Iterable
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from runtime.fake_cuda import BrokenRuleError, Machine

from trt_kvcache.dtypes import array_dtype

MAGIC = b"FAKE ENGINE\n"
VERSIONS = {"tensorrt-rtx": "1.7.1.116", "tensorrt": "11.4.0.106"}
ACTIVATIONS = 4096
DTYPES = {
    "float": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "int32": "INT32", "int8": "INT8",
    "bool": "BOOL",
}  # fmt: skip


class Logger:
    """TensorRT's own logger, which needs nothing of Python."""

    INTERNAL_ERROR, ERROR, WARNING = "INTERNAL_ERROR", "ERROR", "WARNING"

    def __init__(self, min_severity: str) -> None:
        self.min_severity = min_severity


class IErrorRecorder:
    """TensorRT's interface, which its user implements."""

    def report_error(self, code: Any, description: str) -> bool:
        raise NotImplementedError


class AllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class GraphStrategy(enum.Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class Kernels(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class Location(enum.Enum):
    DEVICE = 0
    HOST = 1


class Invalidity(enum.IntFlag):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4


def fake_module(machine: Machine, *, rtx: bool = True, version: str = "1.7.1.116", **faults: Any) -> Any:
    """A module like ``tensorrt_rtx`` or ``tensorrt``.

    Args:
        machine: the GPU.
        rtx: which of the two.
        version: of the module.
        faults: ``refuse``: words with which engines are not opened; ``diagnostics``: an `Invalidity`; ``aliases``: what
            engines report instead of the truth; ``on_host``: names of tensors; ``not_recordable``: words with which a
            step is not recorded; ``no_context``: how many contexts can be made; ``fail_steps``: words with which steps
            are refused; ``fail_graphs``: the same of contexts that record by themselves; ``fail_late``: the same after
            a part of the step was put on the stream; ``no_setting``: what a `RuntimeConfig` does not take.
    """
    module = SimpleNamespace(
        __version__=version, Logger=Logger, IErrorRecorder=IErrorRecorder, rtx=rtx, TensorLocation=Location,
        ExecutionContextAllocationStrategy=AllocationStrategy,
        machine=machine, faults=faults, compiled=[], contexts=[], hung=[],
    )  # fmt: skip
    kind = RtxRuntime if rtx else Runtime
    module.Runtime = lambda logger: kind(module, logger)
    if rtx:
        module.CudaGraphStrategy, module.EngineInvalidityDiagnostics = GraphStrategy, Invalidity
        module.DynamicShapesKernelSpecializationStrategy = Kernels
    return module


_first_logger: dict[str, Logger] = {}


class Dims:
    """TensorRT's sizes, which are no tuple."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = tuple(sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> int:
        return self._sizes[index]


def _report(recorder: Any, words: str) -> None:
    """Give an error to whoever asked for it."""
    if recorder is not None:
        recorder.report_error(1, words)


class Runtime:
    """TensorRT's ``IRuntime``."""

    def __init__(self, module: Any, logger: Any) -> None:
        if not isinstance(logger, Logger):
            raise BrokenRuleError("a logger in Python is called from threads that others wait for with Python's lock")
        if _first_logger.setdefault("logger", logger) is not logger:
            raise BrokenRuleError("the second logger of a process is ignored, and the first may be gone")
        self._module = module
        self.error_recorder: Any = None

    def deserialize_cuda_engine(self, data: Any) -> Engine | None:
        words = self._module.faults.get("refuse")
        if words or data[: len(MAGIC)] != MAGIC:
            _report(self.error_recorder, words or "Serialization assertion magicTag failed.")
            return None
        _check_current(self._module)
        return (RtxEngine if self._module.rtx else Engine)(self._module, bytes(data))


class RtxRuntime(Runtime):
    """``IRuntime`` of TensorRT for RTX."""

    def get_engine_validity(self, data: Any) -> tuple[int, int]:
        return 2, int(self._module.faults.get("diagnostics", 0))


class Engine:
    """TensorRT's ``ICudaEngine``."""

    def __init__(self, module: Any, data: bytes) -> None:
        header, model = data[len(MAGIC) :].split(b"\n", 1)
        facts = json.loads(header)
        self._module = module
        self.error_recorder: Any = None  # nothing is said of what it inherits
        self._profiles, self._aliases = facts["profiles"], facts["aliases"]
        graph = onnx.load_from_string(model).graph
        self._tensors = {v.name: ("INPUT", v.type.tensor_type) for v in graph.input}
        self._tensors |= {v.name: ("OUTPUT", v.type.tensor_type) for v in graph.output}
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = len(self._profiles)
        self.device_memory_size_v2 = ACTIVATIONS + 256 * len(graph.node)
        self._inferred: dict[Any, dict[str, tuple[int, ...]]] = {}

    def __del__(self) -> None:
        if self.error_recorder is not None and self._module.rtx:  # as of a context
            self._module.hung.append("engine")

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name=self._tensors[name][0])

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=DTYPES[self._dtype(name)])

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self._open_shape(name))

    def get_tensor_location(self, name: str) -> Location:
        return Location.HOST if name in self._module.faults.get("on_host", ()) else Location.DEVICE

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return dict(self._module.faults.get("aliases", self._aliases)).get(name)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[Dims]:
        return [Dims(s) for s in self._profiles[index].get(name, [self._open_shape(name)] * 3)]

    def create_execution_context(
        self, how: AllocationStrategy | RuntimeConfig = AllocationStrategy.STATIC
    ) -> Context | None:
        if self._module.faults.get("no_context", 999) <= len(self._module.contexts):
            _report(self.error_recorder, "Requested amount of GPU memory could not be allocated.")
            return None
        _check_current(self._module)
        strategy = how._strategy if isinstance(how, RuntimeConfig) else how
        if self._module.rtx and strategy is not AllocationStrategy.USER_MANAGED:
            _report(self.error_recorder, "Engine was built with BuilderFlag::kREQUIRE_USER_ALLOCATION.")
            return None
        context = Context(self, how)
        self._module.contexts.append(weakref.ref(context))
        return context

    def _open_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self._dims(name))

    def _output_shapes(self, given: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of all outputs for inputs of these shapes: found by a run, where TensorRT computes sizes alone."""
        key = tuple(sorted(given.items()))
        if key not in self._inferred:
            feed = {name: np.zeros(shape, array_dtype(self._dtype(name))) for name, shape in given.items()}
            found = self._session.run(None, feed)
            names = (v.name for v in self._session.get_outputs())
            self._inferred[key] = {name: array.shape for name, array in zip(names, found, strict=True)}
        return self._inferred[key]

    def _dims(self, name: str) -> list[int | str]:
        return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in self._tensors[name][1].shape.dim]

    def _dtype(self, name: str) -> str:
        return onnx.TensorProto.DataType.Name(self._tensors[name][1].elem_type).lower()

    def _names(self, io: str) -> list[str]:
        return [name for name, (mode, _) in self._tensors.items() if mode == io]


class RtxEngine(Engine):
    """``ICudaEngine`` of TensorRT for RTX."""

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig(self._module.faults.get("no_setting", ""))


class RuntimeCache:
    """``IRuntimeCache`` of TensorRT for RTX."""

    def __init__(self) -> None:
        self._kernels: set[str] = set()

    def serialize(self) -> bytes:
        return b"KERNELS sm90 " + json.dumps(sorted(self._kernels)).encode() if self._kernels else b""

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(b"KERNELS sm90 "):
            return False
        self._kernels = set(json.loads(blob[len(b"KERNELS sm90 ") :]))
        return True


class RuntimeConfig:
    """``IRuntimeConfig`` of TensorRT for RTX. What it refuses to set stays as it was, without a word."""

    def __init__(self, refused: str) -> None:
        self.cuda_graph_strategy = GraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = Kernels.LAZY
        self._strategy = AllocationStrategy.STATIC
        self._cache: RuntimeCache | None = None
        self._refused = refused

    def __setattr__(self, name: str, value: Any) -> None:
        if name != getattr(self, "_refused", ""):
            super().__setattr__(name, value)

    def create_runtime_cache(self) -> RuntimeCache | None:
        return None if self._refused == "create_runtime_cache" else RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self._cache = cache
        return self._refused != "set_runtime_cache"

    def set_execution_context_allocation_strategy(self, strategy: AllocationStrategy) -> None:
        self._strategy = strategy


class Context:
    """TensorRT's ``IExecutionContext``."""

    def __init__(self, engine: Engine, how: AllocationStrategy | RuntimeConfig) -> None:
        config = how if isinstance(how, RuntimeConfig) else None
        if (config._strategy if config else how) is AllocationStrategy.STATIC:
            raise BrokenRuleError("a context takes activation memory of its own")
        self._engine, self._module, self._machine = engine, engine._module, engine._module.machine
        self.error_recorder: Any = None
        self._cache = config._cache if config else None
        self._records = bool(config) and config.cuda_graph_strategy is GraphStrategy.WHOLE_GRAPH_CAPTURE
        if self._records and config.dynamic_shapes_kernel_specialization_strategy is not Kernels.EAGER:
            raise BrokenRuleError("a context records before its kernels are there")
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory: tuple[int, int] | None = None
        self._version = 0  # counts changes: a recorded graph is of one version
        self._settled = -1  # the version that has run outside of a recording
        self._in_graph = False
        self._replays: list[int] = []

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        _check_current(self._module)
        if not 0 <= index < self._engine.num_optimization_profiles:
            return self._refuse(f"there is no profile {index}")
        self._changed()
        self._profile, self._shapes = index, {}
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self._changed()
        if address % 256 or size < self._engine.device_memory_size_v2:
            raise BrokenRuleError(f"{size} bytes at {address:#x} are no activation memory")
        self._memory = address, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if name not in self._engine._names("INPUT"):
            return self._refuse(f"{name} is no input")
        if self._profile is None:
            return self._refuse("no optimization profile is selected")
        low, _, high = map(tuple, self._engine.get_tensor_profile_shape(name, self._profile))
        if len(shape) != len(low) or not all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True)):
            return self._refuse(f"{name}: {shape} is not within {low} to {high} of profile {self._profile}")
        self._changed()
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._engine._tensors:
            return self._refuse(f"{name} is no tensor of the engine")
        if address % 256:
            raise BrokenRuleError(f"{name} is bound to {address:#x}, which is no multiple of 256")
        self._changed()
        self._addresses[name] = address
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self._shape(name))

    def execute_async_v3(self, stream: int) -> bool:
        faults = self._module.faults
        if faults.get("fail_steps"):
            return self._refuse(faults["fail_steps"])
        if faults.get("fail_graphs") and self._records:
            return self._refuse(faults["fail_graphs"])
        if missing := [n for n in self._engine._names("INPUT") if -1 in self._shape(n)]:
            return self._refuse(f"the shape of {missing[0]} is not specified")
        if missing := [n for n in self._engine._tensors if not self._addresses.get(n)]:
            return self._refuse(f"{missing[0]} has no address")
        for present, past in self._engine._aliases.items():
            if self._addresses[present] != self._addresses[past]:
                return self._refuse(f"{present} must have the address of {past}, which it shares a buffer with")
        _check_current(self._module)
        recording = self._machine.recording is not None
        if recording and (faults.get("not_recordable") or self._settled != self._version):
            self._machine.invalid = True
            return self._refuse(faults.get("not_recordable") or "deferred updates cannot be recorded")
        if self._memory is None:
            raise BrokenRuleError("a step without activation memory")
        self._compile()
        step = Step(self._engine, {n: self._shape(n) for n in self._engine._tensors}, dict(self._addresses))
        memory, version, machine, me = self._memory, self._version, self._machine, weakref.ref(self)

        def run() -> None:
            step.run(memory)

        def check() -> None:
            context = me()
            if context is None or (recording and context._version != version):
                raise BrokenRuleError("a step runs, or a graph, whose context was changed or is gone")

        machine.put(stream, run, check)
        if faults.get("fail_late"):
            return self._refuse(faults["fail_late"])
        if recording:
            self._in_graph = True
        else:
            self._settled = self._version
            if self._records:
                self._replays.append(self._version)
        return True

    def __del__(self) -> None:
        # TensorRT for RTX waits here for the thread that compiles, which would wait for Python to report an error.
        if getattr(self, "error_recorder", None) is not None and self._module.rtx:
            self._module.hung.append(self._profile)

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        engine = self._engine
        symbols: dict[Any, int] = {}
        for given, shape in self._shapes.items():
            symbols |= dict(zip(engine._dims(given), shape, strict=True))
        found = tuple(d if isinstance(d, int) else symbols.get(d, -1) for d in engine._dims(name))
        inputs = engine._names("INPUT")
        # The importer's sizes in a decoder are true; exporters give two sizes of an encoder one name.
        if -1 not in engine._open_shape(name) or name in inputs or (engine._aliases and -1 not in found):
            return found
        shapes = {n: self._shape(n) for n in inputs}
        return found if any(-1 in shape for shape in shapes.values()) else engine._output_shapes(shapes)[name]

    def _compile(self) -> None:
        """TensorRT for RTX compiles what the runtime cache does not have."""
        kernel = f"{self._profile} {sorted(self._shapes.items())}"
        if self._cache is not None and kernel not in self._cache._kernels:
            self._cache._kernels.add(kernel)
            self._module.compiled.append(kernel)

    def _changed(self) -> None:
        if self._in_graph:
            raise BrokenRuleError("the context of a recorded graph is changed")
        self._version += 1

    def _refuse(self, words: str) -> bool:
        _report(self.error_recorder, f"IExecutionContext: Error Code 3: API Usage Error ({words})")
        return False


class Step:
    """One enqueued step: the model on the addresses and shapes of that moment."""

    def __init__(self, engine: Engine, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        self._engine, self._shapes, self._addresses = engine, shapes, addresses

    def run(self, activations: tuple[int, int]) -> None:
        machine: Machine = self._engine._module.machine
        places = {n: (self._addresses[n], prod(s) * self._dtype(n).itemsize) for n, s in self._shapes.items()}
        shared = set(self._engine._aliases)
        blocks = [("activations", *activations), *((n, *p) for n, p in places.items() if n not in shared)]
        for name, address, size in blocks:
            machine.within(address, size, machine.device, name)
        _disjoint(blocks)
        binding = self._engine._session.io_binding()
        for name, (address, _) in places.items():
            bind = binding.bind_input if name in self._engine._names("INPUT") else binding.bind_output
            bind(name, "cpu", 0, self._dtype(name), self._shapes[name], address)
        self._engine._session.run_with_iobinding(binding)
        start = machine.within(*activations, machine.device, "activations")
        next(b for a, b in machine.device.items() if a == start)[:] = 0xEE

    def _dtype(self, name: str) -> np.dtype[Any]:
        return array_dtype(self._engine._dtype(name))


def _check_current(module: Any) -> None:
    if not module.machine.is_current():
        raise BrokenRuleError("TensorRT is called while another GPU is current, or none")


def _disjoint(blocks: Iterable[tuple[str, int, int]]) -> None:
    ordered = sorted(blocks, key=lambda block: block[1])
    for (name, start, size), (other, after, _) in pairwise(ordered):
        if start + size > after:
            raise BrokenRuleError(f"{name} and {other} overlap")


def public_names(cls: type) -> set[str]:
    """Names of a class: methods and the attributes that its ``__init__`` sets."""
    import inspect

    names = {name for base in cls.__mro__[:-1] for name in vars(base)}
    for base in cls.__mro__[:-1]:
        if "__init__" in vars(base):
            names |= set(re.findall(r"self\.(\w+)", inspect.getsource(vars(base)["__init__"])))
    return {name for name in names if not name.startswith("_")}
