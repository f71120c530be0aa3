"""Messages name options as flags on the command line, and as arguments in Python."""

import ast
import re
from pathlib import Path

import pytest

from trt_kvcache.errors import OptionError
from trt_kvcache.messages import FLAGS, as_arguments, as_flags

PACKAGE = Path(__file__).parent.parent / "trt_kvcache"
COMPILER = {"fmad", "gpu-architecture", "ptxas-options", "std", "device-as-default-execution-space", "extra_options"}
COMMANDS = {"adapter", "chat", "locate", "source"}
"""Named as flags on purpose: of a command in quotes, or "on the command line"."""


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("pass --capacity N, the most tokens", "pass capacity=N, the most tokens"),
        ("--capacity is 0; it must be at least 1", "capacity is 0; it must be at least 1"),
        ("a smaller --capacity or --max-chunk", "a smaller capacity or max_chunk"),
        ("--fallback functional (plain) or --max-chunk 1", 'fallback="functional" (plain) or max_chunk=1'),
        ("for --compute-capabilities sm80,sm89;", 'for compute_capabilities=["sm80", "sm89"];'),
        ("--no-memory-check skips it", "memory_check=False skips it"),
        ("as in --maxShapes image:1x3", "as in max_shapes image:1x3"),
        ("compare with 'verify MODEL --rewritten o.onnx'", "compare with 'verify MODEL --rewritten o.onnx'"),
        ("--encoder names an encoder", "encoder names an encoder"),
        ("--capacity-like and --std=c++17", "--capacity-like and --std=c++17"),
    ],
)
def test_flags_become_arguments(flags: str, arguments: str) -> None:
    assert as_arguments(flags) == arguments
    assert as_arguments(arguments) == arguments
    error = OptionError(flags)
    assert (str(error), error.message) == (arguments, flags)


@pytest.mark.parametrize(("arguments", "flags"), [
    ("max_batch is 0; it must be at least 1", "--max-batch is 0; it must be at least 1"),
    ("temperature=0.5 has no effect without do_sample=True; set that too",
     "--temperature 0.5 has no effect without --sample; set that too"),
    ("leave do_sample=False out", "leave --greedy out"),
    ("seed of a seed=1", "seed of a --seed 1"),
    ("early=True has no effect", "--early True has no effect"),
    ('refit="any": it may', "--refit any: it may"),
    ("generation_config.json: temperature is 0", "generation_config.json: temperature is 0"),
    ("/tmp/max_batch/a.onnx: 'max_batch' is no input", "/tmp/max_batch/a.onnx: 'max_batch' is no input"),
])  # fmt: skip
def test_arguments_become_flags(arguments: str, flags: str) -> None:
    known: dict[str, tuple[str, str | None]] = {
        "max_batch": ("--max-batch", None), "temperature": ("--temperature", None), "seed": ("--seed", None),
        "do_sample": ("--sample", "--greedy"), "refit": ("--refit", None), "early": ("--early", None),
    }  # fmt: skip
    assert as_flags(arguments, known) == flags


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
