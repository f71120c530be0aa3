"""Caches of several layers in one tensor, taken apart before anything else looks at them.

which tensors, along which axes         levels (uses)
what operators do to each part          rules (moves, writes), pieces
where caches come back                  slots
heads of one cache, written one by one  heads
"""

from trt_kvcache.importer.stacks.heads import write_heads_together as write_heads_together
from trt_kvcache.importer.stacks.levels import Unstacked as Unstacked
from trt_kvcache.importer.stacks.levels import unstack as unstack
from trt_kvcache.importer.stacks.slots import check_slots as check_slots
