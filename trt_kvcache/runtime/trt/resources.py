"""The objects of TensorRT and CUDA that an open runner holds, and the order in which it frees them."""

from __future__ import annotations

import os
from contextlib import suppress

from trt_kvcache.errors import BackendError
from trt_kvcache.runtime.trt.context import Context, ContextFactory
from trt_kvcache.runtime.trt.cuda import Cuda
from trt_kvcache.runtime.trt.function import EngineFunction
from trt_kvcache.runtime.trt.graphs import StepGraphs
from trt_kvcache.runtime.trt.load import TensorRT

__all__ = ["Resources"]


class Resources:
    """Resources of a runner, freed even after the runner is gone: Python's garbage collection does not free GPU memory.

    Attributes:
        cuda: the GPU, and all allocated memory.
        trt: the engine, once it is open.
        factory: the factory of contexts, once the engine is open.
        contexts: one context for each profile.
        functions: other engines that run on this GPU.
        graphs: the recorded steps; None if steps are not recorded.
        in_use: a call is running.
    """

    trt: TensorRT
    factory: ContextFactory

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.contexts: list[Context] = []
        self.functions: list[EngineFunction] = []
        self.graphs: StepGraphs | None = None
        self.in_use = False
        self._process = os.getpid()

    def close(self) -> None:
        """Free everything, and save compiled kernels for the next start.

        Do nothing if a call is running: then the process is ending, but this thread is not. Do nothing in a fork: CUDA
        does not work there.
        """
        if self.in_use or os.getpid() != self._process:
            return
        with self.cuda.activated():
            try:
                # If the GPU is lost, the step that lost it has raised that error; here only freeing remains.
                with suppress(BackendError):
                    self.cuda.sync()
                    for factory in (self.factory, *(function.factory for function in self.functions)):
                        if factory.kernels is not None:
                            factory.kernels.save()
                if self.graphs is not None:
                    self.graphs.close()
            finally:
                self.let_go()

    def let_go(self) -> None:
        """Drop the objects of TensorRT, and then the memory that they are bound to."""
        while self.contexts:
            self.contexts.pop().let_go()
        while self.functions:
            self.functions.pop().let_go()
        self.__dict__.pop("factory", None)
        if "trt" in self.__dict__:
            self.__dict__.pop("trt").let_go()
        self.cuda.close()
