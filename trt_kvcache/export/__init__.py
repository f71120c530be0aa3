"""Export a checkpoint as an ONNX decoder with an installed exporter."""
