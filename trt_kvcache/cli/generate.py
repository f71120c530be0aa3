"""``trt-kvcache generate``: continue prompts with an engine or a model."""

from __future__ import annotations

from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trt_kvcache.cli.options import (
    CapacityOption,
    EmbeddingsOption,
    JsonOption,
    LatentOption,
    LogitsOption,
    SlidingOption,
    WindowChunkOption,
    runner_options,
)
from trt_kvcache.importer.plan import LatentAttention, LogitPositions, Sliding

if TYPE_CHECKING:
    from trt_kvcache.runtime.generation.config import GenerationConfig
    from trt_kvcache.runtime.requests import GivenAll
    from trt_kvcache.runtime.text.tokenizer import Tokenizer


class Device(str, Enum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class EarlyStopping(str, Enum):
    """When a beam search ends."""

    TRUE = "true"
    FALSE = "false"
    NEVER = "never"


_EARLY = {EarlyStopping.TRUE: True, EarlyStopping.FALSE: False, EarlyStopping.NEVER: "never"}

_PROMPTS = "What to continue"
_SOURCES = "What an encoder reads (translation, speech, ...)"
_CHOICE = "How tokens are chosen (as in transformers' GenerationConfig)"
_END = "When a sequence ends"
_RUN = "How it runs"


def generate(
    model: Annotated[
        Path, typer.Argument(metavar="ENGINE|MODEL", help="An engine, or a model for the CPU.", readable=False)
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="For several, give it several times.", rich_help_panel=_PROMPTS),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text from a file; - is stdin.", rich_help_panel=_PROMPTS, readable=False),
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(metavar="ID,...", help="Token ids.", rich_help_panel=_PROMPTS)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="tokenizer.json or its folder. Default for text: the one beside the model.",
            rich_help_panel=_PROMPTS,
            readable=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Each text is a user's message; uses the chat template.", rich_help_panel=_PROMPTS),
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of the chat.", rich_help_panel=_PROMPTS)
    ] = None,
    constants: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="NPZ",
            help="What the model reads beside the text, such as an encoder's output: arrays [1, ...] by name of the "
            "input. One file for all prompts, or one for each.",
            rich_help_panel=_PROMPTS,
            readable=False,
        ),
    ] = None,
    embeddings: EmbeddingsOption = None,
    inputs_embeds: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="NPZ",
            help="A prompt as embeddings, such as those of images: inputs_embeds [S, H], input_ids [S], and "
            "position_ids [S] or [3, S] where the tokens do not stand in order.",
            rich_help_panel=_PROMPTS,
            readable=False,
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Such as what is to be translated. For several, give it several times.",
            rich_help_panel=_SOURCES,
        ),
    ] = None,
    source_tokens: Annotated[
        list[str] | None, typer.Option(metavar="ID,...", help="The same as token ids.", rich_help_panel=_SOURCES)
    ] = None,
    source_inputs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="NPZ",
            help="Arrays [1, ...] by name of the encoder's input, such as input_features.",
            rich_help_panel=_SOURCES,
            readable=False,
        ),
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Default: the engine that was built with the decoder's, else the exporter's model beside it, which "
            "runs on the CPU.",
            rich_help_panel=_SOURCES,
            readable=False,
        ),
    ] = None,
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--sample/--greedy",
            help="Default: greedy, unless a sampling setting or the file says otherwise.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", rich_help_panel=_CHOICE)] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="0 keeps all; 50 while sampling.", rich_help_panel=_CHOICE)
    ] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", rich_help_panel=_CHOICE)] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, metavar="P", rich_help_panel=_CHOICE)] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Default: a fresh one, told.", rich_help_panel=_CHOICE)
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(metavar="X", rich_help_panel=_CHOICE)] = None,
    no_repeat_ngram_size: Annotated[int | None, typer.Option(min=0, metavar="N", rich_help_panel=_CHOICE)] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Added to a token's score; -inf forbids it.", rich_help_panel=_CHOICE),
    ] = None,
    num_beams: Annotated[int | None, typer.Option(min=1, metavar="N", rich_help_panel=_CHOICE)] = None,
    length_penalty: Annotated[float | None, typer.Option(metavar="X", rich_help_panel=_CHOICE)] = None,
    early_stopping: Annotated[
        EarlyStopping | None, typer.Option(help="Of beam search.", rich_help_panel=_CHOICE)
    ] = None,
    prompt_lookup: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Propose N tokens at a time from what came before.", rich_help_panel=_CHOICE
        ),
    ] = None,
    generation_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="generation_config.json; flags count. Default: of the one beside the model, only which tokens end or "
            "start a text, or never come.",
            rich_help_panel=_CHOICE,
            readable=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: 128.", rich_help_panel=_END)
    ] = None,
    min_new_tokens: Annotated[int | None, typer.Option(min=0, metavar="N", rich_help_panel=_END)] = None,
    eos: Annotated[
        list[int] | None,
        typer.Option(
            min=0, metavar="ID", help="Default: the file's or model's, else the tokenizer's.", rich_help_panel=_END
        ),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=_END)] = False,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", rich_help_panel=_END)] = None,
    device: Annotated[Device, typer.Option(help="auto: what the file is for.", rich_help_panel=_RUN)] = Device.AUTO,
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Most sequences at a time. Default: the engine's, else 8.", rich_help_panel=_RUN
        ),
    ] = None,
    max_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Longest update in a step. Default: the engine's, else 512.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    capacity: CapacityOption = None,
    sliding: SlidingOption = Sliding.LINEAR,
    window_chunk: WindowChunkOption = None,
    latent_attention: LatentOption = LatentAttention.ABSORBED,
    logits: LogitsOption = LogitPositions.LAST,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: of each token.")] = False,
    json: JsonOption = False,
) -> None:
    """Continue prompts; text comes as it is made. Ctrl-C ends it with what there is, a second one at once."""
    from trt_kvcache.cli.generate_view import JsonView, LiveView, run
    from trt_kvcache.cli.given import read_prompt
    from trt_kvcache.cli.sources import encode, for_each, read_sources, start_of
    from trt_kvcache.errors import NoCapacityError, OptionError
    from trt_kvcache.runtime.session import DecodeSession

    if logprobs and not json:
        raise OptionError("--logprobs are shown by --json; add it")
    if chat and not (prompt or prompt_file):
        raise OptionError("--chat needs messages as text; give --prompt or --prompt-file, or leave it out")
    if system is not None and not chat:
        raise OptionError("--system is a message of a chat; add --chat")
    reader = _tokenizer(model, tokenizer, needed=bool(prompt or prompt_file or chat or source))
    given = [read_prompt(file) for file in inputs_embeds or []]
    sources = read_sources(source or [], source_tokens or [], source_inputs or [])
    if sources and not (prompt or prompt_file or tokens or given):
        prompts = [[start_of(model, encoder)]] * len(sources)
    else:
        prompts = _prompts(prompt or [], prompt_file or [], tokens or [], reader, chat, system, [g.ids for g in given])
    prompts = for_each(prompts, len(sources), encoder, bool(constants))
    before = [None] * (len(prompts) - len(given))
    config = _config(
        model,
        generation_config,
        reader,
        ignore_eos,
        {
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "repetition_penalty": repetition_penalty,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "sequence_bias": _biases(logit_bias) if logit_bias else None,
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "early_stopping": None if early_stopping is None else _EARLY[early_stopping],
            "prompt_lookup_num_tokens": prompt_lookup,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "eos_token_id": eos or None,
            "stop_strings": stop or None,
            "output_logprobs": logprobs or None,
        },
    )
    options = runner_options(model, capacity, sliding, window_chunk, latent_attention, logits)
    view = (JsonView if json else LiveView)(text=reader is not None)
    session_of = partial(
        DecodeSession.open,
        model,
        device=device.value,
        tokenizer=reader,
        embeddings=embeddings,
        encoder=encoder,
        max_batch=max_batch,
        max_chunk=max_chunk,
    )

    def open_session() -> DecodeSession:
        session = open_any()
        if unknown := [token for token in eos or [] if token >= session.vocab]:
            session.close()
            raise OptionError(
                f"--eos is {unknown[0]}, which never comes: the model has tokens 0 to {session.vocab - 1}"
            )
        return session

    def open_any() -> DecodeSession:
        try:
            return session_of(**options)
        except NoCapacityError:  # caches grow: as long as these texts can become
            longest = max(len(prompt) for prompt in prompts) + config.max_new_tokens
            try:
                return session_of(**runner_options(model, longest, sliding, window_chunk, latent_attention, logits))
            except OptionError as error:
                derived = f"{longest} are the longest prompt and --max-new-tokens"
                raise OptionError(f"{error} ({derived}, where --capacity is left out)") from None

    if run(
        open_session,
        prompts,
        config,
        view,
        lambda session: {
            "constants": _constants(constants or [], encode(session, sources), len(prompts)),
            "inputs_embeds": [*before, *(g.embeds for g in given)],
            "positions": [*before, *(g.positions for g in given)],
        },
    ):
        raise typer.Exit(130)


