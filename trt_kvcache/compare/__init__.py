"""Runs one decode at every station and compares the results.

A station is one form of a model together with the runtime that runs it: from the checkpoint in transformers to
TensorRT's parsed network. A runner decodes at one station and does not know other runners. A comparison sees only the
results of runners.
"""
