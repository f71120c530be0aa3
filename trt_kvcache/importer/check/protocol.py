"""Data that pass between the check's process and its caller."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache.importer.plan import CachePlan


@dataclass(frozen=True)
class Verdict:
    """The answer for one region.

    Attributes:
        name: the tensor or the cache that the region makes.
        answer: ``"equal"``, ``"different"``, ``"vacuous"`` (nothing was compared) or ``"undecided"`` (it cannot run).
        why: the reason in words; empty for most equal regions.
        steps: number of steps that were compared.
    """

    name: str
    answer: str
    why: str = ""
    steps: int = 0


@dataclass(frozen=True)
class Request:
    """A check to do.

    Attributes:
        sizes: bytes of the original, of the rewritten model, and of a model that holds weights, which follow.
        folder: the folder of external data.
        thorough: run steps after a past of every length, too.
    """

    sizes: tuple[int, int, int]
    plan: CachePlan
    folder: str
    thorough: bool


@dataclass(frozen=True)
class Answer:
    """The verdicts, or the reason that there are none.

    Attributes:
        refused: an error for the user.
        exhausted: the process needed more memory than it may use.
        bug: a trace.
    """

    verdicts: tuple[Verdict, ...]
    refused: str = ""
    exhausted: bool = False
    bug: str = ""
