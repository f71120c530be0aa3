"""Every command on a small decoder, from end to end: what is on stdout, and that it says what the API says."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder
from typer.testing import Result

from trt_kvcache import CachePlan, Manifest, load_manifest, plan_model, verify_model
from trt_kvcache.importer.cache_plan import CacheLayout, PhysicalLayout, Sliding, Target
from trt_kvcache.reports import EngineReport, VerifyReport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig(layers=2, capacity=64))


def run(*arguments: object) -> Result:
    result = invoke(*arguments)
    assert result.exception is None
    return result


def test_plan_options_reach_the_plan(model: Path) -> None:
    data = run("plan", model, "--json", "--target", "tensorrt", "--cache-layout", "preserve", "--attention-span", "off",
               "--fallback", "functional", "--packed-native", "off", "--sliding", "circular", "--window-chunk", 7
               ).stdout  # fmt: skip
    plan = msgspec.json.decode(data, type=CachePlan)
    assert plan.options.target is Target.TENSORRT
    assert plan.options.cache_layout is CacheLayout.PRESERVE
    assert not plan.options.attention_span
    assert plan.options.fallback.value == "functional"
    assert not plan.options.packed_native
    assert plan.options.sliding is Sliding.CIRCULAR
    assert plan.options.window_chunk == 7
    assert not plan.spans
    assert all(cache.layout is not PhysicalLayout.HEADS_MAJOR for cache in plan.caches)


@pytest.mark.parametrize("command", [["generate", "--tokens", "1"], ["bench"]])
@pytest.mark.parametrize("option", [["--capacity", "48"], ["--sliding", "circular"], ["--window-chunk", "9"]])
def test_engines_are_not_planned_again(command: list[str], option: list[str]) -> None:
    result = invoke(*command, "model.engine", *option, code=1)
    assert "was planned when it was built" in result.stderr


def test_build_and_inspect(model: Path, tmp_path: Path) -> None:
    engine = tmp_path / "model.engine"
    sizes = ["--max-batch", 4, "--max-chunk", 16]
    result = run("build", model, "-o", engine, *sizes, "--backend", "tensorrt-rtx", "--json")
    manifest = load_manifest(engine)
    assert (msgspec.json.decode(result.stdout, type=Manifest), result.stderr) == (manifest, "")
    assert (manifest.max_batch, manifest.max_chunk, len(manifest.aliases)) == (4, 16, 4)
    lines = run("inspect", engine).stdout.splitlines()
    assert len(lines) <= 20
    for label in ("backend", "engine", "model", "limits", "caches", "attention", "memory", "checked", "next"):
        assert any(line.startswith(f"{label} ") for line in lines)
    every = run("inspect", engine, "--all").stdout
    for part in ("4x16", "prefill", "write_indices", "hash: ok"):
        assert part in every
    report = msgspec.json.decode(run("inspect", engine, "--json").stdout, type=EngineReport)
    assert report.manifest == manifest
    assert {path.name for path in tmp_path.iterdir()} == {"model.engine", "model.engine.json", "model.engine.proof"}


def test_rewrite(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "rewritten.onnx"
    done, following = run("rewrite", model, "-o", output).stdout.splitlines()
    assert done == f"{output}: 4 of 4 caches in place"
    assert following == f"next       trt-kvcache verify {model} --rewritten {output}"


def test_verify_fails_above_the_tolerance(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> VerifyReport:
        report = verify_model(model)
        worst = replace(report.stations[0], passed=False, difference=0.5, failure="logits differ by 0.5")
        return replace(report, passed=False, stations=(worst, *report.stations[1:]))

    monkeypatch.setattr("trt_kvcache.verify_model", wrong)
    result = invoke("verify", model, code=1)
    assert "FAILED" in result.stdout
    assert result.stderr.startswith("error: ")
    assert "rewritten: logits differ by 0.5" in result.stderr


def test_warnings_go_to_stderr(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = replace(plan_model(model), warnings=("mind the\ngap", "cache.0 straddles", "cache.1 straddles"))
    monkeypatch.setattr("trt_kvcache.plan_model", lambda *_: warned)
    result = run("plan", model, "--json")
    assert result.stderr == "warning: mind the gap\nwarning: cache.0..1 straddles\n"
    assert msgspec.json.decode(result.stdout, type=CachePlan) == warned
