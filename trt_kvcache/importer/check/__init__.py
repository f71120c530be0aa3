"""One check decides whether a rewritten model is taken: recognizers guess, and nothing that they say is believed.

Everything that the rewritten model computes differently is cut out of it and out of the model as exported. Both parts
run in ONNX Runtime on random queries, keys and values, over steps that tell masks, windows and layouts apart.

    graph      digests: what is equal by construction
    sizes      shapes in batch and new tokens
    cut        regions between boundaries, caches and inputs on one end, joins and presents on the other
    steps      lengths on both sides of every number, ends, wraps, ragged and idle rows
    engine     ONNX Runtime, or ONNX's reference evaluator
    run        both sides of a region, and where they differ first
    models     both models in, verdicts out
    process    all of this in a process with limits on memory and time (worker, protocol)

Only a verdict of "equal" passes. A model that is made odd at one single length, away from every number in its graph, is
not seen; the thorough schedule runs after a past of every length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.check.process import CheckProcessError, check_in_process, start_process
from trt_kvcache.importer.plan import CachePlan, PlanOptions

__all__ = ["check_rewrite", "start_check"]


def start_check(options: PlanOptions) -> None:
    """Starts the process of the check, which loads ONNX Runtime while the caller plans."""
    start_process(options.check_memory << 30)


def check_rewrite(
    original: onnx.ModelProto,
    rewritten: onnx.ModelProto,
    plan: CachePlan,
    weights: Mapping[str, onnx.TensorProto],
    folder: Path,
) -> None:
    """Refuses a rewritten model that does not give the original's numbers.

    Args:
        original: as exported, flat; its weights may be stand-ins.
        rewritten: as planned, in the same state.
        plan: of the model.
        weights: what stand-ins stand for, by name.
        folder: of external data.

    Raises:
        UnsupportedModelError: a part differs, or could not be compared.
    """
    options = plan.options
    try:
        verdicts = check_in_process(
            original, rewritten, plan, weights, folder,
            seconds=options.check_seconds, memory=options.check_memory << 30,
        )  # fmt: skip
    except CheckProcessError as error:
        raise UnsupportedModelError(
            f"the rewritten model could not be compared with the original: {error}; the comparison may use "
            f"{options.check_seconds} s (--check-seconds) and {options.check_memory} GiB (--check-memory)"
        ) from None
    wrong = [v for v in verdicts if v.answer != "equal"]
    if not wrong:
        return
    first = min(wrong, key=lambda v: v.answer != "different")
    if first.answer == "different":
        raise UnsupportedModelError(
            f"around '{first.name}' the model computes something else than what was recognized there: {first.why}; "
            "it is refused, since an engine of it would give wrong numbers"
        )
    raise UnsupportedModelError(
        f"around '{first.name}' the rewritten model could not be compared with the original ({first.why}), and nothing "
        "is built that was not compared"
    )
