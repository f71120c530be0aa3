"""Random operations of several threads on one session; every sequence against the same alone."""

import asyncio
import random
import threading
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from decoders import write_decoder
from foreign_decoders import make_foreign
from greedy import check_greedy
from hostile.held import Fell
from hostile.models import SMALL

from trt_kvcache import DecodeSession, GenerationConfig
from trt_kvcache.decoding import CpuOptions
from trt_kvcache.errors import CapacityError, SlotError

_SHARE = 1e-4  # of the largest logit; what rounding makes of a batch of another shape: 6.5e-5 at most
_CAPACITY = 32


class _Alone:
    """Logits of a text by itself, in a session of its own."""

    def __init__(self, model: Path) -> None:
        self._session = DecodeSession.open(model, capacity=_CAPACITY, max_batch=1, cpu=CpuOptions(threads=1))
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens)
        with self._lock:
            if key not in self._known:
                slot = self._session.cache.acquire()
                self._known[key] = self._session.update({slot: [*tokens]})[slot][-1]
                self._session.cache.release(slot)
            return self._known[key]

    def close(self) -> None:
        self._session.close()


def sessions(rng: random.Random, folder: Path) -> str:
    """Random operations of several threads on one session; every sequence against the same alone."""
    model = folder / "model.onnx"
    form = rng.choice(["mobius", "concat", "gqa", "scatter"])
    config = replace(SMALL, capacity=_CAPACITY, seed=rng.randrange(4))
    if form == "mobius":
        write_decoder(model, config)
    else:
        onnx.save(make_foreign(form, config), model)
    options = {"capacity": _CAPACITY, "max_batch": rng.choice([2, 4, 6]), "max_chunk": rng.choice([3, 8, 32])}
    failed: list[str] = []
    with closing(_Alone(model)) as alone, DecodeSession.open(model, **options, cpu=CpuOptions(threads=1)) as session:

        def work(number: int) -> None:
            own = random.Random(rng_seed + number)
            try:
                for turn in range(12):
                    act = own.choice([_generates, _streams, _astreams, _slots, _slots])
                    with suppress(SlotError):  # others have all rows
                        act(own, session, alone, folder / f"saved-{number}-{turn}")
            except (Fell, AssertionError) as error:
                failed.append(str(error))
            except Exception:  # noqa: BLE001 - whatever it is, it is one more failure
                failed.append(f"trace: {' '.join(traceback.format_exc().split())[-600:]}")

        rng_seed = rng.randrange(2**31)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(rng.choice([2, 4]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not failed and session.cache.slots:
            failed.append(f"slots are left: {session.cache.slots}")
    if failed:
        raise Fell(f"{form}: {failed[0]}")
    return form


def _text(rng: random.Random, most: int = 9) -> list[int]:
    return [rng.randrange(64) for _ in range(rng.randint(1, most))]


def _generates(rng: random.Random, session: DecodeSession, alone: _Alone, _: Path) -> None:
    prompts = [_text(rng) for _ in range(rng.randint(1, 3))]
    config = GenerationConfig(max_new_tokens=rng.randint(1, 8))
    for prompt, made in zip(prompts, session.generate(prompts, config), strict=True):
        if len(made.tokens) != config.max_new_tokens:
            raise Fell(f"{len(made.tokens)} tokens of {config.max_new_tokens}: {made.finish_reason}")
        check_greedy(prompt, made.tokens, alone, _SHARE / 2)


def _streams(rng: random.Random, session: DecodeSession, alone: _Alone, _: Path) -> None:
    prompt, most = _text(rng), rng.randint(0, 6)
    events = session.stream([prompt], GenerationConfig(max_new_tokens=8))
    tokens = []
    for event in events:
        tokens.append(event.token)
        if len(tokens) > most:
            break
    events.close()  # type: ignore[attr-defined]
    check_greedy(prompt, [t for t in tokens if t is not None], alone, _SHARE / 2)


def _astreams(rng: random.Random, session: DecodeSession, alone: _Alone, _: Path) -> None:
    prompt, patience = _text(rng), rng.choice([0.0, 0.001, 0.01, 5.0])
    tokens: list[int] = []

    async def collect() -> None:
        async for event in session.astream([prompt], GenerationConfig(max_new_tokens=8)):
            if event.token is not None:
                tokens.append(event.token)

    async def limited() -> None:
        loop = asyncio.get_running_loop()
        said: list[str] = []
        loop.set_exception_handler(lambda _, context: said.append(str(context["message"])))
        with suppress(TimeoutError):
            await asyncio.wait_for(collect(), patience)
        if said:
            raise Fell(f"asyncio says {said[0]}")

    asyncio.run(limited())
    check_greedy(prompt, tokens, alone, _SHARE / 2)


def _slots(rng: random.Random, session: DecodeSession, alone: _Alone, file: Path) -> None:
    """Slots that are written, forked, cropped, saved and loaded."""
    held: dict[int, list[int]] = {}
    try:
        held[session.cache.acquire()] = []
        for _ in range(rng.randint(2, 8)):
            slot = rng.choice([*held])
            act = rng.choice(["update", "update", "update", "fork", "crop", "save"])
            if act == "fork":
                held[session.cache.fork(slot)] = [*held[slot]]
            elif act == "crop" and held[slot]:
                length = rng.randint(1, len(held[slot]))
                session.cache.crop(slot, length)
                del held[slot][length:]
            elif act == "save" and held[slot]:
                session.cache.save(file, [slot])
                try:
                    for name in session.cache.load(file).values():
                        held[name] = [*held[slot]]
                finally:
                    file.unlink()
            elif act == "update":
                _update(rng, session, alone, slot, held[slot])
        for slot, text in held.items():
            _update(rng, session, alone, slot, text)
    finally:
        for slot in held:
            session.remove(slot)


def _update(rng: random.Random, session: DecodeSession, alone: _Alone, slot: int, text: list[int]) -> None:
    more = _text(rng, 4)
    if len(text) + len(more) > _CAPACITY:
        with suppress(CapacityError):
            session.update({slot: more})
            raise Fell(f"{len(text) + len(more)} tokens fit into {_CAPACITY} rows")
        return
    found = session.update({slot: more})[slot][-1]
    text += more
    wanted = alone(text)
    if not np.allclose(found, wanted, rtol=0, atol=_SHARE * float(np.abs(wanted).max())):
        raise Fell(f"logits after {text} differ by {np.abs(found - wanted).max():.2e}")
