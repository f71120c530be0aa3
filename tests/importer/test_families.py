"""Families that few exports need are loaded for models of these families only."""

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from decoders import DecoderConfig
from foreign_decoders import make_foreign

from trt_kvcache.importer import families

# torch's DeepSeek V3 has assigned slices.
NOT_PLAIN = {"deepseek_v3_dynamic_eager", "bloom", "t5"}  # the last two compute biases by distance in parts
EXPORTS = sorted((Path(__file__).parents[1] / "models").glob("*/*/model.onnx"))
LOADED = """
import sys
from trt_kvcache.errors import OptionError, UnsupportedModelError
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.plan import PlanOptions
planned = 0
for path in sys.argv[1:]:
    for capacity in (16, None):  # None: of a fixed length
        try:
            plan_model(path, PlanOptions(capacity=capacity))
            planned += 1
            break
        except (OptionError, UnsupportedModelError):
            pass
assert planned > 0.8 * len(sys.argv[1:])
folder = "trt_kvcache.importer.families."
print(*sorted({name[len(folder):].split(".")[0] for name in sys.modules if name.startswith(folder)}))
"""


def loaded_for(*paths: Path) -> list[str]:
    """The families that a fresh process loads to plan models."""
    done = subprocess.run([sys.executable, "-c", LOADED, *paths], check=True, capture_output=True, text=True)
    return done.stdout.split()


def loaded(path: Path, model: onnx.ModelProto) -> list[str]:
    """The families that a fresh process loads to plan a model."""
    onnx.save(model, path)
    return loaded_for(path)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["concat", "concat-attention", "scatter", "gqa"])
def test_a_plain_decoder_loads_no_family(tmp_path: Path, form: str) -> None:
    assert loaded(tmp_path / "model.onnx", make_foreign(form, DecoderConfig(vocab=64, capacity=16))) == ["tool_repairs"]


@pytest.mark.slow
def test_no_stored_export_of_a_plain_decoder_loads_a_family_or_repairs() -> None:
    """All in one process: whatever one of them loaded would show."""
    plain = [path for path in EXPORTS if path.parent.name not in NOT_PLAIN]
    assert len(plain) > 25
    assert {*loaded_for(*plain)} <= {"quantizers", "tool_repairs"}


def test_what_a_family_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(families, "no_family")

    def lacking(name: str) -> object:
        raise ModuleNotFoundError("No module named 'lacking'", name="lacking")

    monkeypatch.setattr(families, "import_module", lacking)
    with pytest.raises(ModuleNotFoundError, match="lacking"):
        families.no_family  # noqa: B018
