"""Writes HTML: elements, tables, charts and whole pages, without templates and without external content.

Names in a page may come from untrusted files. Only `tag` writes texts, and it escapes all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from trt_kvcache.messages import visible

_WIDTH, _HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 28, 42
_COLORS = ("#2563a8", "#c2571a", "#2c8a57", "#8a4fb0", "#a8862a", "#b03a5b")
_TICKS = 7

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2733;--dim:#5b6875;--line:#d5dce3;--soft:#f3f6f9;--paper:#fff;--good:#1f7a45;
--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e3e9ef;--dim:#9aa7b4;--line:#36424e;--soft:#1c242d;--paper:#12181f;
--good:#63c28b;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:66rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--paper);overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}p{margin:.4rem 0}
code,td,dd,.box{font-family:ui-monospace,Consolas,monospace;font-size:.86em}
table{border-collapse:collapse;width:100%}.wide{overflow-x:auto}
th,td{text-align:left;vertical-align:top;padding:.35rem .9rem .35rem 0;border-bottom:1px solid var(--line);
min-width:4rem}
th{color:var(--dim);font-weight:600;font-size:.86em}th,td{white-space:pre-line;overflow-wrap:break-word}
dl{display:grid;grid-template-columns:6.5rem 1fr;gap:.25rem .8rem;margin:1rem 0}dt{color:var(--dim)}dd{margin:0}
.charts{display:flex;flex-wrap:wrap;gap:1.2rem}figure{margin:0;flex:1 1 19rem;max-width:34rem}
svg{display:block;width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:currentColor}
figcaption{color:var(--dim);font-size:.86em}figcaption b{font-weight:400;margin-right:.9em;white-space:nowrap}
i.key{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
.flow{display:flex;flex-wrap:wrap;align-items:center;gap:.5rem;margin:.3rem 0 .9rem}.flow .flow{margin:.3rem 0 0}
.step{display:flex;align-items:center;gap:.5rem;max-width:100%}
.box{border:1px solid var(--line);border-radius:6px;background:var(--paper);padding:.4rem .6rem;max-width:100%}
.buffer{border:2px solid var(--good);background:var(--soft)}.copied{border:2px solid var(--bad);background:var(--soft)}
.box small,.dim{display:block;color:var(--dim);font-size:.92em}
.part{background:var(--soft);border-radius:8px;padding:.7rem .9rem;margin:.7rem 0}
.bar{display:inline-block;height:.6em;min-width:1px;background:var(--good)}.bar.bad{background:var(--bad)}
.good{color:var(--good)}.bad{color:var(--bad)}
@media(max-width:34rem){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.5rem}.part{padding:.6rem}.flow,.step{flex-direction:column;
align-items:stretch}.step>span{transform:rotate(90deg);align-self:center}}
"""


class Html(str):
    """A text that is already HTML, so that `tag` does not escape it."""

    __slots__ = ()


