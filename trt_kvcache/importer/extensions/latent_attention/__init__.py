"""Attention over keys and values that a graph computes from its caches row by row, and rotary factors likewise.

    latents in the caches (MLA)     DeepSeek V3, MiniCPM3, GLM-4 MoE Lite, Youtu, Mistral 4
    factors of positions            Llama, Falcon, GPT-NeoX of older transformers: `rotary`

    rows                                    tensors that are functions of each row, computed again
    computed                                keys and values that are such functions
    absorbed                                queries that go to the latents instead

The search for attention takes what is computed for another cache. The rewrite of the graph then computes it from the
rows in use of the canonical caches, or moves the weights to the queries (`absorbed`): what is left is plain attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from trt_kvcache.errors import UnsupportedModelError
from trt_kvcache.importer.extensions.latent_attention.absorbed import Absorbed, find_absorbed, note
from trt_kvcache.importer.extensions.latent_attention.computed import Computed, find_computed
from trt_kvcache.importer.extensions.latent_attention.rotary import Positioned
from trt_kvcache.importer.interface.exported import Interface
from trt_kvcache.importer.normalize.attention.search import find_attentions
from trt_kvcache.importer.normalize.canonical import Canonical
from trt_kvcache.importer.normalize.evidence.samples import Samples
from trt_kvcache.importer.normalize.findings import AttentionSite, Write
from trt_kvcache.importer.plan import LatentAttention

__all__ = ["ComputedAttention", "Positioned", "find_attention"]


@dataclass(frozen=True, eq=False)
class ComputedAttention:
    """Attention over caches, and over what is computed from them.

    Attributes:
        sites: all attentions of the model.
    """

    sites: tuple[AttentionSite, ...]
    _computed: Computed
    _absorbed: Mapping[str, Absorbed]

    @property
    def reasons(self) -> Mapping[str, str]:
        """By name of a cache, why what is computed from it are no keys and values."""
        return self._computed.functions.reasons

    @property
    def notes(self) -> tuple[str, ...]:
        """For the plan."""
        return note(self._absorbed.values())

    def place(self, site: AttentionSite, canonical: Canonical) -> AttentionSite:
        """Emit what an attention reads, and what stands around it; returns the plain attention that is left.

        Raises:
            UnsupportedModelError: keys and values are of different heads.
        """
        if site.node in self._absorbed:
            return self._absorbed[site.node].place(site, self._computed, canonical)
        return self._computed.place(site, canonical)


def find_attention(
    graph: gs.Graph, writes: Sequence[Write], interface: Interface, samples: Samples, form: LatentAttention
) -> ComputedAttention:
    """Find every attention over caches and over what is computed from them.

    Raises:
        UnsupportedModelError: an attention is not what is supported, or reads what is not computed row by row.
    """
    computed = find_computed(graph, [w for w in writes if w.fixed_rows is None], samples)
    try:
        sites = find_attentions(graph, (*writes, *computed.writes), interface, samples)
    except UnsupportedModelError as error:
        if not (broken := computed.functions.broken):
            raise
        raise UnsupportedModelError(
            f"{error}; keys or values are computed from caches, supported is that row by row with constants, and "
            f"{broken}"
        ) from error
    absorbed = find_absorbed(sites, computed, samples) if form is LatentAttention.ABSORBED else {}
    return ComputedAttention(sites, computed, absorbed)
