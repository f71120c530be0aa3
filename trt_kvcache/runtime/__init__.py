"""Runs planned models: sessions, caches and generation, on TensorRT or on ONNX Runtime."""
