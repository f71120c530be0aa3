"""Samples of a model's steps, and the values of its tensors in them."""
