"""Caches whose heads are written one by one, written as a whole."""

from trt_kvcache.importer.stacks.heads import write_heads_together as write_heads_together
