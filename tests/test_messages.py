"""Messages name options as flags that the command line has."""

import ast
import re
from pathlib import Path

from trt_kvcache.messages import FLAGS

PACKAGE = Path(__file__).parent.parent / "trt_kvcache"
COMPILER = {"fmad", "gpu-architecture", "ptxas-options", "std", "device-as-default-execution-space", "extra_options"}
COMMANDS = {"adapter", "chat", "locate", "source"}
"""Named as flags on purpose: of a command in quotes, or "on the command line"."""


def test_every_flag_in_a_message_is_known() -> None:
    named = set()
    for path in PACKAGE.rglob("*.py"):
        if "cli" in path.parts or path.name in ("messages.py", "__main__.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value
            if text and "\n" not in text:
                named |= {name.removeprefix("no-") for name in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*\w)", text)}
    assert named - COMPILER - COMMANDS == set(FLAGS)
