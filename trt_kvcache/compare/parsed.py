"""Compares the network that TensorRT's parser made of a rewritten model with the model, before an engine is built.

ONNX Runtime runs the model and NumPy the network, both in float32, over the same few steps of a decode. All outputs are
compared, including whole caches: rows without a token hold garbage, which must not change.
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
import numpy.typing as npt
from onnx import ModelProto, ValueInfoProto

from trt_kvcache.compare.decode import Piece, plan_pieces
from trt_kvcache.compare.exported import Exported
from trt_kvcache.compare.float32_copy import float32_copy
from trt_kvcache.compare.network import Network, NetworkError, Node, UnknownLayerError
from trt_kvcache.compare.rewritten import GARBAGE, Rewritten, WideSession
from trt_kvcache.cpu import RunError
from trt_kvcache.errors import BuildError, OptionError, OutputError, UnsupportedModelError
from trt_kvcache.importer.families import for_cpu
from trt_kvcache.importer.plan import CachePlan, cache_bytes
from trt_kvcache.importer.planning.index_limits import index_limits
from trt_kvcache.importer.protos import byte_size, copied, iter_tensors
from trt_kvcache.importer.steps.inputs import draw_constants
from trt_kvcache.importer.steps.step import read_limits
from trt_kvcache.machine import free_memory

__all__ = ["NetworkComparison", "NetworkWatch", "compare_network", "share_between", "too_large"]

Array = npt.NDArray[Any]

LIMIT = 2e-5
"""The largest allowed difference, as a share of an output's largest number: both sides compute in float32, and add in
different orders. Measured on 33 stored exports: 2e-6."""

_ROWS = 2
_PIECES = 4
_COPIES = 4  # copies of caches: before and after a step, on each side
_SHARE = 0.5  # share of the free memory


@dataclass(frozen=True)
class NetworkComparison:
    """The result of comparing a network with its model.

    Attributes:
        steps: number of steps that both ran.
        difference: the largest difference, as a share of an output's largest number.
        finding: what differs, and the first layer that differs; empty: nothing.
        note: why they were not compared; empty if they were.
    """

    steps: int
    difference: float
    finding: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Return the result as one line."""
        return (
            f"not compared: {self.note}" if self.note else f"equal in {self.steps} steps, within {self.difference:.1g}"
        )

    @property
    def allowed(self) -> float:
        """The largest difference that counts as equal."""
        return LIMIT

    def check(self) -> None:
        """Raise an error if something differs.

        Raises:
            BuildError: the network computes something else than the model.
        """
        if self.finding:
            raise BuildError(
                f"TensorRT's parser made another network of the model: {self.finding}; an engine of it would give "
                "wrong numbers; try another version of TensorRT, and please report the model ('trt-kvcache report')"
            )


def compare_network(
    network: Any, trt: Any, content: bytes, folder: Path, plan: CachePlan,
    replaced: Mapping[str, bytes | bytearray] | None = None, pieces: Sequence[Piece] = (), tokens: Sequence[Array] = (),
    garbage: float = GARBAGE,
) -> NetworkComparison:  # fmt: skip
    """Run a parsed network and its model side by side.

    Args:
        network: TensorRT's ``INetworkDefinition``.
        trt: the module that parsed it.
        content: the model that was parsed, as bytes.
        folder: folder of its external data.
        plan: plan of the model.
        replaced: bytes of weights by name, which TensorRT was given instead of those in their files.
        pieces: pieces of a decode; empty: a few default ones.
        tokens: tokens of the pieces; empty: random ones.
        garbage: see `trt_kvcache.compare.rewritten.GARBAGE`.

    Returns:
        The result. If ONNX Runtime cannot run the model, NumPy cannot run a layer, or the model does not fit into
            memory, they are not compared, and the note says why.
    """
    model, limits = ModelProto.FromString(content), read_limits(plan, _ROWS)
    if why := too_large(model, plan, limits.batch):
        return NetworkComparison(0, 0.0, note=why)
    try:
        with TemporaryDirectory(prefix="trt-kvcache-network-") as name:
            runs, _ = for_cpu(model)
            wide, place = float32_copy(runs, folder, Path(name), replaced)
            rows = max((row + 1 for piece in pieces for row in piece.rows), default=limits.batch)
            watch, session = NetworkWatch(network, trt, wide, place, garbage), WideSession(wide, place)
            steps = Rewritten(plan, index_limits(model, plan), garbage=garbage)
            steps.start(rows)
            chosen = pieces or plan_pieces(limits, plan, (5,), 1)[:_PIECES]
            for count, piece in enumerate(chosen):
                feeds = steps.feeds(piece, tokens[count] if tokens else None)
                wanted = session.run(feeds)
                watch(feeds, wanted)
                if watch.found.finding or watch.found.note:
                    break
                steps.accept(piece, wanted)
            return watch.found
    except (OptionError, OutputError, RunError, UnsupportedModelError) as error:
        return NetworkComparison(0, 0.0, note=getattr(error, "message", str(error)))


