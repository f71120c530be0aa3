"""The LoRA adapters of a session: small changes of the model, of which each sequence may choose one.

Host memory holds every loaded adapter. The runner has adapter slots: device memory for the adapters of a step.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice

import numpy as np
import numpy.typing as npt

from trt_kvcache.arguments import shown
from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import OptionError, SlotError
from trt_kvcache.importer.cache_plan import AdapterPlan, AdapterProduct, CachePlan, PlanOptions
from trt_kvcache.lora import FUSED, LoraFolder, LoraModule, list_names, module_key, open_lora
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.runner import Array, Runner


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter in host memory. Two adapters are equal only if they are the same object.

    Attributes:
        rank: the largest rank of its modules.
        digest: digest of its contents. Saved cache rows name the adapter by this digest.
        arrays: the matrices, by name of the model's input: A ``[inputs, rank]`` or B ``[rank, outputs]``, in the
            model's dtype. Inputs that the adapter does not change are left out.
    """

    name: str
    rank: int
    digest: str
    arrays: Mapping[str, Array]


class Adapters(Mapping[str, int]):
    """The adapters of a session: a mapping from adapter names to ranks. Any thread may call any method at any time."""

    def __init__(self, plan: CachePlan, guard: Guard) -> None:
        self._plan, self._guard = plan.adapters, guard
        self._known: dict[str, Adapter] = {}

    def __getitem__(self, name: str) -> int:
        return self._known[name].rank

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        slots = "the model takes none" if self._plan is None else f"{self._plan.slots} slots of rank {self._plan.rank}"
        return f"<Adapters: {', '.join(self._known) or 'none'}; {slots}>"

    @property
    def digests(self) -> dict[str, str]:
        """A mapping from each adapter's name to the digest of its contents."""
        return {name: self._known[name].digest for name in sorted(self._known)}

    def load(self, name: str, folder: str | os.PathLike[str] | LoraFolder) -> None:
        """Load an adapter that peft wrote, under a name. If the name is in use, the new adapter replaces the old one.

        Running sequences keep their adapter.

        Args:
            name: the name that `GenerationConfig.adapter` will use.
            folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

        Raises:
            OptionError: the model takes no adapters; or the adapter is damaged, of an unsupported kind, of another
                model, or of a larger rank than the model takes. Nothing has changed.
            SessionError: the session is closed.
        """
        if not isinstance(name, str) or not name or not name.isprintable():
            raise OptionError(f"the name of an adapter is {shown(name)}; give a text")
        opened = folder if isinstance(folder, LoraFolder) else open_lora(folder)
        adapter = read_adapter(name, opened, self._plan)
        with self._guard.lock, self._guard.open:
            self._known[name] = adapter

    def unload(self, name: str) -> None:
        """Forget an adapter; running sequences keep it. Raises `OptionError` if there is no adapter of this name."""
        with self._guard.lock, self._guard.open:
            self.find(name)
            del self._known[name]

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter with this name; None if `name` is None. Raises `OptionError` if there is none."""
        if name is None:
            return None
        adapter = self._known.get(name) if isinstance(name, str) else None
        if adapter is None:
            known = [*self._known]
            near = get_close_matches(name, known, 1) if isinstance(name, str) else []
            names = f"did you mean '{near[0]}'?" if near else f"there are {list_names(known) if known else 'none'}"
            raise OptionError(f"there is no adapter {shown(name)}; {names}")
        return adapter

    def with_digest(self, digest: str) -> Adapter | None:
        """Return the adapter with this digest; None if it is not loaded."""
        return next((adapter for adapter in self._known.values() if adapter.digest == digest), None)


def adapter_folders(adapters: object) -> dict[str, LoraFolder]:
    """Open adapter folders, given by name; return the opened folders. Raises `OptionError` if one holds no adapter."""
    if adapters is None:
        return {}
    if not isinstance(adapters, Mapping):
        raise OptionError(f"adapters is {shown(adapters)}; give a mapping from names to folders")
    return {name: open_lora(folder) for name, folder in adapters.items()}


def for_adapters(options: PlanOptions | None, folders: Mapping[str, LoraFolder]) -> PlanOptions:
    """Return `options` with the largest rank and all modules of these adapters, unless `options` has a LoRA rank."""
    options = options or PlanOptions()
    if options.lora_rank is not None or not folders:
        return options
    targets = sorted({target for folder in folders.values() for target in folder.targets})
    rank = max(folder.rank for folder in folders.values())
    return replace(options, lora_rank=rank, lora_targets=tuple(targets))


class AdapterSlots:
    """Copies adapters into a runner's adapter slots (device memory). A new adapter replaces the least recently used."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._plan = runner, runner.plan.adapters
        self._slots: OrderedDict[Adapter, int] = OrderedDict()  # least recently used first
        self._needed: set[Adapter] = set()

    def reserve(self, adapters: Iterable[Adapter | None]) -> set[Adapter | None]:
        """Reserve adapter slots for the adapters of running sequences, as many as there are slots, in order.

        Return the adapters with a slot, and None (for no adapter). Sequences with other adapters must wait.
        """
        asked = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        self._needed = set(islice(asked, 0 if self._plan is None else self._plan.slots))
        return {None, *self._needed}

    def place(self, adapters: Sequence[Adapter | None]) -> npt.NDArray[np.int64] | None:
        """Load the adapters of a step into adapter slots. Return each row's slot, int64 ``[R]``; 0: no adapter.

        If no row has an adapter, return None. Raises `SlotError` if running sequences use all adapter slots.
        """
        asked = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        if not asked:
            return None
        for adapter in asked:
            if adapter not in self._slots:
                self._write(adapter, self._free(set(asked)))
            self._slots.move_to_end(adapter)
        return np.array([0 if adapter is None else self._slots[adapter] for adapter in adapters], np.int64)

    def _free(self, asked: set[Adapter]) -> int:
        assert self._plan is not None
        if len(self._slots) < self._plan.slots:
            return next(slot for slot in range(1, self._plan.slots + 1) if slot not in self._slots.values())
        oldest = next((adapter for adapter in self._slots if adapter not in asked | self._needed), None)
        if oldest is None:
            raise SlotError(
                f"all {self._plan.slots} slots hold adapters that are in use; wait for the end of a sequence, or plan "
                f"the model with --lora-slots {self._plan.slots + 1} or more"
            )
        return self._slots.pop(oldest)

    def _write(self, adapter: Adapter, slot: int) -> None:
        assert self._plan is not None
        for product in self._plan.products:
            self._runner.write_adapter(product.a, slot, adapter.arrays.get(product.a))
            self._runner.write_adapter(product.b, slot, adapter.arrays.get(product.b))
        self._slots[adapter] = slot  # at the end: after an interrupt, a half-written slot must belong to no adapter


