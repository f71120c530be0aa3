"""An error that belongs to one sequence ends that one, with its own reason, wherever it comes from; the others go on.

The places are all that a step does for a sequence: each is made to fail for one of three.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from runtime.hash_runner import TABLE, VOCAB, Alone, EmbeddedRunner, HashRunner, continued
from runtime.test_draft import Sometimes

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import Schedule
from trt_kvcache.errors import SessionError, TrtKvCacheError
from trt_kvcache.importer.cache_plan import AdapterPlan
from trt_kvcache.runtime import cache_rows as cache
from trt_kvcache.runtime import prefix
from trt_kvcache.runtime.adapters import Adapter, AdapterSlots
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.draft import DraftModel
from trt_kvcache.runtime.embeddings import Embeddings
from trt_kvcache.runtime.prefix import PrefixCache
from trt_kvcache.runtime.runner import StepBatch
from trt_kvcache.runtime.slot import HostRows

COUNT = 9
OTHERS = ([1, 2, 7], [5, 6, 8])
OWN = next(t for t in range(9, VOCAB) if not any(t in continued(HashRunner(), p, COUNT) for p in OTHERS))
"""A token of one prompt alone."""
PROMPTS = (OTHERS[0], [3, OWN, 4], OTHERS[1])


class Masking(HashRunner):
    """It reads the masks of a step before it writes anything, as a GPU that chooses does."""

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        if batch.masks is not None:
            batch.masks(-(-VOCAB // 32))
        return super().step(batch)


class Anything:
    """A grammar that allows every token."""

    def start(self) -> Callable[[NDArray[np.int64]], NDArray[np.int32]]:
        return lambda new: np.full(-(-VOCAB // 32), -1, np.int32)


@dataclass(frozen=True)
class Place:
    """Where it fails.

    Attributes:
        owner, name: of the method.
        mine: whether a call is for the sequence, from the session, its slot and the arguments.
        after: calls for it that succeed.
        session, settings: how it is opened and asked.
        ends: the sequence ends; else it only loses some help.
    """

    owner: type
    name: str
    mine: Callable[[DecodeSession, int, tuple[Any, ...]], bool]
    after: int = 0
    session: Callable[[], DecodeSession] = lambda: DecodeSession(HashRunner())
    settings: tuple[tuple[str, Any], ...] = ()
    ends: bool = True


def row(session: DecodeSession, slot: int) -> int:
    return session.cache.slot(slot).row if slot in session.cache else -1


def has_own(*parts: Any) -> bool:
    return any(OWN in np.asarray(part).ravel().tolist() for part in parts)


def with_adapters() -> DecodeSession:
    runner = HashRunner()
    runner.plan = replace(runner.plan, adapters=AdapterPlan(rank=2, slots=3, index="adapter", products=()))
    return DecodeSession(runner)


def with_prefixes() -> DecodeSession:
    return DecodeSession(HashRunner(), schedule=Schedule(prefix_cache=400))


LOOKUP = (("prompt_lookup_num_tokens", 3), ("max_matching_ngram_size", 1))
PLACES = {
    "its adapter is written": Place(
        AdapterSlots, "_write", lambda s, slot, args: args[1].name == "own", session=with_adapters
    ),
    "its embeddings are looked up": Place(
        Embeddings, "look_up", lambda s, slot, args: has_own(args[1]),
        session=lambda: DecodeSession(EmbeddedRunner(), embeddings=TABLE),
    ),
    "its tokens are run": Place(HashRunner, "step", lambda s, slot, args: has_own(args[1].tokens)),
    "its rows are noted": Place(CacheRows, "note_touched", lambda s, slot, args: args[1] == slot, 2),
    "its mask is made": Place(Continuation, "masks", lambda s, slot, args: args[0].sequence == slot, 1,
        session=lambda: DecodeSession(Masking()), settings=(("grammar", Anything()),)),
    "its draft is looked up": Place(
        Continuation, "draft", lambda s, slot, args: args[0].sequence == slot, 1, settings=LOOKUP
    ),
    "its guesses are dropped": Place(
        CacheRows, "_truncate", lambda s, slot, args: args[1] == row(s, slot),
        session=lambda: DecodeSession(HashRunner(), draft=DraftModel(Sometimes())),
    ),
    "it begins a draft": Place(
        DraftModel, "_begin", lambda s, slot, args: args[1] == slot, 1, ends=False,
        session=lambda: DecodeSession(HashRunner(), draft=DraftModel(HashRunner())),
    ),
    "its piece is cut": Place(
        CacheRows, "largest_update", lambda s, slot, args: args[0] is s._rows and args[1] == slot
    ),
    "its prefix is recalled": Place(PrefixCache, "find", lambda s, slot, args: has_own(args[1]), session=with_prefixes),
    "its prefix is remembered": Place(
        PrefixCache, "add", lambda s, slot, args: has_own(args[2]), session=with_prefixes
    ),
    "its rows come back from the host": Place(
        HostRows, "fill", lambda s, slot, args: s.cache.slot(slot).offloaded is args[0],
        session=lambda: DecodeSession(HashRunner(max_batch=3), schedule=Schedule(max_sequences=6)),
    ),
    "it gets a row": Place(
        CacheRows, "give_row", lambda s, slot, args: args[1] == slot,
        session=lambda: DecodeSession(HashRunner(max_batch=1)),
    ),
    "its token is chosen": Place(Continuation, "advance", lambda s, slot, args: args[0].sequence == slot, 2),
    "its end is told": Place(
        Continuation, "finish", lambda s, slot, args: args[0].sequence == slot,
        session=lambda: DecodeSession(HashRunner((("linear", 8),))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("error", [SessionError("no more of this one"), RuntimeError("secret")], ids=["ours", "a bug"])
@pytest.mark.parametrize("place", PLACES)
def test_a_sequence_that_fails_ends_alone(place: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    where = PLACES[place]
    monkeypatch.setattr(prefix, "BLOCK", 3)
    monkeypatch.setattr(cache, "BLOCK", 3)
    session = where.session()
    runner: Any = session._runner
    slots: list[int] = []
    for i, prompt in enumerate(PROMPTS):
        slots.append(session.add(prompt, GenerationConfig(COUNT, **dict(where.settings))))
        if session.plan.adapters is not None:
            session.cache.slot(slots[-1]).adapter = Adapter("own" if i == 1 else f"{i}", 1, "00", {})
    mine = slots[1]
    if place == "its rows come back from the host":
        session._rows.slots[mine] = replace(
            session.cache.slot(mine), row=-1, offloaded=HostRows(runner, session.cache.slot(mine).row, 1)
        )
    wanted = dict(zip(slots, (alone(session, prompt) for prompt in PROMPTS), strict=True))
    real, calls, raised = getattr(where.owner, where.name), 0, 0

    def fails(*args: Any, **more: Any) -> Any:
        nonlocal calls, raised
        calls += (own := where.mine(session, mine, args))
        if own and calls > where.after:
            raised += 1
            raise error
        return real(*args, **more)

    monkeypatch.setattr(where.owner, where.name, fails)
    tokens: dict[int, list[int | None]] = {slot: [] for slot in slots}
    failures: list[TrtKvCacheError] = []
    while session.running:
        try:
            for event in session.step():
                if event.token is not None:
                    tokens[event.sequence].append(event.token)
        except TrtKvCacheError as failure:
            failures.append(failure)
    monkeypatch.undo()
    assert raised
    for slot in slots:
        told = tokens[slot]
        assert told == wanted[slot][: len(told)]
        assert slot == mine or len(told) == len(wanted[slot])
    if where.ends:
        (failure,) = failures
        assert failure.sequence == mine
        assert str(failure) == (str(error) if isinstance(error, SessionError) else BUG)
        assert failure is error or failure.__cause__ is error
    else:
        assert failures == []
        assert tokens == wanted
    assert session.cache.slots == ()
    assert session.generate([PROMPTS[0]], GenerationConfig(5))[0].tokens == alone(session, PROMPTS[0])[:5]


BUG = "the sequence failed by a bug: RuntimeError; please report it with its trace"


def alone(session: DecodeSession, prompt: list[int]) -> list[int]:
    """What a prompt gives, as far as the caches reach."""
    runner: Any = session._runner
    text = Alone.of(runner)
    text.take(prompt)
    capacity = session.cache.capacity
    assert capacity is not None
    return text.continued(min(COUNT, capacity - len(prompt) + 1))
