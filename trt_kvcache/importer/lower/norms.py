"""Normalizations, with the residual sums and embeddings that ONNX Runtime fuses into them."""

from __future__ import annotations

from trt_kvcache.importer.lower.body import Call


def simplified_layer_norm(call: Call) -> str:
    """RMS normalization. The result has the type of the scale."""
    _refuse_statistics(call, "inverse")
    attributes = f"axis = {call.integer('axis', -1)}, stash_type = {call.integer('stash_type', 1)}"
    return f"""
        x = CastLike (x, scale)
        y = RMSNormalization <{attributes}, epsilon = {call.number("epsilon", 1e-5)}> (x, scale)
    """


def skip_layer_norm(call: Call) -> str:
    """Layer or RMS normalization of a sum."""
    _refuse_statistics(call, "mean", "inverse")
    is_rms = call.node.op_type == "SkipSimplifiedLayerNormalization"
    operator, operands = ("RMSNormalization", "sum, scale") if is_rms else ("LayerNormalization", "sum, scale, shift")
    return f"""
        sum = Add (x, skip)
        {call.when("bias", "sum = Add (sum, bias)")}
        y = {operator} <axis = -1, epsilon = {call.number("epsilon", 1e-12)}> ({operands})
    """


def embed_layer_norm(call: Call) -> str:
    """Layer normalization of the sum of token, position and segment embeddings."""
    if call.has("mask") or call.is_read("lengths") or not call.has("places"):
        call.refuse(
            f"has {'a mask' if call.has('places') else 'no position_ids'}; supported are token ids, position_ids and "
            "segments, without a mask",
            "leave embeddings out of the optimization (FusionOptions.enable_embed_layer_norm = False)",
        )
    return f"""
        sum = Gather (words, ids)
        position = Gather (positions, places)
        sum = Add (sum, position)
        {call.when("segments", "segment = Gather (kinds, segments)")}
        {call.when("segments", "sum = Add (sum, segment)")}
        y = LayerNormalization <axis = -1, epsilon = {call.number("epsilon", 1e-12)}> (sum, scale, shift)
    """


def _refuse_statistics(call: Call, *outputs: str) -> None:
    """Refuse a node whose mean or deviation is read, which only training does."""
    read = [name for name in outputs if call.is_read(name)]
    if read:
        call.refuse(f"gives '{read[0]}' to a reader; supported is the normalized result", "export for inference")
