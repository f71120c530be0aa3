"""Types of arguments and results of sessions: ``from trt_kvcache.decoding import TokenEvent``."""

from __future__ import annotations

from trt_kvcache.lora import LoraFolder, LoraModule
from trt_kvcache.runtime.adapters import Adapter, Adapters
from trt_kvcache.runtime.cache import KVCache
from trt_kvcache.runtime.embeddings import EmbeddingsSource
from trt_kvcache.runtime.encoders.source_reader import Source
from trt_kvcache.runtime.events import FinishReason, SpeculationStats, TokenEvent
from trt_kvcache.runtime.generation.generation_config import LogitsProcessor
from trt_kvcache.runtime.generation.settings import Settings
from trt_kvcache.runtime.generation.token_masks import Grammar, TokenMask
from trt_kvcache.runtime.open import CpuOptions, GpuOptions, Schedule
from trt_kvcache.runtime.prefix import PrefixStats
from trt_kvcache.runtime.requests import ConstantsAll, ConstantValues, EmbedsAll, Generation, PositionsAll, Prompt
from trt_kvcache.runtime.text.tokenizer import TokenBytes
from trt_kvcache.stored_tensors import StoredTensors

__all__ = [
    "Adapter",
    "Adapters",
    "ConstantValues",
    "ConstantsAll",
    "CpuOptions",
    "EmbeddingsSource",
    "EmbedsAll",
    "FinishReason",
    "Generation",
    "GpuOptions",
    "Grammar",
    "KVCache",
    "LogitsProcessor",
    "LoraFolder",
    "LoraModule",
    "PositionsAll",
    "PrefixStats",
    "Prompt",
    "Schedule",
    "Settings",
    "Source",
    "SpeculationStats",
    "StoredTensors",
    "TokenBytes",
    "TokenEvent",
    "TokenMask",
]
