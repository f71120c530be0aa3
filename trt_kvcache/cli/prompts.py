"""Reads the prompts of ``trt-kvcache generate``, and sources (inputs of the encoder) for an encoder-decoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from trt_kvcache.cli.options import EmbeddingsOption, file_flag
from trt_kvcache.errors import OptionError
from trt_kvcache.model_paths import folder_of

if TYPE_CHECKING:
    import numpy as np

    from trt_kvcache.runtime.encoders.source_reader import Source
    from trt_kvcache.runtime.requests import ConstantsAll, Prompt
    from trt_kvcache.runtime.session import DecodeSession
    from trt_kvcache.runtime.text.tokenizer import Tokenizer

    Array = np.ndarray[Any, np.dtype[Any]]

_prompt_flag = partial(file_flag, rich_help_panel="Prompts to continue")
_source_flag = partial(file_flag, rich_help_panel="Sources for an encoder (translation, speech, ...)")
TemplateOption = Annotated[
    str | None,
    _prompt_flag(metavar="JSON", help="Variables for the chat template, such as '{\"enable_thinking\": false}'."),
]
_NEEDED = ("input_ids", "inputs_embeds")


@dataclass(frozen=True)
class EmbeddedPrompt:
    """A prompt given as embeddings, such as those of images, for which the token `ids` have placeholders.

    `embeds` is ``[S, H]``; `positions` is ``[S]``, or ``[planes, S]`` if a token has several positions, or None.
    """

    ids: list[int]
    embeds: Array
    positions: Array | None


@dataclass(frozen=True)
class PromptFlags:
    """Flags that give prompts, and other inputs of the model."""

    prompt: Annotated[
        list[str] | None,
        _prompt_flag("--prompt", "-p", metavar="TEXT", help="Prompt text. Repeat it for several prompts."),
    ] = None
    prompt_file: Annotated[
        list[Path] | None, _prompt_flag(metavar="FILE", help="File with the text of a prompt; - is stdin.")
    ] = None
    tokens: Annotated[list[str] | None, _prompt_flag(metavar="ID,...", help="Prompt as token ids.")] = None
    tokenizer: Annotated[
        Path | None,
        _prompt_flag(metavar="FILE", help="tokenizer.json or its folder. Default: the one beside the model."),
    ] = None
    chat: Annotated[
        bool, _prompt_flag("--chat", help="Treat each text as a message of a user, with the chat template.")
    ] = False
    system: Annotated[str | None, _prompt_flag(metavar="TEXT", help="System message of the chat.")] = None
    chat_template_kwargs: TemplateOption = None
    constants: Annotated[
        list[Path] | None,
        _prompt_flag(
            metavar="NPZ",
            help="Inputs that the model reads beside the text, such as an encoder's output: arrays [1, ...] by name of "
            "the input. One file for all prompts, or one for each.",
        ),
    ] = None
    embeddings: EmbeddingsOption = None
    inputs_embeds: Annotated[
        list[Path] | None,
        _prompt_flag(
            metavar="NPZ",
            help="A prompt as embeddings, such as those of images: inputs_embeds [S, H], input_ids [S], and "
            "position_ids [S] or [3, S] where the tokens do not stand in order.",
        ),
    ] = None

    def check(self) -> None:
        """Raise `OptionError` if a flag needs another flag that is not given."""
        if self.chat and not (self.prompt or self.prompt_file):
            raise OptionError("--chat needs messages as text; give --prompt or --prompt-file, or leave it out")
        if self.system is not None and not self.chat:
            raise OptionError("--system is a message of a chat; add --chat")
        if self.chat_template_kwargs is not None and not self.chat:
            raise OptionError("--chat-template-kwargs are for a chat; add --chat")

    def or_stdin(self) -> PromptFlags:
        """Return these flags; if no flag gives a prompt, the text that is piped to stdin becomes the prompt."""
        if self.prompt or self.prompt_file or self.tokens or self.inputs_embeds or sys.stdin.isatty():
            return self
        piped = sys.stdin.read().removesuffix("\n")
        return replace(self, prompt=[piped]) if piped else self

    def find_tokenizer(self, model: Path, *, needed: bool) -> Tokenizer | None:
        """Return the tokenizer that the flag names, or else the model's own; None if there is no text to encode.

        Raises `OptionError` if there is no tokenizer for the text, or if the model does not exist.
        """
        if self.tokenizer is None and not (needed or self.prompt or self.prompt_file or self.chat):
            return None
        if not model.exists():
            raise OptionError(f"{model}: no such file; give the path of an engine or of an .onnx file")
        file = self.tokenizer or folder_of(model) / "tokenizer.json"
        if self.tokenizer is None and not file.exists():
            raise OptionError(f"text needs a tokenizer, and there is no {file}; give --tokenizer, or ids with --tokens")
        from trt_kvcache.runtime.text.tokenizer import Tokenizer

        return Tokenizer.load(file)

    def embedded(self) -> list[EmbeddedPrompt]:
        """Return the prompts that the user gives as embeddings; raise `OptionError` if a file cannot be used."""
        return [read_embedded(file) for file in self.inputs_embeds or []]

    def read(self, tokenizer: Tokenizer | None, embedded: Sequence[EmbeddedPrompt]) -> list[list[int]]:
        """Return all prompts as token ids: texts, files, ids, embeddings; raise `OptionError` if there is none."""
        texts = [*(self.prompt or []), *(read_text(file) for file in self.prompt_file or [])]
        ids = [token_ids(text, "--tokens") for text in self.tokens or []]
        if not (texts or ids or embedded):
            raise OptionError(
                "nothing to continue; give --prompt, --prompt-file, --tokens or --inputs-embeds, or --source"
            )
        if self.chat and ids:
            raise OptionError("--chat needs messages as text, and --tokens gives ids; use one of them")
        prompts = []
        for text in texts:
            assert tokenizer is not None  # `find_tokenizer` refuses text without one
            if self.chat:
                messages = [{"role": "system", "content": self.system}] if self.system is not None else []
                messages.append({"role": "user", "content": text})
                prompts.append(tokenizer.chat_tokens(messages, values=template_values(self.chat_template_kwargs)))
            else:
                prompts.append(tokenizer.encode(text))
        return prompts + ids + [prompt.ids for prompt in embedded]

    def read_constants(self, encoded: list[dict[str, Any]], prompts: int) -> ConstantsAll:
        """Return the constants (inputs that stay the same in all steps) of each prompt, from files or from `encoded`.

        Raises `OptionError` if a file cannot be read, or there are several files, but not one for each prompt.
        """
        files = self.constants or []
        if files and len(files) not in (1, prompts):
            raise OptionError(
                f"there are {len(files)} files of constants for {prompts} prompts; give one, or one for each"
            )
        constants = encoded or [read_arrays(file) for file in files]
        return (constants * prompts if len(constants) == 1 else constants) or None


@dataclass(frozen=True)
class SourceFlags:
    """Flags that give inputs (sources) for the encoder of an encoder-decoder."""

    source: Annotated[
        list[str] | None,
        _source_flag(metavar="TEXT", help="Text for the encoder, such as a text to translate. Repeat it for several."),
    ] = None
    source_tokens: Annotated[
        list[str] | None, _source_flag(metavar="ID,...", help="Text for the encoder as token ids.")
    ] = None
    source_inputs: Annotated[
        list[Path] | None,
        _source_flag(metavar="NPZ", help="Arrays [1, ...] by name of the encoder's input, such as input_features."),
    ] = None
    encoder: Annotated[
        Path | None,
        _source_flag(
            metavar="FILE|DIR",
            help="The encoder. Default: the engine that was built with the decoder's, else the exporter's model beside "
            "it, which runs on the CPU.",
        ),
    ] = None

    def read(self) -> list[Source]:
        """Return all sources (inputs of the encoder): texts, ids, arrays; raise `OptionError` if one cannot be read."""
        arrays = [read_arrays(file) for file in self.source_inputs or []]
        ids = [token_ids(text, "--source-tokens") for text in self.source_tokens or []]
        return [*(self.source or []), *ids, *arrays]

    def start(self, model: Path) -> list[int]:
        """Return the prompt that starts each text of an encoder-decoder: the token `decoder_start_token_id`.

        Raises `OptionError` if no config names the token.
        """
        from trt_kvcache.importer.families.encoders.encoder_files import decoder_start

        for place in (model, self.encoder):
            if place is not None and (token := decoder_start(place)) is not None:
                return [token]
        raise OptionError(
            f"no config beside {model} names the decoder_start_token_id, with which texts of an encoder-decoder start; "
            "give it with --tokens"
        )

    def for_each(self, prompts: list[list[int]], sources: int, *, constants: bool) -> list[list[int]]:
        """Return one prompt for each source (an input of the encoder); a single prompt is used for all sources.

        Raises `OptionError` if the numbers of prompts and sources differ, there is no source, or constants are given,
        too.
        """
        if not sources:
            if self.encoder is not None:
                raise OptionError(f"--encoder {self.encoder} has nothing to read; give --source, or leave it out")
            return prompts
        if constants:
            raise OptionError("--source and --constants give the same inputs; use one of them")
        if len(prompts) == 1:
            return prompts * sources
        if sources not in (1, len(prompts)):
            raise OptionError(f"there are {sources} sources for {len(prompts)} prompts; give one, or one for each")
        return prompts


def template_values(text: str | None) -> dict[str, Any]:
    """Return the variables of ``--chat-template-kwargs``; raise `OptionError` if `text` is not a JSON object."""
    return {} if text is None else json_object(text, "--chat-template-kwargs", '{"enable_thinking": false}')


def json_object(text: str, option: str, example: str) -> dict[str, Any]:
    """Return the JSON object in the text of an option; raise `OptionError` if it is something else."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise OptionError(f"{option} is {text!r}; give a JSON object, such as '{example}'")
    return value


