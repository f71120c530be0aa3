"""Replaces ONNX Runtime's attention operators, and Attention over ``[B, S, N*D]``, with Attention over split heads.

    com.microsoft::GroupQueryAttention(qkv, -, -, past_k, past_v, seqlens_k, total, cos, sin; do_rotary=1)
        q, k, v   = Split(qkv), heads split [B, N, S, D]
        q, k      = RMSNormalization(q), RMSNormalization(k)            with q_norm_weight, k_norm_weight
        q, k      = RotaryEmbedding(q, cos, sin, seqlens_k + 1 - S + arange(S)), the same for k
        y, present_k, present_v = Attention(q, k, v, bias, past_k, past_v; is_causal=1, left_window_size=W - 1)

    com.microsoft::GroupQueryAttention(q, k [B, 0, N*D], v [B, 0, N*D], other_k, other_v, seqlens_k)
        for a layer without a cache of its own: other_k and other_v are the presents of another layer
        own       = seqlens_k + 1 - S + i
        y         = Attention(q, other_k, other_v, j <= own and j > own - W)

    com.microsoft::MultiHeadAttention(q, k, v, bias, key_padding_mask, attention_bias, past_k, past_v)
        q, k, v = q + bias[:N*D], k + bias[N*D:2*N*D], v + bias[2*N*D:], heads split
        y, present_k, present_v = Attention(q, k, v, mask, past_k, past_v)

    com.microsoft::Attention(x, w, bias, -, -, attention_bias)
        q, k, v = Split(MatMul(x, w) + bias), and then as above without a past

    Attention(q [B, S, N*D], k, v, mask, past_k, past_v; q_num_heads, kv_num_heads)
        heads are split; without a past, presents are the keys and values

Windows become masks, and attention with sinks becomes plain operators, so that ONNX Runtime can run the result.

Measured on ONNX Runtime 1.31.1 (CPU), for GroupQueryAttention:

- New rows go to the row ``seqlens_k + 1 - S``, which is also the first position.
- With a local window of W, a query sees its own key and W - 1 keys before it.
- The softcap is applied before bias and masks, and not to sinks. With head_sink, smooth_softmax=1 has no effect.
- With position_ids, the first step uses only the first id, and counts up from it. Later steps use every id.
- The CPU kernel refuses q_norm_weight and k_norm_weight; their meaning is from the operator's page.
- With keys and values of length 0 (1.32.0; mobius-onnx), it writes nothing: its past already holds the new rows.
- Without inputs for key and value, the query is packed.

MultiHeadAttention: `unidirectional` counts queries after the past, as ONNX's is_causal; masks are added to scores.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from trt_kvcache.importer.lower.body import AGAIN, Call

_WITHOUT = "export the model without this option"
_PAST = "export the model with past"


def group_query_attention(call: Call) -> str:
    """Return ONNX text for GroupQueryAttention with a past."""
    heads, kv_heads = call.integer("num_heads"), call.integer("kv_num_heads")
    packed, shares = not call.has("key"), _is_empty(call, "key") and _is_empty(call, "value")
    if heads < 1 or kv_heads < 1 or heads % kv_heads or packed == call.has("value"):
        layout = "packed" if packed else "in separate inputs"
        call.refuse(
            f"has num_heads={heads}, kv_num_heads={kv_heads}, with queries, keys and values {layout}; num_heads "
            "must be a multiple of kv_num_heads, and both key and value must be given or omitted",
            AGAIN,
        )
    _check_group_query(call, heads)
    if shares:
        _check_shared(call)
    rotates = bool(call.integer("do_rotary"))
    size = call.width("query") // (heads + 2 * kv_heads if packed else heads) if packed or rotates else 0
    widths = [heads * size, kv_heads * size, kv_heads * size]
    past = (call.shape("past_key") or ("?",))[-1]
    if packed and isinstance(past, int) and past != size:
        call.refuse(
            f"has no key and value, so its query is packed, with heads of size {size}; but its past has heads of size "
            f"{past}. If the layer reads the cache of another layer, its keys and values must have length 0",
            AGAIN,
        )
    norm = f"RMSNormalization <axis = -1, epsilon = {call.number('qk_norm_epsilon', 1e-6)}>"
    window = call.integer("local_window_size", -1)
    scores: dict[str, float] = {name: call.number(name) for name in ("scale", "softcap") if call.number(name)}
    attributes = {"is_causal": call.integer("causal", 1)} | scores
    attributes |= {"left_window_size": window - 1} if window > 0 else {}
    if call.integer("smooth_softmax") == 1 and not call.has("sinks"):
        call.constant("sinks", np.zeros(heads, np.float32))
    ring = bool(call.integer("sliding_window_cache"))
    plain = ring or call.has("sinks")
    if plain and not size:
        size = call.width("query") // heads
    for name in ("past_key", "past_value") if plain else ():
        call.state_size(name, 3, size)
    if ring and not call.integer("causal", 1):
        call.refuse(
            "has sliding_window_cache and causal=0; with sliding_window_cache, the importer supports only causal "
            "attention",
            _WITHOUT,
        )
    attend = _attend(call, "bias", attributes)
    if plain:
        attend = _attend_with_sinks(call, heads, kv_heads, attributes, ring=ring)
    own_keys = f"""
        {_split("key", kv_heads)}
        {_split("value", kv_heads)}
        {call.when("key_norm", f"key = {norm} (key, key_norm)")}
        {_rotated(call, "key", size) if rotates else ""}
        {attend}
    """
    return f"""
        {_counted("positions") if rotates and not call.has("positions") else ""}
        {_seen_of_shared(call, window) if shares else ""}
        {f"query, key, value = Split <axis = -1> (query, {widths})" if packed else ""}
        {_split("query", heads)}
        {call.when("query_norm", f"query = {norm} (query, query_norm)")}
        {_rotated(call, "query", size) if rotates else ""}
        {_attend_shared(call, scores) if shares else own_keys}
        {_merged()}
    """


def _check_group_query(call: Call, heads: int) -> None:
    quantized = any(call.string(name, "NONE") not in ("NONE", "") for name in ("k_quant_type", "v_quant_type"))
    if not call.has("past_key") or not call.has("past_value"):
        call.refuse("has no past_key and past_value; the importer supports only decoders with caches as inputs", _PAST)
    if call.has("sinks") and (not call.is_weight("sinks") or call.shape("sinks") != (heads,)):
        what = f"has the sinks '{call.name('sinks')}' {list(call.shape('sinks') or ())}"
        call.refuse(f"{what}; they must be a weight with one logit for each head", _WITHOUT)
    if quantized or call.has("key_scale") or call.has("value_scale"):
        call.refuse("has quantized caches; the importer supports only float caches", _WITHOUT)
    if call.is_read("scores"):
        call.refuse(
            "returns its scores (qk_output); the importer supports only attention without this output", _WITHOUT
        )
    if not call.has("seqlens"):
        call.refuse("has no seqlens_k; the operator needs this input", AGAIN)
    if call.integer("do_rotary") and not (call.has("cos") and call.has("sin")):
        call.refuse("has do_rotary=1, but no cos_cache or no sin_cache; the operator needs both", AGAIN)


def _is_empty(call: Call, name: str) -> bool:
    shape = call.shape(name)
    return shape is not None and len(shape) == 3 and shape[1] == 0


def _check_shared(call: Call) -> None:
    """Refuse options that no exporter uses for layers that read the cache of another layer."""
    options = {
        "head_sink or smooth_softmax": call.has("sinks") or call.integer("smooth_softmax") == 1,
        "causal=0": not call.integer("causal", 1),
        "sliding_window_cache": bool(call.integer("sliding_window_cache")),
    }
    for what in (name for name, is_set in options.items() if is_set):
        call.refuse(
            f"reads the cache of another layer, and has {what}; for such layers, the importer supports only plain "
            "causal attention",
            _WITHOUT,
        )


def _seen_of_shared(call: Call, window: int) -> str:
    """Return ONNX text for `mask`, over the rows of another layer's cache, which already has the new rows."""
    near = f"""
        far = Sub (own, {window})
        near = Greater (rows, far)
        mask = And (mask, near)
    """
    return f"""
        {_counted("own")}
        own = Unsqueeze (own, [1, 3])
        count = Shape <start = 2, end = 3> (past_key)
        count = Squeeze (count, [0])
        rows = Range (0, count, 1)
        mask = LessOrEqual (rows, own)
        {near if window > 0 else ""}
        {call.when("bias", f"hidden = CastLike ({float(np.finfo(np.float16).min)}, bias)")}
        {call.when("bias", "mask = Where (mask, bias, hidden)")}
    """


