"""A command's page of help, readable at 80 columns, and what to type in the place of flags that other tools have."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from trt_kvcache.errors import OptionError

__all__ = ["PLANNED", "Command", "first_sentence"]

PLANNED = "How the model is planned"
"""The group of flags that most commands have."""

_TYPES = "an engine computes in the types of the model; export it in float16 or bfloat16"
_MODEL = "the model or engine is the argument, without a flag"
FOREIGN = {
    **dict.fromkeys(("fp16", "bf16", "fp8", "int8", "int4", "best", "half", "dtype", "precision", "noTF32"), _TYPES),
    **dict.fromkeys(("quantization", "quantize"), "quantize the model before or as it is exported"),
    **dict.fromkeys(("onnx", "model", "m", "loadEngine", "engine", "engine-dir"), _MODEL),
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
    **dict.fromkeys(
        ("tensor-parallel-size", "pipeline-parallel-size", "tp-size", "tp", "num-gpus"),
        "an engine is for one GPU; leave it out",
    ),
    "builderOptimizationLevel": "give --opt-level N",
    "timingCacheFile": "give --timing-cache FILE",
    "versionCompatible": "give --version-compatible",
    "stripWeights": "give --strip-plan",
    "profilingVerbosity": "give --profiling-verbosity",
    "shapes": "give --minShapes, --optShapes and --maxShapes, for inputs of unknown role",
    "stronglyTyped": f"{_TYPES}, always; leave it out",
    "do-sample": "give --sample",
    "logit-processors": "rules of your own are Python: GenerationConfig(logits_processor=...)",
    **dict.fromkeys(("temp",), "give --temperature T"),
    **dict.fromkeys(("repeat-penalty",), "give --repetition-penalty X"),
    **dict.fromkeys(("parallel", "np"), "give --max-batch N"),
    **dict.fromkeys(("predict",), "give --max-new-tokens N"),
    **dict.fromkeys(("system-prompt", "sys"), "give --system TEXT, of a chat"),
    **dict.fromkeys(("file", "prompt-path"), "give --prompt-file FILE"),
    **dict.fromkeys(("input-text", "prompt-text"), "give --prompt TEXT"),
    **dict.fromkeys(
        ("model-draft", "md", "speculative-model", "speculative-config", "draft-model"), "give --draft MODEL"
    ),
    **dict.fromkeys(("draft-max", "num-speculative-tokens"), "give --num-assistant-tokens N, with --draft"),
    **dict.fromkeys(("cache-type-k", "cache-type-v", "kv-cache-dtype", "kv-cache-type"), "give --cache-dtype int8"),
    **dict.fromkeys(("served-model-name", "alias", "model-name"), "give --name NAME"),
    **dict.fromkeys(("api-key", "api-keys"), "give --api-key-file FILE"),
    **dict.fromkeys(("enable-prefix-caching", "cache-reuse", "prompt-cache"), "give --prefix-cache SIZE"),
    **dict.fromkeys(("tokenizer-dir", "tokenizer-path"), "give --tokenizer FILE"),
    **dict.fromkeys(("max-beam-width", "beam-width"), "give --num-beams N"),
    **dict.fromkeys(("grammar-file", "guided-grammar"), "give --grammar FILE"),
    **dict.fromkeys(("guided-json", "response-format"), "give --json-schema FILE"),
    **dict.fromkeys(("guided-regex",), "give --regex PATTERN"),
    **dict.fromkeys(("iterations", "avgRuns", "num-iters"), "give --repeats N"),
    **dict.fromkeys(("warmUp", "num-iters-warmup"), "give --warmup N"),
    **dict.fromkeys(("output-len", "random-output-len"), "give --repeats N and --positions N"),
    **dict.fromkeys(("input-len", "random-input-len", "n-prompt"), "give --lengths N"),
    **dict.fromkeys(("n-gpu-layers", "ngl", "gpu-layers"), "an engine runs on the GPU as a whole; leave it out"),
    **dict.fromkeys(("flash-attn", "fa", "attention-backend"), "TensorRT chooses its kernels; leave it out"),
    **dict.fromkeys(("enforce-eager", "useCudaGraph", "cuda-graph"), "CUDA graphs are on; leave it out"),
    **dict.fromkeys(("trust-remote-code",), "no code of a model is run; leave it out"),
    **dict.fromkeys(("chat-template", "chat-template-file"), "it is read from the file beside the model"),
    **dict.fromkeys(
        ("enable-auto-tool-choice", "tool-call-parser", "jinja"), "tools work by the chat template; leave it out"
    ),
    **dict.fromkeys(("swap-space", "cpu-offload-gb"), "sequences are offloaded in Python: open(..., max_sequences=N)"),
    **dict.fromkeys(("hf-repo", "hf", "model-id", "model-name-or-path", "pretrained-model"), _MODEL),
    **dict.fromkeys(("interactive", "conversation", "cnv"), "that is a command of its own: trt-kvcache chat"),
    **dict.fromkeys(("dumpProfile", "dumpLayerInfo", "exportProfile"), "NVIDIA's Nsight Systems shows layers"),
    **dict.fromkeys(("useDLACore", "allowGPUFallback"), "engines run on a GPU alone; leave it out"),
    **dict.fromkeys(("mirostat", "typical", "typical-p"), "there is no such sampling; leave it out"),
    **dict.fromkeys(("torch-dtype", "device-map", "load-in-4bit", "load-in-8bit"), _TYPES),
    **dict.fromkeys(("opset", "task", "monolith"), "an exporter's own; run that exporter by hand for it"),
    "device-id": "choose the GPU by CUDA_VISIBLE_DEVICES",
    "num-beams": "beam search is for generate",
    "logprobs": "generate shows them in JSON, and serve gives them to who asks",
    "gpu-memory-utilization": "memory follows from --max-batch and --capacity; leave it out",
    "verbose": "leave it out; errors say what to do, and build has its own",
}  # fmt: skip
"""Flags of trtexec, vLLM, TensorRT-LLM, llama.cpp and transformers, with dashes, and what does the same here."""


_SHORT = ("m", "md", "np", "ngl", "fa", "sys", "hf", "cnv", "tp")
"""Names of these with one dash there."""


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
        """Write the flags; those that plan a model, which most commands have, come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                kind = "Options" if parameter.param_type_name == "option" else "Arguments"
                sections.setdefault(panel or kind, []).append(record)
        for title, rows in sorted(sections.items(), key=lambda section: section[0] == PLANNED):
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments.

        Raises:
            OptionError: one is a flag of another tool, or a number as ``4k``; the message says what to type.
        """
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
            if type(error).__name__ in ("NoSuchOption", "BadParameter") and (said := _advice(typed, own)):
                raise OptionError(said) from None
            raise


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, on one line, without its full stop."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?: |$)", paragraph)[0]


def _advice(args: Sequence[str], own: set[str]) -> str:
    """Return what to type, where an argument shows what was meant; else nothing."""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        flag, equals, value = arg.partition("=")
        if not flag.startswith("--"):
            if flag in own or flag[1:] not in _SHORT:
                continue
            flag = f"-{flag}"
        value = value if equals else following
        dashed = "--" + flag[2:].replace("_", "-")
        if flag not in own:
            if dashed in own:
                return f"{flag} is written {dashed}"
            said = FOREIGN.get(flag[2:]) or FOREIGN.get(dashed[2:], "")
            named = set(re.findall(r"(?<!\w)--?[a-zA-Z][\w-]*", said))
            if said and (not named or named & own):
                return f"there is no {flag}: {said}"
        elif match := re.fullmatch(r"(\d+(?:\.\d+)?)[kK]", value):
            return f"{flag} is {value}; write {int(float(match[1]) * 1024)}"
    return ""
