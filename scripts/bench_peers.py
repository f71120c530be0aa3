"""Other people's decode loops over the same weights, for scripts/bench_decode.py."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

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
"""What transformers calls the weights of a layer; our decoders are Llama's architecture."""


class TransformersPeer:
    """``LlamaForCausalLM.generate`` of transformers, greedy, with its default cache.

    Args:
        path: a float32 decoder in the mobius form that scripts/decoders.py wrote.
        config: what it was made from.
        threads: of torch; None: its default.

    Raises:
        ImportError: transformers or torch is not installed.
    """

    def __init__(self, path: Path, config: DecoderConfig, threads: int | None) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        if threads:
            torch.set_num_threads(threads)
        assert isinstance(config.capacity, int)
        shape = LlamaConfig(
            vocab_size=config.vocab, hidden_size=config.hidden, intermediate_size=2 * config.hidden,
            num_hidden_layers=config.layers, num_attention_heads=config.query_heads,
            num_key_value_heads=config.kv_heads, head_dim=config.head_size, rms_norm_eps=1e-6,
            max_position_embeddings=config.capacity, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        state = {}
        for tensor in onnx.load(path).graph.initializer:
            if tensor.name.startswith("const."):
                continue
            values = torch.from_numpy(numpy_helper.to_array(tensor).copy())
            name = _name(tensor.name)
            if name is not None:
                state[name] = values if values.dim() == 1 or "embed" in name else values.T.contiguous()
        self._torch = torch
        self._model = LlamaForCausalLM(shape).eval()
        self._model.load_state_dict(state)

    def steps(self, prompt: list[int], count: int) -> Iterator[int]:
        """The tokens after a prompt: `generate` runs in a thread, and waits until the next token is asked for."""
        asked, given = threading.Semaphore(0), queue.SimpleQueue[int | BaseException]()
        inputs = self._torch.tensor([prompt])

        class Streamer:
            prompt_seen = False

            def put(self, value: object) -> None:
                if self.prompt_seen:
                    given.put(int(value))  # type: ignore[call-overload]
                    asked.acquire()
                self.prompt_seen = True

            def end(self) -> None: ...

        def work() -> None:
            asked.acquire()
            try:
                with self._torch.inference_mode():
                    self._model.generate(
                        inputs, attention_mask=self._torch.ones_like(inputs), do_sample=False, max_new_tokens=count,
                        streamer=Streamer(),
                    )  # fmt: skip
            except BaseException as error:  # noqa: BLE001 - it is raised where the token is missed
                given.put(error)

        threading.Thread(target=work, daemon=True).start()
        for _ in range(count):
            asked.release()
            token = given.get()
            if isinstance(token, BaseException):
                raise token
            yield token


def _name(weight: str) -> str | None:
    """What transformers calls a weight; None for what it computes itself."""
    if weight.startswith("rotary."):
        return None
    if weight.startswith("layers."):
        _, layer, part, _ = weight.split(".")
        return f"model.layers.{layer}.{_PARTS[part]}.weight"
    return {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}.get(
        weight, "lm_head.weight"
    )
