"""A plan and a manifest as data, for tests of what reads them: no model, no TensorRT."""

from dataclasses import replace

from trt_kvcache.engine.manifest import Manifest, Profile, ShapeRange
from trt_kvcache.files import FileIdentity
from trt_kvcache.importer.cache_plan import (
    AttentionKind,
    AttentionPlan,
    CachePlan,
    CacheUpdate,
    Mask,
    PhysicalLayout,
    PlanOptions,
    Role,
    Route,
    SpanInput,
    TensorRole,
    UpdateContract,
    UpdateForm,
    UpdateMode,
)


def cache_update(layer: int, kind: str = "key") -> CacheUpdate:
    """A float16 cache of 256 rows, 4 heads of 64, sequence-major 3-D in the model and heads-major in the engine."""
    return CacheUpdate(
        node=f"/layers.{layer}/{kind}/TensorScatter",
        past=f"{kind}_cache.{layer}",
        present=f"updated_{kind}_cache.{layer}",
        update=f"{kind}_{layer}",
        write_indices="write_indices",
        update_lengths=None,
        dtype="float16",
        logical_shape=("batch", 256, 256),
        sequence_axis=1,
        physical_shape=("batch", 4, 256, 64),
        physical_sequence_axis=2,
        layout=PhysicalLayout.HEADS_MAJOR,
        mode=UpdateMode.LINEAR,
        form=UpdateForm.PADDED,
        update_length="seq",
        capacity=256,
        route=Route.NATIVE,
        reason="linear update of a float16 cache",
        readers=(f"/layers.{layer}/Attention",),
    )


def sample_plan(layers: int = 32, warnings: tuple[str, ...] = ()) -> CachePlan:
    """A grouped-query decoder with `layers` layers: every cache native and in place, one mask, one span."""
    caches = tuple(cache_update(layer, kind) for layer in range(layers) for kind in ("key", "value"))
    attention = tuple(
        AttentionPlan(
            node=f"/layers.{layer}/Attention",
            dtype="float16",
            query_heads=8,
            kv_heads=4,
            head_size=64,
            value_head_size=64,
            kind=AttentionKind.FUSED,
            reason="float16, head size 64",
            caches=(f"key_cache.{layer}", f"value_cache.{layer}"),
            mask="attention_mask_0",
            keys="span",
        )
        for layer in range(layers)
    )
    tensors = (
        _tensor("input_ids", "input", Role.TOKENS, "int64", ("batch", "seq"), "graph: indices of the embedding"),
        _tensor(
            "write_indices", "input", Role.WRITE_INDICES, "int64", ("batch",), "graph: TensorScatter write_indices"
        ),
        _tensor("nonpad_kv_seqlen", "input", Role.VALID_LENGTHS, "int64", ("batch",), "graph: Attention lengths"),
        _tensor("attention_span", "input", Role.SPAN, "int64", ("attention_span",), "added"),
        *(_tensor(c.past, "input", Role.CACHE, c.dtype, c.physical_shape, "graph: past cache") for c in caches),
        _tensor("logits", "output", Role.LOGITS, "float16", ("batch", "seq", 512), "config: logits"),
        *(_tensor(c.present, "output", Role.CACHE, c.dtype, c.physical_shape, "graph: present cache") for c in caches),
    )
    mask = Mask("attention_mask_0", True, "nonpad_kv_seqlen", -1, -1, None, False, "attention_span", True)
    span = SpanInput("attention_span", "attention_span", 256, "nonpad_kv_seqlen")
    return CachePlan(PlanOptions(), 24, caches, attention, (mask,), (span,), tensors, warnings)


def with_contract(cache: CacheUpdate) -> CacheUpdate:
    """The same cache, circular, native under the contract that no update straddles the wrap."""
    return replace(
        cache, mode=UpdateMode.CIRCULAR, reason="no update straddles the wrap", contract=UpdateContract(True, 16)
    )


def sample_manifest(plan: CachePlan, engine: FileIdentity) -> Manifest:
    sizes = {"batch": (1, 4, 4), "sequence": (1, 64, 64), "span": (1, 128, 256), "kept": (1, 1, 64)}
    shapes = {
        t.name: ShapeRange(
            *zip(*(sizes.get(axis, (d,) * 3) for d, axis in zip(t.shape, t.axes, strict=False)), strict=True)
        )
        for t in plan.tensors
        if t.io == "input" and any(isinstance(d, str) for d in t.shape)
    }
    return Manifest(
        created_by="trt-kvcache 0.1.0",
        backend="tensorrt-rtx",
        backend_version="1.7.1.116",
        compute_capabilities=(),
        plan=plan,
        aliases={c.present: c.past for c in plan.caches if c.in_place},
        double_buffered={c.present: c.past for c in plan.caches if not c.in_place},
        profiles=(Profile("prefill", shapes),),
        max_batch=4,
        max_chunk=64,
        model=(FileIdentity("model.onnx", 1024, "00" * 32),),
        engine=engine,
        options={"opt_level": 3},
    )


def _tensor(name: str, io: str, role: Role, dtype: str, shape: tuple[int | str, ...], found_by: str) -> TensorRole:
    axes = tuple("" if isinstance(d, int) else {"seq": "sequence", "attention_span": "span"}.get(d, d) for d in shape)
    return TensorRole(name, io, role, dtype, shape, found_by, axes)
