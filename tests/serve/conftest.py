"""One served model for all tests, and the same model alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trt_kvcache import DecodeSession


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="the tokenizers library is not installed (extra: text)")
    from serve.models import write_served

    return write_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def alone(folder: Path) -> Iterator[DecodeSession]:
    """The reference: no server, one sequence at a time."""
    with DecodeSession.open(folder, max_batch=1) as session:
        yield session


@pytest.fixture(scope="session")
def rows(folder: Path) -> Iterator[DecodeSession]:
    """The served session: four rows, and no slot left in use after any test."""
    with DecodeSession.open(folder, max_batch=4) as session:
        yield session
