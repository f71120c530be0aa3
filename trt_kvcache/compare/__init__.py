"""Comparisons of one decode at every station, from the checkpoint to TensorRT's network.

A runner decodes, and knows no other runner. A comparison takes what several of them gave, and knows no runner.
"""
