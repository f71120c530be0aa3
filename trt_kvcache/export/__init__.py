"""Exports a checkpoint as an ONNX decoder, with an exporter that is installed."""
