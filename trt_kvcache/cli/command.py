"""A command's page of help, readable at 80 columns, and what to type in the place of flags that other tools have."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from trt_kvcache.errors import OptionError

__all__ = ["Command"]

_TYPES = "an engine computes in the types of the model; export it in float16 or bfloat16"
_MODEL = "the model or engine is the argument, without a flag"
FOREIGN = {
    **dict.fromkeys(("fp16", "bf16", "fp8", "int8", "int4", "best", "half", "dtype", "precision", "noTF32"), _TYPES),
    **dict.fromkeys(("quantization", "quantize"), "quantize the model before or as it is exported"),
    **dict.fromkeys(("onnx", "model", "loadEngine", "engine", "engine-dir"), _MODEL),
    **dict.fromkeys(("saveEngine", "save-engine", "output-dir"), "give -o ENGINE, or -o FOLDER/"),
    **dict.fromkeys(("max-tokens", "max-length", "n-predict", "max-output-len"), "give --max-new-tokens N"),
    **dict.fromkeys(
        ("max-model-len", "max-seq-len", "max-seq-length", "max-input-len", "ctx-size", "context-length"),
        "give --capacity TOKENS",
    ),
    **dict.fromkeys(("max-num-seqs", "batch-size", "max-batch-size", "batch"), "give --max-batch N"),
    **dict.fromkeys(("max-num-batched-tokens", "prefill-chunk", "max-num-tokens"), "give --max-chunk TOKENS"),
    **dict.fromkeys(("memPoolSize", "max-workspace-size"), "give --workspace SIZE, such as --workspace 4GiB"),
    **dict.fromkeys(("presence-penalty", "frequency-penalty"), "give --repetition-penalty X"),
    **dict.fromkeys(("stop-token-ids", "end-id", "eos-token-id"), "give --eos ID"),
    **dict.fromkeys(("tensor-parallel-size", "tp-size", "num-gpus"), "an engine is for one GPU; leave it out"),
    "builderOptimizationLevel": "give --opt-level N",
    "timingCacheFile": "give --timing-cache FILE",
    "versionCompatible": "give --version-compatible",
    "stripWeights": "give --strip-plan",
    "profilingVerbosity": "give --profiling-verbosity",
    "shapes": "give --minShapes, --optShapes and --maxShapes, for inputs of unknown role",
    "stronglyTyped": f"{_TYPES}, always; leave it out",
    "do-sample": "give --sample",
    "logit-processors": "rules of your own are Python: GenerationConfig(logits_processor=...)",
    "gpu-memory-utilization": "memory follows from --max-batch and --capacity; leave it out",
    "verbose": "leave it out; errors say what to do",
}  # fmt: skip
"""Flags of trtexec, vLLM, TensorRT-LLM, llama.cpp and transformers, with dashes, and what does the same here."""


class Command(TyperCommand):
    """A command whose help has one section for each panel of flags, with whole names.

    On a terminal it shows what takes long, unless it prints JSON.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if ctx.params.get("json") or not sys.stderr.isatty():
            return super().invoke(ctx)
        from trt_kvcache.cli.progress import show_progress

        with show_progress():
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                kind = "Options" if parameter.param_type_name == "option" else "Arguments"
                sections.setdefault(panel or kind, []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments.

        Raises:
            OptionError: one is a flag of another tool, or a number as ``4k``; the message says what to type.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
            if type(error).__name__ in ("NoSuchOption", "BadParameter") and (said := _advice(given, own)):
                raise OptionError(said) from None
            raise


def _advice(args: Sequence[str], own: set[str]) -> str:
    """Return what to type, where an argument shows what was meant; else nothing."""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        flag, equals, value = arg.partition("=")
        if not flag.startswith("--"):
            continue
        value = value if equals else following
        dashed = "--" + flag[2:].replace("_", "-")
        if flag not in own:
            if dashed in own:
                return f"{flag} is written {dashed}"
            said = FOREIGN.get(flag[2:]) or FOREIGN.get(dashed[2:], "")
            named = set(re.findall(r"--?[a-zA-Z][\w-]*", said))
            if said and (not named or named & own):
                return f"there is no {flag}: {said}"
        elif found := re.fullmatch(r"(\d+(?:\.\d+)?)[kK]", value):
            return f"{flag} is {value}; write {int(float(found[1]) * 1024)}"
    return ""
