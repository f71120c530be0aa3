"""Engines of models that take embeddings: the tokens of the same model with token ids on ONNX Runtime.

But where two are nearly best: products in TF32.
"""

from pathlib import Path
from typing import Any

import pytest
from decoders import DecoderConfig, write_decoder
from gpu_steps import built_for
from greedy import check_greedy
from runtime.embedded_models import cut

from trt_kvcache import BuildOptions, DecodeSession, GenerationConfig, build_engine
from trt_kvcache.runtime.ort.ort_runner import OnnxRuntimeRunner

pytestmark = pytest.mark.gpu


def test_sessions_write_the_same_tokens(workshop: Any, tmp_path: Path) -> None:
    """Prompts as ids and as embeddings, longer than a step, in order and at positions of their own."""
    forms = cut(write_decoder(tmp_path / "model.onnx", DecoderConfig()), tmp_path)
    engine = tmp_path / "embeds.engine"
    options = BuildOptions(backend=workshop.backend, max_batch=3, max_chunk=16, **built_for())
    build_engine(forms.embeds, engine, build=options)
    greedy, prompts = GenerationConfig(max_new_tokens=12), [[1, 2, 3], [4, 5, 6, 7, 8], [9], list(range(20))]
    places = [None, [3, 3, 9, 4, 5], None, [i // 2 for i in range(20)]]
    embeds = [None, forms.table[prompts[1]], None, forms.table[prompts[3]]]
    with DecodeSession(workshop.open(engine), embeddings=forms.table) as session:
        found = session.generate(prompts, greedy, inputs_embeds=embeds, positions=places)
    with DecodeSession(OnnxRuntimeRunner(forms.ids, max_batch=3)) as session:
        for prompt, given, generated in zip(prompts, places, found, strict=True):
            first = list(range(len(prompt))) if given is None else given

            def scores(text: list[int], first: list[int] = first) -> Any:
                after = max(first) + 1
                stand = [*first, *range(after, after + len(text) - len(first))]
                slot = session.cache.acquire()
                logits = session.update({slot: text}, positions={slot: stand})[slot][-1]
                session.cache.release(slot)
                return logits

            assert len(generated.tokens) == 12
            check_greedy(prompt, generated.tokens, scores, 5e-3)
