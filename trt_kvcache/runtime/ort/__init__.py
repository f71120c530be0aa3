"""Runs models on the CPU with ONNX Runtime."""
