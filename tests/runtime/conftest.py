"""An engine that a test may change, and the families of decoders."""

import shutil
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder
from runtime.engines import write_engine
from runtime.families import Corpus

from trt_kvcache.engine.manifest import manifest_path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", DecoderConfig()))


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    for path in (built, manifest_path(built), built.with_suffix(".onnx")):
        shutil.copy(path, tmp_path)
    return tmp_path / built.name


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("families"))
