"""Conversion between text and tokens."""
