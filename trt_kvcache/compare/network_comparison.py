"""Compares a model with the network that TensorRT's parser made of it, before an engine is built.

ONNX Runtime runs the model, and NumPy the network, both in float32, for the same few steps. All outputs are compared,
including whole caches: cache rows without a token hold garbage, which must not change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from onnx import ModelProto

from trt_kvcache.compare.decode import Piece, plan_pieces
from trt_kvcache.compare.differences import GARBAGE, first_layer, share_between, with_inner_outputs
from trt_kvcache.compare.exported_model import Exported
from trt_kvcache.compare.float32_copy import Float32Copies
from trt_kvcache.compare.numpy_network import Network, NetworkError, UnknownLayerError
from trt_kvcache.compare.rewritten_model import Float32Session, Rewritten
from trt_kvcache.compare.text_inputs import TextInputs, token_table
from trt_kvcache.cpu import RunError
from trt_kvcache.errors import BuildError, OptionError, OutputError, UnsupportedModelError
from trt_kvcache.importer.cache_plan import CachePlan, cache_bytes
from trt_kvcache.importer.families import for_cpu
from trt_kvcache.importer.interface import index_limits
from trt_kvcache.importer.protos import Array, byte_size, iter_tensors
from trt_kvcache.importer.steps.drawn_inputs import read_limits
from trt_kvcache.machine import free_memory
from trt_kvcache.plugins.operators import OPERATORS

LIMIT = 2e-5
"""The largest allowed difference, as a share of an output's largest number. NumPy and ONNX Runtime sum differently.

