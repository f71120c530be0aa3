"""The tables of exporters, without running any."""

import pytest
from exporters import exports
from exporters.checkpoints import ARCHITECTURES


def test_reasons_name_exporters_and_architectures_that_exist():
    for exporter, arch in exports.UNAVAILABLE:
        assert exporter in exports.EXPORTERS
        assert arch in ARCHITECTURES


def test_a_combination_that_the_exporter_cannot_do_is_refused_with_its_reason(tmp_path):
    with pytest.raises(ValueError, match="mobius-static cannot export gpt2: .*common decoder layer only"):
        exports.export("mobius-static", "gpt2", tmp_path)


@pytest.mark.parametrize(
    ("exporter", "extra"), [("optimum", "exporters-optimum"), ("torch-static-op24-sdpa", "exporters")]
)
def test_absent_packages_are_named_with_the_extra_that_has_them(exporter, extra, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "find_spec", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match=rf"^{exporter} needs torch, .*\[{extra}\]'$"):
        exports.export(exporter, "llama", tmp_path)
