"""The cache-update kernel, its registration as a TensorRT plugin, and the kernels that choose tokens.

Importing this imports neither CUDA nor TensorRT.

    spec.py       the kernel that an update needs, its arguments and its launch: plain data
    source.py     the kernel's text: the shared files and one entry function for a configuration
    compile.py    NVRTC: PTX and cubin, resource use, the cache on disk
    ahead.py      the kernels of one model, compiled before a build or a session needs them
    choice.py     the best token of each row of logits, or its highest scores, for the runtime

In a source tree this folder lies beside the package, which reaches it by a symbolic link; in a wheel it lies inside.
"""
