"""Models whose interface normalization changes: the original in its own interface against the rewritten one.

The pairs are made by hand, so that nothing here rests on normalization itself; `test_catches` has wrong ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoders import DecoderConfig
from originals import OriginalConfig, import_pair
from verify import mistakes as m

from trt_kvcache.errors import OptionError
from trt_kvcache.importer.steps.original import OriginalInterface
from trt_kvcache.verify import VerifyOptions, VerifyReport, verify_import

HEADS = DecoderConfig(form="heads-major")
CONCAT = OriginalConfig(HEADS)
ASSIGN = replace(CONCAT, cache="assign")
HALF = OriginalConfig(replace(HEADS, dtype="float16"))
ROLLING = OriginalConfig(replace(HEADS, mode="circular", sequence=1, capacity=9), window=9)


def verify(folder: Path, config: OriginalConfig, mistake: m.Mistake = m.nothing, **options: object) -> VerifyReport:
    return verify_import(import_pair(folder, config, mistake), VerifyOptions(**options))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "config",
    [
        CONCAT, ASSIGN, HALF, ROLLING,
        OriginalConfig(replace(HEADS, mask="bool", causal=False, lengths=False), cache="assign"),
        OriginalConfig(replace(HEADS, mask="float", causal=False, lengths=False), cache="assign"),
        replace(CONCAT, window=7), replace(ASSIGN, window=7), replace(CONCAT, embedded=True),
        replace(CONCAT, extras=True), replace(CONCAT, batch=2), replace(ASSIGN, batch=1),
        OriginalConfig(replace(HEADS, sequence=1)), OriginalConfig(replace(HEADS, dtype="bfloat16")),
    ],
)  # fmt: skip
def test_a_right_rewrite_passes(tmp_path: Path, config: OriginalConfig) -> None:
    report = verify(tmp_path, config)
    report.check()
    assert sum(s.length for s in report.steps if s.episode == "decode") >= 3 * 8
    assert {"logits", "updated_key_cache.0", "updated_value_cache.1"} <= {o.name for o in report.outputs}
    if config.batch == 2:
        assert all(len(set(step.starts)) == 1 and len(step.starts) == 2 for step in report.steps)
        assert any("2 rows that start together" in note for note in report.notes)
    if config == ROLLING:
        assert max(max(s.valid) for s in report.steps) > 2 * 9
        assert {s.episode for s in report.steps} == {"decode", "wrap"}


def test_greedy_tokens_are_counted(tmp_path: Path) -> None:
    def counted(report: VerifyReport) -> list[int]:
        (note,) = [n for n in report.notes if n.startswith("greedy")]
        return [int(word) for word in note.split() if word.isdecimal()]

    same, clear = counted(verify(tmp_path, CONCAT))
    assert same == clear > 100
    same, clear = counted(verify(tmp_path, CONCAT, m.swap_query_heads, tolerance=0.0))
    assert same < clear


def test_the_original_is_given_each_row_as_its_caller_would(tmp_path: Path) -> None:
    plan = import_pair(tmp_path, CONCAT).plan
    interface = OriginalInterface(plan, twin=False)
    cache = np.arange(2 * 2 * 64 * 16, dtype=np.float32).reshape(2, 2, 64, 16)
    feeds = {
        "input_ids": np.array([[1, 2, 3], [4, 5, 6]]),
        "write_indices": np.array([4, 0]),
        "nonpad_kv_seqlen": np.array([7, 3]),
        **{t.name: cache for t in plan.original if t.name.endswith(("cache.0", "cache.1")) and t.io == "input"},
    }
    assert interface.groups(feeds) == [(slice(0, 1), 4), (slice(1, 2), 0)]
    first = interface.feeds(feeds, slice(0, 1), 4)
    np.testing.assert_array_equal(first["input_ids"], [[1, 2, 3]])
    np.testing.assert_array_equal(first["position_ids"], [[4, 5, 6]])
    np.testing.assert_array_equal(first["attention_mask"], np.ones((1, 7)))
    np.testing.assert_array_equal(first["key_cache.0"], cache[:1, :, :4])
    second = interface.feeds(feeds, slice(1, 2), 0)
    assert second["key_cache.0"].shape == (1, 2, 0, 16)
    np.testing.assert_array_equal(second["position_ids"], [[0, 1, 2]])


def test_rows_that_start_apart_are_refused_where_the_batch_is_fixed(tmp_path: Path) -> None:
    plan = import_pair(tmp_path, replace(CONCAT, batch=2)).plan
    with pytest.raises(OptionError, match=r"exported for 2 rows that start together, not at \[4, 0\]"):
        OriginalInterface(plan, twin=False).groups({"write_indices": np.array([4, 0])})