The largest difference measured on 33 stored exports is 2e-6.
"""

_ROWS = 2
_PIECES = 4
_COPIES = 4  # copies of caches: before and after a step, on each side
_SHARE = 0.5  # share of the free memory that a comparison may take
_FAILS = (OptionError, OutputError, RunError, UnknownLayerError, UnsupportedModelError)


@dataclass(frozen=True)
class NetworkComparison:
    """The result of comparing a network with its model.

    Attributes:
        steps: number of steps that network and model both ran.
        difference: the largest difference, as a share of an output's largest number.
        finding: the output and the first layer that differ; empty if nothing differs.
        note: why there is no comparison; empty if network and model were compared.
    """

    steps: int
    difference: float
    finding: str = ""
    note: str = ""

    def __str__(self) -> str:
        return (
            f"not compared: {self.note}" if self.note else f"equal in {self.steps} steps, within {self.difference:.1g}"
        )

    def check(self) -> None:
        """Raise `BuildError` if an output differs."""
        if self.finding:
            raise BuildError(
                f"the network that TensorRT's parser made computes other numbers than the model: {self.finding}; an "
                "engine built from it would give wrong numbers; try another version of TensorRT, and please report "
                "the model ('trt-kvcache report')"
            )


def compare_network(
    network: Any, trt: Any, content: bytes, folder: Path, plan: CachePlan,
    replaced: Mapping[str, bytes | bytearray] | None = None, pieces: Sequence[Piece] = (), tokens: Sequence[Array] = (),
    garbage: float = GARBAGE, seed: int = 0, copy: tuple[ModelProto, Path] | None = None,
) -> NetworkComparison:  # fmt: skip
    """Run a parsed network and its model on the same steps, and compare all outputs.

    The result has only a `note` if ONNX Runtime cannot run the model, if NumPy cannot run a layer, or if memory is too
    small. `replaced` are the bytes that TensorRT got instead of those in the files. Without `pieces` and `tokens`, a
    few random steps run. `copy`: the float32 copy of the model and the folder of its data, if they exist already.
    """
    model, limits = ModelProto.FromString(content), read_limits(plan, _ROWS)
    if why := too_large(model, plan, limits.batch):
        return NetworkComparison(0, 0.0, note=why)
    pieces = pieces or plan_pieces(limits, plan, (5,), 1)[:_PIECES]
    inputs = TextInputs(plan, index_limits(model, plan), table=token_table(plan, seed), seed=seed)
    try:
        with TemporaryDirectory(prefix="trt-kvcache-network-") as name:
            wide, place = copy or Float32Copies(Path(name)).copy(for_cpu(model)[0], folder, replaced)
            watch, session = NetworkWatch(network, trt, wide, place, garbage), Float32Session(wide, place)
            steps = Rewritten(plan, inputs, session.run, garbage=garbage, seed=seed)
            steps.watch = watch
            steps.start(max(row + 1 for piece in pieces for row in piece.rows))
            for count, piece in enumerate(pieces):
                steps.step(piece, tokens[count] if tokens else None)
                if watch.found.finding or watch.found.note:
                    break
            return watch.found
    except _FAILS as error:
        return NetworkComparison(0, 0.0, note=getattr(error, "message", str(error)))


def compare_as_exported(network: Any, trt: Any, path: Path, plan: CachePlan) -> NetworkComparison:
    """Run the model as exported in ONNX Runtime and as TensorRT's network, and compare the outputs of both."""
    shares = list[float]()

    def watch(feeds: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        had = run(feeds)
        shares.append(max(share_between(values, had[name]) for name, values in wanted.items()))

    try:
        run, exported = Network(network, trt).run, Exported(path, plan)
        exported.watch = watch
        exported.start(1)
        for piece in plan_pieces(read_limits(plan, 1), plan, (5,), 2):
            tokens = (3 * np.arange(piece.length) + 5) % (exported.vocabulary or 2)
            exported.step(Piece(piece.length, (0,)), tokens[None])
    except _FAILS as error:
        return NetworkComparison(0, 0.0, note=getattr(error, "message", str(error)))
    except NetworkError as error:
        return NetworkComparison(0, math.inf, error.message)
    finding = "" if max(shares) <= LIMIT else "the network's outputs differ from the model's"
    return NetworkComparison(len(shares), max(shares), finding)


class NetworkWatch:
    """Runs a parsed network on each step of its float32 model, and compares all outputs; `found` is the result.

    `garbage` is the value of cache rows without a token. `steps` are the numbers of the steps to compare (None: all).
    """

    def __init__(
        self, network: Any, trt: Any, model: ModelProto, folder: Path, garbage: float = GARBAGE,
        steps: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._folder, self._garbage, self._steps, self._seen = model, folder, garbage, steps, 0
        self.found = NetworkComparison(0, 0.0)
        with self._reported(0):
            updates = {n.output[0]: OPERATORS[n.op_type] for n in model.graph.node if n.op_type in OPERATORS}
            self._network = Network(network, trt, updates)

    def __call__(self, feeds: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Run the network on `feeds` and compare its outputs with `wanted`, unless an earlier step differed."""
        self._seen += 1
        if self.found.finding or self.found.note or not (self._steps is None or self._seen - 1 in self._steps):
            return
        count = self.found.steps + 1
        with self._reported(count):
            had = self._network.run(feeds)
            shares = {name: share_between(values, had[name], self._garbage) for name, values in wanted.items()}
            name = max(shares, key=lambda n: shares[n])
            worst, finding = max(self.found.difference, shares[name]), ""
            if worst > LIMIT:
                by = "is of another size, or not finite" if math.isinf(worst) else f"differs by {worst:.2g} of its size"
                finding = f"'{name}' {by} in step {count}; {self._first(feeds)}"
            self.found = NetworkComparison(count, worst, finding)

    @contextmanager
    def _reported(self, count: int) -> Iterator[None]:
        """Store an error of the network: as a note if a layer cannot run, or as a finding if a step fails."""
        try:
            yield
        except UnknownLayerError as error:
            self.found = NetworkComparison(count, 0.0, note=error.message)
        except NetworkError as error:
            self.found = NetworkComparison(count, math.inf, error.message)

    def _first(self, feeds: Mapping[str, Array]) -> str:
        given = {name for node in self._network.nodes for name in node.output}
        try:
            wanted = Float32Session(with_inner_outputs(self._model, given), self._folder).run(feeds)
        except RunError as error:
            return (
                "the first layer that differs is unknown, because ONNX Runtime cannot return the values inside "
                f"the model: {error}"
            )
        differs: dict[str, bool] = {}
        self._network.run(feeds, lambda node, results: differs.update(
            (name, share_between(wanted[name], values, self._garbage) > LIMIT)
            for name, values in zip(node.output, results, strict=True) if name in wanted
        ))  # fmt: skip
        outputs = [o.name for o in self._model.graph.output]
        return first_layer(self._network.nodes, differs, outputs) or "no layer before it differs"


def too_large(model: ModelProto, plan: CachePlan, rows: int) -> str:
    """Return why memory does not suffice to compare a model, from its sizes alone; empty if memory suffices."""
    weights = 4 * sum(math.prod(t.dims) for t in iter_tensors(model) if (byte_size(t) or 0) > 1024)
    caches = sum(4 * cache_bytes(c, rows) for c in plan.caches)
    needed, free = weights + _COPIES * caches, int(_SHARE * free_memory())
    if needed <= free:
        return ""
    return (
        f"the comparison takes {weights / 1e9:.1f} GB for weights in float32 and {_COPIES * caches / 1e9:.1f} GB "
        f"for caches, but only {free / 1e9:.1f} GB are free"
    )