def compare_as_exported(network: Any, trt: Any, path: Path, plan: CachePlan) -> NetworkComparison:
    """Run the network parsed from a model as exported beside the model itself, which decodes with its own caches.

    Args:
        network: TensorRT's ``INetworkDefinition``.
        trt: the module that parsed it.
        path: path of the model.
        plan: plan of the model; gives the roles of its inputs.
    """
    try:
        run, given = Network(network, trt).run, draw_constants(plan, 1, 0, twin=True)
        exported, shares = Exported(path, plan, wide=True, given=given), list[float]()
        exported.watch = lambda feeds, wanted: shares.append(_worst(run(feeds), wanted))
        exported.start([()])
        limits = read_limits(plan, 1)
        for piece in plan_pieces(limits, plan, (5,), 2):
            exported.step([[(3 * i + 5) % (exported.vocabulary or 2) for i in range(piece.length)]])
    except (OptionError, OutputError, RunError, UnknownLayerError, UnsupportedModelError) as error:
        return NetworkComparison(0, 0.0, note=getattr(error, "message", str(error)))
    except NetworkError as error:
        return NetworkComparison(0, math.inf, error.message)
    worst = max(shares)
    return NetworkComparison(len(shares), worst, "" if worst <= LIMIT else "its outputs are not the model's")


def _worst(had: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    return max(share_between(values, had[name]) for name, values in wanted.items())


def share_between(expected: Array, actual: Array, garbage: float = GARBAGE) -> float:
    """Return the largest difference of two tensors, as a share of the largest number of the first one.

    Garbage does not count as largest number. Codes of 8 bits or less may differ by one, because rounding may move them
    to a neighbour. The result is infinite if shapes differ, if one number is finite and the other is not, or if whole
    numbers differ.
    """
    if expected.shape != actual.shape:
        return math.inf
    if expected.dtype.kind in "iub" and expected.dtype.itemsize > 1:
        return 0.0 if np.array_equal(expected, actual) else math.inf
    differs = expected != actual  # few rows of caches differ: equal numbers are not looked at again
    one, other = expected[differs].astype(np.float64), actual[differs].astype(np.float64)
    known = np.isfinite(one)
    if not np.array_equal(known, np.isfinite(other)) or not np.array_equal(one[~known], other[~known], equal_nan=True):
        return math.inf
    difference = np.abs(one[known] - other[known])
    if not difference.size:
        return 0.0
    if expected.dtype.kind in "iub":
        return math.inf if difference.max() > 1 or difference.size > 1e-3 * expected.size else 0.0
    sizes = np.abs(expected)
    counts = np.isfinite(sizes) & (np.abs(sizes - garbage) > 0.01 * garbage)
    scale = float(sizes.max(initial=0, where=counts))
    return float(difference.max() / scale) if scale else math.inf


class NetworkWatch:
    """Runs a parsed network on the inputs of each step of its model, and compares all outputs.

    Attributes:
        found: the result so far.

    Args:
        network: TensorRT's ``INetworkDefinition``.
        trt: the module that parsed it.
        model: the model in float32.
        folder: folder of its external data.
        garbage: see `trt_kvcache.compare.rewritten.GARBAGE`.
        steps: numbers of the steps to compare; None: all.
    """

    def __init__(
        self, network: Any, trt: Any, model: ModelProto, folder: Path, garbage: float = GARBAGE,
        steps: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._folder, self._garbage, self._steps, self._seen = model, folder, garbage, steps, 0
        self.found = NetworkComparison(0, 0.0)
        with self._reported(0):
            self._network = Network(network, trt)

    def __call__(self, feeds: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Compare a step, unless an earlier step had a finding or a note."""
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
        """Turn errors of the network into a note or a finding."""
        try:
            yield
        except UnknownLayerError as error:
            self.found = NetworkComparison(count, 0.0, note=error.message)
        except NetworkError as error:
            self.found = NetworkComparison(count, math.inf, error.message)

    def _first(self, feeds: Mapping[str, Array]) -> str:
        """Return the first layer whose result differs, among layers whose result is a tensor of the model."""
        known = {name for node in self._model.graph.node for name in node.output if name}
        taken = {o.name for o in self._model.graph.output}
        names = [name for node in self._network.nodes for name in node.outputs if name in known]
        marked = copied(self._model)
        marked.graph.output.extend(ValueInfoProto(name=name) for name in names if name not in taken)
        try:
            wanted = WideSession(marked, self._folder).run(feeds, names)
        except RunError as error:
            return f"no layer is named: ONNX Runtime does not give what is inside of the model: {error}"
        found: list[tuple[Node, str, float]] = []

        def watch(node: Node, results: Sequence[Array]) -> None:
            for name, values in zip(node.outputs, results, strict=True):
                if name in wanted and not found:
                    share = share_between(wanted[name], values, self._garbage)
                    if share > LIMIT:
                        found.append((node, name, share))

        self._network.run(feeds, watch)
        if not found:
            return "no layer before it differs"
        node, name, share = found[0]
        by = "which is of another size, or not finite" if math.isinf(share) else f"by {share:.2g} of its size"
        return f"the first layer that differs is '{node.name}' ({node.kind}), which gives '{name}', {by}"


def too_large(model: ModelProto, plan: CachePlan, rows: int) -> str:
    """Return why a model does not fit into memory; empty if it fits. Nothing is opened for that."""
    weights = 4 * sum(math.prod(t.dims) for t in iter_tensors(model) if (byte_size(t) or 0) > 1024)
    caches = sum(4 * cache_bytes(c, rows) for c in plan.caches)
    needed, free = weights + _COPIES * caches, int(_SHARE * free_memory())
    if needed <= free:
        return ""
    return (
        f"it takes {weights / 1e9:.1f} GB for weights in float32 and {_COPIES * caches / 1e9:.1f} GB for caches, and "
        f"{free / 1e9:.1f} GB are to be had"
    )
