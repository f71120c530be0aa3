"""Quantized caches with one scale each, from a calibration: against NumPy, the float session, and broken scales."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import onnx
import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder
from onnx import numpy_helper
from runtime.engines import open_engine, write_engine
from runtime.families import Twin, turned
from runtime.test_quantized_caches import FORMS, FP8, FULL, INT4, INT8, MOST, RTX, SHORT, Array, read

from trt_kvcache import (
    CachePlan,
    DecodeSession,
    GenerationConfig,
    PlanOptions,
    calibrate_caches,
    plan_model,
    rewrite_model,
    verify_model,
)
from trt_kvcache.errors import CacheFileError, CapacityError, OptionError, PromptError
from trt_kvcache.plan import CacheDtype, Fallback, Target
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner

CONFIG = DecoderConfig(layers=2, capacity=64, vocab=128, form="heads-major")
PROMPTS = [[5, 9, 3, 77, 1, 2, 4, 8, 16, 32], [100, 90, 80, 70], list(range(20, 50))]


def options(kind: CacheDtype, ranges: dict[str, float], target: Target = RTX) -> PlanOptions:
    return PlanOptions(cache_dtype=kind, cache_ranges=ranges, target=target)


def codes_of(rows: Array, span: float, kind: CacheDtype) -> Array:
    """Codes of rotated rows as numbers, by NumPy."""
    scale = np.float32(span / MOST[kind])
    scaled = turned(rows).astype(np.float32) / scale
    if kind is FP8:
        return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.clip(np.round(scaled), -MOST[kind] - 1, MOST[kind])


def held(codes: Array, kind: CacheDtype, *, attention: bool) -> Array:
    """The bytes of codes `[N, S, H]`: 4 bits lie in a uint8 of ONNX Runtime's attention, else in an int8."""
    if kind is INT4:
        whole, size = codes.astype(np.int64) + 8, -(-codes.shape[-1] // 2)
        if attention:
            return (whole[..., ::2] + (whole[..., 1::2] << 4)).astype(np.uint8)
        return (whole[..., :size] + (whole[..., size:] << 4) - 128).astype(np.int8)
    return codes.astype(np.int8 if kind is INT8 else ml_dtypes.float8_e4m3fn)


class Calibrated(Twin):
    """The NumPy decoder whose keys and values become codes and back, by the scale of their cache."""

    def __init__(self, path: Path, config: DecoderConfig, kind: CacheDtype, ranges: dict[str, float]) -> None:
        super().__init__(path, config)
        self._kind, self._ranges = kind, ranges

    def logits(self, tokens: Sequence[int], places: Array | None = None) -> Array:
        self._order = iter(self._ranges.values())  # keys and values of the first layer, of the second, ...
        return super().logits(tokens, places)

    def _rounded(self, rows: Array) -> Array:
        span = next(self._order)
        return turned(codes_of(rows, span, self._kind) * (span / MOST[self._kind]))


CASES = [
    (CONFIG, INT8, True),
    (CONFIG, INT4, True),
    (CONFIG, FP8, False),
    (replace(CONFIG, head_size=20), INT8, False),  # rows that GroupQueryAttention does not take
    (replace(CONFIG, head_size=20), INT4, False),
    (replace(CONFIG, form="mobius", query_heads=2, kv_heads=1, head_size=32, layers=1), INT8, True),
    (replace(CONFIG, form="seq-major", query_heads=6, head_size=8, layers=3), INT4, True),
    (replace(CONFIG, softcap=5.0), INT8, False),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("config", "kind", "attention"), CASES)
def test_sessions_equal_numpy(tmp_path: Path, config: DecoderConfig, kind: CacheDtype, attention: bool) -> None:
    """Bytes of the caches, and logits of three sequences; every other range is halved, so that codes saturate."""
    model = write_decoder(tmp_path / "model.onnx", config)
    own = read(model, PlanOptions(), PROMPTS[0])
    ranges = calibrate_caches(model, PROMPTS)
    ranges = {name: span / (1 + at % 2) for at, (name, span) in enumerate(ranges.items())}
    found = read(model, options(kind, ranges), PROMPTS[0])
    for name in list(own)[:2]:  # later layers read what was quantized
        wanted = held(codes_of(own[name], ranges[name], kind), kind, attention=attention)
        assert found[name].dtype == wanted.dtype
        assert (found[name] != wanted).mean() < 0.01  # a rotation is a sum, whose last bits depend on its order
    twin = Calibrated(model, config, kind, ranges)
    with DecodeSession.open(model, plan_options=options(kind, ranges), max_batch=3) as session:
        assert session.cache.bytes == 3 * plan_model(model, options(kind, ranges, FULL)).cache_bytes()
        slots = {session.cache.acquire(): list(prompt) for prompt in PROMPTS}
        logits = session.update(slots)
        for token in (7, 11):
            for slot, tokens in slots.items():
                wanted = twin.logits(tokens)
                assert np.abs(logits[slot][-1] - wanted).max() < 1e-3 * np.abs(wanted).max()
                tokens.append(token)
            logits = session.update({slot: [token] for slot in slots})


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_ranges_are_the_largest_magnitudes(tmp_path: Path, dtype: str) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, dtype=dtype))
    found = calibrate_caches(model, PROMPTS[:2], PlanOptions(target=FULL))
    rows = [read(model, PlanOptions(), prompt) for prompt in PROMPTS[:2]]
    for name, span in found.items():
        largest = max(float(np.abs(turned(each[name])).max()) for each in rows)
        assert span == pytest.approx(largest, rel=1e-5 if dtype == "float32" else 0.01)


