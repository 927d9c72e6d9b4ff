"""The workspace that comes from a user's allocator."""

from __future__ import annotations

from functools import partial
from typing import Any

from epigemm import errors
from epigemm.engines.cuda import libraries
from epigemm.options import BaseCUDAMemoryManagerAsync

_ADDRESSES = ("device_ptr", "device_pointer", "ptr", "pointer")
_ALIGNMENT_BYTES = 256


class Stream(int):
    """A raw stream as an allocator gets it: the number, under the names that the packages give it too."""

    @property
    def handle(self) -> int:
        return int(self)

    ptr = cuda_stream = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self)


class Workspace:
    """Buffers of an allocator, one for each device and stream, each grown when a launch needs more.

    An owner is dropped after the launches that use it are in their stream; the allocator frees in the order of the stream, as the ones of
    PyTorch and CuPy and `cudaFree` do. Belongs to one thread at a time.

    Args:
        allocator: a `BaseCUDAMemoryManager` or `BaseCUDAMemoryManagerAsync`.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self._kept: dict[tuple[int, int], tuple[int, int, Any]] = {}

    def take(self, index: int, stream: int, size_bytes: int) -> int:
        """The address of at least `size_bytes` bytes for launches on a stream; 0 under capture, where a graph has workspace of its own.

        Raises:
            errors.OptionError: the allocator returned something without an address, or one that is not aligned.
        """
        if libraries.open_driver().is_capturing(index, stream):
            return 0
        address, kept_bytes, _ = self._kept.get((index, stream), (0, 0, None))
        if kept_bytes < size_bytes:
            self._kept.pop((index, stream), None)
            if isinstance(self.allocator, BaseCUDAMemoryManagerAsync):
                owner = self.allocator.memalloc_async(size_bytes, Stream(stream))
            else:
                owner = self.allocator.memalloc(size_bytes)
            address = self._address(owner)
            self._kept[index, stream] = address, size_bytes, owner
        return address

    def on(self, index: int, stream: int) -> partial[int]:
        """`take` for one stream."""
        return partial(self.take, index, stream)

    def release(self) -> None:
        """Drops all buffers."""
        self._kept.clear()

    def _address(self, owner: Any) -> int:
        found = next((getattr(owner, name) for name in _ADDRESSES if hasattr(owner, name)), None)
        try:
            address = int(found or 0)
        except (TypeError, ValueError):
            address = 0
        if address <= 0 or address % _ALIGNMENT_BYTES:
            raise errors.wrong_workspace(self.allocator, found)
        return address
