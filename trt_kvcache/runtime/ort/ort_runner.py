"""Runs a model on the CPU with ONNX Runtime; each cache is one buffer that is updated in place."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from trt_kvcache.arguments import as_whole
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import OptionError, SessionError, TrtKvCacheError
from trt_kvcache.files import identify, stamp
from trt_kvcache.importer import ImportedModel, import_unchecked, quantize_caches
from trt_kvcache.importer.cache_plan import CacheDtype, CachePlan, PlanOptions, Role
from trt_kvcache.importer.interface import index_limits
from trt_kvcache.importer.protos import byte_size, iter_tensors
from trt_kvcache.importer.steps.sessions import exact_experts
from trt_kvcache.machine import allow_memory, memory, shortage
from trt_kvcache.progress import phase
from trt_kvcache.runtime.buffers import Carried, carried_buffers
from trt_kvcache.runtime.encoders.constants import Constants
from trt_kvcache.runtime.ort.calls import CpuSession, bind, open_on_cpu
from trt_kvcache.runtime.ort.cpu_model import NOTE, OPERATOR, fuse_attention, fuse_products, in_float32, keep_experts
from trt_kvcache.runtime.ort.huge_pages import huge_pages
from trt_kvcache.runtime.runner import Array, HostBytes, HostMemory, Logits, StepBatch
from trt_kvcache.runtime.step_inputs import StepInputs, StepLogits, model_identity, run_whole

_DEFAULT_BATCH = 8  # zeroed memory that was never touched costs nothing
_DEFAULT_CHUNK = 512
_MOST_THREADS = 4096  # ONNX Runtime starts as many threads as it is asked for, or crashes
_BINDINGS = 64  # most IOBindings kept: decoding needs one for each batch size and each `SPAN_BUCKET` of cache rows


@dataclass
class _Bound:
    """The arrays of an IOBinding, used by all steps with the same shapes and the same batch rows.

    Attributes:
        arrays: arrays for the inputs that stay the same in all steps of a sequence (constants).
        constants: the constants that were last copied into `arrays`.
    """

    binding: Any
    inputs: dict[str, Array]
    arrays: dict[str, Array]
    logits: Array
    constants: tuple[Constants, ...] = ()

    def give(self, constants: tuple[Constants, ...]) -> None:
        if constants != self.constants:
            for name, array in self.arrays.items():
                for row, constant in enumerate(constants):
                    array[row] = np.asarray(constant.arrays[name])[0]
            self.constants = constants


class OnnxRuntimeRunner:
    """A `Runner` on the CPU, with ONNX Runtime.

    The model is rewritten in memory, so that a step reads only the cache rows in use; large weights stay in their
    files. Past and present of a cache are bound to one address; then ONNX Runtime's TensorScatter and
    GroupQueryAttention write only the new tokens (measured on 1.31.1).

    `model` is the path of the ``.onnx`` file, as exported or rewritten; `options` say how it is planned.
    `DecodeSession.open` and `CpuOptions` explain the other arguments; without `max_batch` there are 8 batch rows, or
    fewer if memory is short.

    Raises:
        ModelError, OptionError: the model cannot be used, or an option is not possible for this model.
        SessionError: the caches or the weights do not fit into memory.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        options: PlanOptions | None = None,
        *,
        max_batch: int | None = None,
        max_chunk: int | None = None,
        threads: int | None = None,
        default_capacity: int | None = None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_chunk", max_chunk), ("threads", threads)):
            if value is not None and as_whole(value, name) < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")
        if threads is not None and threads > _MOST_THREADS:
            raise OptionError(f"threads is {threads}; it must be at most {_MOST_THREADS}")
        options = options or PlanOptions()
        own = options if options.cache_ranges is None else options.unquantized()
        self.plan: CachePlan
        self.home: object = None
        imported, verdict = import_unchecked(model, own, default_capacity=default_capacity)
        try:
            imported = in_float32(imported)
            session = self._open(imported, options, max_batch, max_chunk, threads)
        except TrtKvCacheError:
            verdict.result()  # if the check failed, this raises its error, which says more
            raise
        checked = verdict.result()
        self.plan = checked.on(self.plan)
        if checked.prefill_in_one_step:  # only the runs of the check can show this
            self.inputs = StepInputs(checked.on(imported.plan))
            self.max_chunk = self.inputs.chunk(max_chunk, _DEFAULT_CHUNK)
        if imported.plan.logits_span is not None:
            self._spans[imported.plan.logits_span.name] = np.arange(self.inputs.fixed_length or self.max_chunk)
        if not self._logits.known:
            self._logits.settle(self._look_for_vocabulary(session))
        self.vocab = min([self._logits.vocab, *self._limits.tokens.values()])

    def _open(
        self,
        imported: ImportedModel,
        options: PlanOptions,
        max_batch: int | None,
        max_chunk: int | None,
        threads: int | None,
    ) -> CpuSession:
        """Open the ONNX Runtime session and allocate the caches. Meanwhile, another process checks the rewrite."""
        self._identity: str | None = None
        # Leave out the inode's change time: backups by hard links change it.
        self._stamps = [(path, times[:-1]) for path, times in imported.source.stamps.items()]
        self.inputs = StepInputs(imported.plan)
        self._logits = StepLogits(imported.plan)
        self._limits = index_limits(imported.model, imported.plan)
        self.max_positions = self.inputs.positions(min(self._limits.positions.values(), default=None))
        self.max_chunk = self.inputs.chunk(max_chunk, _DEFAULT_CHUNK)
        model_run, self.plan = _fastest(imported, self.inputs, options)
        narrow = ", bfloat16 in float32" if NOTE in self.plan.notes else ""
        self.name = f"ONNX Runtime {ort.__version__}, CPU{narrow}"
        self.max_logits = 1 if self._logits.last_only else None
        self._carried = {c.past: c for c in carried_buffers(self.plan)}
        in_place = _updated_in_place(model_run, self._carried.values())
        per_row = sum(b.row_bytes * (1 if n in in_place else 2) for n, b in self._carried.items())
        self.max_batch = _admit(per_row, self.inputs.batch(max_batch))
        _admit_weights(model_run)
        advice = "build an engine and run that on a GPU, or export the model in float32 or float16"
        with phase("loading weights"), huge_pages(wait=False), exact_experts():
            session = open_on_cpu(model_run, imported.source.path, advice, threads=threads, name=self.name)
        self._session: CpuSession | None = session
        imported.source.check_unchanged()
        # With past tokens, GroupQueryAttention takes several new tokens only for a batch of 1; see `cpu_model`.
        self._one_by_one = any(node.op_type == OPERATOR for node in model_run.graph.node)
        allow_memory(per_row * self.max_batch)
        self._past = {
            name: np.zeros((self.max_batch, *buffer.row_shape(buffer.capacity)), buffer.array_dtype)
            for name, buffer in self._carried.items()
        }
        # State, and caches that ONNX Runtime cannot update in place, are written to other arrays, and copied back.
        self._present = {n: a if n in in_place else np.zeros_like(a) for n, a in self._past.items()}
        self._spans = {s.name: np.arange(s.capacity) for s in imported.plan.spans}
        weights = [t for t in imported.plan.tensors if t.role is Role.ADAPTER_WEIGHTS]
        self._adapters = {t.name: np.zeros(tuple(map(int, t.shape)), array_dtype(t.dtype)) for t in weights}
        self._bindings: OrderedDict[tuple[int, ...], _Bound] = OrderedDict()
        return session

    def identity(self) -> str:
        """Return a digest of the model file and its external data."""
        try:
            if self._identity is None:
                identity = model_identity([identify(path) for path, _ in self._stamps])
                for path, before in self._stamps:
                    if stamp(path)[:-1] != before:
                        raise SessionError(
                            f"{path}: the file has changed since the session was opened, so it is unknown which model "
                            "the caches belong to; save caches before you replace the model, or open the session again"
                        )
                self._identity = identity
            return self._identity
        except OSError as error:
            raise SessionError(f"{error.filename}: the model can no longer be read: {error.strerror}") from error

    def step(self, batch: StepBatch) -> Logits:
        """Run one step and return its logits; see `Runner.step`."""
        return run_whole(self, self.inputs, batch, self._step)

    def _step(self, batch: StepBatch) -> Logits:
        session = self._session
        if session is None:
            raise SessionError("the runner is closed; open the model again")
        if self._one_by_one and batch.rows > 1 and batch.length > 1 and batch.starts.any():
            return np.concatenate([self._step(row) for row in batch.split()])
        try:
            bound = self._bound(session, batch)
            self.inputs.fill(batch, bound.inputs)
            bound.give(batch.constants)
            session.run_bound(bound.binding)
        except MemoryError:
            raise SessionError(
                f"out of memory for a step of {batch.rows} x {batch.length} tokens; lower max_chunk or max_batch"
            ) from None
        rows = slice(batch.first_row, batch.first_row + batch.rows)
        for name, past in self._past.items():
            if self._present[name] is not past:
                past[rows] = self._present[name][rows]
        return self._logits.last(bound.logits, batch)

    def copy_rows(self, source: int, target: int, tokens: int) -> None:
        """Copy the first cache rows of a batch row to another, in all buffers; see `Runner.copy_rows`."""
        for name in self._carried:
            self._rows(name, target, 0, tokens)[...] = self._rows(name, source, 0, tokens)

    def zero_rows(self, row: int, start: int, stop: int) -> None:
        """Set a range of cache rows of a batch row to 0, in all buffers; see `Runner.zero_rows`."""
        for name in self._carried:
            self._rows(name, row, start, stop)[...] = 0

    def read_row(self, name: str, row: int, tokens: int) -> Array:
        """Return a copy of the first cache rows of a batch row; see `Runner.read_row`."""
        return self._rows(name, row, 0, tokens).copy().reshape(self._carried[name].row_shape(tokens))

    def write_row(self, name: str, row: int, data: Array) -> None:
        """Write data from `read_row` to a batch row; see `Runner.write_row`."""
        axis = self._carried[name].axis
        rows = self._rows(name, row, 0, 1 if axis is None else data.shape[axis - 1])
        rows[...] = data.reshape(rows.shape)

    def write_adapter(self, name: str, slot: int, data: Array | None) -> None:
        """Write matrix A or B of a LoRA adapter to one adapter slot; see `Runner.write_adapter`."""
        weights = self._adapters[name][slot]
        weights[...] = 0
        if data is not None:
            weights[: data.shape[0], : data.shape[1]] = data

    def host_memory(self, size: int) -> HostMemory:
        """Return host memory for copies of cache rows; see `Runner.host_memory`."""
        try:
            return HostMemory(np.empty(size, np.uint8))
        except MemoryError:
            raise SessionError(f"{size / 1e9:.3f} GB of memory cannot be allocated; remove sequences") from None

    def pack_rows(self, row: int, start: int, stop: int, into: HostBytes) -> None:
        """Copy cache rows of a batch row from all buffers to other memory; see `Runner.pack_rows`."""
        for rows, data in self._packed(row, start, stop, into):
            data[...] = rows

    def unpack_rows(self, row: int, start: int, stop: int, data: HostBytes) -> None:
        """Write data from `pack_rows` back to a batch row; see `Runner.unpack_rows`."""
        for rows, content in self._packed(row, start, stop, data):
            rows[...] = content

    def view(self, name: str) -> Array:
        """Return one cache buffer without a copy; see `Runner.view`."""
        return self._past[name]

    def close(self) -> None:
        """Free the session and the caches."""
        self._bindings.clear()
        self._past, self._present, self._adapters = {}, {}, {}
        self._session = None

    def _rows(self, name: str, row: int, start: int, stop: int) -> Array:
        """Return a view of tokens ``start .. stop - 1`` of a batch row, ``[planes, tokens, width]`` (planes: heads)."""
        buffer = self._carried[name]
        view: Array = self._past[name][row].reshape(buffer.planes, buffer.capacity, buffer.width)
        return view[:, slice(*buffer.places(start, stop))]

    def _packed(self, row: int, start: int, stop: int, data: HostBytes) -> Iterator[tuple[Array, Array]]:
        """Yield, for each cache, a view of tokens ``start .. stop - 1``, and a view of its bytes in the copy `data`."""
        at = 0
        for name in self._carried:
            rows = self._rows(name, row, start, stop)
            yield rows, data[at : at + rows.nbytes].view(rows.dtype).reshape(rows.shape)
            at += rows.nbytes

    def _look_for_vocabulary(self, session: CpuSession) -> int:
        """Return the size of the vocabulary, found by one step (the caches stay empty); 0 if no step can run."""
        if self.inputs.constants.tensors:
            return 0  # the size stays unknown, because there are no constants to run a step with
        rows = self.inputs.max_rows or 1
        tokens = np.zeros((rows, self.inputs.fixed_length or 1), np.int64)
        batch = StepBatch(0, tokens, np.zeros(rows, np.int64), embeds=self.inputs.no_embeds(tokens))
        spans = {n: self._spans[n][:size] for n, size in self.inputs.span_sizes(batch).items()}
        feeds = self.inputs.arrays(batch) | spans | self._adapters | {n: a[:rows] for n, a in self._past.items()}
        (logits,) = session.run([self._logits.name], feeds)
        return int(logits.shape[-1])

    def _bound(self, session: CpuSession, batch: StepBatch) -> _Bound:
        """Return the IOBinding for the batch rows and shapes of a step, with its arrays; keep it for decode steps."""
        key = (batch.first_row, *self.inputs.signature(batch))
        if key in self._bindings:
            self._bindings.move_to_end(key)
            return self._bindings[key]
        binding = session.binding()
        inputs = self.inputs.arrays(batch)
        spans = {n: self._spans[n][:size] for n, size in self.inputs.span_sizes(batch).items()}
        sample = batch.constants[0].arrays if batch.constants else {}
        arrays = {name: np.empty((batch.rows, *a.shape[1:]), a.dtype) for name, a in sample.items()}
        for name, array in (inputs | arrays | spans | self._adapters).items():
            bind(binding.bind_input, name, array)
        rows = slice(batch.first_row, batch.first_row + batch.rows)
        for name, buffer in self._carried.items():
            bind(binding.bind_input, name, self._past[name][rows])
            bind(binding.bind_output, buffer.present, self._present[name][rows])
        logits = np.empty(self._logits.shape(batch), self._logits.dtype)
        bind(binding.bind_output, self._logits.name, logits)
        bound = _Bound(binding, inputs, arrays, logits)
        if batch.length == 1:  # prompts have all lengths, and their logits are large
            self._bindings[key] = bound
            if len(self._bindings) > _BINDINGS:
                self._bindings.popitem(last=False)
        return bound


