"""Adapter folders: what is read, and what is refused by name."""

import json
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapters import write
from safetensors.numpy import save_file

from trt_kvcache.errors import OptionError
from trt_kvcache.lora import module_key, open_lora

MODULE = "model.layers.0.self_attn.q_proj"
A, B = np.arange(8, dtype=np.float32).reshape(2, 4), np.arange(6, dtype=np.float32).reshape(3, 2)
PAIR = {f"base_model.model.{MODULE}.lora_A.weight": A, f"base_model.model.{MODULE}.lora_B.weight": B}


def scale_of(folder: Path, **settings: Any) -> float:
    write(folder, PAIR, {"r": 2, "lora_alpha": 6, **settings})
    return open_lora(folder).modules[0].scale


def test_scales(tmp_path: Path) -> None:
    assert scale_of(tmp_path) == 3
    assert scale_of(tmp_path, use_rslora=True) == pytest.approx(6 / 2**0.5)
    assert scale_of(tmp_path, alpha_pattern={"q_proj": 8}) == 4
    assert scale_of(tmp_path, alpha_pattern={"proj": 8}) == 3
    assert scale_of(tmp_path, alpha_pattern={"layers.1.self_attn.q_proj": 8, r".*\.0\..*q_proj": 10}) == 5
    assert scale_of(tmp_path, r=9, rank_pattern={"q_proj": 2}) == 3


def test_what_is_read(tmp_path: Path) -> None:
    write(tmp_path, PAIR, {"r": 2, "lora_alpha": 6, "layers_to_transform": [0], "target_modules": "all-linear"})
    found = open_lora(tmp_path)
    assert [(m.name, m.rank, m.inputs, m.outputs) for m in found.modules] == [(MODULE, 2, 4, 3)]
    assert (found.rank, found.targets) == (2, ("q_proj",))
    a, b = found.read(found.modules[0])
    assert np.array_equal(a, A.T)
    assert np.array_equal(b, 3 * B.T)


def test_digests_tell_what_is_computed(tmp_path: Path) -> None:
    write(tmp_path / "a", PAIR, {"r": 2, "lora_alpha": 6})
    write(tmp_path / "b", PAIR, {"r": 2, "lora_alpha": 6, "revision": "main"})
    write(tmp_path / "c", PAIR, {"r": 2, "lora_alpha": 7})
    changed = dict(PAIR, **{f"base_model.model.{MODULE}.lora_A.weight": A + 1})
    write(tmp_path / "d", changed, {"r": 2, "lora_alpha": 6})
    digests = [open_lora(tmp_path / name).digest for name in "abcd"]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_types(dtype: Any, tmp_path: Path) -> None:
    write(tmp_path, {name: value.astype(dtype) for name, value in PAIR.items()}, {"r": 2, "lora_alpha": 2})
    found = open_lora(tmp_path)
    assert np.array_equal(found.read(found.modules[0])[0], A.T)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "the adapter is of kind 'IA3'; only LORA is supported"),
        ({"bias": "all"}, "bias is 'all', and biases are not supported"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the model's own weights"),
        ({"layer_replication": [[0, 4]]}, "layer_replication is"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters is"),
        ({"something_new": 1}, "something_new is 1, which is not supported"),
        ({"r": 3}, "has a rank of 2, and adapter_config.json says 3"),
        ({"lora_alpha": "much"}, "lora_alpha of module '.*' is 'much', which is not a number"),
        ({"alpha_pattern": {"(": 3}}, r"alpha_pattern has '\(', which RE2 does not read"),
    ],
)
def test_kinds_that_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, PAIR, {"r": 2, **settings})
    with pytest.raises(OptionError, match=words):
        open_lora(tmp_path)