def _attend_shared(call: Call, attributes: dict[str, float]) -> str:
    return f"""
        {"present_key = Identity (past_key)" if call.is_read("present_key") else ""}
        {"present_value = Identity (past_value)" if call.is_read("present_value") else ""}
        y = Attention {_stated(attributes)} (query, past_key, past_value, mask)
    """


def _counted(name: str) -> str:
    """Return ONNX text that sets `name` to the positions of the new tokens, int64 ``[B, S]``."""
    return f"""
        length = Shape <start = 1, end = 2> (query)
        count = Squeeze (length, [0])
        steps = Range (0, count, 1)
        last = Cast <to = 7> (seqlens)
        last = Reshape (last, [-1, 1])
        first = Sub (last, length)
        first = Add (first, [1])
        {name} = Add (first, steps)
    """


def _rotated(call: Call, name: str, size: int) -> str:
    """Return ONNX text that applies rotary embedding to `name`: to whole heads, or to the first columns of each."""
    part = 2 * call.width("cos")
    some = "" if part == size else f", rotary_embedding_dim = {part}"
    attributes = f"interleaved = {call.integer('rotary_interleaved')}{some}"
    return f"{name} = RotaryEmbedding <{attributes}> ({name}, cos, sin, positions)"


def multi_head_attention(call: Call) -> str:
    """Return ONNX text for MultiHeadAttention, with or without a past."""
    if call.has("shared") or call.has("beams"):
        call.refuse(
            "reads past_sequence_length or cache_indirection (a shared buffer, beams); the importer supports only "
            "pasts that grow",
            _WITHOUT,
        )
    if call.is_read("scores"):
        call.refuse("returns its scores (qk); the importer supports only attention without this output", _WITHOUT)
    if not call.has("key") or not call.has("value"):
        call.refuse("has packed inputs; the importer supports only separate query, key and value", _WITHOUT)
    heads = call.integer("num_heads")
    ranks = [len(call.shape(name) or (0,) * 3) for name in ("query", "key", "value")]
    if heads < 1 or ranks[0] != 3 or set(ranks) - {3, 4}:
        shapes = [list(call.shape(name) or ()) for name in ("query", "key", "value")]
        what = (
            f"has num_heads={heads} and inputs {', '.join(map(str, shapes))}; the importer supports [B, S, N*D] "
            "and, for"
        )
        call.refuse(f"{what} keys and values, [B, N, S, D]", AGAIN)
    return f"""
        {_biased(call, heads, ranks)}
        {_split("query", heads)}
        {_split("key", heads) if ranks[1] == 3 else ""}
        {_split("value", heads) if ranks[2] == 3 else ""}
        {_masked_attention(call)}
    """