class Point(NamedTuple):
    """A point of a chart: x, y, and the ends `low` and `high` of its spread."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def tag(element: str, *inside: object, **attributes: object) -> Html:
    """Return an HTML element with texts and elements inside. Texts and attributes are escaped.

    In names of attributes, write ``_`` for ``-``, and add ``_`` to Python's keywords: ``class_``.
    """
    pairs = "".join(f' {name.rstrip("_").replace("_", "-")}="{_text(value)}"' for name, value in attributes.items())
    return Html(f"<{element}{pairs}>{''.join(map(_text, inside))}</{element}>")


def _text(value: object) -> str:
    return value if isinstance(value, Html) else escape(visible(str(value), "\n"))


def _breaking(cell: object) -> Html:
    return cell if isinstance(cell, Html) else Html(re.sub(r"(?<=[/_])|(?=\.[A-Za-z])", "<wbr>", _text(cell)))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Return an HTML table that scrolls if it is too wide, and in which long names may break."""
    head = tag("tr", *(tag("th", column) for column in columns))
    body = [tag("tr", *(tag("td", _breaking(cell)) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide")


def page(title: str, *sections: Html) -> Html:
    """Return a whole HTML page, which loads no other files and runs no code."""
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    )
    head = tag("head", Html(meta), tag("title", title), tag("style", Html(_STYLE)))
    return Html("<!doctype html>\n" + tag("html", head, tag("body", *sections), lang="en") + "\n")


def chart(
    title: str,
    x_label: str,
    lines: Sequence[tuple[str, Sequence[Point]]],
    *,
    y_text: Callable[[float], str] = "{:g}".format,
    binary: bool = False,
    marks: Sequence[tuple[str, float]] = (),
) -> Html:
    """Return an SVG chart: lines over logarithmic axes, with a legend if there are several lines.

    `lines` are names and points of positive numbers. `y_text` returns a value as text. `binary` puts the ticks of the
    values at powers of two. `marks` get a horizontal line, if they lie within the range of the points.
    """
    points = [point for _, line in lines for point in line]
    xs = sorted({point.x for point in points})
    ys = [y for point in points for y in (point.y, point.low, point.high) if y is not None]
    x_of = _scale(xs[0], xs[-1], _LEFT + 12, _WIDTH - _RIGHT - 12)
    low, high = min(ys), max(ys)
    low, high = (low / 2, high * 2) if high < 2 * low else (low / 1.15, high * 1.15)
    y_of = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    drawn = [tag("text", title, x=4, y=15, font_weight="600")]
    for y in _ticks(low, high, binary=binary):
        drawn.append(_line(_LEFT, y_of(y), _WIDTH - _RIGHT, y_of(y), opacity=".15"))
        drawn.append(tag("text", y_text(y), x=_LEFT - 6, y=y_of(y) + 4, text_anchor="end"))
    for name, y in marks:
        if low < y < high:
            drawn.append(_line(_LEFT, y_of(y), _WIDTH - _RIGHT, y_of(y), stroke_dasharray="4 4", opacity=".7"))
            drawn.append(tag("text", name, x=_LEFT + 4, y=y_of(y) - 4))
    for x in xs[:: math.ceil(len(xs) / _TICKS)]:
        drawn.append(tag("text", f"{x:g}", x=x_of(x), y=_HEIGHT - _BOTTOM + 17, text_anchor="middle"))
    drawn.append(tag("text", x_label, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 6, text_anchor="middle"))
    for at, (name, line) in enumerate(lines):
        color = _COLORS[at % len(_COLORS)]
        path = " ".join(f"{x_of(point.x):.1f},{y_of(point.y):.1f}" for point in line)
        drawn.append(tag("polyline", points=path, fill="none", stroke=color, stroke_width=2))
        for point in line:
            x, spread = x_of(point.x), (point.low, point.high)
            if spread[0] is not None and spread[1] is not None:
                drawn.append(_line(x, y_of(spread[0]), x, y_of(spread[1]), color))
            said = tag("title", f"{name}: {point.x:g}: {y_text(point.y)}")
            drawn.append(tag("circle", said, cx=f"{x:.1f}", cy=f"{y_of(point.y):.1f}", r=3.5, fill=color))
    svg = tag("svg", *drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title)
    names = [
        tag("b", tag("i", class_="key", style=f"background:{_COLORS[at % len(_COLORS)]}"), name)
        for at, (name, _) in enumerate(lines)
    ]
    return tag("figure", svg, tag("figcaption", *(names if len(lines) > 1 else [])))


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "currentColor", **attributes: object) -> Html:
    ends = {name: f"{value:.1f}" for name, value in {"x1": x1, "y1": y1, "x2": x2, "y2": y2}.items()}
    return tag("line", **ends, stroke=color, **attributes)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a function from values to coordinates on a logarithmic axis. A single value is put in the middle."""
    span = math.log(high / low)
    return lambda value: (start + end) / 2 if span == 0 else start + (end - start) * math.log(value / low) / span


def _ticks(low: float, high: float, *, binary: bool) -> list[float]:
    base = 2 if binary else 10
    powers = [float(base) ** n for n in range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)]
    for steps in ((1,),) if binary else (range(1, 10), (1, 2, 5), (1,)):
        ticks = [step * power for power in powers for step in steps if low <= step * power <= high]
        if len(ticks) <= _TICKS:
            break
    return ticks[:: math.ceil(len(ticks) / _TICKS)]
