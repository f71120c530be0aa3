"""GGUF files that transformers reads in parts only are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_kvcache.export.from_gguf import MODULES, _dropped_settings, save_checkpoint

pytestmark = pytest.mark.slow  # torch and transformers take seconds to load

HIDDEN, INNER, VOCAB = 32, 64, 40
Change = Callable[[Any, dict[str, np.ndarray]], None]


def _nothing(writer: Any, tensors: dict[str, np.ndarray]) -> None:
    pass


def written(path: Path, change: Change = _nothing, arch: str = "llama") -> Path:
    """A Llama of one layer, without a tokenizer."""
    for module in MODULES:
        pytest.importorskip(module, reason=f"{module} is not installed: pip install {' '.join(MODULES)}")
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("small")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(VOCAB)
    norm = (HIDDEN,)
    layer = {
        "attn_norm": norm, "attn_q": (32, HIDDEN), "attn_k": (16, HIDDEN), "attn_v": (16, HIDDEN),
        "attn_output": (HIDDEN, 32), "ffn_norm": norm, "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"token_embd": (VOCAB, HIDDEN), "output_norm": norm, "output": (VOCAB, HIDDEN)}
    tensors = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    change(writer, tensors)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _scaled(writer: Any, tensors: dict[str, np.ndarray]) -> None:
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


def _capped(writer: Any, tensors: dict[str, np.ndarray]) -> None:
    writer.add_attn_logit_softcapping(50.0)


def _factors(writer: Any, tensors: dict[str, np.ndarray]) -> None:
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)  # of Llama 3.1


def _biased(writer: Any, tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.attn_q.bias"] = np.ones(32, np.float32)


def _lacking(writer: Any, tensors: dict[str, np.ndarray]) -> None:
    del tensors["blk.0.ffn_up.weight"]


def _split(writer: Any, tensors: dict[str, np.ndarray]) -> None:
    writer.add_uint16("split.count", 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_scaled, r"does not read llama.rope.scaling.type = yarn, llama.rope.scaling.factor = 4.0, which changes"),
        (_capped, r"does not read llama.attn_logit_softcapping = 50.0, which changes the numbers"),
        (
            _factors,
            r"the file holds \d+ numbers, and transformers' LlamaForCausalLM \d+; without .*: rope_freqs.weight",
        ),
        (_biased, r"not read all of its tensors: .*: blk.0.attn_q.bias"),
        (_lacking, r"the file has no model.layers.0.mlp.up_proj.weight"),
        (_split, r"one of 3 parts; join them first"),
    ],
)
def test_what_transformers_would_drop_is_named(change: Change, said: str, tmp_path: Path) -> None:
    file = written(tmp_path / "small.gguf", change)
    with pytest.raises(ValueError, match=said):
        save_checkpoint(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


ROTATED = {  # numbers of a head of 64 that transformers rotates
    "llama": 64, "qwen2": 64, "qwen2_moe": 64, "qwen3_moe": 64, "phi3": 64, "starcoder2": 64, "falcon": 64,
    "gemma2": 64, "gemma3": 64, "stablelm": 16, "nemotron": 32,
}  # fmt: skip


@pytest.mark.parametrize("count", [64, 32, 16])
@pytest.mark.parametrize("arch", ROTATED)
def test_a_part_of_each_head_that_transformers_would_not_rotate_is_named(arch: str, count: int, tmp_path: Path) -> None:
    """Its map has the key for most of these, and nothing that the key would become."""
    for module in MODULES:
        pytest.importorskip(module, reason=f"{module} is not installed: pip install {' '.join(MODULES)}")
    import gguf
    import transformers

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", arch)
    writer.add_block_count(2)
    writer.add_embedding_length(256)
    writer.add_head_count(4)
    writer.add_key_length(64)
    writer.add_rope_dimension_count(count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="a.gguf")
    dropped = _dropped_settings(gguf.GGUFReader(tmp_path / "a.gguf"), config)
    if count == ROTATED[arch]:
        assert dropped == []
    elif arch == "llama":  # it takes the count for the size of a head
        assert dropped == [f"{arch}.attention.key_length = 64"]
    else:
        assert dropped == [f"{arch}.rope.dimension_count = {count}"]


def test_half_of_each_head(tmp_path: Path) -> None:
    def halve(writer: Any, tensors: dict[str, np.ndarray]) -> None:
        del writer.kv_data[0]["phi3.rope.dimension_count"]
        writer.add_rope_dimension_count(8)

    file = written(tmp_path / "small.gguf", halve, arch="phi3")
    with pytest.raises(ValueError, match=r"transformers does not read phi3.rope.dimension_count = 8, which changes"):
        save_checkpoint(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    """By transformers and gguf, with the architecture's name."""
    with pytest.raises(ValueError, match="GGUF model with architecture strange is not supported"):
        save_checkpoint(written(tmp_path / "strange.gguf", arch="strange"), tmp_path / "out")
    (tmp_path / "none.gguf").write_bytes(b"no such file format" * 9)
    with pytest.raises(ValueError, match="GGUF magic invalid"):
        save_checkpoint(tmp_path / "none.gguf", tmp_path / "out")
