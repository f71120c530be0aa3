"""Advice for users of other tools: what replaces their commands and flags in this tool."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_TYPES = "an engine computes in the types of the model; export it in float16 or bfloat16"
_BITS = "weights keep their bits in the engine; export the model in float16, in bfloat16, or with weights of 4 bits"
_MODEL = (
    "the checkpoint is the argument, without a flag; --exporter NAME chooses who exports it",
    "the model or engine is the argument, without a flag",
)
_QUIET = "leave it out; progress shows only on a terminal, and an error is one line"
_ADVICE: dict[str, str | tuple[str, ...]] = {
    "fp16 bf16 fp8 best half dtype noTF32 torch-dtype device-map load-in-4bit load-in-8bit": _TYPES,
    "int8 precision bits": ("give --int4 for weights of 4 bits, or --dtype", _BITS),
    "int4": _BITS,
    "quantization quantize": ("give --int4 for weights of 4 bits", "quantize the model before or as it is exported"),
    "e execution-provider provider backend-device": (
        ("give --device cuda, or cpu", "engines are for NVIDIA GPUs; leave it out")
    ),
    "p": ("give --port N",),
    "i input input-file": ("the file is the argument, without a flag; give -o for the output",),
    "text": ("give --prompt TEXT", "give a file, as in trt-kvcache score MODEL FILE"),
    "f file-prompt file prompt-path": "give --prompt-file FILE",
    "t threads num-threads": (
        ("give --threads N", "ONNX Runtime takes one thread for each core; in Python: CpuOptions(threads=N)")
    ),
    "no-cnv": "leave it out; generate does not hold a conversation",
    "quiet q silent log-disable v vv debug log-level loglevel log-verbosity": _QUIET,
    "num-return-sequences": "give the prompt several times, each with --prompt",
    "stream": "leave it out; text is printed as it is generated",
    "atol rtol tolerance threshold": "leave it out; verify measures rounding, and allows no larger difference",
    "onnx model m loadEngine engine engine-dir hf-repo hf model-id model-name-or-path pretrained-model": _MODEL,
    "saveEngine save-engine output-dir": "give -o ENGINE, or -o FOLDER/",
    "max-tokens max-length n-predict max-output-len predict": "give --max-new-tokens N",
    "max-model-len max-seq-len max-seq-length max-input-len ctx-size context-length": "give --capacity TOKENS",
    "max-num-seqs batch-size max-batch-size batch parallel np": "give --max-batch N",
    "max-num-batched-tokens prefill-chunk max-num-tokens": "give --max-chunk TOKENS",
    "memPoolSize max-workspace-size": "give --workspace SIZE, such as --workspace 4GiB",
    "presence-penalty frequency-penalty repeat-penalty": "give --repetition-penalty X",
    "stop-token-ids end-id eos-token-id": "give --eos ID",
    "tensor-parallel-size pipeline-parallel-size tp-size tp num-gpus": "an engine is for one GPU; leave it out",
    "builderOptimizationLevel": "give --opt-level N",
    "timingCacheFile": "give --timing-cache FILE",
    "versionCompatible": "give --version-compatible",
    "stripWeights": "give --strip-plan",
    "profilingVerbosity": "give --profiling-verbosity",
    "shapes": "give --minShapes, --optShapes and --maxShapes, for inputs of unknown role",
    "stronglyTyped": f"{_TYPES}, always; leave it out",
    "do-sample": "give --sample",
    "logit-processors": "in Python: GenerationConfig(logits_processor=...)",
    "temp": "give --temperature T",
    "system-prompt sys": "give --system TEXT, of a chat",
    "input-text prompt-text": "give --prompt TEXT",
    "model-draft md speculative-model speculative-config draft-model": "give --draft MODEL",
    "draft-max num-speculative-tokens": "give --num-assistant-tokens N, with --draft",
    "cache-type-k cache-type-v kv-cache-dtype kv-cache-type": "give --cache-dtype int8",
    "served-model-name alias model-name": "give --name NAME",
    "api-key api-keys": "give --api-key-file FILE",
    "enable-prefix-caching cache-reuse prompt-cache": "give --prefix-cache SIZE",
    "tokenizer-dir tokenizer-path": "give --tokenizer FILE",
    "max-beam-width beam-width": "give --num-beams N",
    "grammar-file guided-grammar": "give --grammar FILE",
    "guided-json response-format": "give --json-schema FILE",
    "guided-regex": "give --regex PATTERN",
    "iterations avgRuns num-iters": "give --repeats N",
    "warmUp num-iters-warmup": "give --warmup N",
    "output-len random-output-len": "give --repeats N and --positions N",
    "input-len random-input-len n-prompt": "give --lengths N",
    "n-gpu-layers ngl gpu-layers": "an engine runs on the GPU as a whole; leave it out",
    "flash-attn fa attention-backend": "TensorRT chooses its kernels; leave it out",
    "enforce-eager useCudaGraph cuda-graph": "CUDA graphs are on; leave it out",
    "trust-remote-code": "leave it out; code that comes with a model is never run",
    "chat-template chat-template-file": "leave it out; it is in a file beside the model",
    "enable-auto-tool-choice tool-call-parser jinja": "tools work by the chat template; leave it out",
    "swap-space cpu-offload-gb": "sequences are offloaded in Python: Schedule(max_sequences=N)",
    "interactive conversation cnv": "that is a command of its own: trt-kvcache chat",
    "dumpProfile dumpLayerInfo exportProfile": "NVIDIA's Nsight Systems shows layers",
    "useDLACore allowGPUFallback": "leave it out; engines run only on a GPU",
    "mirostat typical typical-p": "leave it out; this way of sampling is not supported",
    "opset task monolith": "only the exporter has this option; run it by hand",
    "device-id": "choose the GPU by CUDA_VISIBLE_DEVICES",
    "num-beams": "only generate has beam search",
    "logprobs": "generate shows them in its JSON, and serve returns them if a request asks for them",
    "gpu-memory-utilization": "leave it out; --max-batch and --capacity determine the memory",
    "verbose": "leave it out; only build has it, for the log of TensorRT",
}
FOREIGN = {name: said for names, said in _ADVICE.items() for name in names.split()}
"""Flags of trtexec, vLLM, TensorRT-LLM, llama.cpp and transformers, with dashes, and their replacements here."""


_SHORT = ("m", "md", "np", "ngl", "fa", "sys", "hf", "cnv", "no-cnv", "tp", "e", "f", "i", "p", "t", "q", "v", "vv")
"""Names of such flags that other tools write with a single dash."""


_ADVICE_ON_COMMANDS = {
    "run infer start": "give trt-kvcache chat MODEL, or generate MODEL, or serve MODEL",
    "list ls models": "models are files: give the path of one, as in trt-kvcache plan model.onnx",
    "ps stop top": "a server shows at /metrics what it runs; Ctrl-C ends the server",
    "pull download push login": (
        "hf download NAME downloads a model of the hub; then give trt-kvcache export NAME -o FOLDER/"
    ),
    "show info view": "give trt-kvcache plan MODEL, or inspect ENGINE",
    "create convert compile optimize import": (
        "give trt-kvcache export CHECKPOINT -o FOLDER/ for ONNX, and build MODEL -o ENGINE/ for an engine"
    ),
    "quantize quantization": (
        "give trt-kvcache export CHECKPOINT -o FOLDER/ --int4; for caches, build MODEL -o ENGINE/ --cache-dtype int8"
    ),
    "completion completions": "give trt-kvcache --install-completion",
    "perplexity eval evaluate": "give trt-kvcache score MODEL FILE",
    "tokenize tokens detokenize": "a server has /tokenize; in Python, Tokenizer.load(FILE).encode(TEXT)",
    "embed embedding embeddings": "models here make text; there are no embeddings",
    "benchmark profile throughput latency": "give trt-kvcache bench MODEL",
    "complete prompt ask text-generation": "give trt-kvcache generate MODEL TEXT",
    "server api launch": "give trt-kvcache serve MODEL",
    "rm delete cp mv": "models and engines are files; the shell copies and deletes them",
}
_COMMANDS = {name: said for names, said in _ADVICE_ON_COMMANDS.items() for name in names.split()}
"""Commands of ollama, llama.cpp, vLLM, TensorRT-LLM and optimum-cli, and their replacements here."""

_MORE = {
    "verify": "it compares MODEL with a new rewrite of it; give --rewritten FILE for a file that 'rewrite' wrote",
    "export": "it takes one checkpoint; give -o FOLDER/ for the output",
    "build": "it takes one model; give -o ENGINE/ for the output",
    "rewrite": "it takes one model; give -o FILE for the output",
    "inspect": "it takes only an engine; trt-kvcache plan shows a model",
}
"""For each command: advice if the user gives one argument too many."""

_SPELLED = {
    "--device": {"gpu": "cuda"},
    "--dtype": {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"},
}
"""Values of flags in the spelling of other tools, with the spelling here."""


def translated(args: Sequence[str]) -> list[str]:
    """Return the arguments of a command line, with other tools' spelling of values replaced by this tool's."""
    changed = list(args)
    for at, arg in enumerate(changed):
        flag, equals, value = arg.partition("=")
        known = _SPELLED.get(flag, {})
        if equals and value in known:
            changed[at] = f"{flag}={known[value]}"
        elif not equals and at + 1 < len(changed):
            changed[at + 1] = known.get(changed[at + 1], changed[at + 1])
    return changed


def advice_on_command(args: Sequence[str], own: Collection[str]) -> str:
    """Return advice on what to type for an unknown command; "" without advice. `own`: existing commands and flags."""
    word = args[0] if args else ""
    if word in _COMMANDS:
        return f"there is no command {word!r}: {_COMMANDS[word]}"
    flag = word.partition("=")[0]
    if flag.startswith("-") and flag not in own and flag.lstrip("-") in (*FOREIGN, *_SHORT, "prompt"):
        return f"{flag} needs a command before it, such as trt-kvcache build MODEL -o ENGINE/, or generate MODEL TEXT"
    return ""


def advice_on_more(command: str, args: Sequence[str], said: str) -> str:
    """Return advice on one argument too many, or an illegal value; "" without advice. `said`: the parser's error."""
    if "unexpected extra argument" in said:
        return f"there is an argument too many: {_MORE.get(command, 'it takes one model or engine; quote paths')}"
    if (match := re.search(r"'(--[\w-]+)'.*valid (integer|number)", said)) and match[1] in args[:-1]:
        kind = "a whole number" if match[2] == "integer" else "a number"
        return f"{match[1]} is {args[args.index(match[1]) + 1]}; give {kind}"
    places = [arg for arg in args if not arg.startswith("-")]
    if "'--output'" in said and len(places) > 1:
        return f"the output is a flag: give -o {places[-1]}"
    return ""


