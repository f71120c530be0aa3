"""What to do with a mixture of experts whose exporter lets tokens decide sizes."""

from __future__ import annotations

EXPERTS = (
    "export a mixture of experts with mobius-onnx, or with torch.onnx (dynamo) from transformers 5 after "
    'model.set_experts_implementation("batched_mm")'
)
"""Both compute all sizes from the number of tokens alone."""
