"""Settings of a generation, with the names and meanings of transformers' ``GenerationConfig``.

Source: https://huggingface.co/docs/transformers/main_classes/text_generation (measured against 5.23).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from trt_kvcache.arguments import as_path, is_number, is_whole, shown
from trt_kvcache.engine.engine_folder import load_settings
from trt_kvcache.errors import OptionError
from trt_kvcache.setting import Setting, check_settings, described

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trt_kvcache.runtime.generation.token_masks import Grammar


LogitsProcessor = Callable[["npt.NDArray[np.int64]", "npt.NDArray[np.float32]"], "npt.NDArray[np.float32]"]
"""A caller's function that changes scores: from the tokens so far ``[T]`` (with the prompt) and the scores of the next
token ``[V]``, it returns new scores ``[V]``."""


_T = TypeVar("_T")
_choice = partial(Setting, group="How tokens are chosen (as in transformers' GenerationConfig)")
_count = partial(_choice, metavar="N", least=0)
_plain_choice = partial(_choice, has_flag=False)
_end = partial(Setting, group="When a sequence ends")
_plain_end = partial(_end, has_flag=False)


@described
@dataclass(frozen=True, repr=False)
class GenerationConfig:
    """Settings of a generation. The default is greedy.

    Attributes:
        logits_processor: a `LogitsProcessor`, or several, applied after the penalties and other rules, and before
            temperature, top-k and so on. It may change the scores that it gets. Its result must depend on the tokens
            alone, because guessed tokens may be taken back. It must not change the session that calls it. If it raises
            an error, only its own sequence ends.
        grammar: limits the new text: `trt_kvcache.Grammars` makes a grammar from a JSON schema, a regular expression or
            a Lark grammar; or give your own `Grammar`. It is applied after all other rules. If rules and grammar allow
            no token, the sequence ends with an `OptionError`. A text cut by `max_new_tokens` or the capacity is the
            beginning of a text that the grammar allows.

    Raises:
        OptionError: a value is out of range, or two values contradict each other.
    """

    max_new_tokens: Annotated[
        int,
        _end(
            "Most tokens to generate. Default: 128.",
            "Most new tokens of a sequence. (Without a limit, transformers stops at 20 tokens, those of the prompt "
            "included.)",
            short="n",
            metavar="N",
            least=1,
        ),
    ] = 128
    min_new_tokens: Annotated[
        int, _end(more="A sequence cannot end before it has this many new tokens.", metavar="N", least=0)
    ] = 0
    min_length: Annotated[
        int,
        _plain_end(
            more="A sequence cannot end before it has this many tokens, those of the prompt included. If both are "
            "set, `min_new_tokens` counts.",
            least=0,
        ),
    ] = 0
    do_sample: Annotated[
        bool,
        _choice(
            "Draw tokens at random. Default: greedy, unless a sampling option or the file asks for it.",
            "True: draw from the distribution. False: take the most probable token; of equally probable tokens, "
            "the lowest id.",
            flag="sample/greedy",
        ),
    ] = False
    temperature: Annotated[
        float,
        _choice(
            "Sampling temperature; 0 is greedy.",
            "Divides the scores; above 0 in a config, and for sampling only.",
            metavar="T",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        _choice(
            "Draw from the N most likely tokens; 0 and -1: from all. Default: 50.",
            "Keeps the tokens with the `top_k` highest scores, and tokens with the same score as the last of "
            "these; sampling only.",
            metavar="N",
            least=-1,
        ),
    ] = 50
    top_p: Annotated[
        float,
        _choice(
            more="Keeps the smallest set of most probable tokens that has at least this probability; sampling only.",
            metavar="P",
        ),
    ] = 1.0
    min_p: Annotated[
        float | None,
        _choice(
            more="Keeps tokens at least `min_p` times as probable as the most probable one; sampling only.",
            metavar="P",
            least=0,
            most=1,
        ),
    ] = None
    seed: Annotated[
        int | None,
        _count(
            "Seed of the random numbers. Default: a new one, which is printed.",
            "For sampling. The random number that chooses a token depends only on `seed`, on the number `i` of the "
            "sequence in its call and on the position of the token in the sequence. So tokens do not depend on "
            "what else runs, and a sequence that continues in another session or process, or after it was cropped, "
            "gets the same tokens.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float,
        _choice(
            more="For tokens that occurred, also in the prompt: positive scores are divided by it, and negative "
            "scores are multiplied. Values above 1 discourage these tokens.",
            metavar="X",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        _plain_choice(
            more="Subtracted from the scores of tokens that were generated, however often; tokens of the prompt do "
            "not count."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        _plain_choice(
            more="Subtracted from the score of a token once for each time that it was generated; tokens of the "
            "prompt do not count."
        ),
    ] = 0.0
    no_repeat_ngram_size: Annotated[
        int, _count(more="No token may complete an n-gram of this size that occurred already; 0 allows all.")
    ] = 0
    sequence_bias: Annotated[
        Mapping[int | tuple[int, ...], float],
        _choice(
            "Added to a token's score; -inf forbids it.",
            "``{token: bias, (token, token): bias}``. The bias of a run of tokens is added to the score of its "
            "last token, if the other tokens of the run came just before.",
            flag="logit-bias",
            metavar="ID=BIAS",
            flag_type=list[str],
        ),
    ] = field(default_factory=dict, hash=False)
    bad_words_ids: Annotated[
        Sequence[Sequence[int]],
        _plain_choice(
            more="Runs of tokens that no sequence may contain. (A run that consists of one end-of-sequence token "
            "is ignored.)"
        ),
    ] = ()
    suppress_tokens: Annotated[Sequence[int], _plain_choice(more="Tokens that are never chosen.")] = ()
    begin_suppress_tokens: Annotated[
        Sequence[int], _plain_choice(more="Tokens that are not chosen as the first new token.")
    ] = ()
    forced_bos_token_id: Annotated[
        int | None,
        _plain_end(more="The first new token after a prompt of one token, such as the language of a translation."),
    ] = None
    forced_eos_token_id: Annotated[
        int | Sequence[int] | None,
        _plain_end(more="If a sequence reaches `max_new_tokens`, its last token is one of these."),
    ] = None
    exponential_decay_length_penalty: Annotated[
        tuple[int, float] | None,
        _plain_end(
            more="``(start, factor)``: the score of an end-of-sequence token rises by "
            "``abs(score) * (factor ** n - 1)`` at the n-th token after the first `start` new ones."
        ),
    ] = None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = ()
    grammar: Grammar | None = None
    eos_token_id: Annotated[
        int | Sequence[int] | None,
        _end(
            "Tokens that end a text. Default: those of the model's files.",
            "The token, or tokens, that end a sequence; None: no token ends it.",
            flag="eos",
            metavar="ID",
            least=0,
            flag_type=list[int],
        ),
    ] = None
    stop_strings: Annotated[
        str | Sequence[str] | None,
        _end(
            more="Text, or texts, that end a sequence; needs a tokenizer. The generated text does not contain it.",
            flag="stop",
            metavar="TEXT",
            flag_type=list[str],
        ),
    ] = None
    num_beams: Annotated[
        int, _choice(more="Hypotheses kept by beam search; 1 is no beam search.", metavar="N", least=1)
    ] = 1
    length_penalty: Annotated[
        float,
        _choice(
            more="Beams are compared by log-probability / length ** length_penalty.",
            metavar="X",
            least=-32,  # a larger power of 16 million tokens is infinite or 0
            most=32,
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        _choice(
            "When beam search stops.",
            "True: as soon as `num_beams` hypotheses ended. False: when the best unfinished hypothesis cannot win "
            'at its present length. "never": only when it cannot win at any length.',
            flag_type=Literal["true", "false", "never"],
        ),
    ] = False
    renormalize_logits: Annotated[
        bool,
        _plain_choice(
            more="Beam search compares probabilities that are normalized again, to a sum of 1, after the "
            "rules changed the scores."
        ),
    ] = False
    output_logprobs: Annotated[
        bool,
        Setting(
            "Give the log-probability of each token, in JSON.",
            "In Python, each event has the log-probability of its token.",
            flag="logprobs",
        ),
    ] = False
    top_logprobs: Annotated[
        int,
        _plain_choice(
            more="With `output_logprobs`: each event also has the log-probabilities of this many most probable tokens.",
            least=0,
        ),
    ] = 0
    prompt_lookup_num_tokens: Annotated[
        int | None,
        _choice(
            "Guess N tokens at a time by looking them up in the text so far.",
            "The last n-gram is looked up in the text before it, and one update verifies the tokens that followed "
            "it there; the result stays the same.",
            flag="prompt-lookup",
            metavar="N",
            least=1,
        ),
    ] = None
    max_matching_ngram_size: Annotated[
        int, _plain_choice(more="Longest n-gram that prompt lookup looks up.", least=1)
    ] = 2
    num_assistant_tokens: Annotated[
        int | None,
        _count(
            "Tokens that the --draft guesses at a time. Default: 4.",
            "The result stays the same. 0: the draft is not used. None: 4 if there is a draft and prompt lookup is "
            "off.",
        ),
    ] = None
    adapter: Annotated[
        str | None,
        _plain_choice(
            more="Name of the adapter (LoRA) that the sequence is computed with, see `DecodeSession.adapters`; None: "
            "the model itself."
        ),
    ] = None

    def __repr__(self) -> str:
        """Show only settings that differ from the default, because the text appears in signatures of functions."""
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        changed = [f"{name}={value!r}" for name, d in defaults.items() if (value := getattr(self, name)) != d]
        return f"GenerationConfig({', '.join(changed)})"

    def __post_init__(self) -> None:
        check_settings(self)
        for name, (read, supported) in _READERS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, read(value))
            except (TypeError, ValueError):
                raise OptionError(f"{name} is {shown(value)}; supported: {supported}") from None
        self._check_together()

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """`eos_token_id`, always as a tuple."""
        return tuple(_as_sequence(self.eos_token_id))

    @cached_property
    def forced_eos_token_ids(self) -> tuple[int, ...]:
        """`forced_eos_token_id`, always as a tuple."""
        return tuple(_as_sequence(self.forced_eos_token_id))

    @cached_property
    def logits_processors(self) -> tuple[LogitsProcessor, ...]:
        """`logits_processor`, always as a tuple."""
        processors = self.logits_processor
        return (processors,) if callable(processors) else tuple(processors)

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop_strings`, always as a tuple."""
        return tuple(_as_sequence(self.stop_strings))

    @cached_property
    def biases(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """`sequence_bias` as pairs: consecutive tokens, and the bias that is added to the score of the last one."""
        return tuple(((key,) if isinstance(key, int) else key, bias) for key, bias in self.sequence_bias.items())

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> GenerationConfig:
        """Read the settings from transformers' ``generation_config.json``. `changes` replace fields of the file.

        Warns:
            UserWarning: the file names a setting without effect, such as sampling settings without ``do_sample``.

        Raises:
            OptionError: the file is unreadable, or asks for a way of choosing tokens that is not supported.
        """
        path = as_path(path, "path")
        settings = read_config_file(path, changes)
        try:
            return cls(**settings)
        except OptionError as error:
            cls(**changes)  # this raises an error if the fault is in the caller's own settings
            raise OptionError(f"{path}: {error}") from None

    @classmethod
    def for_model(cls, model: str | Path, **changes: Any) -> GenerationConfig:
        """Return a config with the end tokens, forced tokens and suppressed tokens from the files of a model.

        Settings of sampling are not taken from the files. In order of priority, the files are
        ``generation_config.json`` (transformers), ``genai_config.json`` (onnxruntime-genai) and, only if the
        first is missing, ``config.json``. For an engine, files beside it come first, then the settings that the build
        copied to its manifest.

        Args:
            model: an ``.onnx`` file, an engine, or their folder.
            changes: more fields, which override those of the files.

        Raises:
            OptionError: a file is unreadable, or a value is out of range.
            ManifestError: the manifest of an engine is unreadable.
        """
        from trt_kvcache.engine.engine_folder import each_beside
        from trt_kvcache.engine.manifest import load_manifest, manifest_path
        from trt_kvcache.model_paths import engine_in, is_model

        path = engine_in(as_path(model, "model"))
        is_engine = not is_model(path) and manifest_path(path).is_file()
        sources = {manifest_path(path): dict(load_manifest(path).generation)} if is_engine else {}
        settings = dict(changes)
        for file, said in reversed((sources | each_beside(path)).items()):
            counts = {name: value for name, value in said.items() if name not in settings}
            try:
                cls(**counts)
            except OptionError as error:
                raise OptionError(f"{file}: {error}") from None
            settings |= counts
        return cls(**settings)

    def _check_together(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens is {self.min_new_tokens}, above max_new_tokens {self.max_new_tokens}; raise the latter"
            )
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = set(_as_sequence(getattr(self, name)))
            if forced and forced <= set(self.suppress_tokens):
                raise OptionError(f"{name} is {sorted(forced)}, which suppress_tokens forbids; change one of the two")
        for switch, names in idle_settings(vars(self)).items():
            settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            raise OptionError(f"{settings} has no effect without {switch}; set that too, or leave it out")
        if self.prompt_lookup_num_tokens and self.num_assistant_tokens:
            raise OptionError(
                f"prompt_lookup_num_tokens={self.prompt_lookup_num_tokens} and num_assistant_tokens="
                f"{self.num_assistant_tokens} are two ways to guess the same tokens; choose one"
            )
        if self.num_beams == 1:
            return
        off = _IDLE["do_sample=True"]
        drawn = [f"{name}={getattr(self, name)!r}" for name in off if getattr(self, name) != off[name]]
        together = {
            (" and ".join(drawn) or "do_sample=True") + ", which draws tokens": self.do_sample,
            "stop_strings": bool(self.stops),
            "prompt_lookup_num_tokens": self.prompt_lookup_num_tokens is not None,
            "num_assistant_tokens": bool(self.num_assistant_tokens),
            "grammar": self.grammar is not None,
            "top_logprobs": self.top_logprobs > 0,
        }
        for name, active in together.items():
            if active:
                raise OptionError(f"num_beams={self.num_beams} cannot be combined with {name}; drop one of them")


_IDLE: dict[str, dict[str, object]] = {
    "do_sample=True": {"temperature": 1.0, "top_k": GenerationConfig.top_k, "top_p": 1.0, "min_p": None},
    "output_logprobs=True": {"top_logprobs": 0},
    "num_beams above 1": {"length_penalty": 1.0, "early_stopping": False, "renormalize_logits": False},
}
"""For each condition: the settings that have an effect only under this condition, and their defaults."""


def idle_settings(values: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the settings without effect, by the setting that they need: ``{"do_sample=True": ["top_p"]}``."""
    active = {
        "do_sample=True": values.get("do_sample"),
        "output_logprobs=True": values.get("output_logprobs"),
        "num_beams above 1": values.get("num_beams", 1) != 1,
    }
    idle = {
        switch: [name for name, off in settings.items() if values.get(name, off) != off]
        for switch, settings in _IDLE.items()
        if not active[switch]
    }
    return {switch: names for switch, names in idle.items() if names}


def _several(values: Any) -> Collection[Any]:
    """Return a collection unchanged. Raise `ValueError` for a text, a mapping, a single value or an iterator."""
    wrong = isinstance(values, (str, bytes, Mapping)) or not getattr(values, "ndim", 1)
    return _only(values, isinstance(values, Collection) and not wrong)


def _only(value: _T, legal: object) -> _T:
    """Return `value` if `legal` is true; else raise `ValueError`, which the caller turns into a message."""
    if not legal:
        raise ValueError
    return value


def _id(value: Any) -> int:
    return int(_only(value, is_whole(value) and value >= 0))


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(map(_id, _several(values)))


def _id_or_ids(value: Any) -> int | tuple[int, ...] | None:
    return value if value is None else _id(value) if isinstance(value, Integral) else _ids(value)


def _run(tokens: Any) -> tuple[int, ...]:
    run = _ids(tokens)
    return _only(run, run)


def _texts(value: Any) -> str | tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return _only(value, value != "")
    return _only(tuple(_several(value)), all(isinstance(text, str) and text for text in value))


def _decay(value: Any) -> tuple[int, float] | None:
    if value is None:
        return None
    start, factor = _several(value)
    return _id(start), float(_only(factor, is_number(factor) and 0 < factor < math.inf))


def _biases(value: Any) -> dict[int | tuple[int, ...], float]:
    biases: dict[int | tuple[int, ...], float] = {}
    for key, bias in value.items() if isinstance(value, Mapping) else _several(None):
        run = _run(key) if isinstance(key, tuple) else _id(key)
        biases[run] = float(_only(bias, is_number(bias) and bias < math.inf))
    return biases


def _processors(value: Any) -> Any:
    return value if callable(value) else _only(tuple(_several(value)), all(map(callable, value)))


def _early(value: Any) -> Any:
    return _only(value, isinstance(value, bool) or (isinstance(value, str) and value == "never"))


def _grammar(value: Any) -> Any:
    return _only(value, value is None or callable(getattr(value, "start", None)))


_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "temperature": (lambda v: _only(v, v > 0), "above 0; for the most probable token do not sample"),
    "top_p": (lambda v: _only(v, 0 < v <= 1), "above 0 and at most 1"),
    "top_k": (lambda v: max(v, 0), ""),  # -1 is vLLM's value for all
    "repetition_penalty": (lambda v: _only(v, v > 0), "above 0; 1 means no penalty"),
    "early_stopping": (_early, 'True, False or "never"'),
    "eos_token_id": (_id_or_ids, "a token id, 0 or more, or several, or None"),
    "forced_bos_token_id": (lambda v: v if v is None else _id(v), "a token id, 0 or more, or None"),
    "forced_eos_token_id": (_id_or_ids, "a token id, 0 or more, or several, or None"),
    "suppress_tokens": (_ids, "token ids, 0 or more"),
    "begin_suppress_tokens": (_ids, "token ids, 0 or more"),
    "bad_words_ids": (lambda v: tuple(map(_run, _several(v))), "runs of token ids, such as [[5], [7, 8]]"),
    "exponential_decay_length_penalty": (_decay, "(new tokens before it starts, a factor above 0), or None"),
    "logits_processor": (_processors, "a function, or several"),
    "grammar": (_grammar, "a grammar that trt_kvcache.Grammars compiled, an object with start(), or None"),
    "stop_strings": (_texts, "texts of at least one character, or None"),
    "sequence_bias": (_biases, "{token: number, (token, token): number}, with -inf to forbid"),
}
"""For each setting: a function that converts the caller's value to a plain value, and which values are supported."""


def _as_sequence(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else value


_WITHOUT_EFFECT = {
    # Ids of other tokens, how transformers runs, and what it returns. These settings do not change which tokens are
    # chosen.
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config",
    "_commit_hash", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache",
    "low_memory", "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    "remove_invalid_values",
}  # fmt: skip

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # Ways of choosing tokens that are not supported, and the values that turn them off.
    "constraints": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "force_words_ids": (),
    "guidance_scale": (1.0,),
    "max_time": (),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "use_mtp": (False,),
    "watermarking_config": (),
}

_SAID = {"forced_decoder_ids", "max_length"}
"""Settings for which `read_config_file` has special messages."""


def read_config_file(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of transformers' ``generation_config.json``; `changes` replace those of the file.

    Warns of settings without effect. Raises `OptionError` if the file is unreadable, or asks for something unsupported.
    """
    content = {key: value for key, value in load_settings(path).items() if value is not None}
    known = {field.name for field in fields(GenerationConfig)} - _WITHOUT_EFFECT
    strange = content.keys() - known - _WITHOUT_EFFECT - _UNSUPPORTED.keys() - _SAID
    if len(strange) > 1 and strange == content.keys():
        raise OptionError(
            f"{path} has none of the settings of a generation_config.json, but {', '.join(sorted(strange)[:4])}; give "
            "a generation_config.json"
        )
    for key in sorted(content.keys() - known - _WITHOUT_EFFECT):
        value = content[key]
        said = f"{path}: {key}={shown(value)} is not supported"
        if key in _UNSUPPORTED:
            if (tuple(value) if isinstance(value, list) else value) not in _UNSUPPORTED[key]:
                raise OptionError(f"{said}; remove it from the file, or do without it")
        elif key == "forced_decoder_ids":
            raise OptionError(f"{said}; give these tokens as the prompt, and remove it from the file")
        elif key != "max_length":
            _warn(path, f"{key} is not a setting of transformers' GenerationConfig; ignored")
        elif "max_new_tokens" not in changes:
            _warn(path, f"max_length={value} is ignored, because it counts the prompt, too; use max_new_tokens")
    settings = {key: content[key] for key in known & content.keys()}
    if "sequence_bias" in settings:
        settings["sequence_bias"] = _sequence_bias(path, settings["sequence_bias"])
    settings.update(changes)
    # Models come with such files (a temperature without do_sample); transformers ignores the setting with a warning,
    # too.
    for switch, names in idle_settings(settings).items():
        for name in [name for name in names if name not in changes]:
            _warn(path, f"{name}={shown(settings.pop(name))} has no effect without {switch}; ignored")
    return settings


def _sequence_bias(path: Path, value: Any) -> dict[tuple[int, ...], float]:
    try:
        if not isinstance(value, list):
            raise TypeError
        return {tuple(int(token) for token in tokens): float(bias) for tokens, bias in value}
    except (TypeError, ValueError):
        raise OptionError(f"{path}: sequence_bias is {shown(value)}; supported: [[[token, ...], bias], ...]") from None


def _warn(path: Path, message: str) -> None:
    warnings.warn(f"{path}: {message}", UserWarning, stacklevel=2)
