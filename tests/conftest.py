"""Tests marked `gpu` run where a GPU and its driver are, and are skipped, with the reason, where not."""

from __future__ import annotations

import pytest

from trt_kvcache.engine.doctor import find_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    _, _, problem = find_gpus()
    if problem:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))
