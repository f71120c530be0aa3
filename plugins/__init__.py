"""Kernels that update caches, their registration as TensorRT plugins, and kernels that choose tokens.

Importing this package imports neither CUDA nor TensorRT. In a source tree this folder lies beside the package
trt_kvcache, and a symbolic link leads to it; in a wheel it lies inside.
"""
