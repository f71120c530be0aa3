"""The documentation shows the table of exporters as it was measured, and the script measures what an exporter wrote."""

from exporter_matrix import (
    ARCHITECTURES,
    EXPORTERS,
    ORDER,
    PAGE,
    UNAVAILABLE,
    cell,
    families,
    load,
    load_twins,
    replaced,
    twin_names,
)


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replaced(text), "python scripts/exporter_matrix.py --write"


def test_every_cell_is_measured_or_has_a_reason() -> None:
    results = load()
    for exporter in EXPORTERS:
        for arch in ARCHITECTURES:
            text, reason = cell(results, exporter, arch)
            assert text == "yes" or (text in ("-", "no", "copied", "wrong") and reason), (exporter, arch)
            assert (text == "-") == ((exporter, arch) in UNAVAILABLE)


def test_every_family_is_measured() -> None:
    results = load()
    for exporter in families.EXPORTERS:
        for family in families.FAMILIES:
            text, reason = cell(results, exporter, family)
            assert text == "yes" or (text in ("no", "copied", "wrong") and reason), (exporter, family)


def test_no_twin_is_silently_wrong() -> None:
    """Each checkpoint was measured with the exporters that auto tries, up to the first that is right."""
    results = load_twins()
    assert len(twin_names()) > 60
    for name in twin_names():
        outcomes = [results[name].get(exporter, {}).get("outcome", "?") for exporter in ORDER]
        tried = outcomes[: outcomes.index("right")] if "right" in outcomes else outcomes
        assert {*tried} <= {"wrong", "refused", "-"}, name
