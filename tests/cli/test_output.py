"""Nothing that a file says can move the cursor, hide a line or make one up."""

import io
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache.cli.output import console, print_error, print_json, print_warnings, table, visible

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
