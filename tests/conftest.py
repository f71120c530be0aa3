"""Tests marked ``gpu`` are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import pytest

from trt_kvcache.engine.doctor import find_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    _, gpus, problem = find_gpus()
    for item in marked:
        if not gpus:
            item.add_marker(pytest.mark.skip(reason=problem))