def _fastest(imported: ImportedModel, inputs: StepInputs, options: PlanOptions) -> tuple[onnx.ModelProto, CachePlan]:
    """Return the model and its plan, with experts, MatMuls and attention in the forms that ONNX Runtime runs fastest.

    Attention is not replaced if steps have fixed sizes: padding tokens may lie beyond the end of the caches. ONNX
    Runtime's GroupQueryAttention can quantize caches with one scale itself, but has no kernel for float8 (1.32.0).
    """
    model = imported.model
    taken = options.cache_ranges is None or options.cache_dtype is not CacheDtype.FP8
    if taken and inputs.fixed_rows is None and inputs.fixed_length in (None, 1):
        model = fuse_attention(model, imported.plan)
    model = fuse_products(keep_experts(model, imported.source.proto))
    if options.cache_ranges is None:
        return model, imported.plan
    asked = replace(options, capacity=imported.plan.options.capacity)
    planned = replace(imported, plan=replace(imported.plan, options=asked), model=model)
    quantized = quantize_caches(planned, plain=True)
    return quantized.model, quantized.plan


def _updated_in_place(model: onnx.ModelProto, carried: Iterable[Carried]) -> set[str]:
    """Return the names of caches that ONNX Runtime can write in place: one node reads past and writes present."""
    reads = Counter(name for node in model.graph.node for name in node.input)
    written = {names for node in model.graph.node for names in _writes(node)}
    return {b.past for b in carried if reads[b.past] == 1 and (b.past, b.present) in written}