def _constants(files: list[Path], made: list[Any], prompts: int) -> GivenAll:
    """What is given beside each prompt, in files or by the encoder."""
    from trt_kvcache.errors import OptionError
    from trt_kvcache.verify.inputs import load_inputs

    if files and len(files) not in (1, prompts):
        raise OptionError(f"there are {len(files)} files of constants for {prompts} prompts; give one, or one for each")
    given = made or [load_inputs(str(file)) for file in files]
    return (given * prompts if len(given) == 1 else given) or None


def _tokenizer(model: Path, given: Path | None, *, needed: bool) -> Tokenizer | None:
    """The tokenizer that was asked for, or for text the one beside the model; None where nothing needs one."""
    from trt_kvcache.errors import OptionError
    from trt_kvcache.runtime.text.tokenizer import Tokenizer

    if given is not None:
        return Tokenizer.load(given)
    if not needed:
        return None
    beside = (model if model.is_dir() else model.parent) / "tokenizer.json"
    if not beside.exists():
        raise OptionError(f"text needs a tokenizer, and there is no {beside}; give --tokenizer, or ids with --tokens")
    return Tokenizer.load(beside)


def _prompts(
    texts: list[str],
    files: list[Path],
    ids: list[str],
    tokenizer: Tokenizer | None,
    chat: bool,
    system: str | None,
    embedded: list[list[int]],
) -> list[list[int]]:
    """All prompts as token ids: texts, then files, then ids, then those of embeddings."""
    from trt_kvcache.cli.given import token_ids
    from trt_kvcache.errors import OptionError

    texts = [*texts, *(_read(file) for file in files)]
    if not texts and not ids and not embedded:
        raise OptionError("nothing to continue; give --prompt, --prompt-file, --tokens or --inputs-embeds, or --source")
    if chat and ids:
        raise OptionError("--chat needs messages as text, and --tokens gives ids; use one of them")
    prompts = []
    for text in texts:
        assert tokenizer is not None  # there is text
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            rendered = tokenizer.render_chat([*messages, {"role": "user", "content": text}])
            # The template writes the special tokens itself.
            prompts.append(tokenizer.encode(rendered, special_tokens=False))
        else:
            prompts.append(tokenizer.encode(text))
    return prompts + [token_ids(text, "--tokens") for text in ids] + embedded


