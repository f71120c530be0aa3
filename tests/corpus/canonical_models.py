"""Models that have TensorScatter and Attention from the start: those of `scripts/decoders.py`."""

from collections.abc import Iterator
from typing import Any

from decoders import FORMS, DecoderConfig, make_decoder

from corpus import Entry, built


def entries() -> Iterator[Entry]:
    configs: dict[str, dict[str, Any]] = {form: {"form": form} for form in FORMS}
    configs |= {f"{f} mask={m}": {"form": f, "mask": m} for f in FORMS for m in ("bool", "float")}
    configs |= {f"circular {f} {s}": {"form": f, "mode": "circular", "sequence": s} for f in FORMS for s in (1, "S")}
    configs |= {"float16": {"dtype": "float16"}, "bfloat16": {"dtype": "bfloat16"}, "softcap": {"softcap": 5.0}}
    configs |= {
        "no lengths": {"lengths": False, "mask": "bool", "causal": False},
        "wide values": {"value_head_size": 8},
        # Without lengths the first query sees the first key only, whatever the mask adds to it.
        "mask, no lengths": {"form": "heads-major", "mask": "bool", "lengths": False},
        "half precision": {"softmax_precision": "bfloat16", "softcap": 4.0, "dtype": "float16"},
        "one step": {"batch": 2, "sequence": 1},
        "4 rows": {"capacity": 4},
        "opset 25": {"opset": 25},
        "opset 26": {"opset": 26, "form": "five-d"},
    }
    models = {name: (lambda how=how: make_decoder(DecoderConfig(vocab=64, **how))) for name, how in configs.items()}
    yield from built("canonical", models)
    yield from built("canonical, tensorrt", models, target="tensorrt")
    for name, value in (("fallback", "contract"), ("fallback", "functional"), ("cache_layout", "preserve")):
        some = {n: m for n, m in models.items() if n in ("mobius", "circular mobius S", "seq-major")}
        yield from built(f"canonical, {value}", some, **{name: value})
    yield from built("canonical, plain", {"mobius": models["mobius"]}, attention_span=False, logits="all")