def _biased(call: Call, heads: int, ranks: list[int]) -> str:
    """Return ONNX text that adds the bias to ``[B, S, N*D]`` inputs, but not to inputs with split heads."""
    if not call.has("bias"):
        return ""
    size = (call.shape("past_key") or ("?",))[-1]
    width = heads * size if isinstance(size, int) else call.width("query")
    ends = [0, width, 2 * width, call.width("bias")]
    lines = ""
    for index, name in enumerate(("query", "key", "value")):
        if ranks[index] == 3:
            lines += f"""
                part = Slice (bias, [{ends[index]}], [{ends[index + 1]}], [0])
                {name} = Add ({name}, part)
            """
    return lines


def attention(call: Call) -> str:
    """Return ONNX text for ONNX Runtime's Attention, which also computes Q, K and V from its input."""
    width = (call.shape("weight") or ("?",))[-1]
    if call.has("past") or call.is_read("present") or call.has("shared"):
        reason = "holds the keys and values of its cache in one tensor"
        supported = "caches of MultiHeadAttention and GroupQueryAttention"
    elif call.integer("do_rotary"):
        reason, supported = "rotates queries and keys (do_rotary)", "rotary embeddings before the operator"
    elif not isinstance(width, int):
        reason, supported = f"has weights '{call.name('weight')}' of unknown width", "weights of known shape"
    else:
        reason = supported = ""
    heads = call.integer("num_heads")
    if reason or heads < 1:
        call.refuse(
            f"{reason or 'has no num_heads'}; the importer supports {supported or 'a stated num_heads'}",
            "export the model this way",
        )
    widths = [int(n) for n in call.attributes.get("qkv_hidden_sizes", [])] or [int(width) // 3] * 3
    return f"""
        x = MatMul (x, weight)
        {call.when("bias", "x = Add (x, bias)")}
        query, key, value = Split <axis = -1> (x, {widths})
        {_split("query", heads)}
        {_split("key", heads)}
        {_split("value", heads)}
        {_masked_attention(call)}
    """


def _masked_attention(call: Call) -> str:
    """Return ONNX text for attention, with a padding mask ``[B, P + S]`` and a bias if the node has them."""
    past = call.has("past_key")
    presents = [name for name in ("present_key", "present_value") if call.is_read(name)]
    if presents and not past:
        what = (
            f"returns the present '{call.output(presents[0])}', but has no past; the importer supports only "
            "decoders with"
        )
        call.refuse(f"{what} caches as inputs", _PAST)
    mask, shape = "", call.shape("padding")
    if call.has("padding") and (not past or shape is None or len(shape) != 2):
        what = f"has a padding mask '{call.name('padding')}' {list(shape or ())} {'and' if past else 'and no'} past"
        call.refuse(
            f"{what}; the importer supports padding masks [B, P + S] together with a past",
            "export the mask as attention_bias",
        )
    if call.has("padding"):
        hidden = call.number("mask_filter_value", -10000.0)
        mask = f"""
            mask = Cast <to = {TensorProto.BOOL}> (padding)
            mask = Unsqueeze (mask, [1, 2])
            {call.when("score_bias", f"hidden = CastLike ({hidden}, score_bias)")}
            {call.when("score_bias", "mask = Where (mask, score_bias, hidden)")}
        """
    elif call.has("score_bias"):
        mask = "mask = Identity (score_bias)"
    attributes: dict[str, float] = {"is_causal": call.integer("unidirectional")}
    attributes |= {"scale": call.number("scale")} if call.number("scale") else {}
    return f"""
        {mask}
        {_attend(call, "mask" if mask else "", attributes)}
        {_merged()}
    """


def onnx_attention(call: Call) -> str | None:
    """Return ONNX text for an Attention with 3-D inputs, or with presents but no pasts; None for others, which stay."""
    past = call.has("past_key")
    if past and (call.is_read("scores") or call.integer("right_window_size", -1) > 0):
        what = "returns its scores (qk_matmul_output)" if call.is_read("scores") else "has right_window_size"
        call.refuse(
            f"{what}; the importer supports only attention without this output, with windows that end at the "
            "query's own key",
            _WITHOUT,
        )
    heads, kv_heads = call.integer("q_num_heads"), call.integer("kv_num_heads")
    shape = call.shape("query")
    merged = bool(heads or kv_heads) if shape is None else len(shape) == 3
    presents = call.is_read("present_key") or call.is_read("present_value")
    if not merged and (past or not presents):
        return None
    if merged and min(heads, kv_heads) < 1:
        call.refuse(
            f"has 3-D inputs, q_num_heads={heads} and kv_num_heads={kv_heads}; 3-D inputs need both numbers", AGAIN
        )
    for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)) if merged else ():
        width = (call.shape(name) or ("?",))[-1]
        if isinstance(width, int) and width % count:
            call.refuse(
                f"has a {name} '{call.name(name)}' of width {width}, which is no multiple of its {count} heads", AGAIN
            )
    split = _split("query", heads) + _split("key", kv_heads) + _split("value", kv_heads) if merged else ""
    own = {n: v for n, v in call.attributes.items() if n not in ("q_num_heads", "kv_num_heads")}
    if past:
        attend = _attend(call, "mask", own)
    else:
        # mobius-onnx wrongly declares presents of cross-attention as [B, S, N*D]
        for name in ("present_key", "present_value"):
            call.forget_shape(name)
        results = "y, , , scores" if call.is_read("scores") else "y"
        attend = f"""
            {"present_key = Identity (key)" if call.is_read("present_key") else ""}
            {"present_value = Identity (value)" if call.is_read("present_value") else ""}
            {results} = Attention {_stated(own)} (query, key, value, mask, , , lengths)
        """
    return f"""
        {split}
        {attend}
        {_merged() if merged else ""}
    """