def read_adapter(name: str, folder: LoraFolder, plan: AdapterPlan | None) -> Adapter:
    """Convert an adapter to LoRA inputs of the model; raise `OptionError` if the model cannot take the adapter."""
    if plan is None:
        raise OptionError(
            f"adapter '{name}': the model takes no adapters; plan the model with --lora-rank {folder.rank} or more"
        )
    if folder.rank > plan.rank:
        raise OptionError(
            f"adapter '{name}' ({folder.path}) has a rank of {folder.rank}, but the model takes a rank of at most "
            f"{plan.rank}; plan the model with --lora-rank {folder.rank}"
        )
    places = {key: product for product in plan.products for key in _columns(product)}
    changes: dict[AdapterProduct, list[_Piece]] = {}
    for module in folder.modules:
        for piece in _pieces(module, places, name, folder):
            changes.setdefault(places[piece.key], []).append(piece)
    arrays: dict[str, Array] = {}
    for product, pieces in changes.items():
        arrays[product.a], arrays[product.b] = _factors(name, product, pieces, folder)
    return Adapter(name, folder.rank, folder.digest, arrays)


_Key = tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """Columns `start` to `stop - 1` of the matrix B of an adapter's `module`, which change the model's module `key`."""

    module: LoraModule
    key: _Key
    start: int
    stop: int


