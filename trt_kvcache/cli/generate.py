"""``trt-kvcache generate``: continues prompts with an engine or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.flags import Flags, flags_of
from trt_kvcache.cli.options import (
    CheckOption,
    DeviceOption,
    JsonOption,
    RunnableArgument,
    SessionPlanFlags,
    bounded_on_cpu,
    file_flag,
    named_folders,
    run_flag,
)
from trt_kvcache.cli.prompts import PromptFlags, SourceFlags, encode, read_text
from trt_kvcache.errors import OptionError
from trt_kvcache.model_paths import folder_of, is_model
from trt_kvcache.runtime.generation.generation_config import GenerationConfig

if TYPE_CHECKING:
    from trt_kvcache.runtime.generation.token_masks import Grammar
    from trt_kvcache.runtime.session import DecodeSession
    from trt_kvcache.runtime.text.tokenizer import Tokenizer


_form_flag = partial(file_flag, rich_help_panel="Form of the text (extra structured)")


_DRAWN = ("do_sample", "temperature", "top_k", "top_p", "min_p")
_FOR_BATCHES = ("num_beams", "length_penalty", "early_stopping", "output_logprobs")


@flags_of(GenerationConfig, leave=_FOR_BATCHES, unset=None)
class GenerationFlags(Flags):
    """The flags of a generation, as in `GenerationConfig`. If a flag is not given, the model's files decide."""

    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", rich_help_panel="When a sequence ends")] = False
    generation_config: Annotated[
        Path | None,
        file_flag(
            metavar="FILE",
            help="generation_config.json with the settings; flags override it. Default: the file beside the model; "
            "only its special tokens are used.",
            rich_help_panel="How tokens are chosen (as in transformers' GenerationConfig)",
        ),
    ] = None

    def config(
        self, model: Path, tokenizer: Tokenizer | None, sampling: Mapping[str, Any] | None = None
    ) -> GenerationConfig:
        """Return the settings of a generation: from flags, then a config file, then the model's end tokens.

        Raises `OptionError` if a value is illegal, or has no effect.

        Args:
            model: path of the model or engine, as typed.
            tokenizer: its end token is used if no file names one. None: look for a tokenizer beside the model.
            sampling: settings to use if the user gives no config file and no sampling flags; None: greedy decoding.
        """
        import secrets
        import warnings

        from trt_kvcache.cli.output import print_warnings
        from trt_kvcache.runtime.generation.settings import with_sampling
        from trt_kvcache.runtime.open import ended_by, find_tokenizer

        settings, file = self.values("generation_config", "ignore_eos"), self.generation_config
        if "sequence_bias" in settings:
            settings["sequence_bias"] = _biases(settings["sequence_bias"])
        if "early_stopping" in settings:
            settings["early_stopping"] = {"true": True, "false": False}.get(settings["early_stopping"], "never")
        if self.ignore_eos and "eos_token_id" in settings:
            raise OptionError("--eos and --ignore-eos contradict each other; use one of them")
        if sampling and file is None and settings.keys().isdisjoint(_DRAWN):
            settings |= sampling
        settings = with_sampling(settings)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if file is None:
                config = GenerationConfig.for_model(model, **settings)
            else:
                config = GenerationConfig.from_file(file, **settings)
        print_warnings(str(warning.message) for warning in said)
        if self.ignore_eos:
            config = replace(config, eos_token_id=(), forced_eos_token_id=None)
        elif not config.eos_token_ids:
            config = ended_by(config, tokenizer or find_tokenizer(model))
        if self.seed is not None and self.temperature != 0 and not config.do_sample:
            raise OptionError(
                f"--seed {config.seed} is for sampling, and greedy decoding draws nothing; add --sample, or leave "
                "it out"
            )
        if config.do_sample and config.seed is None:
            # The result shows the seed, so that the run can be repeated.
            config = replace(config, seed=secrets.randbelow(2**32))
        return config


def sampling_text(session: DecodeSession) -> str:
    """Return a text with the default sampling settings of a session, and where they come from."""
    from trt_kvcache.runtime.open import USUAL_SAMPLING

    shown = ", ".join(f"{name} {value}" for name, value in session.sampling.items())
    source = "the model names no sampling" if session.sampling == USUAL_SAMPLING else "generation_config.json"
    return f"{shown} ({source})" if shown else "temperature 1"


