"""Options of a build: their textual forms, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trt_kvcache.engine.backend as backend_module
import trt_kvcache.engine.engine_build as build_module
from trt_kvcache.engine.backend import Backend, check_build_options, choose_backend, installed_version
from trt_kvcache.engine.build_options import BuildOptions, format_shapes, parse_bytes, parse_shapes
from trt_kvcache.engine.diagnosis import Gpu
from trt_kvcache.errors import BackendError, OptionError
from trt_kvcache.importer.cache_plan import Target

RTX = Backend(Target.TENSORRT_RTX, "1.7.1.116")
FULL = Backend(Target.TENSORRT, "11.4.0.106")


NAMES = st.from_regex(r"[a-z_.:/]*[a-z]", fullmatch=True, alphabet=st.characters(codec="ascii"))


@given(st.dictionaries(NAMES, st.lists(st.integers(0, 9999), min_size=1)))
def test_shapes_survive_their_text(shapes: dict[str, list[int]]) -> None:
    wanted = {name: tuple(shape) for name, shape in shapes.items()}
    if wanted:
        assert parse_shapes(format_shapes(wanted)) == wanted


@pytest.mark.parametrize("text", ["", "x", "x:", ":1x2", "x:1xx2", "x:1x-1", "x:1,", "x:axb", "x:1 x2", "x:1,y:2,x:3"])
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not of the form name:1x2x3|the shape of 'x' is given twice"):
        parse_shapes(text)


@pytest.mark.parametrize(("text", "value"), [
    ("4GiB", 4 << 30), ("4G", 4 << 30), ("512 MiB", 512 << 20), ("512m", 512 << 20), ("1.5KiB", 1536),
    ("4GB", 4 * 10**9), ("7", 7), ("7B", 7), ("2TiB", 2 << 40),
])  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "4 elephants", "-1", "1e9", "4GiBs", "0"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a number of bytes such as 4GiB|less than one byte"):
        parse_bytes(text)


def test_compute_capabilities_have_one_form() -> None:
    given = BuildOptions(compute_capabilities=("sm80", "8.0", "SM_89", "120", "12.1"))
    assert given.compute_capabilities == ("sm80", "sm89", "sm120", "sm121")
    assert BuildOptions(compute_capabilities=("Current",)).compute_capabilities == ("current",)


def test_options_take_the_text_of_their_flags() -> None:
    text = BuildOptions(workspace="4GiB", compute_capabilities="sm80,8.9", max_shapes="x:1x2")  # type: ignore[arg-type]
    assert text == BuildOptions(workspace=4 << 30, compute_capabilities=("sm80", "sm89"), max_shapes={"x": (1, 2)})


def test_the_gpu_at_hand_needs_one_and_is_written_down_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = BuildOptions(compute_capabilities=("current",))
    monkeypatch.setattr(backend_module, "driver_present", lambda: False)
    with pytest.raises(
        OptionError, match="current.* builds for the GPU of this machine, but this machine has no NVIDIA GPU"
    ):
        check_build_options(RTX, here)
    monkeypatch.setattr(backend_module, "driver_present", lambda: True)
    check_build_options(RTX, here)
    gpu = Gpu("NVIDIA H200", "9.0", 1 << 37)
    monkeypatch.setattr(build_module, "find_gpus", lambda: ("13.0", (gpu, gpu), ""))
    assert build_module._built_for(here) == ("sm90",)
    assert build_module._built_for(BuildOptions(compute_capabilities=("sm80",))) == ("sm80",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cuda"}, "backend is 'cuda'; it must be one of auto, tensorrt, tensorrt-rtx"),
        ({"max_batch": 0}, "max_batch is 0; it must be at least 1"),
        ({"max_batch": "4"}, "max_batch is '4'; it must be a whole number"),
        ({"max_chunk": -1}, "max_chunk is -1"),
        ({"workspace": 4}, r"workspace is 4 bytes, too little for any kernel; give a unit"),
        ({"opt_level": 6}, "opt_level is 6; it must be 0 to 5"),
        ({"profiling_verbosity": "loud"}, "must be one of none, layer-names-only, detailed"),
        ({"refit": True}, "refit is True; it must be one of none, any, identical"),
        ({"compute_capabilities": ("ampere",)}, "'ampere' must have the form sm80, 80 or 8.0, or be current"),
        (
            {"compute_capabilities": ("sm80", "current")},
            "'current' is this machine's GPU, and cannot be combined with others",
        ),
    ],
)
def test_illegal_values_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BuildOptions(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "build", "message"),
    [
        (RTX, BuildOptions(compute_capabilities=("sm90",)), "cannot build for sm90; give some of sm75, sm80, sm86"),
        (
            RTX,
            BuildOptions(opt_level=5),
            "opt_level has no effect here: TensorRT for RTX 1.7.1.116 gives the same engine",
        ),
        (RTX, BuildOptions(timing_cache="t.cache"), "timing_cache has no effect here"),
        (RTX, BuildOptions(version_compatible=True), "version_compatible has no effect here"),
        (RTX, BuildOptions(refit="any", strip_plan=True), "refit and strip_plan: .* needs an NVIDIA GPU and driver"),
        (RTX, BuildOptions(refit="identical"), "refit: .* needs an NVIDIA GPU and driver"),
        (
            FULL,
            BuildOptions(compute_capabilities=("sm80",)),
            r'compute_capabilities=\["sm80"\] is for TensorRT for RTX',
        ),
    ],
)
def test_options_that_a_backend_would_ignore_are_refused(
    backend: Backend, build: BuildOptions, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_kvcache.engine.backend.driver_present", lambda: False)
    with pytest.raises(OptionError, match=message):
        check_build_options(backend, build)


@pytest.mark.parametrize("version", ["10.16.1", "11.0.0", "11.2.1", "11.3.1.5", "11.4.0.106", "12.0"])
def test_versions_that_drop_a_bias_refit_identical_weights_only(version: str) -> None:
    backend = Backend(Target.TENSORRT, version)
    for build in (BuildOptions(), BuildOptions(strip_plan=True), BuildOptions(refit="identical", strip_plan=True)):
        check_build_options(backend, build)
    if version in ("11.0.0", "11.2.1", "11.3.1.5"):
        words = rf'refit="any": TensorRT {version} may give wrong numbers.*11\.0 to 11\.3.*or refit="identical"'
        with pytest.raises(OptionError, match=words):
            check_build_options(backend, BuildOptions(refit="any"))
    else:
        check_build_options(backend, BuildOptions(refit="any"))


def install(monkeypatch: pytest.MonkeyPatch, *, driver: bool, **versions: str) -> None:
    by_target = {Target.TENSORRT: versions.get("full"), Target.TENSORRT_RTX: versions.get("rtx")}
    monkeypatch.setattr("trt_kvcache.engine.backend.installed_version", by_target.get)
    monkeypatch.setattr("trt_kvcache.engine.backend.driver_present", lambda: driver)


def test_auto_needs_a_driver_for_full_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, driver=True, full="10.16.1", rtx="1.7.1")
    assert choose_backend("auto") == Backend(Target.TENSORRT, "10.16.1")
    install(monkeypatch, driver=False, full="10.16.1", rtx="1.7.1")
    assert choose_backend("auto") == Backend(Target.TENSORRT_RTX, "1.7.1")
    install(monkeypatch, driver=True, rtx="1.7.1")
    assert choose_backend("auto") == Backend(Target.TENSORRT_RTX, "1.7.1")


@pytest.mark.parametrize(
    ("choice", "driver", "versions", "message"),
    [
        ("auto", True, {}, r"TensorRT for RTX is not installed; run: pip install 'trt-kvcache\[rtx\]'"),
        ("tensorrt", True, {"rtx": "1.7"}, r"TensorRT is not installed; run: pip install 'trt-kvcache\[tensorrt\]'"),
        ("tensorrt", True, {"full": "10.14.1.48"}, r"TensorRT 10.14.1.48 is too old, 10.15 or later is needed"),
        ("tensorrt-rtx", False, {"rtx": "1.2"}, r"TensorRT for RTX 1.2 is too old, 1.7 or later is needed"),
        ("tensorrt", False, {"full": "11.4"}, "needs an NVIDIA GPU and driver to build, and this machine has none"),
    ],
)
def test_backends_that_cannot_build_are_refused(
    choice: str, driver: bool, versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, driver=driver, **versions)
    with pytest.raises(BackendError, match=message):
        choose_backend(choice)


def test_packed_updates_are_native_from_11_on() -> None:
    assert not Backend(Target.TENSORRT, "10.16.1.11").packed_native
    assert Backend(Target.TENSORRT, "11.0.0.114").packed_native
    assert RTX.packed_native


def test_the_version_is_known_without_importing_the_module() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    assert installed_version(Target.TENSORRT_RTX) == trt.__version__