def encode(session: DecodeSession, sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the encoder's result for each source. Warnings, such as that the encoder runs on the CPU, go to stderr."""
    import warnings

    from trt_kvcache.cli.output import print_warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        encoded = [session.encode(source) for source in sources]
    print_warnings(str(warning.message) for warning in said)
    return encoded


def read_embedded(file: Path) -> EmbeddedPrompt:
    """Read a prompt of embeddings from an ``.npz`` file. The ids may have a batch axis of 1, as in models.

    Raises `OptionError` if the file cannot be read, lacks an array, has unknown arrays, or its ids are not integers
    ``[S]``.
    """
    arrays = read_arrays(file)
    missing = [name for name in _NEEDED if name not in arrays]
    if missing or (unknown := [name for name in arrays if name not in (*_NEEDED, "position_ids")]):
        fault = f"lacks {' and '.join(missing)}" if missing else f"has {', '.join(unknown)}"
        raise OptionError(
            f"--inputs-embeds {file} {fault}; it must hold {', '.join(_NEEDED)}, and may hold position_ids"
        )
    ids = arrays["input_ids"]
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise OptionError(f"--inputs-embeds {file}: input_ids are {ids.dtype} {list(ids.shape)}; give integers [S]")
    return EmbeddedPrompt(ids.tolist(), arrays["inputs_embeds"], arrays.get("position_ids"))


def read_arrays(file: Path) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file by name; raise `OptionError` if the file cannot be read."""
    from trt_kvcache.compare.text_inputs import load_inputs

    return load_inputs(str(file))


def token_ids(text: str, option: str) -> list[int]:
    """Return the token ids in the text of an option; raise `OptionError` if it is not a list of numbers."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise OptionError(f"{option} {text!r} is not a list of token ids such as 1,15,7") from None


def read_text(file: Path, option: str = "--prompt-file") -> str:
    """Return the text in a file, or on stdin for ``-``; raise `OptionError` if it cannot be read."""
    if str(file) == "-" and sys.stdin is None:
        raise OptionError(f"{option} - reads stdin, which is closed")
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option} {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{option} {file} is not UTF-8 text") from None


def read_prompts(file: Path, option: str) -> list[Prompt]:
    """Return the prompts in a file, one in each line that is not empty: a text, or JSON in a ``.jsonl`` file.

    A JSON line is a text, a list of token ids, or an object whose ``prompt`` is one of these. Raises `OptionError` if
    the file cannot be read, has no prompt, or a line is malformed.
    """
    lines = [(at, line) for at, line in enumerate(read_text(file, option).split("\n"), start=1) if line.strip()]
    if not lines:
        raise OptionError(f"{option} {file} is empty; give a prompt in each line")
    if file.suffix.lower() != ".jsonl":
        return [line.rstrip("\r") for _, line in lines]
    prompts: list[Prompt] = []
    for at, line in lines:
        try:
            read = msgspec.json.decode(line, type=str | list[int] | _Line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise OptionError(
                f"{option} {file}, line {at}: {error}; a line is a text, a list of token ids, or an object with one "
                'of them as "prompt", in JSON'
            ) from None
        prompts.append(read.prompt if isinstance(read, _Line) else read)
    return prompts


class _Line(msgspec.Struct):
    prompt: str | list[int]