def test_a_ring_is_read_before_it_overwrites_rows(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "ring.onnx", replace(CONFIG, form="mobius", mode="circular", capacity=16))
    planned, prompt = PlanOptions(fallback=Fallback.CONTRACT), list(range(60))
    found = calibrate_caches(model, [prompt], planned)
    runner = OnnxRuntimeRunner(model, planned, max_batch=1)
    seen: dict[str, list[float]] = {name: [] for name in found}
    with DecodeSession(runner) as session:
        slot = session.cache.acquire()
        for token in prompt:
            session.update({slot: [token]})
            for name, largest in seen.items():
                largest.append(float(np.abs(turned(runner.view(name))).max()))
    assert found == pytest.approx({name: max(largest) for name, largest in seen.items()}, rel=1e-5)
    assert any(largest[-1] < 0.99 * found[name] for name, largest in seen.items())
    made = PlanOptions(cache_dtype=INT8, cache_ranges=found, fallback=Fallback.CONTRACT)
    assert all(cache.reason.endswith("; 3 codes of 8 bits in each float32") for cache in plan_model(model, made).caches)
    config = GenerationConfig(max_new_tokens=4)
    with DecodeSession.open(model, plan_options=made) as session, DecodeSession.open(model) as own:
        assert session.generate([prompt], config)[0].tokens == own.generate([prompt], config)[0].tokens


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "target"), FORMS[:4], ids=lambda value: value.value)
def test_engines_decode_as_the_cpu_does(tmp_path: Path, kind: CacheDtype, target: Target) -> None:
    """On the stand-ins. The first tokens are those of the float session, too."""
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, capacity=128))
    ranges = calibrate_caches(model, PROMPTS)
    engine = write_engine(model, options=options(kind, ranges), backend=target.value)
    config = GenerationConfig(max_new_tokens=6)
    with DecodeSession.open(model, plan_options=options(kind, ranges, target)) as session:
        wanted = [r.tokens for r in session.generate(PROMPTS, config)]
    with DecodeSession(open_engine(engine, backend=target.value)) as session:
        assert [r.tokens for r in session.generate(PROMPTS, config)] == wanted
    if kind is INT8:
        with DecodeSession.open(model) as session:
            assert [r.tokens for r in session.generate(PROMPTS, config)] == wanted


