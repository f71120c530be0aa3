"""Reads, checks and writes model files and the files beside them."""