def _read(file: Path) -> str:
    import sys

    from trt_kvcache.errors import OptionError

    if str(file) == "-" and sys.stdin is None:
        raise OptionError("--prompt-file - reads stdin, which is closed")
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--prompt-file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"--prompt-file {file} is not UTF-8 text") from None


def _biases(pairs: list[str]) -> dict[int, float]:
    from trt_kvcache.errors import OptionError

    try:
        return {int(token): float(bias) for token, bias in (pair.split("=") for pair in pairs)}
    except ValueError:
        raise OptionError(f"--logit-bias {' '.join(pairs)!r} is not ID=BIAS, such as 50256=-inf") from None


def _config(
    model: Path, file: Path | None, tokenizer: Tokenizer | None, ignore_eos: bool, flags: dict[str, Any]
) -> GenerationConfig:
    """The settings: flags, then the file's, or what the model was trained with, then what follows from them."""
    import secrets
    import warnings
    from dataclasses import replace

    from trt_kvcache.cli.output import print_warnings
    from trt_kvcache.errors import OptionError
    from trt_kvcache.runtime.generation.config import GenerationConfig

    given = {name: value for name, value in flags.items() if value is not None}
    if ignore_eos and "eos_token_id" in given:
        raise OptionError("--eos names an end that --ignore-eos ignores; use one of them")
    if {"temperature", "top_k", "top_p", "min_p"} & given.keys():
        given.setdefault("do_sample", True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if file is None:
            config = GenerationConfig.for_model(model, **given)
        else:
            config = GenerationConfig.from_file(file, **given)
    print_warnings(str(warning.message) for warning in said)
    if ignore_eos:
        config = replace(config, eos_token_id=None, forced_eos_token_id=None)
    elif not config.eos_token_ids and tokenizer is not None:
        config = replace(config, eos_token_id=tokenizer.eos_token_id)
    if "seed" in given and not config.do_sample:
        raise OptionError(
            f"--seed {config.seed} is of sampling, and greedy decoding draws nothing; add --sample, or leave it out"
        )
    if config.do_sample and config.seed is None:
        # Told with the result, so that the run can be repeated.
        config = replace(config, seed=secrets.randbelow(2**32))
    return config
