"""The objects of TensorRT and CUDA that an open runner holds, and the order in which it lets go of them."""

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
    """Apart from the runner, which may be gone: GPU memory is no Python object, and would stay until the process ends.

    Attributes:
        cuda: the GPU, and all memory that was taken.
        trt: the engine, once it is open.
        factory: of contexts, once the engine is open.
        contexts: one for each profile.
        functions: other engines that run there.
        graphs: the recorded steps; None where none are.
        in_use: a call is under way.
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
        """Free everything, and keep compiled kernels for the next start.

        Nothing where a call is under way: the process ends, and a thread is left that does not. Nor in a fork: CUDA
        does not work there.
        """
        if self.in_use or os.getpid() != self._process:
            return
        with self.cuda.activated():
            try:
                # Where the GPU is lost, whoever ran the step that lost it knows; what is left is to let go.
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
        """Free what TensorRT holds, and then the memory that it is bound to."""
        while self.contexts:
            self.contexts.pop().let_go()
        while self.functions:
            self.functions.pop().let_go()
        self.__dict__.pop("factory", None)
        if "trt" in self.__dict__:
            self.__dict__.pop("trt").let_go()
        self.cuda.close()
