"""Arrays that stay on the GPU: the results of an encoder's engine, which the decoder reads there."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from trt_kvcache.runtime.trt.cuda import Cuda

Array = np.ndarray[Any, np.dtype[Any]]


class DeviceBlock:
    """GPU memory that holds several arrays. When the last array is gone, its address is appended to `gone`.

    The owner of `gone` frees the memory later: an array may be collected in any thread and at any time, even while a
    CUDA graph is recorded.
    """

    def __init__(self, address: int, gone: deque[int]) -> None:
        self.address = address
        weakref.finalize(self, gone.append, address).atexit = False


class DeviceArray:
    """A read-only array on a GPU; ``numpy.asarray`` copies it.

    Args:
        home: the GPU and stream that it belongs to.
        block: the memory that holds it.
        offset: bytes from the start of `block`.
        shape: sizes.
        dtype: dtype of the elements.
        fetch: copies ``size`` bytes from an address to the host.

    Attributes:
        home, shape, dtype: as the arguments.
        address: address of the C-contiguous elements.
    """

    def __init__(
        self,
        home: Cuda,
        block: DeviceBlock,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        fetch: Callable[[int, int], Array],
    ) -> None:
        self.home, self.shape, self.dtype = home, shape, dtype
        self.address = block.address + offset
        self._block = block  # keeps the memory alive
        self._fetch = fetch

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array on a GPU cannot be seen from the host without a copy")
        array = self._fetch(self.address, self.nbytes).view(self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.shape)} on {self.home.name}>"
