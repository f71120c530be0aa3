"""The kernel's source, compiled for the host, against numpy: bytes equal, and the sanitizers are silent."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from host_kernel import HostKernels, Launch, compiler, sanitizer_flags
from kernel_cases import FLOATS, Case, all_kernels, make_case, quantize_linear, varied
from onnx import TensorProto, helper

from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.spec import KernelConfig, Quantization, Shapes, launch_params

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

CASES_PER_KERNEL = 40
"""For each of the 56 kernels: 2,240 cases."""

ROWS, ROW = 2**20, 5 * 2**10  # 5 GiB in each of two heads
LARGE = {
    "": KernelConfig(8),
    "circular": KernelConfig(8, mode=UpdateMode.CIRCULAR),
    "quantized": KernelConfig(8, quantization=Quantization("float16", "int8", per_head=True)),
    "packed": KernelConfig(8, UpdateForm.PACKED_NHD, length_type="int64"),
    "packed quantized": KernelConfig(
        8, UpdateForm.PACKED_NHD, UpdateMode.CIRCULAR, quantization=Quantization("float", "int8"), length_type="int64"
    ),
}
QUANTIZING = [
    KernelConfig(8, quantization=Quantization(source, target))  # type: ignore[arg-type]
    for target in ("int8", "float8e4m3fn") for source in ("float16", "bfloat16", "float")
]  # fmt: skip

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler (g++ or clang++)")


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """Without slow tests, every fourth kernel and those that tests name: compiling all takes most of the time."""
    folder = tmp_path_factory.mktemp("host")
    flags = sanitizer_flags(folder)
    if flags is None:
        pytest.skip(f"{compiler()} has no address and undefined-behavior sanitizers (libasan, libubsan)")
    kernels = list(all_kernels())
    if request.config.option.markexpr == "not slow":
        named = {config.name for config in (*LARGE.values(), *QUANTIZING)}
        kernels = [config for i, config in enumerate(kernels) if i % 4 == 0 or config.name in named]
    return HostKernels(folder, kernels, ["-O0", *flags])


def check(host: HostKernels, cases: list[Case]) -> None:
    for case, outputs in zip(cases, host.run([case.launch for case in cases]), strict=True):
        for i, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
            if output.tobytes() != expected:
                wrong = np.flatnonzero(output != np.frombuffer(expected, np.uint8))
                raise AssertionError(f"output {i} differs in {wrong.size} bytes, first {wrong[:8]}: {case.about}")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(4))
def test_every_kernel_equals_the_reference(host: HostKernels, part: int) -> None:
    rng = np.random.default_rng(part)
    configs = list(host.configs.values())[part::4]
    cases = [make_case(rng, varied(rng, config)) for config in configs for _ in range(CASES_PER_KERNEL)]
    assert len(cases) >= 500
    check(host, cases)


def test_any_lengths_stay_inside_the_cache(host: HostKernels) -> None:
    """The sanitizers are what looks here: lengths as they may lie in memory that nobody has written yet."""
    rng = np.random.default_rng(4)
    cases = []
    for config in host.configs.values():
        if config.form is UpdateForm.PACKED_NHD:
            for kind in (np.int32, np.int64):
                limits = np.iinfo(kind)
                near, any_ = rng.integers(-3, 8, 4), rng.integers(limits.min, limits.max, 4, kind, endpoint=True)
                cases += [packed_case(config, x.astype(kind)) for x in (near, any_, np.where([1, 0, 1, 0], near, any_))]
    host.run(cases)
    assert cases


@pytest.mark.parametrize("case", ["all rows", "last row", "copy", "copy and last row"])
@pytest.mark.parametrize("kind", LARGE)
def test_offsets_beyond_32_bits(host: HostKernels, kind: str, case: str) -> None:
    """The last bytes of the last head arrive: places in cache and update that 32 bits cannot hold."""
    config, q = LARGE[kind], LARGE[kind].quantization
    packed, length, copies = config.form is UpdateForm.PACKED_NHD, ROWS if case == "all rows" else 1, "copy" in case
    ratio = q.source_bits // 8 if q else 1
    total, window = 2 * ROWS * ROW, (2 * ROWS * ROW - ROW, ROW)
    rng = np.random.default_rng(5)
    content = rng.integers(1, 100, ROW).astype(np.uint8)
    update = content.astype(FLOATS[q.source]) if q else content
    cache = np.full(ROW, 200, np.uint8)
    written = 0 if case == "copy" else length
    inputs: list[np.ndarray] = [cache, update, np.array([ROWS - length])]
    if packed:
        inputs.append(np.array([0, written]))
    elif not written:
        inputs[2] = np.array([ROWS])  # refused
    if q:
        inputs.append(np.array([7.0, 1.0] if q.per_head else [1.0], np.float32))
    launch = launch_params(config, Shapes(1, 2, ROWS, length, (ROW,)), copies=copies)
    size = 2 * length * ROW * ratio
    # A packed token is the block's of its number, a short update the first two's of its head; the last do the rest.
    last_head = range(launch.grid // 2, launch.grid)
    blocks = [length - 1, *last_head[:2], *last_head[2:][-5:]]
    (got,) = host.run([
        Launch(
            config, launch.grid, launch.block, inputs, [0] * len(inputs), launch.scalars, [total],
            [-1 if copies else 0], blocks=blocks, places={0: (total, window[0]), 1: (size, size - ROW * ratio)},
            windows=[window],
        )
    ])[0]  # fmt: skip
    np.testing.assert_array_equal(got, content if written else cache)


def packed_case(config: KernelConfig, lengths: np.ndarray) -> Launch:
    """Four packed tokens for caches [3, 2, 8, 16]."""
    q = config.quantization
    shapes = Shapes(3, 2, 8, 4, (16,) * config.caches)
    launch = launch_params(config, shapes)
    cache = np.zeros((3, 2, 8, 16), np.uint8)
    update = np.zeros((4, 2, 16), f"V{q.source_bits // 8 if q else 1}")
    inputs = [*[cache] * config.caches, *[update] * config.caches, np.zeros(3, np.int64), lengths]
    inputs += [np.ones(1, np.float32)] * (config.caches if q else 0)
    sizes = [cache.nbytes] * config.caches
    aliases = list(range(config.caches))
    return Launch(config, launch.grid, launch.block, inputs, [0] * len(inputs), launch.scalars, sizes, aliases)


@pytest.mark.parametrize("empty", ["batch", "heads", "capacity", "length", "size"])
def test_sizes_may_be_zero(host: HostKernels, empty: str) -> None:
    launches = []
    for config in host.configs.values():
        sizes = {"batch": 2, "heads": 3, "capacity": 4, "length": 3, "size": 16} | {empty: 0}
        batch, heads, capacity, length, size = sizes.values()
        q, packed = config.quantization, config.form is UpdateForm.PACKED_NHD
        update = (length, heads, size) if packed else (batch, heads, length, size)
        inputs = [np.zeros((batch, heads, capacity, size), np.uint8)] * config.caches
        inputs += [np.zeros(update, f"V{q.source_bits // 8 if q else 1}")] * config.caches
        inputs.append(np.zeros(batch, np.int64))
        if packed:
            inputs.append(np.full(batch + 1, length, np.int32) * (np.arange(batch + 1, dtype=np.int32) > 0))
        inputs += [np.ones(1, np.float32)] * (config.caches if q else 0)
        scalars = launch_params(config, Shapes(batch, heads, capacity, length, (size,) * config.caches)).scalars
        outputs = [inputs[0].size] * config.caches
        aliases = [-1] * len(outputs)
        launches.append(Launch(config, 4, 128, inputs, [0] * len(inputs), scalars, outputs, aliases))
    for launch, outputs in zip(launches, host.run(launches), strict=True):
        assert not any(present.any() for present in outputs), launch.config


@pytest.mark.parametrize("target", ["int8", "float8e4m3fn"])
def test_quantization_equals_division_and_rounding_for_all_halves_and_many_floats(
    host: HostKernels, target: str
) -> None:
    rng = np.random.default_rng(1)
    scales = [2.0**k for k in (-149, -130, -126, -61, -60, 0, 60, 61, 127)] + [
        0.0,
        np.inf,
        np.nan,
        -0.3,
        1 / 3,
        3e-39,
        2.5e38,
    ]
    scales += (2.0 ** rng.uniform(-30, 30, 20)).tolist()
    ones = 2.0**24 - np.arange(1, 12)  # mantissas of ones: quotients that are closest to where division itself rounds
    scales += (ones * 2.0**-30).tolist()
    eighths = np.arange(127, dtype=np.uint8).view(FLOAT8).astype(np.float64)
    between = np.tile((eighths[1:] + eighths[:-1]) / 2, 16)  # where float8 rounds up or down
    launches, expected = [], []
    for config in QUANTIZING:
        if config.quantization is None or config.quantization.target != target:
            continue
        source = config.quantization.source
        for scale in np.array(scales, np.float32):
            bits = np.arange(2**16, dtype=np.uint16)
            if source == "float":  # any floats, and those whose quotient is near what rounding decides on
                with np.errstate(all="ignore"):
                    ties = rng.choice(np.concatenate([np.arange(-1000, 1000) / 2, between, -between]), 2**15)
                    near = (ties * scale).astype(np.float32).view(np.uint32)
                bits = np.concatenate([rng.integers(0, 2**32, 2**15, np.uint32), near + rng.integers(-1, 2, 2**15)])
            x = bits.astype(np.uint32 if source == "float" else np.uint16).view(FLOATS[source])
            launch = launch_params(config, Shapes(1, 1, 1, 1, (x.size,)))
            inputs = [np.zeros(x.size, np.uint8), x, np.zeros(1, np.int64), np.array([scale], np.float32)]
            launches.append(Launch(config, launch.grid, launch.block, inputs, [0] * 4, launch.scalars, [x.size], [0]))
            expected.append((scale, x, quantize_linear(x, np.float32(scale), target)))
    for (scale, x, wanted), (got,) in zip(expected, host.run(launches), strict=True):
        wrong = np.flatnonzero(got != wanted)
        if target == "float8e4m3fn":  # the sign of NaN is nobody's
            wrong = wrong[((got | 0x80) != 0xFF)[wrong] | ((wanted | 0x80) != 0xFF)[wrong]]
        assert wrong.size == 0, f"{x.dtype} {x[wrong[:4]]} / {scale}: {got[wrong[:4]]}, not {wanted[wrong[:4]]}"


@pytest.mark.parametrize("target", ["int8", "float8e4m3fn"])
@pytest.mark.parametrize("source", ["float16", "float"])
def test_the_reference_is_onnx_quantize_linear(source: str, target: str) -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.normal(0, 100, 4000), rng.integers(-700, 700, 4000) / 4]).astype(FLOATS[source])
    scale = np.float32(0.37)
    for each in (scale, np.float32(0.5)):
        assert np.array_equal(run_with_onnxruntime(x, each, target), quantize_linear(x, each, target))


def quantize_model(x: np.ndarray, target: str) -> onnx.ModelProto:
    number = {"int8": TensorProto.INT8, "float8e4m3fn": TensorProto.FLOAT8E4M3FN}[target]
    source = helper.np_dtype_to_tensor_dtype(x.dtype)
    node = helper.make_node("QuantizeLinear", ["x", "scale"], ["y"], output_dtype=number, precision=TensorProto.FLOAT)
    graph = helper.make_graph(
        [node],
        "quantize",
        [helper.make_tensor_value_info("x", source, [x.size]), helper.make_tensor_value_info("scale", 1, [])],
        [helper.make_tensor_value_info("y", number, [x.size])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def run_with_onnxruntime(x: np.ndarray, scale: np.float32, target: str) -> np.ndarray:
    # ONNX Runtime has no kernel that takes float16 numbers with a float32 scale: the numbers are the same as float32.
    x = x.astype(np.float32)
    session = ort.InferenceSession(quantize_model(x, target).SerializeToString())
    value = session.run_with_ort_values(
        ["y"], {"x": ort.OrtValue.ortvalue_from_numpy(x), "scale": ort.OrtValue.ortvalue_from_numpy(np.asarray(scale))}
    )[0]
    return value.numpy().view(np.uint8)
