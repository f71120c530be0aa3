"""The line of a failed exporter's output that says why."""

import subprocess
import sys
from pathlib import Path

import pytest

from trt_kvcache.export.reason import failure_reason

TORCH = """
class DispatchError(Exception): pass
class ConversionError(Exception): pass
def convert():
    try:
        try:
            raise DispatchError("No ONNX function found for <OpOverload(op='aten.unsqueeze')>. Failure message: none")
        except DispatchError as error:
            raise ConversionError("Error when translating node %a.\\n\\nSee the stack trace.") from error
    except ConversionError as error:
        raise ConversionError("\\x1b[96mFailed\\x1b[0m. \\n- one\\n\\n(Refer to the stack trace.)") from error
convert()
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (TORCH, "DispatchError: No ONNX function found for <OpOverload(op='aten.unsqueeze')>. Failure message: none"),
        ("try:\n    {}['rope']\nexcept KeyError:\n    raise ValueError('no rope here')", "ValueError: no rope here"),
        ("assert 1 == 2", "AssertionError: without words, by 'assert 1 == 2'"),
        ("assert 1 == 2, 'two\\n  lines'", "AssertionError: two lines"),
        ("raise RuntimeError('x' * 900)", f"RuntimeError: {'x' * 382} ..."),
        ("import sys; print('first', file=sys.stderr); sys.exit('no such architecture')", "no such architecture"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", ""),
    ],
    ids=range(8),
)
def test_the_reason(code: str, reason: str, tmp_path: Path) -> None:
    """The reason is, of real traces, the first error of those that caused each other, else the last one."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode
    assert failure_reason(done.stderr) == reason
