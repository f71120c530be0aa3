"""Compares one decode at every station, from the checkpoint to TensorRT's network.

A runner decodes, and does not know other runners. A comparison uses results of runners, and does not know runners.
"""
