"""Runs engines, on TensorRT or TensorRT for RTX, with buffers in GPU memory."""
