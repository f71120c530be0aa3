"""Inputs that a sequence is given once: the outputs of an encoder, and values computed from them."""