def test_files_say_their_scales(tmp_path: Path) -> None:
    """A rewritten model is verified without another calibration; saved caches of other scales are refused."""
    model, made = write_decoder(tmp_path / "model.onnx", CONFIG), tmp_path / "made.onnx"
    ranges = calibrate_caches(model, PROMPTS)
    rewrite_model(model, made, options(INT8, ranges))
    assert verify_model(model, verify=SHORT, rewritten=made).passed
    with DecodeSession.open(model, plan_options=options(INT8, ranges)) as session:
        session.update({session.cache.acquire(): PROMPTS[0]})
        session.cache.save(tmp_path / "slots")
    with DecodeSession.open(model, plan_options=options(INT8, ranges)) as session:
        session.cache.load(tmp_path / "slots")
    other = {name: 2 * span for name, span in ranges.items()}
    with (
        DecodeSession.open(model, plan_options=options(INT8, other)) as session,
        pytest.raises(CacheFileError, match="other sizes, layouts or scales"),
    ):
        session.cache.load(tmp_path / "slots")


def _changed(path: Path, name: str, value: float) -> Path:
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == name:
            values = np.full_like(numpy_helper.to_array(tensor), value)
            tensor.CopyFrom(numpy_helper.from_array(values, name))
    onnx.save(model, path)
    return path


def test_prompts_that_are_refused(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", CONFIG)
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], OptionError, "there are no prompts to calibrate caches with; give some"),
        ([[1], []], PromptError, "calibration prompt 2 is empty; it needs at least one token"),
        ([[1, 128]], PromptError, r"calibration prompt 1: token id 128 is out of range; the model has 0 to 127"),
        ([[1] * 65], CapacityError, "prompt 1 has 65 tokens, but a sequence may have at most 64; shorten it, or plan"),
        (["text"], PromptError, "calibration prompt 1 is text, but there is no tokenizer beside the model; give token"),
        ("text", OptionError, "prompts is 'text'; give a list"),
    ]
    for prompts, error, words in cases:
        with pytest.raises(error, match=words):
            calibrate_caches(model, prompts)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "cache 'value_cache.1' holds nothing but 0 after all"), (np.inf, "holds NaN or infinity after calibration")],
)
def test_caches_that_no_scale_fits(tmp_path: Path, value: float, words: str) -> None:
    model = _changed(write_decoder(tmp_path / "model.onnx", CONFIG), "layers.1.v.weight", value)
    with pytest.raises(OptionError, match=words):
        calibrate_caches(model, [[1, 2, 3]])


def test_ranges_that_are_refused(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, layers=1))
    right = {"key_cache.0": 1.0, "value_cache.0": 1.0}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cache_ranges": right}, "cache_ranges are given without cache_dtype: give cache_dtype"),
        ({"cache_dtype": "int8", "cache_ranges": [1.0]}, "cache_ranges is .1.0.; it must be a mapping, such as the"),
        (
            {"cache_dtype": "int8", "cache_ranges": right | {"key_cache.0": 0}},
            r"cache_ranges\['key_cache.0'\] is 0; it",
        ),
        (
            {"cache_dtype": "int8", "cache_ranges": right | {"key_cache.0": float("nan")}},
            "must be the largest magnitude",
        ),
        ({"cache_dtype": "int8", "cache_ranges": right | {"other": 1}}, "cache_ranges names the unknown cache 'other'"),
        ({"cache_dtype": "int8", "cache_ranges": {"key_cache.0": 1}}, "cache_ranges has no range for 'value_cache.0'"),
        ({"cache_dtype": "fp8", "cache_ranges": right}, "cache_dtype is fp8, but TensorRT for RTX has no 8-bit caches"),
    ]
    for given, words in cases:
        with pytest.raises(OptionError, match=words):
            plan_model(model, PlanOptions(**given))


def test_the_command_line(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", replace(CONFIG, layers=1))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('[5, 9, 3]\n\n{"id": "a", "prompt": [100, 90]}\n', encoding="utf-8")
    done = invoke("plan", model, "--cache-dtype", "int8", "--calibrate", prompts, "--json", code=None)
    found = msgspec.json.decode(done.stdout, type=CachePlan).options.cache_ranges
    assert found == pytest.approx(calibrate_caches(model, [[5, 9, 3], [100, 90]]))
