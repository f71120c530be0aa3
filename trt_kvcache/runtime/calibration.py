"""Measures the range of each cache over some prompts, for the scales of quantized caches."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from trt_kvcache.arguments import as_list, as_options
from trt_kvcache.errors import CapacityError, OptionError, PromptError
from trt_kvcache.importer import families
from trt_kvcache.importer.cache_plan import PlanOptions
from trt_kvcache.runtime.requests import Prompt
from trt_kvcache.runtime.session import DecodeSession
from trt_kvcache.runtime.token_inputs import read_ids

_OPTIONS = PlanOptions()


def calibrate_caches(
    model: str | os.PathLike[str], prompts: Sequence[Prompt], options: PlanOptions = _OPTIONS
) -> dict[str, float]:
    """Run a model over prompts, on the CPU with unquantized caches, and return the range of each cache.

    The range is the largest magnitude in the rows after a Hadamard rotation, because quantized caches hold rotated rows
    (`trt_kvcache.importer.families.quantized_caches`).

    Args:
        model: path of an ONNX decoder, or of its folder.
        prompts: typical prompts: texts, if there is a tokenizer in the model's folder, or token ids.
        options: how the model is planned; the dtype of the caches is ignored.

    Returns:
        The value for `PlanOptions.cache_ranges`: the range of each cache, by the name of the cache's input.

    Raises:
        OptionError: there are no prompts; or a cache holds NaN or infinity, or only zeros.
        PromptError: a prompt is empty, is text without a tokenizer, or has a token that the model does not know.
        CapacityError: a prompt is longer than the caches.
        ModelError, SessionError: the model does not run on the CPU.
    """
    prompts = as_list(prompts, "prompts", "prompts, each a text or a list of token ids")
    if not prompts:
        raise OptionError("there are no prompts to calibrate caches with; give some that the model will get")
    options = as_options(options, PlanOptions, "options").unquantized()
    rotation = families.quantized_caches.rotation
    with DecodeSession.open(model, device="cpu", plan_options=options) as session:
        caches = [cache for cache in session.plan.caches if cache.carried]
        ranges = dict.fromkeys((cache.past for cache in caches), 0.0)
        chunk = min(cache.capacity for cache in caches)  # so that no circular cache loses a row before it is read
        for number, prompt in enumerate(prompts, start=1):
            what = f"calibration prompt {number}"
            ids = _ids(session, prompt, what)
            slot = session.cache.acquire()
            for start in range(0, len(ids), chunk):
                session.update({slot: ids[start : start + chunk]}, keep=0)
                row = session.cache.slot(slot).row
                for name, before in ranges.items():
                    rows = np.asarray(session.cache.view(name)[row], np.float32)
                    largest = float(np.abs(rows @ rotation(rows.shape[-1])).max())
                    if not np.isfinite(largest):
                        raise OptionError(
                            f"cache '{name}' holds NaN or infinity after {what}, for which there is no scale; leave "
                            "that prompt out, or export the model in a wider type"
                        )
                    ranges[name] = max(before, largest)
            session.cache.release(slot)
    if empty := [name for name, largest in ranges.items() if largest == 0]:
        raise OptionError(f"cache '{empty[0]}' holds nothing but 0 after all calibration prompts; give other ones")
    return ranges


def _ids(session: DecodeSession, prompt: Prompt, what: str) -> list[int]:
    if isinstance(prompt, str) and session.tokenizer is None:
        raise PromptError(f"{what} is text, but there is no tokenizer beside the model; give token ids")
    try:
        ids = read_ids(session.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, session.vocab)
    except PromptError as error:
        raise PromptError(f"{what}: {error.message}") from None
    if not ids:
        raise PromptError(f"{what} is empty; it needs at least one token")
    most = session.cache.capacity
    if most is not None and len(ids) > most:
        raise CapacityError(
            f"{what} has {len(ids)} tokens, but a sequence may have at most {most}; shorten it, or plan with a "
            "larger --capacity if the model leaves it open"
        )
    return ids
