"""Kernels that update caches, their registration as TensorRT plugins, and kernels that choose tokens.

Importing this package imports neither CUDA nor TensorRT.

    spec.py       data classes: the kernel that an update needs, its arguments, its launch
    source.py     the kernel's source: the shared files and one entry function for a configuration
    compile.py    NVRTC: PTX and cubin, resource use, the cache on disk
    ahead.py      the kernels of one model, compiled before a build or a session needs them
    choice.py     the best token of each row of logits, or its highest scores, for the runtime

In a source tree this folder lies beside the package, and a symbolic link leads to it; in a wheel it lies inside.
"""
