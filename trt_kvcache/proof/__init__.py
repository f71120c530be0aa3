"""Proofs: a decode of the original model, recorded where an engine is built, and replayed where it runs."""
