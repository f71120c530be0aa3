"""From a checkpoint to an ONNX decoder, by an exporter that is installed."""
