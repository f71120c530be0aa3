"""Pages for a browser: what they say, that they load nothing, and that no name in them is anything but text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
from sample_plans import sample_manifest, sample_plan
from typer.testing import CliRunner

from trt_kvcache.cli.app import app
from trt_kvcache.cli.pages import bench_page, inspect_page, plan_page, verify_page
from trt_kvcache.compare.verify_report import Station, VerifyReport
from trt_kvcache.engine.inspection import EngineReport
from trt_kvcache.files import FileIdentity
from trt_kvcache.importer.cache_plan import CachePlan, InterfaceChange, OriginalRole, OriginalTensor, Route, StateUpdate
from trt_kvcache.page import Html
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


def test_pages_load_nothing() -> None:
    for made in all_pages("plain"):
        assert not re.search(r"https?:|url\(|@import|<script|<link|<img|\ssrc=|\shref=", made)
        assert "default-src 'none'" in made
        assert made.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">')


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
