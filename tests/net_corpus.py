"""The models of the net: stored exports, models of every builder of the tests, mutants of exports at fixed seeds.

Nothing is built before it is asked for. A builder that is gone takes its models with it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx

TESTS = Path(__file__).resolve().parent
STORED = (TESTS / "models", TESTS.parent.parent / "shared" / "models", TESTS.parents[2] / "shared" / "models")
GROWS = ("optimum/*", "mobius/*_dynamic_*", "ort-genai/*", "transformers/*", "torch/*_dynamic_*")
MUTATED = ("optimum/llama", "mobius/llama_static_f32", "torch/llama_static_wrap_op24")
SEEDS = range(40)

Make = Callable[[Path], Path]
"""Writes a model to a folder, or gives the path of one that is there."""
Entry = tuple[str, Make, dict[str, Any]]
"""Key, model, and options of the plan."""


def stored() -> Iterator[Entry]:
    """The stored exports, and those that lie beside the repository and have no copy in it."""
    seen = set()
    for root in STORED:
        for path in sorted(root.glob("**/*.onnx")):
            name = path.parent.relative_to(root).as_posix()
            if name not in seen:
                seen.add(name)
                yield f"stored/{name}", lambda folder, path=path: path, _capacity(name)


def _capacity(name: str) -> dict[str, Any]:
    return {"capacity": 40} if any(fnmatch.fnmatch(name, p) for p in GROWS) else {}


def mutants() -> Iterator[Entry]:
    """Changed exports."""
    from mutation_trials import mutant

    for name in MUTATED:
        source = TESTS / "models" / name / "model.onnx"
        for seed in SEEDS:
            yield (
                f"mutant/{name}/{seed}",
                lambda folder, source=source, seed=seed: mutant(source, folder, seed)[0],
                _capacity(name),
            )


def _made(group: str, models: dict[str, Callable[[], onnx.ModelProto]], **options: Any) -> Iterator[Entry]:
    for name, build in models.items():

        def make(folder: Path, build: Callable[[], onnx.ModelProto] = build) -> Path:
            onnx.save(build(), folder / "model.onnx")
            return folder / "model.onnx"

        yield f"{group}/{name}", make, options


def concat() -> Iterator[Entry]:
    """Decoders whose caches grow by Concat."""
    import numpy as np
    from concat_graphs import Decoder, make_decoder

    forms: dict[str, dict[str, Any]] = {"plain": {}, "upcast": {"dtype": np.float16, "upcast": True}}
    choices: dict[str, tuple[Any, ...]] = {
        "scale": ("q", "k", "both", "none"), "by": ("Div",), "softcap": (5.0,), "window": (5,), "guard": (True,),
        "mask": ("padding", "positions", "buffer", "own", "none"), "apply": ("where", "hide"), "layers": (2,),
        "sinks": ("weight", "zero"), "repeat": ("tile", "gather"), "kv_heads": (4, 1), "layout": ("bsnd", "flat"),
        "positions": ("past", "padding", "present", "none"), "embedded": (True,), "last": (True,), "batch": (1,),
        "dtype": (np.float16,), "sequence": (1,),
    }  # fmt: skip
    for name, values in choices.items():
        forms.update({f"{name}={getattr(v, '__name__', v)}": {name: v} for v in values})
    forms["own float"] = {"mask": "own", "own_type": np.float32}
    forms["padding bsnd"] = {"mask": "padding", "layout": "bsnd", "layers": 2}
    models = {name: (lambda how=how: make_decoder(Decoder(**how))) for name, how in forms.items()}
    yield from _made("concat", models, capacity=24)


def attended() -> Iterator[Entry]:
    """Attention in other forms, over the same decoders."""
    from concat_graphs import Decoder, make_decoder

    def of(group: str, forms: dict[str, Any]) -> Iterator[Entry]:
        yield from _made(group, {n: (lambda d=d: make_decoder(d)) for n, d in forms.items()}, capacity=24)

    with suppress(ImportError):
        from apart_graphs import FORMS as APART

        yield from _made("apart", APART, capacity=24)
    with suppress(ImportError):
        from grouped_graphs import Grouped

        forms = (
            "broadcast",
            "einsum",
            "jax",
            "rows",
            "flat",
            "front",
            "front einsum",
            "tiled",
            "folded",
            "folded back",
        )
        how = [{"form": f} for f in forms] + [{"mask": m} for m in (3, 4, 5)] + [{"apply": "where"}, {"rolled": True}]
        yield from of("grouped", {str(h): Decoder(repeat="none", attend=Grouped(**h)) for h in how})
    with suppress(ImportError):
        from merged_graphs import Merged

        how = [{"split": s} for s in ("mask", "softmax")] + [{"split": "none", "spread": s} for s in ("heads", "one")]
        how += [{"scale": s} for s in ("scores", "keys", "none")] + [{"apply": "where"}, {"sizes": "heads"}]
        yield from of("merged", {str(h): Decoder(attend=Merged(**h)) for h in how})
    with suppress(ImportError):
        from latent_graphs import Latent, latent_decoder

        how = [{}, {"heads": "weights"}, {"products": "blocks"}, {"products": "two"}, {"join": "scatter"}]
        how += [{"parts": "slice"}, {"norm": "pieces"}, {"bias": True}, {"absorbed": True}, {"operator": True}]
        yield from of("latent", {str(h): latent_decoder(Latent(**h)) for h in how})
    with suppress(ImportError):
        from rope_graphs import Rope

        forms = ("slice", "negative", "open", "gather", "gather 2d", "position_ids", "range", "table")
        how = [{"form": f} for f in forms] + [{"keys": True}, {"angles": "einsum"}, {"angles": "matmul"}]
        yield from of("rope", {str(h): Decoder(attend=Rope(**h), positions="none") for h in how})
    with suppress(ImportError):
        import slope_graphs as s

        made = {"counted": s.counted, "table": s.table, "distance": s.distance, "absolute": s.absolute}
        yield from of("slopes", {n: Decoder(scores=s.added(f), mask="padding") for n, f in made.items()})
    with suppress(ImportError):
        from cut_graphs import CUTS, MASKS, Cut, make_cut

        how = [{"cut": c} for c in CUTS] + [{"mask": m} for m in MASKS] + [{"attention": "fused"}, {"layout": "bsnd"}]
        how += [{"kept": (0, 7), "window": (0, 8)}, {"sequence": 1}, {"values": 1}, {"reads": "cut"}]
        cuts = {str(h): (lambda h=h: make_cut(Cut(**h))) for h in how}
        yield from _made("cut", cuts, capacity=24)
        rings = {n: m for n, m in cuts.items() if "attention" in n or "kept" in n or n in ("{'mask': 'lengths'}",)}
        yield from _made("cut, circular", rings, capacity=24, sliding="circular", window_chunk=8)


def foreign() -> Iterator[Entry]:
    """Decoders as other tools export them; stacked caches, new rows only, other layouts, quantized weights."""
    from decoders import DecoderConfig
    from foreign_decoders import FORMS, make_foreign

    config = DecoderConfig(vocab=64, capacity=32)

    def base(form: str) -> onnx.ModelProto:
        return make_foreign(form, config)

    yield from _made("foreign", {f: (lambda f=f: base(f)) for f in FORMS}, capacity=32)
    expanded = {"latents": lambda: base("latents")}
    yield from _made("foreign, expanded", expanded, capacity=32, latent_attention="expanded")
    with suppress(ImportError):
        from stacked_graphs import Stacking, stacked

        kinds = [
            ("concat", ("L", 1, "slice")), ("concat-attention", ("M",)), ("concat-attention", ("K", 2)),
            ("concat", ("LK",)), ("past-attention", ("LK", 1, "split")), ("gqa", ("LK", 1)),
            ("scatter", ("L", 0, "slice", "slots")), ("scatter", ("L", 0, "gather", "stack", True)),
        ]  # fmt: skip
        models = {f"{f} {how}": (lambda f=f, how=how: stacked(base(f), Stacking(*how))) for f, how in kinds}
        yield from _made("stacked", models, capacity=32)
    with suppress(ImportError):
        import new_row_graphs as n

        models = {
            "joined": lambda: n.give_new_rows(base("concat"), n.as_joined),
            "flat": lambda: n.give_new_rows(base("concat"), n.flat),
            "relu": lambda: n.give_new_rows(base("concat"), n.changed("Relu")),
            "laid 0213": lambda: n.lay_caches(base("concat"), (0, 2, 1, 3), (0, 1, 3, 2)),
            "turned": lambda: n.turn_within(base("concat"), (0, 2, 1, 3)),
        }
        yield from _made("new rows", models, capacity=32)
    with suppress(ImportError):
        from block_graphs import FORMS as QUANTIZED
        from block_graphs import in_blocks
        from concat_graphs import Decoder, make_decoder

        plain = Decoder(heads=8, size=8, opset=23)
        models = {form: (lambda form=form: in_blocks(make_decoder(plain), form)) for form in QUANTIZED}
        yield from _made("blocks", models, capacity=24)


def others() -> Iterator[Entry]:
    """Canonical models, hybrids, speech, and the single nodes of the support matrix."""
    from decoders import FORMS, DecoderConfig, make_decoder

    configs: dict[str, dict[str, Any]] = {form: {"form": form} for form in FORMS}
    configs |= {f"{f} mask={m}": {"form": f, "mask": m} for f in FORMS for m in ("bool", "float")}
    configs |= {f"circular {f} {s}": {"form": f, "mode": "circular", "sequence": s} for f in FORMS for s in (1, "S")}
    configs |= {"float16": {"dtype": "float16"}, "bfloat16": {"dtype": "bfloat16"}, "softcap": {"softcap": 5.0}}
    configs |= {
        "no lengths": {"lengths": False, "mask": "bool", "causal": False},
        "wide values": {"value_head_size": 8},
    }
    models = {name: (lambda how=how: make_decoder(DecoderConfig(vocab=64, **how))) for name, how in configs.items()}
    yield from _made("canonical", models)
    yield from _made("canonical, tensorrt", models, target="tensorrt")
    for name, value in (("fallback", "contract"), ("fallback", "functional"), ("cache_layout", "preserve")):
        some = {n: m for n, m in models.items() if n in ("mobius", "circular mobius S", "seq-major")}
        yield from _made(f"canonical, {value}", some, **{name: value})
    yield from _made("canonical, plain", {"mobius": models["mobius"]}, attention_span=False, logits="all")
    with suppress(ImportError):
        from hybrids import cross_model, hybrid_model

        for growing in (False, True):
            hybrid = {
                f"convolution={c}": (lambda c=c, g=growing: hybrid_model(convolution=c, growing=g))
                for c in (True, False)
            }
            crosses = [(kind, mask) for kind in ("keys", "hidden") for mask in ("none", "ones", "bool")]
            hybrid |= {f"{k} {m}": (lambda k=k, m=m, g=growing: cross_model(k, m, growing=g)) for k, m in crosses}
            yield from _made(f"hybrid, growing={growing}", hybrid, capacity=24)
    with suppress(ImportError):
        import speech_graphs

        how = ({}, {"write": "rows"}, {"mask": "all"}, {"first": 1}, {"back": 1}, {"scrambled": True})
        speech = {str(h): (lambda h=h: speech_graphs.make_decoder(speech_graphs.Speech(**h))) for h in how}
        yield from _made("speech", speech)
    with suppress(ImportError):
        import scan_graphs

        scans = {r: (lambda r=r: scan_graphs.scan(r, cached=True)) for r in ("", *scan_graphs.REPEATS)}
        yield from _made("scan", scans | {"decoder": scan_graphs.decoder})
    with suppress(ImportError):
        from originals import OriginalConfig, make_original

        heads = DecoderConfig(form="heads-major", vocab=64, capacity=24)
        how = ({}, {"cache": "assign"}, {"window": 5}, {"embedded": True}, {"extras": True}, {"batch": 2})
        made = {str(h): (lambda h=h: make_original(OriginalConfig(heads, **h))) for h in how}
        yield from _made("original", made, capacity=24)
    with suppress(ImportError):
        from cases import ALL_CASES

        for case in ALL_CASES:
            yield from _made("case", {case.key: case.model}, **({"capacity": case.capacity} if case.capacity else {}))
    with suppress(ImportError):
        from onnx_cases import node_cases

        yield from _made("node", {c.name: (lambda c=c: c.model) for c in node_cases()[0]})


GROUPS = (stored, concat, attended, foreign, others, mutants)


def entries(only: str = "*", groups: tuple[Callable[[], Iterator[Entry]], ...] = GROUPS) -> list[Entry]:
    """The corpus, or those models whose keys match."""
    return [entry for group in groups for entry in group() if fnmatch.fnmatch(entry[0], only)]