def _attend(call: Call, mask: str, attributes: dict[str, float]) -> str:
    """Return ONNX text for the Attention node, with windows as masks. `mask` names a bool mask or bias; empty: none."""
    if not call.has("past_key"):
        return f"y = Attention {_stated(attributes)} (query, key, value, {mask})"
    settings = {name: value for name, value in attributes.items() if name != "left_window_size"}
    window = int(attributes.get("left_window_size", -1))
    lines = ""
    if window >= 0:
        lines = _seen("keys_near", window)
        if mask and call.has(mask):
            masked = f"And ({mask}, keys_near)"
            if call.dtype(mask) != TensorProto.BOOL:
                lines += f"""
                    hidden = CastLike ({float(np.finfo(np.float16).min)}, {mask})
                """
                masked = f"Where (keys_near, {mask}, hidden)"
            lines += f"""
                keys_near = {masked}
            """
        mask = "keys_near"
    return f"""
        {lines}
        y, present_key, present_value = Attention {_stated(settings)} (query, key, value, {mask}, past_key, past_value)
    """


def _seen(name: str, window: int, *, causal: bool = False) -> str:
    """Return ONNX text that sets `name` to a bool mask ``[S, P + S]`` of visible keys. `window` < 0: no window."""
    return f"""
        rows_past = Shape <start = 2, end = 3> (past_key)
        rows_new = Shape <start = 2, end = 3> (key)
        rows_total = Add (rows_past, rows_new)
        rows_first = Squeeze (rows_past, [0])
        rows_last = Squeeze (rows_total, [0])
        rows_keys = Range (0, rows_last, 1)
        rows_own = Range (rows_first, rows_last, 1)
        rows_own = Unsqueeze (rows_own, [1])
        {f"rows_far = Sub (rows_own, {window})" if window >= 0 else ""}
        {f"{name} = GreaterOrEqual (rows_keys, rows_far)" if window >= 0 else ""}
        {"rows_causal = LessOrEqual (rows_keys, rows_own)" if causal else ""}
        {f"{name} = {f'And ({name}, rows_causal)' if window >= 0 else 'Identity (rows_causal)'}" if causal else ""}
    """


