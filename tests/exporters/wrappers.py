"""Modules whose inputs and outputs are the caches of a transformers model, and their export by torch. Imports torch."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer


@dataclass(frozen=True)
class Export:
    """Arguments of `torch.onnx.export`: a module, samples and names of its inputs, and dimensions that change."""

    module: torch.nn.Module
    samples: tuple[Any, ...]
    inputs: list[str]
    outputs: list[str]
    shapes: tuple[Any, ...]


def pairs(tensors: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def names(prefix: str, layers: int, kind: str = "") -> list[str]:
    return [f"{prefix}.{i}.{kind}{part}" for i in range(layers) for part in ("key", "value")]


def heads(config: Any) -> tuple[int, int]:
    """Number of KV heads, and the size of each."""
    queries = config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or queries, getattr(
        config, "head_dim", None
    ) or config.hidden_size // queries


class Dynamic(torch.nn.Module):
    """Caches that grow: `past_key_values.i` `[B, N, P, H]` in, `present.i` `[B, N, P + S, H]` out.

    With `sliding`, layers that attend a window keep the newest W - 1 rows, as `generate` has it.
    """

    def __init__(self, model: torch.nn.Module, sliding: bool = False) -> None:
        super().__init__()
        self.model, self.sliding = model, sliding

    def forward(self, input_ids, attention_mask, position_ids, past):
        cache = DynamicCache(pairs(past), config=self.model.config if self.sliding else None)
        result = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache)
        return result.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


def dynamic(model: Any, sliding: bool = False) -> Export:
    config, (n, h) = model.config, heads(model.config)
    layers, auto = config.num_hidden_layers, {0: Dim.AUTO, 1: Dim.AUTO}
    tokens = torch.randint(3, config.vocab_size, (2, 3))
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    rows = [config.sliding_window - 1 if sliding and kind == "sliding_attention" else 12 for kind in kinds]
    past = tuple(torch.randn(2, n, held, h) for held in rows for _ in range(2))
    samples = (tokens, torch.ones(2, 15, dtype=torch.int64), torch.arange(12, 15).expand(2, 3).contiguous(), past)
    return Export(
        Dynamic(model, sliding), samples,
        ["input_ids", "attention_mask", "position_ids", *names("past_key_values", layers)],
        ["logits", *names("present", layers)], (auto, auto, auto, ({0: Dim.AUTO, 2: Dim.AUTO},) * len(past)),
    )  # fmt: skip


class Grown(torch.nn.Module):
    """`Dynamic` for any family: positions as an input where the model takes them."""

    def __init__(self, model: torch.nn.Module, positions: bool) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, input_ids, attention_mask, position_ids, past):
        cache = DynamicCache(pairs(past))
        more = {"position_ids": position_ids} if self.positions else {}
        result = self.model(input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **more)
        return result.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


def grown(model: Any) -> Export:
    """An export with caches of the number and sizes that a first run of the model makes.

    Raises:
        NotImplementedError: the model keeps something else than keys and values of every token.
    """
    tokens, auto = torch.randint(3, model.config.vocab_size, (2, 15)), {0: Dim.AUTO, 1: Dim.AUTO}
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens[:, :12], past_key_values=cache, use_cache=True)
    held = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
    if not held or any(t is None or t.ndim != 4 or t.shape[2] != 12 for t in held):
        raise NotImplementedError("not every layer's cache is keys and values of all tokens")
    past, names_ = tuple(t.clone() for t in held), names("past_key_values", len(held) // 2)
    positions = "position_ids" in inspect.signature(model.forward).parameters
    samples = (
        tokens[:, 12:],
        torch.ones(2, 15, dtype=torch.int64),
        torch.arange(12, 15).expand(2, 3).contiguous(),
        past,
    )
    return Export(
        Grown(model, positions), samples, ["input_ids", "attention_mask", "position_ids", *names_],
        ["logits", *names("present", len(held) // 2)], (auto, auto, auto, ({0: Dim.AUTO, 2: Dim.AUTO},) * len(past)),
    )  # fmt: skip


class Static(torch.nn.Module):
    """Caches of fixed size `[B, N, L, H]`, written at `cur_len` (a scalar), attended as far as that plus S.

    Layers that attend a window have the whole capacity as well: transformers' own caches of a window's size choose
    between "not full yet" and "full" in Python, which an export can only do once for good (`Rolled`).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, cur_len, past):
        cache = static_cache(past, cur_len)
        result = self.model(input_ids, position_ids=position_ids, past_key_values=cache)
        return result.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


def static_cache(past: tuple[torch.Tensor, ...], length: torch.Tensor) -> Cache:
    layers = []
    for key, value in pairs(past):
        layer = StaticLayer(max_cache_len=key.shape[2])
        layer.lazy_initialization(key, value)
        # Written in place: copies keep the inputs as they are, and the exporter drops them.
        layer.keys, layer.values, layer.cumulative_length = key.clone(), value.clone(), length.clone()
        layers.append(layer)
    return Cache(layers=layers)


def static(model: Any, capacity: int) -> Export:
    config, (n, h) = model.config, heads(model.config)
    layers = config.num_hidden_layers
    tokens, positions = torch.randint(3, config.vocab_size, (2, 3)), torch.arange(5, 8).expand(2, 3).contiguous()
    past = tuple(torch.randn(2, n, capacity, h) for _ in range(2 * layers))
    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    return Export(
        Static(model), (tokens, positions, torch.tensor(5), past),
        ["input_ids", "position_ids", "cur_len", *names("past_key_values", layers)],
        ["logits", *names("present", layers)], (auto, auto, None, ({0: Dim.AUTO},) * len(past)),
    )  # fmt: skip