def advice_on_address(args: Sequence[str]) -> str:
    """Return advice on what to type if the first argument is a web address; "" otherwise."""
    match = re.match(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)|https?://", args[0]) if args else None
    name = "NAME" if match is None else match[1] or "NAME"
    return (match and f"{args[0]} is an address: give hf download {name}, and then the name or the folder") or ""


def advice_on_flags(args: Sequence[str], own: Collection[str]) -> str:
    """Return advice on what to type for a flag of another tool; "" without advice. `own`: the command's flags."""
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        flag, equals, value = arg.partition("=")
        typed = flag
        if not flag.startswith("--"):
            if flag in own or flag[1:] not in _SHORT:
                continue
            flag = f"-{flag}"
        value = value if equals else following
        dashed = "--" + flag[2:].replace("_", "-")
        if flag not in own:
            if dashed in own:
                return f"{flag} is written {dashed}"
            known = FOREIGN.get(flag[2:]) or FOREIGN.get(dashed[2:], "")
            for said in (known,) if isinstance(known, str) else known:
                named = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", said))
                if said and (not named or named & {*own}):
                    return f"there is no {typed}: {said}"
        elif match := re.fullmatch(r"(\d+(?:\.\d+)?)[kK]", value):
            return f"{flag} is {value}; write {int(float(match[1]) * 1024)}"
    return ""
