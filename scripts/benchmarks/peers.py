"""Exporters and decode loops of other projects with the same weights, for the benchmark of decoding.

Everything starts from one decoder of scripts/decoders.py, which is Llama's architecture. The packages are the extra
`bench`, CTranslate2 and openvino-genai the extra `bench-more`. Each function raises ImportError if a package that it
needs is not installed.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
from decoders import DecoderConfig
from onnx import numpy_helper

_PARTS = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The names that transformers gives the weights of a layer."""


def save_llama(path: Path, config: DecoderConfig, folder: Path) -> Path:
    """Save a decoder's weights as a `LlamaForCausalLM`, with the tokenizer that onnxruntime-genai's builder asks for.

    `path` is a float32 decoder in the mobius form. onnxruntime-genai needs an end of sequence among the tokens: 0,
    which a random decoder of a large vocabulary hardly ever chooses. If it does, that peer's tokens differ and the
    benchmark stops.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = LlamaConfig(
        vocab_size=config.vocab, hidden_size=config.hidden, intermediate_size=2 * config.hidden,
        num_hidden_layers=config.layers, num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads, head_dim=config.head_size, rms_norm_eps=1e-6,
        max_position_embeddings=config.positions, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    state = {}
    for tensor in onnx.load(path).graph.initializer:
        name = _name(tensor.name)
        if name is not None:
            values = torch.from_numpy(numpy_helper.to_array(tensor).copy())
            state[name] = values if values.dim() == 1 or "embed" in name else values.T.contiguous()
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    model.load_state_dict(state, assign=True)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    return folder


def _name(weight: str) -> str | None:
    if weight.startswith(("rotary.", "const.")):
        return None
    if weight.startswith("layers."):
        _, layer, part, _ = weight.split(".")
        return f"model.layers.{layer}.{_PARTS[part]}.weight"
    return {
        "embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }[weight]  # fmt: skip


def export_mobius(llama: Path, capacity: int, output: Path) -> Path:
    """Export a folder of transformers with static caches of `capacity` rows to `output`, by mobius-onnx."""
    import mobius
    import onnx_ir
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = mobius.ArchitectureConfig.from_transformers(AutoConfig.from_pretrained(llama))
    config.dtype = onnx_ir.DataType.FLOAT
    module = mobius.models.CausalLMModel(config)
    task = mobius.CausalLMTask(static_cache=True, max_seq_len=capacity)
    model = mobius.build_from_module(module, config, task)["model"]
    mobius.apply_weights(model, module.preprocess_weights(load_file(llama / "model.safetensors")))
    onnx_ir.save(model, output, external_data=f"{output.name}.data")
    return output


class TransformersPeer:
    """`generate` of transformers, greedy, with a static cache of `capacity` rows, or one that grows (None)."""

    def __init__(self, llama: Path, threads: int | None, capacity: int | None = None) -> None:
        import torch
        from transformers import LlamaForCausalLM, StaticCache

        if threads:
            torch.set_num_threads(threads)
        self._torch = torch
        self._model = LlamaForCausalLM.from_pretrained(llama).eval()
        self._model.generation_config.eos_token_id = None
        self._options: dict[str, Any] = {}
        if capacity is not None:
            self._options["past_key_values"] = StaticCache(config=self._model.config, max_cache_len=capacity)

    def steps(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield the tokens after a prompt, one per step."""
        inputs = self._torch.tensor([prompt])

        def generate(put: Callable[[int], None]) -> None:
            class Streamer:
                prompt_seen = False

                def put(self, value: object) -> None:
                    if self.prompt_seen:
                        put(int(value))  # type: ignore[call-overload]
                    self.prompt_seen = True

                def end(self) -> None: ...

            with self._torch.inference_mode():
                self._model.generate(
                    inputs, attention_mask=self._torch.ones_like(inputs), do_sample=False, max_new_tokens=count,
                    streamer=Streamer(), **self._options,
                )  # fmt: skip

        return paced(generate, count)


