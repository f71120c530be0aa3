"""Runs what the importer planned: sessions, caches and generation, on TensorRT or on ONNX Runtime."""