@pytest.mark.parametrize(("tensors", "words"), [
    ({}, "the adapter has no tensors"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": A}, "embed_tokens.lora_embedding_A' is not A or B"),
    ({f"base_model.model.{MODULE}.lora_magnitude_vector": A[0]}, "lora_magnitude_vector' is not A or B"),
    ({"base_model.model.lm_head.weight": A}, "lm_head.weight' is not A or B"),
    (dict([next(iter(PAIR.items()))]), f"module '{MODULE}' has only .*lora_A.weight; copy the file again"),
    ({**PAIR, f"base_model.model.{MODULE}.lora_B.weight": B.T}, r"has A \[2, 4\] and B \[2, 3\], which cannot"),
    ({**PAIR, f"base_model.model.{MODULE}.lora_A.weight": A.astype(np.int32)}, "is I32; supported are F16, F32"),
])  # fmt: skip
def test_tensors_that_are_refused(tensors: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, tensors, {"r": 2})
    with pytest.raises(OptionError, match=words):
        open_lora(tmp_path)


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no adapter: there is no adapter_config.json"):
        open_lora(tmp_path)
    with pytest.raises(OptionError, match="folder is 3"):
        open_lora(3)  # type: ignore[arg-type]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(OptionError, match="there are no weights; save the adapter as adapter_model.safetensors"):
        open_lora(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(OptionError, match="adapter_model.bin is a pickle, which runs code when it is read"):
        open_lora(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    save_file(PAIR, weights)
    whole = weights.read_bytes()
    for length in (0, 4, 8, 60, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(
            OptionError, match=r"adapter_model.safetensors: (not a safetensors file|cut short|cannot be read)"
        ):
            open_lora(tmp_path)
    for header in (
        b"[]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b"\xff\xff",
        b'{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
    ):
        weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(OptionError):
            open_lora(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not JSON: "), (b'{"peft_type": "LO', "is not JSON: "), (b"[]", "holds list, not an object"),
        (b'{"peft_type": "\xff"}', "is not JSON: "), (b"\0" * 64, "is not JSON: "), (b"3", "holds int, not an object"),
        (b"[" * 200_000, "is not JSON: "), (b" " * ((16 << 20) + 1), "cannot be read: larger than 16"),
        (b'{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "rank_pattern": ["q_proj"]}', "rank_pattern is .* not a map"),
        (b'{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_rslora": "no"}', "use_rslora is 'no'; it must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_damaged_config_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    write(tmp_path, PAIR, {"r": 2})
    (tmp_path / "adapter_config.json").write_bytes(data)
    with pytest.raises(OptionError, match=rf"adapter_config.json:? {words}"):
        open_lora(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_any_damage_is_refused_or_read(name: str, tmp_path: Path) -> None:
    """Bytes that are cut, changed, put in or left out: never another error."""
    write(tmp_path, PAIR, {"r": 2, "lora_alpha": 6, "rank_pattern": {"q": 2}, "target_modules": ["q_proj"]})
    file, rng = tmp_path / name, random.Random(5)
    refused: list[str] = []
    whole = file.read_bytes()
    for _ in range(300):
        at, more = rng.randrange(len(whole)), rng.choice([0, 0, 1, 7])
        left = rng.choice([at, at + 1, min(len(whole), at + 9), len(whole)])
        file.write_bytes(whole[:at] + rng.randbytes(more) + whole[left:])
        try:
            found = open_lora(tmp_path)
            found.read(found.modules[0])
        except OptionError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(tmp_path) in said and "\n" not in said for said in refused)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.self_attn.q_proj", ("3", "attn", "q_proj")),
        ("model.model.layers.3.attn.q_proj", ("3", "attn", "q_proj")),
        ("model.language_model.layers.3.self_attn.q_proj", ("3", "attn", "q_proj")),
        ("transformer.h.0.attn.c_attn", ("0", "attn", "c_attn")),
        ("lm_head", ("lm_head",)),
        ("vision_tower.encoder.layers.3.self_attn.q_proj", None),
        ("model.encoder.layers.3.self_attn.q_proj", None),
        ("model.visual.blocks.3.attn.qkv", None),
        ("", None),
    ],
)
def test_module_keys(name: str, key: tuple[str, ...] | None) -> None:
    assert module_key(name) == key
