"""Chooses tokens, and ends sequences."""
