"""Pages for a browser: what they say, that they load nothing, and that no name in them is anything but text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from sample_plans import sample_manifest, sample_plan
from typer.testing import CliRunner

from trt_kvcache.cli.app import app
from trt_kvcache.cli.pages import bench_page, inspect_page, plan_page, verify_page
from trt_kvcache.compare.verify_report import Station, VerifyReport
from trt_kvcache.engine.inspection import EngineReport
from trt_kvcache.files import FileIdentity
from trt_kvcache.importer.plan import (
    CachePlan,
    InterfaceChange,
    OriginalRole,
    OriginalTensor,
    Route,
    StateUpdate,
    UpdateMode,
)
from trt_kvcache.messages import human_bytes
from trt_kvcache.page import Html, Point, chart, page, table, tag
from trt_kvcache.runtime.measure import BenchReport, Timing

run = CliRunner().invoke
HOSTILE = "</td><script>alert(1)</script><img src=x onerror=\"alert('2')\">\x1b[2J\u202e&amp;{}"
ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "strong", "dl", "dt", "dd", "div",
    "span", "small", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "b", "i", "svg", "text",
    "line", "polyline", "circle",
}  # fmt: skip


class Reader(HTMLParser):
    """Elements, attributes and texts as a browser takes them, without places at which a text may break."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(made.replace("<wbr>", ""))
        self.close()
        assert self.open == []

    def handle_starttag(self, element: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((element, dict(attributes)))
        if element != "meta":
            self.open.append(element)

    def handle_endtag(self, element: str) -> None:
        assert self.open.pop() == element

    def handle_data(self, text: str) -> None:
        self.texts.append(text)


def named(name: str) -> CachePlan:
    """A plan whose names and reasons are all this one."""
    plan = sample_plan(2, warnings=(name,))
    caches = tuple(replace(c, past=name, present=name, write_indices=name, reason=name, idiom=name, dtype="float16")
                   for c in plan.caches)  # fmt: skip
    original = (OriginalTensor(name, "input", OriginalRole.GROWING_CACHE, "float16", (name, 2), ("batch", "past")),)
    return replace(
        plan,
        caches=(replace(caches[0], route=Route.FUNCTIONAL), *caches[1:]),
        attention=tuple(replace(a, node=name, reason=name, caches=(name,), mask=name) for a in plan.attention),
        masks=(replace(plan.masks[0], name=name, lengths=name, mask=name, span=name),),
        tensors=tuple(replace(t, name=name, shape=(name,), found_by=name) for t in plan.tensors),
        changes=(InterfaceChange("input", name, name, name),),
        notes=(name,),
        inlined=(name,),
        original=original,
        states=(StateUpdate(name, name, "float16", ("batch", 4), name),),
    )


def timings(factor: float = 1.0) -> tuple[Timing, ...]:
    sizes = [("prefill", 1, 16), ("prefill", 1, 64), ("decode", 1, 16), ("decode", 1, 64), ("decode", 4, 16)]
    return tuple(Timing(*size, 2 * factor, factor, 3 * factor, 500 / factor) for size in sizes)


def measured(model: str = "model.onnx", factor: float = 1.0) -> BenchReport:
    return BenchReport(model, model, "float16", 256, 8, 64, 1 << 20, 1 << 30, timings(factor))


def verified(name: str, difference: float | None = 0.001) -> VerifyReport:
    passed = difference is not None
    failure = "" if passed else name
    station = Station(name, name, name, 9, difference, 0.02, 1.0, passed, failure)
    return VerifyReport(name, passed, 3, 30, None, name, (station, Station(name, note=name)), (name,))


def all_pages(name: str) -> list[Html]:
    manifest = replace(sample_manifest(named(name), FileIdentity(name, 3, name)), created_by=name, backend=name)
    return [
        plan_page(name, named(name), 4, name),
        inspect_page(EngineReport(f"folder/{name.replace('/', '_')}", manifest, None, name), [(name, name)]),
        verify_page(name, verified(name)),
        verify_page(name, verified(name, None)),
        bench_page([(name, measured(name)), (name, measured(name, 2))]),
    ]


def test_names_are_text() -> None:
    for made, plain in zip(all_pages(HOSTILE), all_pages("plain"), strict=True):
        found, expected = Reader(made), Reader(plain)
        assert {element for element, _ in found.elements} <= ELEMENTS
        assert [element for element, _ in found.elements] == [element for element, _ in expected.elements]
        assert {key for _, given in found.elements for key in given} == {
            key for _, given in expected.elements for key in given
        }
        assert sum("<script>alert(1)</script>" in text for text in found.texts) >= 4
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", made)
        assert r"\x1b[2J\u202e&amp;amp;" in made


def test_attributes_are_text() -> None:
    made = tag("i", title='"><b x="', data_x=HOSTILE)
    assert Reader(made).elements == [("i", {"title": '"><b x="', "data-x": HOSTILE.replace("\x1b", r"\x1b").replace(
        "\u202e", r"\u202e")})]  # fmt: skip
    assert tag("p", "a < b", tag("b", "c")) == "<p>a &lt; b<b>c</b></p>"


def test_pages_load_nothing() -> None:
    for made in all_pages("plain"):
        assert not re.search(r"https?:|url\(|@import|<script|<link|<img|\ssrc=|\shref=", made)
        assert "default-src 'none'" in made
        assert made.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">')


def test_memory_is_that_of_the_plan() -> None:
    """By batch and by capacity: of 256 tokens, as planned, and of 1024, as a plan for these would say."""
    plan = sample_plan(3)
    larger = replace(plan, caches=tuple(replace(c, physical_shape=("batch", 4, 1024, 64)) for c in plan.caches))
    said = [text for text in Reader(plan_page("m", plan, 1, "")).texts if " tokens each: " in text]
    assert len(said) == 5 * 7
    for batch in (1, 8, 64):
        assert f"256 tokens each: {batch}: {human_bytes(plan.cache_bytes(batch))}" in said
        assert f"1024 tokens each: {batch}: {human_bytes(larger.cache_bytes(batch))}" in said
    circular = replace(plan, caches=tuple(replace(c, mode=UpdateMode.CIRCULAR) for c in plan.caches))
    assert f"a window each: 2: {human_bytes(plan.cache_bytes(2))}" in plan_page("m", circular, 1, "")
    fixed = replace(plan, caches=tuple(replace(c, physical_shape=(2, *c.physical_shape[1:])) for c in plan.caches))
    assert f"256 tokens each: 2: {human_bytes(plan.cache_bytes(2))}" in plan_page("m", fixed, 2, "")
    assert "Memory" not in plan_page("m", replace(plan, caches=(), attention=()), 1, "")


def test_what_is_around_a_cache() -> None:
    plan = sample_plan(2)
    texts = " | ".join(Reader(plan_page("m", plan, 1, "")).texts)
    assert "key_cache.0..1, value_cache.0..1 | float16 [batch, 256, 256] | of fixed capacity" in texts
    assert "one buffer: float16 [batch, 4, 256, 64]" in texts
    assert "TensorRT's cache update | writes the new rows | at write_indices, linear" in texts
    assert "attention, fused | reads the rows in use | j < nonpad_kv_seqlen" in texts
    grown = tuple(
        OriginalTensor(name, io, OriginalRole.GROWING_CACHE, "float16", ("batch", 4, axis, 64), ("batch", "", axis, ""))
        for c in plan.caches
        for name, io, axis in ((c.past, "input", "past"), (c.present, "output", "total"))
    )
    caches = tuple(replace(c, idiom="Concat", route=Route.FUNCTIONAL) for c in plan.caches)
    made = plan_page("m", replace(plan, caches=caches, original=grown), 1, "")
    assert '<strong class="bad">0 of 4 caches in place' in made
    texts = " | ".join(Reader(made).texts)
    assert "float16 [batch, 4, past, 64] | grows in each step, and is copied" in texts
    assert "two buffers: all rows are copied in each step" in texts
    assert "plain operators" in texts


def test_charts_have_logarithmic_axes() -> None:
    made = chart("t", "x", [("a", [Point(1, 10), Point(10, 100, 50, 200), Point(100, 1000)])])
    circles = [given for element, given in Reader(made).elements if element == "circle"]
    x, y = ([float(given[key] or "") for given in circles] for key in ("cx", "cy"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[0] > y[2]
    for lines in ([Point(3, 5)], [Point(1, 1e15), Point(1 << 40, 1e-3)]):
        for binary in (False, True):
            made = chart("t", "x", [("a", lines)], binary=binary)
            assert "nan" not in made
            assert 1 <= made.count('text-anchor="end"') <= 7


def test_a_table_keeps_lines_of_our_own() -> None:
    assert "<td>a\nb</td>" in table(("x",), [("a\nb",)])
    assert page("t").endswith("<body></body></html>\n")


def test_results_are_compared(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        (tmp_path / f"{name}.json").write_bytes(b"a line before\n" + msgspec.json.encode(measured(factor=factor)))
    given = ["bench", str(tmp_path / "b.json"), "--compare", str(tmp_path / "a.json")]
    result = run(app, [*given, "--html", str(tmp_path / "o.html")])
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].startswith("a.json: model.onnx, float16, capacity 256; ")
    assert "prefill 1 16 2.00 4.00 (2.00x)" in lines
    made = (tmp_path / "o.html").read_text(encoding="utf-8")
    assert "a.json, b.json" in Reader(made).texts
    assert "b.json: 16: 4" in Reader(made).texts
    assert msgspec.json.decode(run(app, [*given, "--json"]).stdout, type=BenchReport) == measured(factor=2)


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"{}", b'{"timings": []}', *(
        msgspec.json.encode(replace(measured(), timings=(replace(timings()[0], **{field: value}),)))
        for field, value in (("median_ms", 0.0), ("low_ms", -1.0), ("tokens", 0), ("tokens_per_second", 1e300))
    )],
)  # fmt: skip
def test_files_that_are_no_results(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    result = run(app, ["bench", str(tmp_path / "a.json")])
    assert result.exit_code == 1
    assert re.fullmatch(r"error: [^\n]*a.json: not JSON of 'trt-kvcache bench' [^\n]*\n", result.stderr)
