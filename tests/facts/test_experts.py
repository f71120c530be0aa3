"""Kernels of TensorRT for RTX for experts' weights that a Gather chooses, as its builder names them.

A failure here means that TensorRT changed: `normalize.moe` relies on the bits of chosen experts alone being read.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorrt_rtx
import trt
from lowering import lowered
from mixtures import Mixture

from trt_kvcache.importer.files.signed_weights import for_tensorrt as sign_weights

TOKENS = 64
CASE = Mixture(experts=16, k=2, hidden=256, inner=256, dtype=np.float16)


class Words(trt.Log):
    """Keeps everything that TensorRT says."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def log(self, severity: tensorrt_rtx.ILogger.Severity, message: str) -> None:
        super().log(severity, message)
        self.words.append(message)


def build(case: Mixture, tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The builder's words about each kernel, and about memory, for steps of 1 to `tokens` tokens."""
    monkeypatch.setattr(trt, "Log", Words)
    model = lowered(case.model())
    sign_weights(model, Path())
    parsed = trt.parse(model)
    assert parsed.ok, parsed.words
    config = parsed.builder.create_builder_config()
    config.profiling_verbosity = tensorrt_rtx.ProfilingVerbosity.DETAILED
    profile = parsed.builder.create_optimization_profile()
    for name, width in (("x", case.hidden), ("logits", case.experts)):
        profile.set_shape(name, (1, width), (tokens, width), (tokens, width))
    config.add_optimization_profile(profile)
    assert parsed.builder.build_serialized_network(parsed.network, config) is not None
    assert isinstance(parsed.log, Words)
    return [line for words in parsed.log.words for line in words.splitlines()]


@pytest.mark.few(2)
@pytest.mark.parametrize(("bits", "kind"), [(4, "Int4"), (8, "Int8")])
@pytest.mark.parametrize("zeros", [False, True])
def test_one_kernel_reads_the_bits_of_the_chosen_experts(
    bits: int, kind: str, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, bits=bits, zeros=zeros)
    lines = build(case, 1, monkeypatch)
    weights = rf"Dimensions: \[16,(512|256),256\][^}}]*Datatype: {kind}"
    readers = [line for line in lines if line.startswith("Name: ") and re.search(weights, line.split("Outputs:")[0])]
    assert readers
    for line in readers:
        written = re.findall(r"Dimensions: \[([\d,]+)\]", line.split("Outputs:")[1])
        assert "Gath" in line.split(",")[0]
        assert written
        assert all(sizes.startswith("2,") for sizes in written), line  # of k experts, not of 16
    made = [line for line in lines if line.startswith("Name: ") and "[16,512,256]" in line.split("Outputs:")[-1]]
    assert not made
