"""What sessions take and give: ``from trt_kvcache.decoding import TokenEvent``."""

from __future__ import annotations

from trt_kvcache.runtime.adapters import (
    Adapters,
)
from trt_kvcache.runtime.cache import (
    KVCache,
)
from trt_kvcache.runtime.embeddings import (
    GivenEmbeddings,
)
from trt_kvcache.runtime.encoders.encoder import (
    Source,
)
from trt_kvcache.runtime.events import (
    FinishReason,
    TokenEvent,
)
from trt_kvcache.runtime.generation.config import (
    LogitsProcessor,
)
from trt_kvcache.runtime.generation.masks import (
    Grammar,
    TokenMask,
)
from trt_kvcache.runtime.generation.settings import (
    Settings,
)
from trt_kvcache.runtime.generation.speculation import (
    SpeculationStats,
)
from trt_kvcache.runtime.prefix import (
    PrefixStats,
)
from trt_kvcache.runtime.requests import (
    EmbedsAll,
    Generation,
    Given,
    GivenAll,
    PositionsAll,
    Prompt,
)

__all__ = [
    "Adapters",
    "EmbedsAll",
    "FinishReason",
    "Generation",
    "Given",
    "GivenAll",
    "GivenEmbeddings",
    "Grammar",
    "KVCache",
    "LogitsProcessor",
    "PositionsAll",
    "PrefixStats",
    "Prompt",
    "Settings",
    "Source",
    "SpeculationStats",
    "TokenEvent",
    "TokenMask",
]
