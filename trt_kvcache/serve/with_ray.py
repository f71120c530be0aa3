"""Runs batch jobs on Ray Data: a pool of actors, each with its own session, on this machine or on a cluster."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import ray
import ray.data

from trt_kvcache.errors import OptionError, SessionError
from trt_kvcache.model_paths import is_model
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.serve.batch_job import Answered, Row, RowRunner

_ROWS = 32
"""Most rows of a block: an actor waits for the slowest row, and killing the driver loses unfinished blocks."""


class _Actor:
    def __init__(self, model: Path, name: str, options: dict[str, Any]) -> None:
        self._runner = RowRunner(DecodeSession.open(model, **options), name)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        rows = [msgspec.msgpack.decode(row, type=Row) for row in block["row"].to_pylist()]

        async def run() -> list[bytes]:
            return [msgspec.msgpack.encode(answered) async for answered in self._runner.answers(rows)]

        return pyarrow.table({"answered": asyncio.run(run()), "model": [self._runner.model] * len(rows)})


def answer_with_ray(
    model: Path,
    name: str,
    options: dict[str, Any],
    workers: int | None,
    rows: Iterable[Row],
    take: Callable[[str, Answered], None],
) -> None:
    """Answer the rows (requests) of a batch job with Ray actors. If an actor dies, another one repeats its rows.

    `options` are keyword arguments of `DecodeSession.open`. `workers` is the number of actors; None: one for each GPU
    if `model` is an engine, else one. All rows are read before the first one is computed. `take` is called with the
    model's digest and each answer. Raises `OptionError` if there are too few GPUs, and `SessionError` with the message
    of a failed actor.
    """
    started = not ray.is_initialized()
    if started:
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    try:
        resources = ray.cluster_resources()
        engine, gpus = not is_model(model), int(resources.get("GPU", 0))
        workers = workers or max(1, gpus if engine else 1)
        if engine and workers > gpus:  # Ray would wait for ever
            raise OptionError(
                f"an engine needs a GPU for each of {workers} workers, but Ray has {gpus}; give fewer --workers"
            )
        # Ray's own tasks need a CPU: if actors take all CPUs, the job hangs silently.
        share = max(0.01, min(1.0, math.floor(100 * (resources.get("CPU", 1) - 1) / workers) / 100))
        absolute = {key: _absolute(value) for key, value in options.items()}
        items = [{"row": msgspec.msgpack.encode(row)} for row in rows]
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        blocks = max(math.ceil(len(items) / _ROWS), min(len(items), 4 * workers))
        answers = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
            _Actor,
            fn_constructor_args=(model.resolve(), name, absolute),
            batch_size=None,  # None: a batch is a block
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=share,
            num_gpus=1 if engine else 0,
        )
        for row in answers.iter_rows():
            take(row["model"], msgspec.msgpack.decode(row["answered"], type=Answered))
    except ray.exceptions.RayError as error:
        words = [line for line in str(error).splitlines() if line.strip()]
        raise SessionError(f"a worker failed: {words[-1].strip() if words else type(error).__name__}") from None
    finally:
        if started:
            ray.shutdown()


def _absolute(value: Any) -> Any:
    """Make paths absolute, also inside a mapping, because workers run in other folders. Keep other values."""
    if isinstance(value, dict):
        return {key: _absolute(one) for key, one in value.items()}
    return value.resolve() if isinstance(value, Path) else value
