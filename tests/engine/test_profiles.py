"""Optimization profiles from a plan: legal and complete for every limit, or refused by name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import sample_plan, with_contract

from trt_kvcache.engine.build_options import BuildOptions
from trt_kvcache.engine.manifest import Profile, ShapeRange
from trt_kvcache.engine.profiles import make_profiles, resolve_limits
from trt_kvcache.errors import OptionError
from trt_kvcache.importer.cache_plan import CachePlan, Dim, LogitsSpan, Role, TensorRole

PLAN = sample_plan(layers=1)


def profiles(plan: CachePlan, build: BuildOptions) -> dict[str, Profile]:
    return {p.name: p for p in make_profiles(plan, build, resolve_limits(plan, build))}


def with_input(name: str, shape: tuple[Dim, ...], axes: tuple[str, ...]) -> CachePlan:
    tensor = TensorRole(name, "input", Role.OTHER, "int64", shape, "config: test", axes)
    return replace(PLAN, tensors=(*PLAN.tensors, tensor))


def with_fixed(symbol: str, size: int) -> CachePlan:
    def fix(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(size if d == symbol else d for d in shape)

    def fix_axes(tensor: TensorRole) -> TensorRole:
        axes = tuple("" if d == symbol else a for d, a in zip(tensor.shape, tensor.axes, strict=True))
        return replace(tensor, shape=fix(tensor.shape), axes=axes)

    caches = tuple(
        replace(
            c,
            physical_shape=fix(c.physical_shape),
            logical_shape=fix(c.logical_shape),
            update_length=size if c.update_length == symbol else c.update_length,
        )
        for c in PLAN.caches
    )
    return replace(PLAN, caches=caches, tensors=tuple(map(fix_axes, PLAN.tensors)))


def with_logits(plan: CachePlan) -> CachePlan:
    """The plan with logits of the last positions only."""
    span = LogitsSpan("logits_span", "logits_span", "logits", "norm", 1, ("head",))
    role = TensorRole("logits_span", "input", Role.SPAN, "int64", ("logits_span",), "added", ("kept",))
    return replace(plan, logits_span=span, tensors=(*plan.tensors, role))


@pytest.mark.parametrize(
    ("build", "limit", "prefill"),
    [
        (BuildOptions(max_batch=4, max_chunk=64), 16, 16),
        (BuildOptions(max_batch=4, max_chunk=9), 9, 9),
        (BuildOptions(max_batch=4, max_chunk=64, max_logits=5), 5, 5),
        (BuildOptions(max_batch=4, max_chunk=64, max_logits=1), 1, 1),
        (BuildOptions(max_batch=1, max_chunk=64, max_logits=1), 1, 2),  # or the tail's weights would be stored twice
        (BuildOptions(max_batch=1, max_chunk=64, max_logits=1, decode_weights="own"), 1, 1),
    ],
)
def test_logits_of_some_positions(build: BuildOptions, limit: int, prefill: int) -> None:
    plan = with_logits(PLAN)
    assert resolve_limits(plan, build).max_logits == limit
    made = profiles(plan, build)
    assert made["prefill"].shapes["logits_span"] == ShapeRange((1,), (1,), (prefill,))
    assert made["decode"].shapes["logits_span"] == ShapeRange((1,), (1,), (1,))


def test_updates_of_a_fixed_length_may_end_anywhere() -> None:
    """A step of fewer tokens is filled up after them."""
    plan = with_logits(with_fixed("seq", 4))
    assert resolve_limits(plan, BuildOptions(max_batch=2)).max_logits == 4
    made = profiles(plan, BuildOptions(max_batch=2))
    assert [p.shapes["logits_span"] for p in made.values()] == [ShapeRange((1,), (1,), (4,))]
    with pytest.raises(OptionError, match="every update of the model has 4 tokens, and any of them may be the"):
        resolve_limits(plan, BuildOptions(max_logits=2))


def test_logits_that_cannot_be_asked_for() -> None:
    with pytest.raises(OptionError, match="max_logits is 3, but the plan leaves the model's logits as they are"):
        resolve_limits(PLAN, BuildOptions(max_logits=3))
    with pytest.raises(OptionError, match="max_logits is 9, but a step has at most 8 positions"):
        resolve_limits(with_logits(PLAN), BuildOptions(max_chunk=8, max_logits=9))
    with pytest.raises(OptionError, match=r"'logits_span' 4 in dimension 0 \(kept\); it must be 16 \(from max_logits"):
        profiles(with_logits(PLAN), BuildOptions(max_batch=4, max_shapes={"logits_span": (4,)}))
    own = profiles(with_logits(PLAN), BuildOptions(max_batch=4, opt_shapes={"logits_span": (4,)}))
    assert own["prefill"].shapes["logits_span"] == ShapeRange((1,), (4,), (16,))
    assert own["decode"].shapes["logits_span"] == ShapeRange((1,), (1,), (1,))


@given(
    max_batch=st.integers(1, 64) | st.none(),
    opt_batch=st.integers(1, 64) | st.none(),
    max_chunk=st.integers(1, 300) | st.none(),
    batch=st.sampled_from(["batch", 1, 3]),
    keys=st.sampled_from(["keys", "tokens", "batch+1", "sequence"]),
)
def test_every_profile_is_legal(
    max_batch: int | None, opt_batch: int | None, max_chunk: int | None, batch: Dim, keys: str
) -> None:
    """Refused for a reason, or every dynamic input has a range that grows, holds the limits and fits the model."""
    plan = with_fixed("batch", batch) if isinstance(batch, int) else PLAN
    plan = replace(plan, tensors=(*plan.tensors, TensorRole("x", "input", Role.OTHER, "bool", ("n",), "test", (keys,))))
    build = BuildOptions(max_batch=max_batch, opt_batch=opt_batch, max_chunk=max_chunk)
    try:
        limits = resolve_limits(plan, build)
    except OptionError:
        assert (
            (max_chunk or 0) > 256
            or (isinstance(batch, int) and max_batch not in (None, batch))
            or (opt_batch or 0) > (batch if isinstance(batch, int) else max_batch or 1)
        )
        return
    made = make_profiles(plan, replace(build, decode_weights="own"), limits)
    assert len({tuple(p.shapes.items()) for p in made}) == len(made)
    dynamic = {t.name: t for t in plan.tensors if t.io == "input" and any(isinstance(d, str) for d in t.shape)}
    for profile in made:
        assert profile.shapes.keys() == dynamic.keys()
        chunk = 1 if profile.name == "decode" else limits.max_chunk
        largest = {
            "batch": limits.max_batch, "sequence": chunk, "span": 256, "keys": 256,
            "tokens": limits.max_batch * chunk, "batch+1": limits.max_batch + 1,
        }  # fmt: skip
        for name, range_ in profile.shapes.items():
            tensor = dynamic[name]
            columns = zip(tensor.shape, tensor.axes, range_.min, range_.opt, range_.max, strict=True)
            for size, axis, low, typical, high in columns:
                assert 1 <= low <= typical <= high
                assert high == (size if isinstance(size, int) else largest[axis])
                assert low == (size if isinstance(size, int) else 2 if axis == "batch+1" else 1)


@pytest.mark.parametrize("quantized", [False, True])
def test_auto_is_what_gives_the_smaller_engine(quantized: bool) -> None:
    limits = resolve_limits(PLAN, BuildOptions())
    chosen = make_profiles(PLAN, BuildOptions(), limits, quantized=quantized)
    options = BuildOptions(decode_weights="own" if quantized else "shared")
    assert chosen == make_profiles(PLAN, options, limits)
    assert chosen != make_profiles(PLAN, BuildOptions(decode_weights="shared" if quantized else "own"), limits)


def test_limits_and_profiles_follow_the_model() -> None:
    """A fixed update length, or a prefill of one token, gives one profile."""
    limits = resolve_limits(with_fixed("batch", 3), BuildOptions())
    assert (limits.max_batch, limits.opt_batch, limits.max_chunk, limits.capacity) == (3, 3, 256, 256)
    large = replace(PLAN, caches=tuple(replace(c, capacity=4096) for c in PLAN.caches))
    assert resolve_limits(large, BuildOptions()).max_chunk == 512
    made = profiles(with_fixed("seq", 16), BuildOptions(max_batch=2))
    assert list(made) == ["prefill"]
    assert made["prefill"].shapes["input_ids"].max == (2, 16)
    assert list(profiles(with_fixed("seq", 1), BuildOptions())) == ["decode"]
    assert list(profiles(PLAN, BuildOptions(max_chunk=1))) == ["decode"]


@pytest.mark.parametrize(
    ("plan", "build", "message"),
    [
        (PLAN, BuildOptions(max_chunk=257), "max_chunk is 257, but cache 'key_cache.0' holds 256 tokens"),
        (PLAN, BuildOptions(max_batch=2, opt_batch=3), r"opt_batch is 3, more than the largest batch \(2\)"),
        (with_fixed("batch", 3), BuildOptions(max_batch=4), "max_batch is 4, but the model's batch is fixed at 3"),
        (
            with_fixed("seq", 1),
            BuildOptions(max_chunk=8),
            "max_chunk is 8, but the model's update length is fixed at 1",
        ),
        (replace(PLAN, caches=()), BuildOptions(), "the model has no KV cache to build for"),
    ],
)
def test_limits_against_the_model_are_refused(plan: CachePlan, build: BuildOptions, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        resolve_limits(plan, build)


@pytest.mark.parametrize("chunk", [17, 300])
def test_the_longest_update_of_a_circular_cache_bounds_the_chunk(chunk: int) -> None:
    plan = replace(PLAN, caches=(with_contract(PLAN.caches[0]), PLAN.caches[1]))
    assert resolve_limits(plan, BuildOptions()).max_chunk == 16
    assert resolve_limits(plan, BuildOptions(max_chunk=16)).max_chunk == 16
    with pytest.raises(OptionError, match=r"at most 16 tokens .* give max_chunk=16 or less, or .* window_chunk"):
        resolve_limits(plan, BuildOptions(max_chunk=chunk))


def test_an_unknown_axis_needs_shapes() -> None:
    plan = with_input("image", ("batch", 3, "patches", "width"), ("batch", "", "?", "?"))
    with pytest.raises(OptionError) as caught:
        profiles(plan, BuildOptions(max_batch=2))
    message = str(caught.value)
    assert "input 'image' [batch, 3, patches, width]: the largest patches, width is unknown" in message
    assert "min_shapes, opt_shapes and max_shapes" in message
    assert "max_shapes image:1x3x1x1" in message

    build = BuildOptions(max_batch=2, min_shapes={"image": (1, 3, 0, 8)}, max_shapes={"image": (2, 3, 64, 8)})
    for profile in profiles(plan, build).values():
        assert profile.shapes["image"] == ShapeRange((1, 3, 0, 8), (2, 3, 64, 8), (2, 3, 64, 8))
    assert profiles(plan, BuildOptions(opt_shapes={"image": (1, 3, 5, 8)}))["decode"].shapes["image"] == ShapeRange(
        (1, 3, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8)
    )


def test_shapes_narrow_known_axes() -> None:
    build = BuildOptions(
        max_batch=4,
        max_chunk=64,
        min_shapes={"attention_span": (64,), "input_ids": (2, 4)},
        opt_shapes={"input_ids": (3, 32)},
    )
    made = profiles(PLAN, build)
    assert made["prefill"].shapes["attention_span"] == ShapeRange((64,), (128,), (256,))
    assert made["prefill"].shapes["input_ids"] == ShapeRange((2, 4), (3, 32), (4, 64))
    assert made["decode"].shapes["input_ids"] == ShapeRange((2, 1), (3, 1), (4, 1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            BuildOptions(min_shapes={"ids": (1,)}),
            "min_shapes names 'ids', which is not an input of the model; inputs: input_i",
        ),
        (
            BuildOptions(max_shapes={"input_ids": (1, 2, 3)}),
            r"max_shapes gives 'input_ids' the shape \[1, 2, 3\], but .*: give",
        ),
        (BuildOptions(max_shapes={"key_cache.0": (1, 4, 512, 64)}), "dimension 2 is fixed at 256"),
        (
            BuildOptions(max_shapes={"input_ids": (8, 64)}),
            r"'input_ids' 8 in dimension 0 \(batch\); .* 4 \(from max_batch",
        ),
        (
            BuildOptions(max_shapes={"input_ids": (2, 64)}),
            r"'input_ids' 2 in dimension 0 \(batch\); .* 4 \(from max_batch",
        ),
        (BuildOptions(max_shapes={"input_ids": (4, 65)}), r"65 in dimension 1 \(sequence\); .* 64 \(from max_chunk"),
        (
            BuildOptions(max_shapes={"attention_span": (257,)}),
            r"257 in dimension 0 \(span\); .* at most 256 \(the capac",
        ),
        (BuildOptions(min_shapes={"input_ids": (0, 1)}), r"min_shapes gives 'input_ids' 0 in dimension 0"),
        (
            BuildOptions(min_shapes={"attention_span": (99,)}, opt_shapes={"attention_span": (98,)}),
            "must grow from min_shapes over opt_shapes to max_shapes; dimension 0 is 99, 98, 256",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(build: BuildOptions, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        profiles(PLAN, replace(build, max_batch=4, max_chunk=64))
