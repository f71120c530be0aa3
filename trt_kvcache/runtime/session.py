"""A decode session: a model that is ready to run, its caches, and the sequences in them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from trt_kvcache.arguments import as_list, as_options, as_path, as_switch, as_whole, shown
from trt_kvcache.errors import OptionError, PromptError
from trt_kvcache.importer.cache_plan import CachePlan, PlanOptions
from trt_kvcache.lora import LoraFolder
from trt_kvcache.model_paths import engine_in, is_model, runnable_named
from trt_kvcache.page import Html, tag
from trt_kvcache.runtime.adapters import Adapters, adapter_folders, for_adapters
from trt_kvcache.runtime.cache import KVCache
from trt_kvcache.runtime.cache_rows import CacheRows
from trt_kvcache.runtime.continuation import Continuation
from trt_kvcache.runtime.draft import DraftModel, open_draft
from trt_kvcache.runtime.embeddings import EmbeddingsSource, embedded_input, find_embeddings, open_embeddings
from trt_kvcache.runtime.encoders.encoder import Encoder, open_encoder
from trt_kvcache.runtime.encoders.source_reader import Source
from trt_kvcache.runtime.events import TokenEvent
from trt_kvcache.runtime.generation.beam import beam_events
from trt_kvcache.runtime.generation.generation_config import GenerationConfig
from trt_kvcache.runtime.generation.settings import Settings, changed
from trt_kvcache.runtime.guard import Guard
from trt_kvcache.runtime.loop import DecodeLoop
from trt_kvcache.runtime.open import (
    CpuOptions,
    GpuOptions,
    RunnerOptions,
    Schedule,
    Unread,
    default_config,
    default_sampling,
    open_runner,
    open_tokenizer,
)
from trt_kvcache.runtime.requests import (
    ConstantsAll,
    ConstantValues,
    EmbedsAll,
    Generation,
    PositionsAll,
    Prompt,
    PromptReader,
    ReadPrompt,
    check_config,
    is_one,
)
from trt_kvcache.runtime.runner import Runner
from trt_kvcache.runtime.streams import Streams, in_a_thread

_GREEDY = GenerationConfig()


class DecodeSession:
    """A model that is ready to generate. Use it in a ``with`` block, or close it.

        with DecodeSession.open("my-export/") as session:
            print(session.generate("Hello", max_new_tokens=64).text)
            for event in session.stream([[1, 2, 3]], max_new_tokens=64):
                print(event.token)

    Any thread may call any method: one lock serializes the steps, and the sequences of all threads share the steps. A
    forked process cannot use the session. A sequence that fails or ends does not disturb other sequences.

    Args:
        runner: executes the steps; the session closes it.
        tokenizer: turns text into tokens and back, see `trt_kvcache.runtime.text.tokenizer`.
        embeddings: turns token ids into embeddings, for a model that takes embeddings; see `open`.
        encoder: function that opens the model's encoder; called at the first use, with the session's lock.
        config: the default for generations without a config.
        schedule: how sequences share the batch rows of the caches.
        adapters: folders of LoRA adapters, by name; see `open`.
        draft: the draft model, which guesses tokens; the session closes it.
        sampling: see the attribute `sampling`.

    Attributes:
        cache: the caches; its methods change them.
        adapters: the loaded adapters (LoRA); they can be loaded and unloaded at any time.
        config: default config: greedy decoding that ends at the model's own end tokens. A `GenerationConfig` without
            ``eos_token_id`` takes the one of this config; ``eos_token_id=()`` means no end token.
        sampling: sampling settings that the model's ``generation_config.json`` recommends, such as ``{"temperature":
            0.6, "top_p": 0.95}``; servers use them.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any = None,
        embeddings: EmbeddingsSource = None,
        encoder: Callable[[Guard], Encoder] | None = None,
        config: GenerationConfig = _GREEDY,
        *,
        schedule: Schedule | None = None,
        adapters: Mapping[str, str | os.PathLike[str] | LoraFolder] | None = None,
        draft: DraftModel | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        if not hasattr(runner, "plan"):
            raise OptionError(f"runner is {shown(runner)}; open models and engines with DecodeSession.open")
        why = "there is no tokenizer"
        if isinstance(tokenizer, Unread):
            why, tokenizer = tokenizer.why, None
        able = any(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode"))
        if isinstance(tokenizer, (str, bytes)) or (tokenizer is not None and not able):
            raise OptionError(
                f"tokenizer is {shown(tokenizer)}; give an object with the methods encode and decode, or the path "
                "of a tokenizer.json to DecodeSession.open"
            )
        schedule = as_options(Schedule() if schedule is None else schedule, Schedule, "schedule")
        schedule.check(runner.max_batch)
        if draft is not None:
            draft.check(runner)
        self._guard = Guard()
        self._draft = draft
        self._runner = runner
        self._tokenizer = tokenizer
        self.config, self.sampling = config, dict(sampling or {})
        self.adapters = Adapters(runner.plan, self._guard)
        for name, folder in (adapters or {}).items():
            self.adapters.load(name, folder)
        self._rows = CacheRows(runner, max_sequences=schedule.max_sequences, prefix_cache=schedule.prefix_cache)
        self.cache = KVCache(runner, self._rows, self._guard, self.adapters)
        opened = open_embeddings(embeddings, runner.plan, runner.vocab)
        self._reader = PromptReader(runner, self._rows, opened, tokenizer, why)
        self._loop = DecodeLoop(runner, self._rows, opened, draft, schedule.prefill_budget, self._guard.pause)
        self._streams = Streams(self._guard, self._rows, self._loop, self.adapters)
        self._beam_events = partial(beam_events, self._rows, self._loop, self._guard, self.adapters, self._streams)
        self._open_encoder = encoder
        self._encoder: Encoder | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        capacity: int | None = None,
        max_batch: int | None = None,
        max_chunk: int | None = None,
        tokenizer: str | os.PathLike[str] | Any = None,
        embeddings: EmbeddingsSource = None,
        encoder: str | os.PathLike[str] | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        draft: str | os.PathLike[str] | None = None,
        check: Literal["first", "always", "off"] = "first",
        plan_options: PlanOptions | None = None,
        schedule: Schedule | None = None,
        cpu: CpuOptions | None = None,
        gpu: GpuOptions | None = None,
    ) -> DecodeSession:
        """Open an engine or a model, with the tokenizer, end tokens, embeddings and encoder in its folder.

        Args:
            path: an engine that ``trt-kvcache build`` wrote, or its folder; or an ``.onnx`` file or its folder, which
                run on the CPU.
            device: ``"cpu"``, ``"cuda"``, or ``"auto"``: engines run on the GPU, models on the CPU.
            capacity: tokens per sequence, for a model whose caches grow or have a symbolic length.
            max_batch: batch rows of each cache, and most sequences in a step; None: as many as the engine was built
                for, or as fit into memory.
            max_chunk: most tokens of one sequence per step; None: the number in the engine, or 512 for a model.
            tokenizer: path of a ``tokenizer.json``, or an object that encodes and decodes. None: the file beside
                `path`, if there is one; False: token ids only.
            embeddings: for a model that takes embeddings: an ``.onnx`` model, which runs on the CPU; or a table ``[V,
                H]`` of any float type, scaled as the decoder takes it, as an array, ``.npy`` or ``.safetensors``
                (``FILE:NAME`` names a tensor). None: the exporter's model beside `path`.
            encoder: the encoder of an encoder-decoder, for `encode`: an engine; or an ``.onnx`` file or its folder,
                which run on the CPU. None: the encoder engine that was built with the decoder's engine; without one,
                the exporter's model beside `path`.
            adapters: folders of adapters (LoRA) that peft wrote, by name; `GenerationConfig.adapter` takes these names.
                An engine takes adapters that fit the rank and the targets that it was built for. A model is planned for
                these adapters, unless `plan_options` has a ``lora_rank``.
            draft: a smaller model or engine with the same vocabulary. It guesses tokens, and the model checks several
                guesses in one step; the generated tokens do not change. See `GenerationConfig.num_assistant_tokens`.
            check: when to compare an engine with its proof. The proof is a decode of the rewritten model in float32,
                recorded at the build. ``"first"``: once for each GPU, driver and TensorRT version; this takes some
                seconds and writes a ``.passed_check`` file beside the engine (or into its kernel cache). ``"always"``:
                each time; engines without a proof are refused. ``"off"``: never. Models on the CPU need no proof.
            plan_options: how a model is planned; engines were planned when they were built.
            schedule: how sequences share steps and batch rows: offloading, prefix cache, and the prefill budget.
            cpu: how ONNX Runtime runs a model.
            gpu: how TensorRT runs an engine.

        Raises:
            OptionError: the file cannot run on that device, an option is not for that device, or a file beside it
                cannot be used.
            ModelError, ManifestError, BackendError, SessionError: the model or engine cannot be used here.
            VerificationError: the engine's results on this GPU differ from those in its proof.
        """
        model = engine_in(runnable_named(as_path(path, "path")))
        encoder_path = None if encoder is None else as_path(encoder, "encoder")
        folders = adapter_folders(adapters)
        if is_model(model) and folders:
            plan_options = for_adapters(plan_options, folders)
        options = RunnerOptions(device, check, max_batch, max_chunk, capacity, plan_options, cpu, gpu)
        reader = open_tokenizer(tokenizer, model)
        guesser: DraftModel | None = None
        runner = open_runner(model, options)
        try:
            if embeddings is None and embedded_input(runner.plan) is not None:
                embeddings = find_embeddings(model)
            config = default_config(model, reader)
            encode = partial(open_encoder, encoder_path, model, runner)
            if draft is not None:
                guesser = open_draft(as_path(draft, "draft"), runner, options)
            return cls(
                runner, reader, embeddings, encode, config,
                schedule=schedule, adapters=folders, draft=guesser, sampling=default_sampling(model),
            )  # fmt: skip
        except BaseException:
            runner.close()
            if guesser is not None:
                guesser.close()
            raise

    def __repr__(self) -> str:
        if self._guard.open.closed:
            return "<DecodeSession: closed>"
        running = f"{len(self._loop.slots)} running" if self._loop.slots else "idle"
        return f"<DecodeSession: {self.name}; {self.plan.in_place_text}, {running}; cache {self.cache!r}>"

    def _repr_html_(self) -> Html:
        said = tag("p", repr(self)[1:-1])
        return said if self._guard.open.closed else tag("div", said, self.plan._repr_html_(), self.cache._repr_html_())

    @property
    def name(self) -> str:
        """Runtime and device of the decoder, and of the encoder and the draft model if there are any, as one text."""
        draft = "" if self._draft is None else f"draft on {self._draft.name}"
        encoder = "" if self._encoder is None else self._encoder.where
        return ", ".join(part for part in (self._runner.name, encoder, draft) if part)

    @property
    def plan(self) -> CachePlan:
        """The plan of the model."""
        return self._runner.plan

    @property
    def vocab(self) -> int:
        """Size of the vocabulary: token ids are 0 to ``vocab - 1``."""
        return self._reader.vocab

    def identity(self) -> str:
        """Return a digest of the model's content, equal for a model and its engines. This may read whole files.

        Raises `SessionError` if the files changed after the session was opened, or the session is closed.
        """
        with self._guard.lock, self._guard.open:
            return self._runner.identity()

    def takes(self, token: int) -> bool:
        """Return True if prompts may have this token id: it is in range, with an embedding if the model needs one."""
        with self._guard.lock, self._guard.open:
            return self._reader.takes(token)

    @property
    def max_batch(self) -> int:
        """Most sequences in a step."""
        return self._runner.max_batch

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in one step. Longer prompts take several steps."""
        return self._runner.max_chunk

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that turns text into tokens and back, or None."""
        return self._tokenizer

    def encode(self, source: Source) -> dict[str, Any]:
        """Run the encoder of an encoder-decoder model for one sequence, and return its results for the decoder.

        The encoder runs on the decoder's device, or on the CPU if it has no engine; the session's `name` tells which.

        Args:
            source: one sequence without padding: text or token ids; or arrays by names of the encoder's inputs, such as
                ``{"input_features": [1, 80, 3000]}``.

        Returns:
            Constants of one sequence, for `generate`, `stream` and `add`. An encoder on the GPU leaves them in GPU
            memory, which is freed with the last reference; ``numpy.asarray`` copies them.

        Raises:
            OptionError: the model takes no inputs from an encoder, or there is no encoder in the model's folder.
            ModelError, ManifestError: the encoder cannot be used.
            PromptError: the source does not fit the encoder.
            SessionError: the encoder failed, or the session is closed.
        """
        with self._guard.lock, self._guard.idle:
            if self._encoder is None:
                if self._open_encoder is None:
                    raise OptionError("the session has no encoder; open the model with DecodeSession.open")
                self._encoder = self._open_encoder(self._guard)
            read = self._reader.text_tokenizer("a source").encode(source) if isinstance(source, str) else source
            encoder = self._encoder
        return encoder.encode(read)  # without the lock: the CPU encoder runs beside the steps of other threads

    # --- whole generations

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        config: GenerationConfig | None = None,
        constants: ConstantValues | None = None,
        *,
        inputs_embeds: npt.NDArray[Any] | None = None,
        positions: npt.ArrayLike | None = None,
        **settings: Unpack[Settings],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | None = None,
        constants: ConstantsAll = None,
        *,
        inputs_embeds: EmbedsAll = None,
        positions: PositionsAll = None,
        **settings: Unpack[Settings],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerationConfig | None = None,
        constants: ConstantsAll | ConstantValues = None,
        *,
        inputs_embeds: EmbedsAll | npt.NDArray[Any] = None,
        positions: PositionsAll | npt.ArrayLike = None,
        **settings: Unpack[Settings],
    ) -> Generation | list[Generation]:
        """Continue every prompt to its end.

        Args:
            prompts: one prompt or a list of prompts: texts or lists of token ids. If there are more prompts than free
                batch rows, the remaining prompts wait.
            config: settings for all prompts; None: `config` of the session.
            constants: other inputs of each prompt, see `ConstantValues`; for one prompt, without a list.
            inputs_embeds: embeddings of each prompt, see `add`.
            positions: positions of each prompt, see `add`.
            settings: fields of `GenerationConfig`, such as ``max_new_tokens=20``; they override the config. Settings of
                sampling turn ``do_sample`` on.

        Returns:
            One result per prompt, in order; for one prompt that is not in a list, the result itself.

        Raises:
            PromptError: a prompt is empty, or has token ids that the model does not know; or constants, embeddings or
                positions do not fit the prompt or the model.
            CapacityError: a prompt is longer than the cache, or has positions that the model does not have.
            OptionError: the config does not fit the model.
            SlotError: no batch row is free, and no running sequence will free one.
            SessionError: the session is closed, or a step failed.
        """
        config = self._configured(config, settings)
        checked, one = self._read(prompts, constants, inputs_embeds, positions)
        results = [Generation(prompt.tokens) for prompt in checked]
        if config.num_beams > 1:
            for event in self._beam_events(checked, config, self._tokenizer):
                results[event.sequence].take(event)
            return results[0] if one else results
        continuations = self._continuations(checked, config)
        for event in self._streams.stream(continuations, checked):
            results[event.sequence].take(event)
        for result, continuation in zip(results, continuations, strict=True):
            result.speculation = continuation.speculation
        return results[0] if one else results

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        config: GenerationConfig | None = None,
        **settings: Unpack[Settings],
    ) -> Generation:
        """Answer the last message of a conversation.

        Each call computes the whole conversation. To keep the conversation in the cache between calls, use `add` with
        `slot` and `keep`.

        Args:
            messages: ``{"role": "user", "content": "..."}`` and so on, as the tokenizer's chat template takes them.
            config: settings of the answer; None: `config` of the session.
            settings: fields of `GenerationConfig`, which override the config; see `generate`.

        Raises:
            PromptError: there is no tokenizer.
            OptionError: there is no chat template, or it fails on the messages; see also `generate`.
        """
        return self.generate(self.render_chat(messages), config, **settings)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        config: GenerationConfig | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[TokenEvent]:
        """Answer the last message of a conversation; yield an event per token. `chat` explains arguments and errors."""
        return self.stream(self.render_chat(messages), config, **settings)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **how: Any
    ) -> list[int]:
        """Write a conversation with the chat template. Return its token ids, up to the start of the model's answer.

        Args:
            messages: the conversation, see `chat`.
            tools: functions that the model may call, if the template supports tools: ``{"type": "function", "function":
                {"name": "f", "parameters": {...}}}``.
            how: fields of `trt_kvcache.runtime.text.chat_template.Chat`, such as ``values={"enable_thinking": False}``.

        Raises:
            PromptError: there is no tokenizer.
            OptionError: there is no chat template, or it fails on the messages.
        """
        entries = "messages, such as {'role': 'user', 'content': 'Hello'}"
        several = as_list(messages, "messages", entries, PromptError)
        if not several or not all(isinstance(message, Mapping) for message in several):
            raise PromptError(f"messages is {shown(messages)}; give a list of {entries}")
        tokenizer = self._reader.text_tokenizer("a chat")
        if not hasattr(tokenizer, "render_chat"):
            raise PromptError(
                f"a chat needs a tokenizer with a chat template, but {shown(tokenizer)} has no method render_chat"
            )
        ids: list[int]
        if hasattr(tokenizer, "chat_tokens"):
            ids = tokenizer.chat_tokens(several, tools, **how)
        else:  # the template writes the special tokens itself
            text = tokenizer.render_chat(several, tools, **how) if tools else tokenizer.render_chat(several, **how)
            ids = tokenizer.encode(text, special_tokens=False)
        return ids

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerationConfig | None = None,
        constants: ConstantsAll | ConstantValues = None,
        *,
        inputs_embeds: EmbedsAll | npt.NDArray[Any] = None,
        positions: PositionsAll | npt.ArrayLike = None,
        **settings: Unpack[Settings],
    ) -> Generator[TokenEvent]:
        """Continue every prompt; yield an event per token. `TokenEvent.sequence` is the index of the prompt.

        Arguments and errors are those of `generate`. Prompts are checked at the call; the first step runs when the
        first event is asked for. Closing the iterator ends its sequences and frees their slots.
        """
        config = self._configured(config, settings)
        checked, _ = self._read(prompts, constants, inputs_embeds, positions)
        if config.num_beams > 1:  # a beam search knows its tokens only at the end
            return self._beam_events(checked, config, self._tokenizer)
        return self._streams.stream(self._continuations(checked, config), checked)

    async def astream(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerationConfig | None = None,
        constants: ConstantsAll | ConstantValues = None,
        *,
        inputs_embeds: EmbedsAll | npt.NDArray[Any] = None,
        positions: PositionsAll | npt.ArrayLike = None,
        **settings: Unpack[Settings],
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio: steps run in a thread. If the task is cancelled, its sequences end after the step."""
        events = self.stream(prompts, config, constants, inputs_embeds=inputs_embeds, positions=positions, **settings)
        async with aclosing(in_a_thread(events)) as steps:
            async for event in steps:
                yield event

    # --- continuous batching

    def add(
        self,
        prompt: Prompt = (),
        config: GenerationConfig | None = None,
        *,
        slot: int | None = None,
        keep: bool = False,
        index: int = 0,
        client: Hashable = None,
        constants: ConstantValues | None = None,
        inputs_embeds: npt.NDArray[Any] | None = None,
        positions: npt.ArrayLike | None = None,
        **settings: Unpack[Settings],
    ) -> int:
        """Add a sequence: each `step` advances it, and its slot is freed when it ends.

        If other sequences run in all batch rows, the new sequence waits until one of them ends. A session opened with
        `max_sequences` refuses more sequences than this.

        Args:
            prompt: text or token ids; may be empty if `slot` holds tokens that are not in its cache yet.
            config: settings of the generation; None: `config` of the session.
            slot: an existing slot that is not generating; the prompt is appended to its tokens. None: a new slot.
            keep: keep the slot, with its tokens and caches, when the sequence ends.
            index: number of the sequence's stream of random numbers. Sequences with the same seed and the same index
                draw the same numbers.
            client: the owner of the sequence. A free batch row goes to the client that got its last row the longest
                time ago; the sequences of one client start in the order in which they were added. None: a new client.
            constants: other inputs of a new slot (`ConstantValues`); an existing slot keeps the constants that it has.
            inputs_embeds: float ``[S, H]``, for a model that takes embeddings: replaces the embeddings of the prompt's
                tokens, images and sound included. The prompt still needs an id for each embedding, because penalties,
                n-grams and prompt lookup read the ids. At the places of an image the ids are the model's placeholders.
            positions: ints ``[S]``, or ``[planes, S]`` for a model with several positions per token (M-RoPE: time,
                height, width): the positions of the prompt's tokens. Later tokens get the next positions after the
                largest of these, the same in all planes. None: the prompt follows the tokens of the slot.
            settings: see `generate`.

        Returns:
            The slot; its events have it as `TokenEvent.sequence`.

        Raises:
            PromptError, CapacityError, OptionError, SlotError, SessionError: see `generate`; then nothing has changed.
        """
        config = self._configured(config, settings)
        index, keep = as_whole(index, "index"), as_switch(keep, "keep")
        if index < 0:
            raise OptionError(f"index is {index}; it must be 0 or more")
        if config.num_beams > 1:
            raise OptionError("sequences that are added run step by step; for beam search use generate")
        if slot is not None and constants is not None:
            raise OptionError(f"slot {slot} got its constants when its sequence began; leave the constants out")
        with self._guard.lock, self._guard.idle:
            new, after = self._reader.read_added(slot, prompt, constants, inputs_embeds, positions)
            continuation = Continuation(-1, after.tokens, config, self._tokenizer, index=index)
            if slot is None:
                adapter = self.adapters.find(config.adapter)
                name = self._rows.take(constants=new.constants, adapter=adapter, queue=True)
            else:
                name, own = int(slot), self._rows.slot(slot).adapter
                if config.adapter is not None and own is not self.adapters.find(config.adapter):
                    raise OptionError(
                        f"adapter is {shown(config.adapter)}, but slot {slot} was computed with "
                        f"{'no adapter' if own is None else shown(own.name)}; leave it out, or begin a new sequence"
                    )
                self._rows.give_row(name)
            continuation.sequence = name
            entry = new.after(self._rows.slot(name))
            self._loop.add(name, entry, continuation, self._streams.unclaimed, keep_slot=keep, client=client)
            return name

    def step(self) -> list[TokenEvent]:
        """Compute the next tokens of all sequences; return the events of sequences that were added with `add`.

        Ctrl-C waits for the end of a step. The next call returns the events that the interrupted call did not return.

        Raises:
            SessionError: the session is closed, or the step of a sequence failed; the error's `sequence` names it. This
                sequence has ended, and the next call returns the events of the other sequences.
        """
        return self._streams.step()

    @property
    def running(self) -> tuple[int, ...]:
        """Slots that `step` will advance, and ended slots whose events `step` still has to return."""
        with self._guard.lock, self._guard.open:
            return tuple(dict.fromkeys((*self._loop.slots, *self._streams.untold)))

    def remove(self, slot: int) -> None:
        """End a sequence, whether it runs or not, and free its slot. A stream of this sequence reports it as cancelled.

        Raises `SlotError` if the slot is not in use.
        """
        with self._guard.lock, self._guard.idle:
            if slot not in self._rows and slot in self._streams.untold:
                self._streams.forget(slot)
                return
            if self._rows.slot(slot).running:
                self._streams.cancel(slot)
            self._streams.forget(slot)
            self._rows.drop(slot)

    def stop(self, slot: int) -> None:
        """End a running sequence; its slot stays, with its tokens and caches, as after `add` with `keep`.

        Nothing happens if the sequence has already ended. A stream of this sequence reports it as cancelled. Raises
        `SlotError` if the slot is not in use.
        """
        with self._guard.lock, self._guard.idle:
            if self._rows.slot(slot).running:
                self._streams.cancel(slot)

    def update(
        self,
        tokens: Mapping[int, Sequence[int]],
        keep: int = 1,
        *,
        inputs_embeds: Mapping[int, npt.NDArray[Any]] | None = None,
        positions: Mapping[int, npt.ArrayLike] | None = None,
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Write tokens to slots and return the model's scores: for callers that choose tokens themselves.

        Slots come from ``session.cache.acquire()`` or ``fork``. Long updates take several steps.

        Args:
            tokens: token ids by slot: at least one for each slot, or none if the slot has tokens that are not in the
                cache yet.
            keep: number of last positions whose logits are returned.
            inputs_embeds: embeddings by slot, see `add`.
            positions: positions by slot, see `add`.

        Returns:
            float32 ``[min(keep, positions written), V]`` by slot.

        Raises:
            PromptError, CapacityError, SlotError, SessionError: see `generate`; a refused update writes nothing.
        """
        if as_whole(keep, "keep") < 0:
            raise OptionError(f"keep is {keep}; it must be 0 or more")
        inputs = [{} if value is None else value for value in (inputs_embeds, positions)]
        with self._guard.lock, self._guard.idle:
            return self._loop.update(self._reader.read_updates(tokens, *inputs), keep)

    # --- the end

    def close(self) -> None:
        """Free all memory; every later call is refused. A second call, or a call in a forked process, does nothing.

        Raises `SessionError` if a running step called this; nothing has changed then.
        """
        if self._guard.elsewhere:
            return
        with self._guard.lock:
            self._guard.close()
            self._runner.close()
            if self._draft is not None:
                self._draft.close()

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _configured(self, config: GenerationConfig | None, settings: Mapping[str, Any]) -> GenerationConfig:
        """Return the checked config of a generation: `config` or the session's own, with `settings` applied."""
        with self._guard.lock, self._guard.open:  # a closed session is refused at the call
            result = self.config if config is None else config
            check_config(result, self.plan, draft=self._draft is not None)
            result = changed(result, settings) if settings else result
            if result.eos_token_id is None and self.config.eos_token_ids:
                result = replace(result, eos_token_id=self.config.eos_token_id)
            check_config(result, self.plan, draft=self._draft is not None)
            self.adapters.find(result.adapter)
            return result

    def _read(self, prompts: Prompt | Sequence[Prompt], *inputs: Any) -> tuple[list[ReadPrompt], bool]:
        """Check all prompts and their inputs. Return the prompts, and True if `prompts` is one prompt, not a list."""
        one = is_one(prompts)
        several = [prompts] if one else prompts
        each = [[value] if one and value is not None else value for value in inputs]
        with self._guard.lock, self._guard.open:
            return self._reader.read_all(cast("Sequence[Prompt]", several), *each), one

    def _continuations(self, prompts: Sequence[ReadPrompt], config: GenerationConfig) -> list[Continuation]:
        return [Continuation(i, prompt.tokens, config, self._tokenizer) for i, prompt in enumerate(prompts)]
