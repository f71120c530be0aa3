"""Decodes the same texts with several forms of a model, each in its own runtime, and compares the logits.

A runner decodes with one form (a "station"), from transformers to TensorRT's network, and knows no other runner.
"""
