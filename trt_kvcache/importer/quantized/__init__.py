"""Quantized weights and products, in the form that TensorRT and ONNX Runtime take."""
