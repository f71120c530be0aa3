"""Nothing that a file says can move the cursor, hide a line or make one up."""

import io
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache.cli.output import console, group_rows, print_error, print_json, print_warnings, ranges, table, visible

UNSAFE = ["\x1b[2J", "\x9b2J", "\x07", "\r", "\x08", "\u202e", "\u2066", "\u200f", "\u061c", "\u2028", "\x85", "\ufeff"]


def _is_safe(text: str) -> bool:
    marks = {"\u200e", "\u200f", "\u061c", "\ufeff", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
    return not any(unicodedata.category(c) in ("Cc", "Zl", "Zp") or c in marks for c in text.replace("\n", ""))


@pytest.mark.parametrize("unsafe", UNSAFE, ids=ascii)
def test_every_way_out_escapes(unsafe: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"cache{unsafe}.0"
    print_error(name)
    print_warnings([name])
    print_json({name: [name]})
    out = console()
    out.print(f"\n{name}")
    grid = table("name", title=name)
    grid.add_row(name)
    out.print(grid)
    printed = capsys.readouterr()
    assert _is_safe(printed.out)
    assert _is_safe(printed.err)
    assert printed.out.count("cache") == 5
    assert len(printed.err.splitlines()) == 2


@pytest.mark.slow
@given(st.text())
def test_json_says_the_same(text: str) -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        try:
            print_json({"text": text})
        except UnicodeEncodeError:  # a lone surrogate
            return
    assert json.loads(out.getvalue()) == {"text": text}
    assert _is_safe(out.getvalue())


def test_text_without_control_characters_stays() -> None:
    text = "é 漢字 👩\u200d🚀 a\u0301 \u200c"
    assert visible(text) == text
    assert visible("a\nb\tc", "\n") == "a\nb\\tc"


LAYERS = [(f"{kind}.{layer}", "[1, 4]") for layer in range(3) for kind in ("key", "value")]
BLOCKS = [(f"layers.{layer}.block2", f"reason of layer {layer}: head size 64") for layer in range(2)]
APART = [(f"layer.{layer}.expert.{expert}",) for layer in range(2) for expert in range(2)]


@pytest.mark.parametrize(
    ("rows", "names", "grouped"),
    [(LAYERS, 1, [(("key.0..2", "[1, 4]"), [0, 2, 4]), (("value.0..2", "[1, 4]"), [1, 3, 5])]),
     ([("key.0", "[1, 4]"), ("key.1", "[1, 8]"), ("key.2", "[1, 4]")], 1,
      [(("key.0,2", "[1, 4]"), [0, 2]), (("key.1", "[1, 8]"), [1])]),
     (BLOCKS, 2, [(("layers.0..1.block2", "reason of layer 0..1: head size 64"), [0, 1])]),
     (APART, 1, [(row, [at]) for at, row in enumerate(APART)]),
     ([("layers.0/Attention_16", "fused"), ("layers.1/Attention_42", "fused")], 1,
      [(("layers.0..1/Attention_*", "fused"), [0, 1])]),
     ([("l0.n0",), ("l1.n1",)], 1, [(("l0..1.n0..1",), [0, 1])]),
     ([("a", "1"), ("a", "2")], 1, [(("a", "1"), [0]), (("a", "2"), [1])]),
     ([("a", "1"), ("a", "1")], 1, [(("a", "1"), [0]), (("a", "1"), [1])])],
    ids=["layers in order of appearance", "another shape stays apart", "numbers that do not run are kept",
         "two numbers that run apart", "a count of nodes is left out", "two numbers that run together",
         "cells after the names are never merged", "equal rows without numbers"],
)  # fmt: skip
def test_layers_become_one_row(rows: list[tuple[str, ...]], names: int, grouped: list[object]) -> None:
    assert group_rows(rows, names) == grouped


def test_ranges() -> None:
    given = ([3], [2, 0, 1], [0, 1, 5, 7, 8], range(0, 31, 2), [0, 2])
    assert [ranges(numbers) for numbers in given] == ["3", "0..2", "0..1,5,7..8", "0..30 step 2", "0,2"]