class Rolled(torch.nn.Module):
    """`Static`, one token a step, with transformers' own caches of W rows in layers that attend a window.

    These count their tokens in Python: the export is of the state in which they are full (roll, then write the last
    row), with the caller's masks, or of the first step.
    """

    def __init__(self, model: torch.nn.Module, full: bool) -> None:
        super().__init__()
        self.model, self.full = model, full

    def forward(self, input_ids, position_ids, cur_len, masks, past):
        layers = static_cache(past, cur_len).layers
        for i, (key, value) in enumerate(pairs(past)):
            if (rows := key.shape[2]) == self.model.config.sliding_window:
                layers[i] = StaticSlidingWindowLayer(max_cache_len=rows, sliding_window=rows)
                layers[i].lazy_initialization(key, value)
                layers[i].keys, layers[i].values = key.clone(), value.clone()
                layers[i].cumulative_length_int = rows if self.full else 0
        cache = Cache(layers=layers)
        given = masks if len(masks) > 1 else next(iter(masks.values()), None)
        result = self.model(input_ids, attention_mask=given, position_ids=position_ids, past_key_values=cache)
        return result.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


def rolled(model: Any, capacity: int, *, full: bool = True, masked: bool = True) -> Export:
    """As `Rolled`.

    Args:
        model: of transformers, some of whose layers attend a window.
        capacity: rows of the other layers' caches.
        full: the caches of windows are full; else they are empty.
        masked: the caller gives a mask for each kind of layer.
    """
    config, (n, h) = model.config, heads(model.config)
    layers, window = config.num_hidden_layers, config.sliding_window
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    rows = {kind: window if kind == "sliding_attention" else capacity for kind in kinds}
    past = tuple(torch.randn(2, n, rows[kind], h) for kind in kinds for _ in range(2))
    shown = {kind: torch.ones(2, 1, 1, count, dtype=torch.bool) for kind, count in rows.items()}
    if config._attn_implementation == "eager":
        shown = {kind: torch.zeros(mask.shape) for kind, mask in shown.items()}
    masks, batch = shown if masked else {}, {0: Dim.AUTO}
    tokens = torch.randint(3, config.vocab_size, (2, 1))
    return Export(
        Rolled(model, full), (tokens, torch.full((2, 1), 5), torch.tensor(5), masks, past),
        ["input_ids", "position_ids", "cur_len", *masks, *names("past_key_values", layers)],
        ["logits", *names("present", layers)], (batch, batch, None, dict.fromkeys(masks, batch), (batch,) * len(past)),
    )  # fmt: skip


class EncoderDecoder(torch.nn.Module):
    """A decoder's own caches as in `Dynamic` or `Static`; those of cross-attention `[B, N, E, H]` are inputs only."""

    def __init__(self, model: torch.nn.Module, static: bool) -> None:
        super().__init__()
        self.model, self.static = model, static

    def forward(self, decoder_input_ids, past, cross, encoder_attention_mask=None, cur_len=None):
        own = static_cache(past, cur_len) if self.static else DynamicCache(pairs(past))
        cache = EncoderDecoderCache(own, DynamicCache(pairs(cross)))
        batch, _, length, _ = cross[0].shape
        # Read for its shape only: the caches of cross-attention hold what would be computed from it.
        states = cross[0].new_zeros(batch, length, self.model.config.d_model)
        result = self.model(
            encoder_outputs=(states,), attention_mask=encoder_attention_mask, decoder_input_ids=decoder_input_ids,
            past_key_values=cache,
        )  # fmt: skip
        return result.logits, *(t for layer in own.layers for t in (layer.keys, layer.values))


def encoder_decoder(model: Any, capacity: int | None = None) -> Export:
    config = model.config
    layers, n = config.num_hidden_layers, config.num_attention_heads
    h, masked = config.d_model // n, config.model_type != "whisper"  # Whisper's encoder has one length, no padding
    encoded = 7 if masked else config.max_source_positions
    past = tuple(torch.randn(2, n, capacity or 12, h) for _ in range(2 * layers))
    cross = tuple(torch.randn(2, n, encoded, h) for _ in range(2 * layers))
    tokens, auto = torch.randint(3, config.vocab_size, (2, 3)), {0: Dim.AUTO, 1: Dim.AUTO}
    grown = {0: Dim.AUTO, 2: Dim.AUTO}
    own_dims, cross_dims = {0: Dim.AUTO} if capacity else grown, grown if masked else {0: Dim.AUTO}
    inputs = [
        "decoder_input_ids",
        *names("past_key_values", layers, "decoder."),
        *names("past_key_values", layers, "encoder."),
    ]
    return Export(
        EncoderDecoder(model, capacity is not None),
        (tokens, past, cross, torch.ones(2, encoded, dtype=torch.int64) if masked else None,
         torch.tensor(5) if capacity else None),
        [*inputs, *["encoder_attention_mask"] * masked, *["cur_len"] * bool(capacity)],
        ["logits", *names("present", layers, "decoder.")],
        (auto, (own_dims,) * len(past), (cross_dims,) * len(cross), auto if masked else None, None),
    )  # fmt: skip


def save(export: Export, opset: int, path: Path) -> Path:
    """Export with torch's dynamo exporter; weights lie inside the file."""
    torch.onnx.export(
        export.module, export.samples, path, dynamo=True, opset_version=opset, input_names=export.inputs,
        output_names=export.outputs, dynamic_shapes=export.shapes, external_data=False, verbose=False,
    )  # fmt: skip
    return path
