"""The shape of a model's logits, and the positions that a step returns logits of."""

from __future__ import annotations

from trt_kvcache.dtypes import array_dtype
from trt_kvcache.errors import SessionError, UnsupportedModelError
from trt_kvcache.importer.plan import CachePlan, Role
from trt_kvcache.input_values import named_axes
from trt_kvcache.runtime.runner import Array, StepBatch


class StepLogits:
    """The output with the logits of a model.

    Attributes:
        name: name of the output.
        dtype: dtype of the output.
        known: whether the model fixes V; else call `settle` before anything else.
        last_only: the model returns logits of the last position of each row only.

    Raises:
        UnsupportedModelError: the model has no logits, or their shape is not understood.
    """

    def __init__(self, plan: CachePlan) -> None:
        tensor = plan.tensor(Role.LOGITS, "output")
        if tensor is None:
            outputs = [t for t in plan.tensors if t.io == "output" and t.role in (Role.LOGITS, Role.OTHER)]
            names = ", ".join(f"'{t.name}' {t.dtype} {list(t.shape)}" for t in outputs) or "caches alone"
            raise UnsupportedModelError(
                f"no output has the role 'logits' (outputs: {names}), and a session chooses tokens by the scores of "
                "the whole vocabulary: export the model with logits, or name them in a config (--config)"
            )
        tensor = named_axes(tensor, plan)
        self.name, self.dtype, self._tensor = tensor.name, array_dtype(tensor.dtype), tensor
        what = f"logits '{tensor.name}' {list(tensor.shape)}"
        size = tensor.shape[-1] if tensor.shape else "?"
        self._what = what
        for dim, axis in zip(tensor.shape[:-1], tensor.axes[:-1], strict=True):
            if axis in ("batch", "sequence", "kept", "tokens") or dim == 1:
                continue
            if isinstance(dim, str):
                raise UnsupportedModelError(f"{what}: nothing says how large '{dim}' is; fix it in the model")
            raise UnsupportedModelError(
                f"{what} hold {dim} vectors of scores for each position, as of several codebooks, and a session "
                "chooses one token by one of them: export logits [B, S, V]"
            )
        self.known = isinstance(size, int)
        self._vocab = size if isinstance(size, int) else 0
        tokens = plan.tensor(Role.TOKENS)
        one_at_a_time = tokens is not None and not {"sequence", "tokens"} & set(named_axes(tokens, plan).axes)
        self._counted = "kept" in tensor.axes
        self.last_only = not one_at_a_time and not {"sequence", "kept", "tokens"} & set(tensor.axes)

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, V: the size of the last axis."""
        if not self._vocab:
            raise UnsupportedModelError(f"{self._what}: nothing says how large the vocabulary is; fix it in the model")
        return self._vocab

    def settle(self, vocab: int) -> None:
        """Set the size of the vocabulary, for a model that leaves it open."""
        self._vocab = self._vocab or vocab

    def shape(self, batch: StepBatch) -> tuple[int, ...]:
        """Return the shape of the output in this step."""
        sizes, tensor = batch.sizes, self._tensor
        dims = zip(tensor.shape[:-1], tensor.axes[:-1], strict=True)
        return (*(d if isinstance(d, int) else sizes[a] for d, a in dims), self.vocab)

    def last(self, output: Array, batch: StepBatch) -> Array:
        """Return the last `keep` positions of the output, ``[R, keep, V]``, in the output's dtype.

        Raises:
            SessionError: the model returns fewer positions.
        """
        positions = self.check(batch)
        return output.reshape(batch.rows, positions, self.vocab)[:, positions - batch.keep :]

    def check(self, batch: StepBatch) -> int:
        """Return the number of positions that the model returns logits of in this step.

        Raises:
            SessionError: the step asks for more.
        """
        positions = 1 if self.last_only else batch.sizes["kept"] if self._counted else batch.length
        if batch.keep > positions:
            raise SessionError(
                f"the model gives the logits of the last position only (output '{self.name}'), and those of the last "
                f"{batch.keep} are needed; export the model with logits of all positions"
            )
        return positions