def _writes(node: onnx.NodeProto) -> list[tuple[str, str]]:
    """Return (past, present) names of caches that this operator writes in place if both are bound to one buffer."""
    if node.op_type == "TensorScatter":
        return [(node.input[0], node.output[0])]
    if node.op_type == OPERATOR:
        return [(node.input[3], node.output[1]), (node.input[4], node.output[2])]
    return []


def _admit(one: int, asked: int | None) -> int:
    """Return the batch size: `asked`, or by default up to 8. One sequence takes `one` bytes of caches.

    Raises `SessionError` if the caches do not fit into this machine's memory.
    """
    most = memory()
    batch = asked or max(1, min(_DEFAULT_BATCH, most // (2 * one)))
    if batch * one > most:
        raise SessionError(
            f"the caches of {batch} sequence(s) take {batch * one / 1e9:.1f} GB ({one / 1e9:.2f} GB each), and this "
            f"machine has {most / 1e9:.1f} GB; lower max_batch, or the capacity if the model leaves it open"
        )
    return batch


def _admit_weights(model: onnx.ModelProto) -> None:
    """Refuse a model whose weights do not fit into memory.

    Measured with ONNX Runtime 1.32: float32 weights of 1.67 GB need 1.4 GB more, because ONNX Runtime keeps rearranged
    copies for MatMuls (but not of embedding tables). float16 weights of 3.56 GB need up to 11.7 GB, because MatMuls
    convert them to float32.
    """
    narrow = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    sizes = [(byte_size(t) or 0, t.data_type in narrow) for t in iter_tensors(model)]
    half, rest = (sum(size for size, is_half in sizes if is_half is wanted) for wanted in (True, False))
    need = int(2.5 * half + 0.8 * rest)
    if free := shortage(need):
        why = "computes 16-bit floats in float32" if half > rest else "packs them for products"
        raise SessionError(
            f"on the CPU the weights of this model, {(half + rest) / 1e9:.1f} GB, take at least {need / 1e9:.1f} GB of "
            f"memory (ONNX Runtime {why}), and {free}; free memory that other programs hold, use weights of 4 or 8 "
            "bits or a larger machine, or build an engine and run that on a GPU"
        )
