"""Position tables that end before the caches do."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import plan_model


@pytest.mark.parametrize(("rows", "said"), [(40, True), (63, True), (64, False), (4096, False)])
def test_a_table_shorter_than_the_caches_is_named(rows: int, said: bool, tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(capacity=64, positions=rows))
    expected = (
        f"'position_ids' looks up a table of {rows} positions, and the caches hold 64 tokens: no text may be longer "
        f"than {rows}"
    )
    assert [w for w in plan_model(tmp_path / "model.onnx").warnings if "table" in w] == [expected] * said
