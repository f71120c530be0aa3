"""Names say roles where the graph does not: those that are shipped, and those of a configuration."""

import re
from pathlib import Path

import onnx
import pytest
from concat_graphs import Decoder, make_decoder
from decoders import DecoderConfig, write_decoder
from graphs import renamed

from trt_kvcache.errors import AmbiguousRoleError, OptionError
from trt_kvcache.importer import plan_model
from trt_kvcache.importer.cache_plan import PlanOptions, Role, TensorRole
from trt_kvcache.importer.interface import shipped_patterns

SMALL = DecoderConfig(layers=1, hidden=16, vocab=32, query_heads=2, kv_heads=1, head_size=8, capacity=16, positions=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("model") / "model.onnx", SMALL)


def roles(model: Path, folder: Path, config: str) -> dict[str, TensorRole]:
    (folder / "own.yaml").write_text(config)
    return {t.name: t for t in plan_model(model, PlanOptions(config=str(folder / "own.yaml"))).tensors}


def test_the_user_is_not_argued_with(model: Path, tmp_path: Path) -> None:
    found = roles(model, tmp_path, "roles:\n  valid_lengths: ['write_.*']\n  other: nonpad_kv_seqlen\n")
    assert found["write_indices"].role is Role.VALID_LENGTHS
    assert found["nonpad_kv_seqlen"].role is Role.OTHER
    assert found["write_indices"].found_by == "config: own.yaml"
    assert found["input_ids"].found_by == "graph: index into the embedding table [32, 16]"
    assert found["logits"].found_by == "config: mobius.yaml"


def test_a_name_that_does_not_fit_is_refused_until_the_user_says_more(tmp_path: Path) -> None:
    onnx.save(renamed(make_decoder(Decoder()), {"position_ids": "write_indices"}), tmp_path / "model.onnx")
    with pytest.raises(AmbiguousRoleError, match=r"'write_indices': .* positions: write_indices}$"):
        plan_model(tmp_path / "model.onnx", PlanOptions(capacity=24))
    (tmp_path / "own.yaml").write_text("roles: {positions: write_indices}")
    plan = plan_model(tmp_path / "model.onnx", PlanOptions(capacity=24, config=str(tmp_path / "own.yaml")))
    assert {t.name: t.role for t in plan.tensors}["write_indices"] is Role.POSITIONS


@pytest.mark.slow
def test_patterns_match_whole_names_and_the_right_side(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gives the role 'logits' to 'updated_key_cache\.0', which is a cache"):
        roles(model, tmp_path, "roles: {mask: 'input', logits: '.*'}")
    found = roles(model, tmp_path, "roles: {mask: 'input', tokens: logits}")
    assert {n: t.role for n, t in found.items()} == {t.name: t.role for t in plan_model(model).tensors}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("roles: [", "is not YAML: "),
        ("roles: {tokens: \x07}", "is not YAML: "),
        ("roles: {tokens: 2001-99-99}", "is not YAML: month must be in 1..12"),
        ("[" * 10_000, "is not YAML: "),
        ("", "must be one mapping under the key 'roles'"),
        ("tokens: input_ids", "must be one mapping under the key 'roles'"),
        ("roles: [tokens]", "must be one mapping under the key 'roles'"),
        ("roles: {}\npreset: x", "must be one mapping under the key 'roles'"),
        ("roles: {token: x}", "role 'token': there is no such role; a pattern can give the roles tokens, positions, "),
        ("roles: {state: x}", "role 'state': the graph shows each state, so names cannot"),
        ("roles: {cache: x}", "role 'cache': the graph shows each cache, so names cannot; a pattern can give"),
        ("roles: {1: x}", "role '1': there is no such role"),
        ("roles: {tokens: 3}", "role 'tokens' has the pattern 3; a pattern must be a string or a list of strings"),
        ("roles: {tokens: [a, null]}", "role 'tokens' has the pattern None"),
        ("roles: {tokens: ''}", "role 'tokens' has the pattern ''"),
        ("roles: {tokens: '(x'}", "role 'tokens' has '(x', which is not a regular expression of RE2: "),
        (
            "roles: {tokens: 'input.*', positions: '.*_ids'}",
            "'input_ids' matches both 'input.*' of the role 'tokens' and '.*_ids'",
        ),
        ("roles: {tokens: 'key_.*'}", "gives the role 'tokens' to 'key_cache.0', which is a cache; use a narrower"),
    ],
)
def test_bad_config(model: Path, tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)) as caught:
        roles(model, tmp_path, content)
    assert "own.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shipped_patterns_agree_with_each_other() -> None:
    """A plain name in one file must not have another role in another file."""
    for pattern in shipped_patterns():
        for io in ("input", "output"):
            agreeing = {other.role for other in shipped_patterns() if other.matches(pattern.regex.pattern, io)}
            assert len(agreeing) <= 1