@flags_of(GenerationConfig, *_FOR_BATCHES, unset=None)
class BatchGenerationFlags(GenerationFlags):
    """The flags of a generation in the command `generate`, including flags that `chat` does not have."""


@dataclass(frozen=True)
class GrammarFlags:
    """Flags that restrict the form of the generated text: to JSON, a regular expression or a grammar."""

    json_schema: Annotated[
        str | None, _form_flag(metavar="FILE|JSON", help="Generate only JSON that matches this schema.")
    ] = None
    regex: Annotated[
        str | None, _form_flag(metavar="PATTERN", help="Generate only text that matches this whole pattern.")
    ] = None
    grammar: Annotated[
        Path | None,
        _form_flag(metavar="FILE", help="Generate only text of this grammar: Lark's syntax or llama.cpp's GBNF."),
    ] = None

    def check(self) -> None:
        """Raise `OptionError` if more than one of these flags is given."""
        if len(names := [name for name, value in vars(self).items() if value is not None]) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
            raise OptionError(f"{flags} restrict the same text; use one of them")

    def compiled(self, session: DecodeSession) -> Grammar | None:
        """Return the grammar that the flags ask for, or None.

        Raises `OptionError` if the grammar does not compile, a file is unreadable, or the session has no grammars.
        """
        if self == GrammarFlags():
            return None
        from trt_kvcache.runtime.structured import Grammars

        grammars = Grammars(session)
        if self.json_schema is not None:
            text = self.json_schema
            inline = text.lstrip().startswith("{")
            return grammars.json_schema(text if inline else read_text(Path(text), "--json-schema"))
        if self.regex is not None:
            return grammars.regex(self.regex)
        assert self.grammar is not None
        return grammars.lark(read_text(self.grammar, "--grammar"))


@dataclass(frozen=True)
class RunFlags(Flags):
    """The flags for opening a session; they become parameters of `DecodeSession.open`."""

    device: DeviceOption = "auto"
    check: CheckOption = "first"
    max_batch: Annotated[
        int | None, run_flag(min=1, metavar="N", help="Largest batch. Default: the engine's, else 8.")
    ] = None
    max_chunk: Annotated[
        int | None,
        run_flag(
            min=1,
            metavar="TOKENS",
            help="Most tokens that a step writes for a sequence. Default: the engine's limit, else 512.",
        ),
    ] = None
    prefill_budget: Annotated[
        int | None,
        run_flag(
            min=1,
            metavar="TOKENS",
            help="Most prompt tokens per step while other sequences generate. Default: 16 on the CPU, 256 on a GPU.",
        ),
    ] = None
    draft: Annotated[
        Path | None,
        run_flag(
            metavar="MODEL|ENGINE",
            help="Smaller model with the same vocabulary that guesses tokens. The result stays the same.",
        ),
    ] = None
    prefix_cache: Annotated[
        str | None,
        run_flag(
            metavar="SIZE",
            help="Host memory, such as 512MiB, to reuse cache rows of prompts that begin alike. Default: none.",
        ),
    ] = None

    def options(self) -> dict[str, Any]:
        """Return these flags as keyword arguments of `DecodeSession.open`; raise `OptionError` for a malformed size."""
        from trt_kvcache.engine.build_options import parse_bytes
        from trt_kvcache.runtime.open import Schedule

        size = None if self.prefix_cache is None else parse_bytes(self.prefix_cache)
        schedule = Schedule(prefix_cache=size, prefill_budget=self.prefill_budget)
        return self.values("prefix_cache", "prefill_budget") | {"schedule": schedule}


@dataclass(frozen=True)
class AdapterFlags:
    """The flag that chooses one adapter (LoRA) for all texts."""

    adapter: Annotated[str | None, run_flag(metavar="FOLDER", help="Adapter (LoRA) of peft to use.")] = None

    def options(self) -> dict[str, Any]:
        """Return the adapter, if one is given, as keyword arguments of `DecodeSession.open`."""
        return {"adapters": named_folders([self.adapter], "--adapter")} if self.adapter else {}

    def config(self, config: GenerationConfig) -> GenerationConfig:
        """Return `config` with the adapter's name, if the user gives an adapter."""
        return replace(config, adapter=next(iter(self.options()["adapters"]))) if self.adapter else config


