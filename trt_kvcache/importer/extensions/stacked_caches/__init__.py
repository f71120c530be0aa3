"""Caches of several layers in one tensor, taken apart before anything else looks at them.

which tensors, along which axes         levels (uses)
what operators do to each part          operators, pieces
caches with the text first              order
where caches come back                  slots
the model as exported, in verify        session
"""

from __future__ import annotations

from trt_kvcache.importer.extensions.stacked_caches.levels import rewrite as rewrite
from trt_kvcache.importer.extensions.stacked_caches.session import open_original as open_original