def _columns(product: AdapterProduct) -> dict[_Key, tuple[int, int]]:
    """Return the range of output columns of each module that one MatMul computes."""
    ranges = {module_key(part.module): (part.start, part.stop) for part in product.parts}
    if product.whole is not None:
        ranges[module_key(product.whole)] = 0, product.outputs
    return {key: columns for key, columns in ranges.items() if key is not None}


def _pieces(
    module: LoraModule, places: Mapping[_Key, AdapterProduct], name: str, folder: LoraFolder
) -> Iterator[_Piece]:
    """Yield ranges of an adapter's matrix B: one for each of the model's modules that `module` or its parts change."""
    key = module_key(module.name)
    parts = [] if key is None else [(*key[:-1], part) for part in FUSED.get(key[-1], ())]
    if key is not None and key in places:
        yield _Piece(module, key, 0, module.outputs)
    elif parts and all(part in places for part in parts):
        at = 0
        for part in parts:
            start, stop = _columns(places[part])[part]
            yield _Piece(module, part, at, at + stop - start)
            at += stop - start
        if at != module.outputs:
            raise _of_another_model(name, folder, module, module.inputs, at)
    else:
        known = sorted({part.module for product in places.values() for part in product.parts})
        near = get_close_matches(module.name, known, 2, 0.4) or known[:2]
        raise OptionError(
            f"adapter '{name}' ({folder.path}) changes module '{module.name}', but in this model adapters change "
            f"other modules, such as {list_names(near)}; give an adapter of this model, or plan the model with "
            "other --lora-targets"
        )


def _of_another_model(name: str, folder: LoraFolder, module: LoraModule, inputs: int, outputs: int) -> OptionError:
    return OptionError(
        f"adapter '{name}' ({folder.path}) changes module '{module.name}' with {module.inputs} inputs and "
        f"{module.outputs} outputs, but in this model the module has {inputs} and {outputs}; give an adapter of "
        "this model"
    )


def _factors(name: str, product: AdapterProduct, pieces: Sequence[_Piece], folder: LoraFolder) -> tuple[Array, Array]:
    """Return A and B for one MatMul of the model. If it computes several modules, their ranks are concatenated."""
    rank = sum(piece.module.rank for piece in pieces)
    names = [piece.module.name for piece in pieces]
    if rank > product.rank or len({piece.key for piece in pieces}) < len(pieces):
        raise OptionError(
            f"adapter '{name}' ({folder.path}) changes {list_names(names)}, which this model computes in one "
            f"product. Together they have a rank of {rank}, but the product takes at most {product.rank}; plan the "
            "model with a larger --lora-rank, or with more --lora-targets"
        )
    a = np.zeros((product.inputs, rank), np.float32)
    b = np.zeros((rank, product.outputs), np.float32)
    at = 0
    for piece in pieces:
        module, (start, stop) = piece.module, _columns(product)[piece.key]
        if (module.inputs, piece.stop - piece.start) != (product.inputs, stop - start):
            raise _of_another_model(name, folder, module, product.inputs, stop - start)
        rows = slice(at, at + module.rank)
        a[:, rows], whole = folder.read(module)
        b[rows, start:stop] = whole[:, piece.start : piece.stop]
        at = rows.stop
    dtype = array_dtype(product.dtype)
    with np.errstate(over="ignore"):  # overflows are refused below
        factors = a.astype(dtype), b.astype(dtype)
    if not all(np.isfinite(array).all() for array in factors):
        raise OptionError(
            f"adapter '{name}' ({folder.path}): module '{names[0]}' has NaN, infinity or numbers outside the range "
            f"of {dtype}, in which the model computes"
        )
    return factors