def _attend_with_sinks(call: Call, heads: int, kv_heads: int, attributes: dict[str, float], *, ring: bool) -> str:
    """Return ONNX text for attention with sinks (extra logits). With `ring`, the present is as long as the past."""
    repeated = [head * kv_heads // heads for head in range(heads)]
    cap = attributes.get("softcap", 0.0)
    causal, window = bool(attributes["is_causal"]), int(attributes.get("left_window_size", -1))
    scale = f"factor = CastLike ({float(attributes.get('scale', 0.0))!r}, query)"
    if not attributes.get("scale"):
        scale = """
            factor = Shape <start = 3, end = 4> (query)
            factor = Cast <to = 1> (factor)
            factor = Sqrt (factor)
            factor = Reciprocal (factor)
            factor = CastLike (factor, query)
        """
    capped = f"""
        cap = CastLike ({float(cap)!r}, query)
        scores = Div (scores, cap)
        scores = Tanh (scores)
        scores = Mul (scores, cap)
    """
    hidden = f"""
        hidden = CastLike ({float(np.finfo(np.float16).min)}, query)
        scores = Where (mask, scores, hidden)
    """
    grown = f"""
        present_key = Concat <axis = 2> (past_key, key)
        present_value = Concat <axis = 2> (past_value, value)
        {_seen("mask", window, causal=causal) if causal or window >= 0 else ""}
    """
    written = f"""
        count = Shape <start = 2, end = 3> (past_key)
        count = Squeeze (count, [0])
        rows = Range (0, count, 1)
        rows_new = Shape <start = 2, end = 3> (key)
        last = Cast <to = 7> (seqlens)
        last = Reshape (last, [-1, 1])
        first = Sub (last, rows_new)
        first = Add (first, [1])
        place = Sub (rows, first)
        early = GreaterOrEqual (place, 0)
        late = Less (place, rows_new)
        inside = And (early, late)
        inside = Unsqueeze (inside, [1, 3])
        place = Max (place, [0])
        bound = Sub (rows_new, [1])
        place = Min (place, bound)
        place = Unsqueeze (place, [1, 3])
        whole = Shape (past_key)
        place = Expand (place, whole)
        rows_key = GatherElements <axis = 2> (key, place)
        rows_value = GatherElements <axis = 2> (value, place)
        present_key = Where (inside, rows_key, past_key)
        present_value = Where (inside, rows_value, past_value)
        rows_length = Squeeze (rows_new, [0])
        steps = Range (0, rows_length, 1)
        own = Add (first, steps)
        own = Unsqueeze (own, [1, 3])
        mask = LessOrEqual (rows, own)
        {f"far = Sub (own, {window})" if window >= 0 else ""}
        {"near = GreaterOrEqual (rows, far)" if window >= 0 else ""}
        {"mask = And (mask, near)" if window >= 0 else ""}
    """
    sinks = """
        sizes = Shape <start = 0, end = 3> (scores)
        column = Concat <axis = 0> (sizes, [1])
        logits = Reshape (sinks, [1, -1, 1, 1])
        logits = CastLike (logits, scores)
        logits = Expand (logits, column)
        scores = Concat <axis = -1> (scores, logits)
    """
    cut = """
        keys = Shape <start = 2, end = 3> (present_key)
        weights = Slice (weights, [0], keys, [3])
    """
    return f"""
        {written if ring else grown}
        all_keys = Gather <axis = 1> (present_key, {repeated})
        all_values = Gather <axis = 1> (present_value, {repeated})
        all_keys = Transpose <perm = [0, 1, 3, 2]> (all_keys)
        {scale}
        query = Mul (query, factor)
        scores = MatMul (query, all_keys)
        {capped if cap else ""}
        {call.when("bias", "scores = Add (scores, bias)")}
        {hidden if ring or causal or window >= 0 else ""}
        {call.when("sinks", sinks)}
        weights = Softmax <axis = -1> (scores)
        {call.when("sinks", cut)}
        y = MatMul (weights, all_values)
    """


def _stated(attributes: Mapping[str, float]) -> str:
    return f"<{', '.join(f'{name} = {value!r}' for name, value in attributes.items())}>" if attributes else ""


def _split(name: str, heads: int) -> str:
    """Return ONNX text that splits heads: ``[B, S, N*D] -> [B, N, S, D]``."""
    return f"""
        {name} = Reshape ({name}, [0, 0, {heads}, -1])
        {name} = Transpose <perm = [0, 2, 1, 3]> ({name})
    """


def _merged() -> str:
    """Return ONNX text that brings `y` from ``[B, N, S, D]`` to ``[B, S, N*D]``."""
    return """
        y = Transpose <perm = [0, 2, 1, 3]> (y)
        y = Reshape (y, [0, 0, -1])
    """
