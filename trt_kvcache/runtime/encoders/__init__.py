"""Inputs that a sequence is given once: the output of an encoder, and results made of it."""
