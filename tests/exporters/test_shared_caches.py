"""Gemma 3n and Gemma 4 by torch: the last two layers read the caches of the first two. Skipped without torch."""

from importlib.util import find_spec

import pytest
from exporters.checkpoints import GROUPED, MIXED_WINDOWS, SIZES

from trt_kvcache import PlanOptions, plan_model, verify_model

_LAYERS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * MIXED_WINDOWS["layer_types"]}
_EACH = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SIZES["vocab_size"]}
_GEMMA3N = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is absent: pip install -e '.[exporters]'")
@pytest.mark.filterwarnings("ignore")  # exporters warn of their own dependencies
@pytest.mark.parametrize(
    ("name", "settings", "opset"),
    [("Gemma3n", _GEMMA3N, 24), ("Gemma4", {"global_head_dim": 32, "use_double_wide_mlp": True}, 20)],
)
def test_layers_that_share_caches(name, settings, opset, tmp_path):
    import transformers
    from exporters import wrappers

    config = getattr(transformers, f"{name}TextConfig")(
        **SIZES | GROUPED | MIXED_WINDOWS | _LAYERS | _EACH | {"tie_word_embeddings": True} | settings
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    path = wrappers.save(wrappers.grown(model), opset, tmp_path / "model.onnx")
    options = PlanOptions(capacity=40)
    plan = plan_model(path, options)
    assert [len(cache.readers) for cache in plan.caches] == [2, 2, 2, 2]
    assert len(plan.masks) == 2
    verify_model(path, options).check()
