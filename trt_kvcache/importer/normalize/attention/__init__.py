"""Attention over caches: scores, masks, biases, reads of keys and values."""
