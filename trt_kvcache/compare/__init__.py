"""Runs one decode at every station, from the checkpoint to TensorRT's network, and compares the results.

A runner decodes at one station, and does not know other runners. A comparison sees only the results of runners.
"""