def paced(generate: Callable[[Callable[[int], None]], object], count: int) -> Iterator[int]:
    """Yield the tokens of another project's loop, one per step.

    `generate` runs in a thread, and calls its argument with every token. There it waits until the next step.
    """
    asked, given = threading.Semaphore(0), queue.SimpleQueue[int | BaseException]()

    def put(token: int) -> None:
        given.put(token)
        asked.acquire()

    def work() -> None:
        asked.acquire()
        try:
            generate(put)
        except BaseException as error:  # noqa: BLE001 - it is raised where the token is missed
            given.put(error)

    threading.Thread(target=work, daemon=True).start()
    for _ in range(count):
        asked.release()
        token = given.get()
        if isinstance(token, BaseException):
            raise token
        yield token


def export_genai(llama: Path, folder: Path) -> Path:
    """Export a folder of transformers by onnxruntime-genai's model builder; raise `RuntimeError` if that refuses it."""
    import onnx_ir  # noqa: F401 - the builder is another process: its lack would show there
    import onnxruntime_genai  # noqa: F401 - likewise

    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    builder += ["-i", str(llama), "-o", str(folder), "-c", str(folder)]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(builder, capture_output=True, text=True, env=offline, check=False)
    if done.returncode:
        raise RuntimeError(f"onnxruntime-genai's model builder: {done.stderr.strip().splitlines()[-1]}")
    return folder


class GenaiPeer:
    """onnxruntime-genai over the export of `export_genai`, greedy, its caches of `capacity` rows in place."""

    def __init__(self, folder: Path, capacity: int, threads: int | None) -> None:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(folder))
        if threads:
            options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
            config.overlay(json.dumps(options))
        self._genai = onnxruntime_genai
        self._model = onnxruntime_genai.Model(config)
        self._capacity = capacity

    def steps(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield the tokens after a prompt, one per step."""
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(
            max_length=self._capacity, do_sample=False, past_present_share_buffer=True, batch_size=1
        )
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens([prompt])
        for _ in range(count):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])


def export_ctranslate(llama: Path, folder: Path) -> Path:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(llama)).convert(str(folder))
    path = folder / "config.json"  # the tokenizer names no tokens of its own, and CTranslate2 reads no null
    named = {name: "<pad>" if value is None else value for name, value in json.loads(path.read_text()).items()}
    path.write_text(json.dumps(named))
    return folder


class CTranslatePeer:
    """CTranslate2 in float32 over a folder of `export_ctranslate`, greedy; its caches grow."""

    def __init__(self, folder: Path, threads: int) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
        )
        self._words: list[str] = json.loads((folder / "vocabulary.json").read_text())

    def steps(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield the tokens after a prompt, one per step."""

        def generate(put: Callable[[int], None]) -> None:
            self._generator.generate_batch(
                [[self._words[token] for token in prompt]], max_length=count, sampling_topk=1, end_token=[],
                include_prompt_in_result=False, callback=lambda result: put(result.token_id),
            )  # fmt: skip

        return paced(generate, count)


class OpenVinoPeer:
    """openvino-genai in float32 over a folder of `export_openvino`, greedy; its caches grow."""

    def __init__(self, folder: Path, threads: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        # Its other loop, over pages of a cache, takes no model of this form.
        self._pipeline = openvino_genai.LLMPipeline(
            str(folder), "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32",
            INFERENCE_NUM_THREADS=threads,
        )  # fmt: skip

    def steps(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield the tokens after a prompt, one per step."""
        import numpy as np
        from openvino import Tensor

        genai, pipeline = self._genai, self._pipeline

        def generate(put: Callable[[int], None]) -> None:
            class Streamer(genai.StreamerBase):  # type: ignore[misc]
                def write(self, tokens: int | list[int]) -> Any:
                    for token in [tokens] if isinstance(tokens, int) else tokens:
                        put(token)
                    return genai.StreamingStatus.RUNNING

                def end(self) -> None: ...

            config = genai.GenerationConfig(
                max_new_tokens=count, ignore_eos=True, do_sample=False, eos_token_id=0, stop_token_ids={0}
            )
            pipeline.generate(Tensor(np.array([prompt], np.int64)), config, Streamer())

        return paced(generate, count)
