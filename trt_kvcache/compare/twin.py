"""Makes a twin of a checkpoint: a small model with equal settings but random weights; computes its logits.

    python twin.py CHECKPOINT FOLDER
    python twin.py explain FOLDER LOGITS.npz TOLERANCE

This file runs in the interpreter of an exporter: it needs torch, transformers, and ``checkpoint.py`` beside it, but
nothing else of this package. Sizes and heads shrink in proportion; how a setting shrinks depends on its name, not on
the model family. Each kind of layer occurs twice. Windows have a few tokens. If the model's computation changes at some
position, this position is made small, so that short texts pass it. Every parameter changes the logits, and is exact in
float16, bfloat16 and int4, so one twin serves exports of all types.

`FOLDER` gets the twin as transformers saves it, `decode.json` with texts and their steps, and `logits.npz`. `explain`
compares an exporter's logits of the twin, and writes into `settings.json` the settings that the exporter ignores.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

HEADS, LAYERS, EXPERTS = 4, 4, 4
VOCABULARY = 124
"""No other size is equal: onnxruntime-genai takes every product of this width for the one that computes logits."""
WINDOW, THRESHOLD, POSITIONS = 6, 16, 64
"""Sizes of the twin: tokens of a window; position from which it computes differently; tokens of the longest text."""

DECODE = {
    "texts": [[3 + 41 * i * i % 97 for i in range(30)], [5 + 29 * i * i % 89 for i in range(12)]],
    "cuts": [[20, 5, 1, 1, 1, 1, 1], [7, 3, 1, 1]],
}
"""Two texts: the first prompt is longer, and the other text shorter, than every window and threshold."""

_COUNT = re.compile(r"^(num_hidden|n|num|decoder|num_decoder)_layers?$|^num_blocks$")
_HIDDEN = re.compile(r"^(hidden_size|d_model|n_embd|embedding_dim|emb_dim)$")
_HEAD = re.compile(r"(^|_)(n|num)_(\w+_)?heads?(_kv)?$|attention_heads$|^num_query_groups$|^multi_query_group_num$")
_HEAD_SIZE = re.compile(r"head_dim$|head_size$|headdim$|d_head$|dim_head$|^kv_channels$|^d_kv$|^rotary_dim$|_dim_head$")
_SIZE = re.compile(r"(size|dim|width|rank|inner|embd|d_state|dff|d_ff|dim_ff|d_ssm)$|hidden_size_per_layer_input$")
_LENGTH = re.compile(r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_length|context_length)$")
_THRESHOLD = re.compile(r"^original_max_position|floor_scale$|scaling_n_floor$")
_WINDOW = re.compile(r"window(_size|_len)?$|attention_chunk_size$|^local_attention|^index_topk$")
_PERIOD = re.compile(r"(pattern|interval|period|step|every_n_layers|layer_group_size)$")
_EXPERT = re.compile(r"(num|n)_(\w+_)?experts$|expert_num$")
_CHOSEN = re.compile(r"experts?_per_tok(en)?$|topk$|top_k$|moe_k$")
_SHARED = re.compile(r"shared_experts$|^n_group$|expert_group$")
_LAYERED = re.compile(r"layer(?!.*size)|_k_dense_")
_LISTED = re.compile(r"layer|idx|ids$")
_TOKENIZER = re.compile(r"token|vocab|merges|\.model$")
_NAMES = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id",
          "initializer_range", "use_cache")  # fmt: skip
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct")


class Sizes:
    """The sizes of a checkpoint, and the small sizes of its twin (small model with random weights).

    `config` is what transformers' `to_dict` returns. Raises `ValueError` if a size is missing.

    Attributes:
        layers, heads, size, hidden, positions: sizes of the checkpoint; `size` is that of a head.
        width, head: sizes of hidden states and heads in the twin, divided by those of the checkpoint.
        kept: indices of the checkpoint's layers that the twin keeps; an index may occur twice.
        length: number of positions of the twin.
        ids: maps each special token's id in the checkpoint to its id in the twin.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        first = {name: next((v for k, v in config.items() if pattern.search(k) and _counts(v)), 0)
                 for name, pattern in (("layers", _COUNT), ("heads", _HEAD), ("hidden", _HIDDEN))}  # fmt: skip
        if missing := [name for name, value in first.items() if not value]:
            raise ValueError(f"config.json does not say its number of {' and '.join(missing)}")
        self.layers, self.heads, self.hidden = _, heads, hidden = first.values()
        sizes = [v for k, v in config.items() if _HEAD_SIZE.search(k) and _counts(v) and k != "qk_head_dim"]
        self.size = size = config.get("head_dim") or hidden // heads
        largest = max([*sizes, size]) if config.get("qk_rope_head_dim") is None else max(sizes)
        part = next((v for k, v in _all_items(config) if k in _PARTIAL and isinstance(v, float)), 1.0)
        # onnxruntime-genai needs the rotated part of a head to be a multiple of 16.
        wanted = next((n for n in (32, 40, 48, 64, 80, 96, 128) if n * part % 16 == 0), 64)
        self.head = min(1.0, wanted / largest)
        inner = min(heads, HEADS) * round(size * self.head)
        wide = inner if heads * size == hidden else 2 * inner if heads * size < hidden else max(inner // 2, 32)
        self.width = min(1.0, wide / hidden)
        rope = dict(_all_items({k: v for k, v in config.items() if k.startswith("rope_")}))
        self.positions = positions = next((v for k, v in config.items() if _LENGTH.search(k) and _counts(v)), 0)
        original = next((v for k, v in _all_items(config) if _THRESHOLD.search(k) and _counts(v)), positions)
        times = positions // original if original and positions > original else 1
        grows = "dynamic" in (rope.get("rope_type"), rope.get("type"))
        special = [v if isinstance(v, list) else [v] for k, v in config.items() if k.endswith("token_id")]
        ids = sorted({v for values in special for v in values if _counts(v)})
        self.kept = tuple(_kept_layers(config, self.layers))
        self.length = THRESHOLD if grows else max(POSITIONS, THRESHOLD * min(times, 64))
        self.ids = {v: v if v < 3 else VOCABULARY - 1 - i % 20 for i, v in enumerate(ids)}

    def small(self, name: str, value: Any) -> Any:
        """Return the value of a setting in the twin (small model with random weights)."""
        if isinstance(value, dict):
            return {key: self.small(str(key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return self._list(name, value)
        if isinstance(value, str) and len(value) == self.layers > 1 and "pattern" in name:
            return "".join(value[i] for i in self.kept)
        return self._number(name, value) if _counts(value) else value

    def _list(self, name: str, value: list[Any]) -> list[Any]:
        if name.endswith("token_id"):
            return [self.small(name, v) for v in value]
        if _is_listing(name, value, self.layers):
            return [place for place, layer in enumerate(self.kept) if layer in value]
        if len(value) == self.layers:
            return [value[i] if value[i] in (0, 1) else self.small(name, value[i]) for i in self.kept]
        if value and isinstance(value[0], list):  # kinds of layers and how often: [[["global", "local"], 12]]
            return [[kinds, max(1, len(self.kept) // len(kinds))] for kinds, _ in value[:1]]
        if name == "mrope_section":
            parts = [max(1, round(v * self.head)) for v in value]
            return [*parts[:-1], round(sum(value) * self.head) - sum(parts[:-1])]
        if name.endswith("factor"):  # one factor for each pair of rotated numbers
            count = max(1, round(len(value) * self.head))
            return [value[i * len(value) // count] for i in range(count)]
        return value

    def _number(self, name: str, value: int) -> int:
        few, layers = min(self.heads, HEADS), len(self.kept)
        other_heads = 2 * few if value > self.heads else 1 if value == 1 else max(1, few // 2)
        layer = layers if value >= self.layers else layers - 1 if value == self.layers - 1 else min(value, layers // 2)
        window = WINDOW if not self.positions or value < self.positions else self.length
        of_head, of_width = max(1, round(value * self.head)), max(16, 16 * round(value * self.width / 16))
        rules = (
            (name.endswith(("token_id", "token_index")), self.ids.get(value, min(value, VOCABULARY - 1))),
            ("vocab" in name, min(value, VOCABULARY)),
            (_COUNT.search(name), layers),
            (_THRESHOLD.search(name), THRESHOLD),
            (_LENGTH.search(name), self.length),
            (_WINDOW.search(name), window),
            (name.endswith("chunk_size"), min(value, 8)),
            (_HEAD.search(name), few if value == self.heads else other_heads),
            (_HEAD_SIZE.search(name) or (value == self.size and name.endswith("scalar")), of_head),
            (_CHOSEN.search(name) or _SHARED.search(name), min(value, 2)),
            (name == "topk_group", 1),
            (_EXPERT.search(name), min(value, EXPERTS)),
            (_PERIOD.search(name), min(value, 2)),
            (_LAYERED.search(name), layer),
            (name.endswith("offset"), min(value, 1)),
            ((_SIZE.search(name) or value == self.hidden) and value > 16, of_width),
        )
        return next((small for fits, small in rules if fits), value)


def threshold(config: Mapping[str, Any]) -> int | None:
    """Return the position at which a model's computation changes, such as to other rotary factors; None: nowhere."""
    return min((v for k, v in _all_items(config) if _THRESHOLD.search(k) and _counts(v)), default=None)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _all_items(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        yield str(key), value
        if isinstance(value, dict):
            yield from _all_items(value)


def _is_listing(name: str, value: Any, layers: int) -> bool:
    numbers = isinstance(value, list) and bool(value) and all(isinstance(v, int) and v < layers for v in value)
    return numbers and bool(_LISTED.search(name)) and sorted(set(value)) == value


def _kept_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return the layers that the twin keeps: two of each kind, in the checkpoint's pattern."""
    periods = any(_PERIOD.search(k) and _counts(v) and v > 1 for k, v in config.items())
    layered = [v for k, v in config.items() if _LAYERED.search(k) and not _COUNT.search(k) and _counts(v)]
    kinds: dict[str, list[int]] = {}
    for i in range(layers):
        kind = json.dumps([
            i in v if _is_listing(k, v, layers) else v[i] for k, v in config.items()
            if _is_listing(k, v, layers) or (isinstance(v, (list, str)) and len(v) == layers > 1 and k != "model_type")
        ])  # fmt: skip
        kinds.setdefault(kind, []).append(i)
    pairs = [(of[0], of[1] if len(of) > 1 else of[0]) for of in list(kinds.values())[:LAYERS]]
    if len(pairs) == 1:
        return [*range(min(layers, LAYERS if periods or min(layered, default=layers) < layers - 1 else 2))]
    runs = [of[-1] - of[0] + 1 == len(of) > 1 for of in kinds.values()]
    ordered = [i for place in zip(*pairs, strict=True) for i in place]
    return sorted(ordered) if any(runs) else ordered


def small_config(stored: Mapping[str, Any], whole: Mapping[str, Any], outer: Sizes | None = None) -> dict[str, Any]:
    """Return the config.json of a twin (small model with random weights).

    `stored` is the checkpoint's config.json, `whole` the same with all defaults. `outer` are the sizes of the model
    that contains this one (None: there is none). Raises `ValueError` if a size is missing.
    """
    models = [k for k, v in stored.items() if isinstance(v, dict) and "model_type" in v]
    parts, sizes = [k for k in models if isinstance(whole.get(k), dict)], outer
    try:
        sizes = Sizes(whole)
    except ValueError:
        if outer is None and not parts:
            raise
    twin = {k: small_config(stored[k], whole[k], sizes) for k in parts}
    for name, value in {**whole, **stored}.items():
        changed = value if sizes is None else sizes.small(name, value)
        if name not in parts and (name in stored or (_counts(value) and changed != value)):
            twin[name] = changed
    return {**stored, **twin}


def draw(model: Any) -> None:
    """Fill every parameter and every saved floating-point buffer with random numbers, seeded by its name."""
    torch: Any = import_module("torch")
    saved = set(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in saved or not tensor.is_floating_point():
                continue
            made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randint(-8, 8, tensor.shape, generator=made)
            if tensor.ndim < 2:  # near the model's initial values: 1 or 0 for norms, 0 for biases
                tensor.copy_((tensor + drawn / 32).bfloat16())
                continue
            # One number of each block is -8, the lowest value: it determines the block's scale.
            lowest = torch.randint(0, 32, (*tensor.shape[:-1], -(-tensor.shape[-1] // 32)), generator=made)
            drawn.scatter_(-1, (lowest + 32 * torch.arange(lowest.shape[-1])).clamp(max=tensor.shape[-1] - 1), -8)
            exponent = (torch.tensor(float(tensor.shape[-1])).sqrt() * 3.0).log2().round()
            tensor.copy_(drawn * 2.0**-exponent)


def left_out(config: Mapping[str, Any], length: int = POSITIONS) -> Iterable[tuple[str, dict[str, Any]]]:
    """For each setting, yield its name, and the configuration without this setting or with another value of it."""
    for name, value in config.items():
        if name in _NAMES or name.endswith(("token_id", "dropout")) or "vocab" in name:
            continue
        if isinstance(value, dict):
            for inner, changed in left_out(value, length):
                yield f"{name}.{inner}", {**config, name: changed}
        others = _others(name, value, length)
        if others == [None] and isinstance(value, int) and isinstance(config.get("head_dim"), int):
            others.append(config["head_dim"])  # scales use this value if the setting is missing
        for other in others:
            yield name, {**{k: v for k, v in config.items() if k != name}, **({} if other is None else {name: other})}


def _others(name: str, value: Any, length: int) -> list[Any]:
    """Return other values to try for a setting; None stands for the default."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int) and _WINDOW.search(name):
        return [length]
    if isinstance(value, list):
        return [[one] * len(value) for one in value if value.count(one) < len(value)][:LAYERS]
    if isinstance(value, float):
        return [None, 1.0]
    sizes = (_COUNT, _HIDDEN, _HEAD, _HEAD_SIZE, _SIZE, _EXPERT, _CHOSEN, _LENGTH)
    return [] if value is None or any(size.search(name) for size in sizes) else [None]


def _model(config: Any) -> Any:
    torch: Any = import_module("torch")
    automatic = import_module("transformers").AutoModelForCausalLM
    model = automatic.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw(model)
    return model


def make(checkpoint: Path, folder: Path) -> None:
    """Write the twin of a checkpoint (small model with random weights), its texts and its logits into a folder."""
    configs: Any = import_module("transformers").AutoConfig
    stored = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(small_config(stored, configs.from_pretrained(checkpoint).to_dict()), indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    model = _model(configs.from_pretrained(folder))
    model.save_pretrained(folder)
    # transformers wrote its own form over it, but exporters need the checkpoint's form
    (folder / "config.json").write_text(text, encoding="utf-8")
    for file in checkpoint.iterdir():  # some exporters need a tokenizer
        if _TOKENIZER.search(file.name):
            shutil.copyfile(file, folder / file.name)
    (folder / "decode.json").write_text(json.dumps(DECODE), encoding="utf-8")
    runner = import_module("checkpoint")
    runner.save_logits(folder / "logits.npz", runner.decode(model, **DECODE))


def explain(folder: Path, logits: Path, tolerance: float) -> list[str]:
    """Return settings of config.json that an exporter ignored: if one changes, transformers gives its `logits`.

    If no single setting explains the logits, each text names up to three settings. If these do not explain them either,
    the list is empty. `folder` has the twin. `tolerance` is the allowed difference, as a share of the largest logit.
    """
    found = import_module("numpy").load(logits)
    config, names = json.loads((folder / "config.json").read_text(encoding="utf-8")), list[str]()
    nearest = float("inf")
    while True:
        tried = [(_distance(changed, found), name, changed) for name, changed in left_out(config)]
        alone = [name for distance, name, _ in tried if distance <= tolerance]
        if alone:
            return [" and ".join([*names, name]) for name in dict.fromkeys(alone)]
        distance, name, config = min(tried, key=lambda each: each[0], default=(nearest, "", config))
        if distance > nearest / 3 or len(names) == 2:  # a second setting brings the logits no nearer
            return []
        nearest = distance
        names.append(name)


def _distance(config: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Return how far `found` is from the logits of a model with this config, as a share; infinite if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            model = _model(import_module("transformers").AutoConfig.from_pretrained(folder))
            rows = import_module("checkpoint").decode(model, **DECODE)
            return float(max(abs(found[i] - rows[int(i)]).max() / abs(rows[int(i)]).max() for i in found))
        except Exception:  # noqa: BLE001 - transformers raises many kinds of errors for settings that do not fit
            return float("inf")


def main() -> None:
    """Run the command line."""
    sys.path.append(str(Path(__file__).parent))
    import_module("torch").set_num_threads(1)
    if len(sys.argv) == 3:
        make(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        folder = Path(sys.argv[2])
        names = explain(folder, Path(sys.argv[3]), float(sys.argv[4]))
        (folder / "settings.json").write_text(json.dumps(names), encoding="utf-8")


if __name__ == "__main__":
    main()
