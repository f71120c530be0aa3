"""Decodes with the inputs and outputs of the rewritten model, computed by ONNX Runtime in float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from trt_kvcache.compare.decode import Piece
from trt_kvcache.compare.differences import GARBAGE
from trt_kvcache.compare.text_inputs import TextInputs, by_position
from trt_kvcache.cpu import lean_options, open_in_time, run_in_time
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import CachePlan, Role
from trt_kvcache.importer.protos import Array
from trt_kvcache.importer.steps.cache_contents import all_contents, find_caches, find_states
from trt_kvcache.importer.weights import for_session

Feeds = dict[str, Array]


class TextCaches(ABC):
    """The caches of several texts as inputs of the rewritten model.

    Cache rows without a token hold `garbage`. `seed` is for random contents. `tensors` are the caches and states of the
    plan, by past input; `ends` are the texts' numbers of tokens; `texts` are the texts whose caches are in memory.
    """

    def __init__(self, plan: CachePlan, garbage: float, seed: int) -> None:
        self.tensors = {c.role.name: c for c in (*find_caches(plan), *find_states(plan))}
        self._garbage, self._seed = garbage, seed
        self.begin(0)

    @abstractmethod
    def read(self, name: str, text: int) -> Array:
        """Return the contents of a cache for one text, ``[*physical_shape[1:]]``."""

    @abstractmethod
    def write(self, name: str, texts: Sequence[int], values: Array) -> None:
        """Replace the cache contents of some texts (sequences) with `values`, ``[texts, *physical_shape[1:]]``."""

    def begin(self, rows: int, texts: range | None = None) -> None:
        """Start `rows` new texts without tokens. Keep only the caches of `texts` in memory; None: of all texts."""
        self.ends, self.texts = np.zeros(rows, np.int64), range(rows) if texts is None else texts

    def fill(self, episode: int = 0) -> None:
        """Fill cache rows of tokens with random numbers (others for each `episode`), and later rows with garbage."""
        for name, values in all_contents(self.tensors, self._seed, self.ends.tolist(), self._garbage, episode):
            self.write(name, range(len(self.ends)), self.tensors[name].to_physical(values))

    def skip(self, piece: Piece) -> None:
        """Apply `Piece.skip` and `Piece.drawn`: lengthen texts with copies of rows, or fill all caches randomly."""
        updated = [(name, cache) for name, cache in self.tensors.items() if cache.update is not None]
        for name, cache in updated if piece.skip and not piece.drawn else ():
            for text in {*piece.rows}.intersection(self.texts):
                values, end = np.array(self.read(name, text)), int(self.ends[text])
                rows = cache.physical_rows(values[None])[0]
                skipped = np.arange(max(end + piece.skip - len(rows), 0), end + piece.skip) % len(rows)
                rows[skipped] = rows[skipped % min(end, len(rows))]
                self.write(name, [text], values[None])
        self.ends[list(piece.rows)] += piece.skip
        if piece.drawn:
            self.fill(1)


class Rewritten(TextCaches):
    """Decodes texts with the rewritten model, whose outputs `run` computes; all floats are float32.

    `caches` are caches and states ``[rows, *physical_shape[1:]]``, by name of the past input. `watch` is called with
    the inputs and outputs of each step.
    """

    name = f"ONNX Runtime {ort.__version__}, float32"

    def __init__(
        self, plan: CachePlan, inputs: TextInputs, run: Callable[[Feeds], Mapping[str, Array]] = lambda _: {}, *,
        garbage: float = GARBAGE, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(plan, garbage, seed)
        self._plan, self._inputs, self._run = plan, inputs, run
        self.watch: Callable[[Feeds, Mapping[str, Array]], None] = lambda *_: None
        self.caches: Feeds = {}

    def read(self, name: str, text: int) -> Array:
        """Return the contents of a cache for one text, ``[*physical_shape[1:]]``."""
        return np.asarray(self.caches[name][text])

    def write(self, name: str, texts: Sequence[int], values: Array) -> None:
        """Replace the cache contents of some texts (sequences) with `values`, ``[texts, *physical_shape[1:]]``."""
        if len(texts) == len(self.ends):
            self.caches[name] = _wide(values)
        else:
            self.caches[name][list(texts)] = values

    def start(self, rows: int) -> None:
        """Start `rows` new texts without tokens."""
        self.begin(rows)
        self._inputs.start(rows)
        self.fill()

    def step(self, piece: Piece, tokens: Array | None) -> Array:
        """Run one step (`piece`) of the decode, and return its logits. If `tokens` is None, use random tokens."""
        self.skip(piece)
        feeds = self.feeds(piece, tokens)
        outputs = self._run(feeds)
        self.watch(feeds, outputs)
        self.accept(piece, outputs)
        name = output_of(self._plan)
        axes = next(t.axes for t in self._plan.tensors if t.io == "output" and t.name == name)
        logits = by_position(outputs[name], axes, len(piece.rows))
        return logits if piece.kept is None else logits[:, -piece.kept :].copy()

    def feeds(self, piece: Piece, tokens: Array | None = None) -> Feeds:
        """Return all inputs of a step, including caches. For a step of all texts, the caches are not copied."""
        rows = list(piece.rows)
        feeds = self._inputs.feeds(piece, self.ends[rows].tolist(), tokens)
        caches = self.caches if len(rows) == len(self.ends) else {n: v[rows] for n, v in self.caches.items()}
        return {name: _wide(values) for name, values in feeds.items()} | caches

    def accept(self, piece: Piece, outputs: Mapping[str, Array]) -> None:
        """Store the presents in the `outputs` of a step as the caches of its texts, for the next step."""
        rows = list(piece.rows)
        for name, cache in self.tensors.items():
            if cache.output is not None:
                self.write(name, rows, outputs[cache.output])
        self.ends[rows] += piece.length


def output_of(plan: CachePlan) -> str:
    """Return the output to compare: the logits, or the first output that no later step takes as an input."""
    outputs = [t for t in plan.tensors if t.io == "output" and t.role not in (Role.CACHE, Role.STATE)]
    found = [t.name for t in outputs if t.role is Role.LOGITS] or [t.name for t in outputs if t.shape]
    if not found:
        raise OptionError("the model has no output except its caches, so there is nothing to compare")
    return found[0]


class Float32Session:
    """Runs a float32 model in ONNX Runtime, without fusions. Raises `RunError` if ONNX Runtime refuses the model."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        options = lean_options(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        self._session = open_in_time(for_session(model, folder, options), options)
        self._inputs = frozenset(i.name for i in self._session.get_inputs())
        self._outputs = [o.name for o in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> Feeds:
        """Return all outputs by name. Extra `feeds` are ignored. Raises `RunError` if the model cannot run on them."""
        values = run_in_time(self._session, self._outputs, {n: v for n, v in feeds.items() if n in self._inputs})
        return dict(zip(self._outputs, values, strict=True))


def _wide(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype.name in ("float16", "bfloat16") else values