@dataclass(frozen=True)
class LoraFlags:
    """Flags for the adapters (LoRA) of a server."""

    lora: Annotated[
        list[str] | None,
        run_flag(metavar="NAME=FOLDER", help="Adapter (LoRA) of peft; requests choose it as their model. Repeatable."),
    ] = None

    def options(self, model: str) -> dict[str, Any]:
        """Return the adapters as keyword arguments of `DecodeSession.open`. No adapter may have the model's name."""
        folders = named_folders(self.lora or [], "--lora")
        if model in folders:
            raise OptionError(f"--lora {model}=...: the model has this name; rename the adapter, or the model (--name)")
        return {"adapters": folders} if folders else {}


def generate(
    model: RunnableArgument,
    text: PromptFlags,
    encoded: SourceFlags,
    generation: BatchGenerationFlags,
    form: GrammarFlags,
    running: RunFlags,
    adapters: AdapterFlags,
    planning: SessionPlanFlags,
    prompt_text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="Prompt text, as with --prompt. Default: stdin, if piped.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Continue prompts and print the text. Ctrl-C stops with the text so far; a second Ctrl-C stops at once."""
    if generation.output_logprobs and not json:
        raise OptionError("--logprobs are shown by --json; add it")
    if prompt_text is not None:
        text = replace(text, prompt=[prompt_text, *(text.prompt or [])])
    elif not (encoded.source or encoded.source_tokens or encoded.source_inputs):
        text = text.or_stdin()
    text.check()
    form.check()
    tokenizer = text.find_tokenizer(model, needed=bool(encoded.source))
    embedded = text.embedded()
    sources = encoded.read()
    if sources and not (text.prompt or text.prompt_file or text.tokens or embedded):
        prompts = [encoded.start(model)]
    else:
        prompts = text.read(tokenizer, embedded)
    prompts = encoded.for_each(prompts, len(sources), constants=bool(text.constants))
    options = planning.session_options(model)
    config = adapters.config(generation.config(model, tokenizer))
    from trt_kvcache.cli.generate_view import JsonView, LiveView, run  # a slow import, so after the checks of flags
    from trt_kvcache.importer.files.model_folder import usual_capacity
    from trt_kvcache.runtime.open import CpuOptions
    from trt_kvcache.runtime.session import DecodeSession

    view = (JsonView if json else LiveView)(text=tokenizer is not None)
    options |= running.options() | adapters.options() | {"embeddings": text.embeddings, "encoder": encoded.encoder}

    def open_session() -> DecodeSession:
        longest = max(len(prompt) for prompt in prompts) + config.max_new_tokens
        more = longest if longest > usual_capacity(folder_of(model)) else None
        cpu = CpuOptions(default_capacity=more) if is_model(model) else None
        session = DecodeSession.open(model, tokenizer=tokenizer or False, cpu=cpu, **options)
        if unknown := [token for token in generation.eos_token_id or [] if token >= session.vocab]:
            session.close()
            raise OptionError(
                f"--eos is {unknown[0]}, which the model never gives: it has tokens 0 to {session.vocab - 1}"
            )
        return session

    before = [None] * (len(prompts) - len(embedded))
    with bounded_on_cpu(model):
        interrupted = run(
            open_session,
            prompts,
            config,
            view,
            lambda session: {
                "constants": text.read_constants(encode(session, sources), len(prompts)),
                "inputs_embeds": [*before, *(prompt.embeds for prompt in embedded)],
                "positions": [*before, *(prompt.positions for prompt in embedded)],
            },
            form.compiled,
        )
    if interrupted:
        raise typer.Exit(130)
    from trt_kvcache.cli.summary import tell_next

    tell_next(model, "chat", planning)


def _biases(pairs: list[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (pair.split("=") for pair in pairs)}
    except ValueError:
        raise OptionError(f"--logit-bias {' '.join(pairs)!r} is not ID=BIAS, such as 50256=-inf") from None
