"""Operands on the CPU computed on a GPU: `MatmulOptions(device_id=...)` copies them there and the results back.

It needs neither PyTorch nor CuPy: the compiled core allocates and copies.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from epigemm import dtypes, errors, layouts, tensors
from epigemm.arguments import Arguments
from epigemm.dtypes import DType
from epigemm.engines.cuda import libraries
from epigemm.tensors import Library, Tensor

DEVICE = "device"


class Memory:
    """Device memory of our own, freed with the last array over it."""

    __slots__ = ("__weakref__", "address", "index")

    def __init__(self, index: int, size_bytes: int) -> None:
        core = libraries.open_driver()
        self.index = index
        self.address: int = core.allocate(index, max(size_bytes, 1))
        weakref.finalize(self, core.free, index, self.address)


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A strided array on a GPU; strides in elements, dense in some order of its axes."""

    memory: Memory
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Elements from the first to one past the last."""
        return layouts.extent_bytes(self.shape, self.strides, 1)[1]


def _wrap(array: DeviceArray, name: str) -> Tensor:
    return Tensor(array, DEVICE, f"cuda:{array.memory.index}", array.dtype, array.shape, array.strides, array.memory.address)


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: str) -> DeviceArray:
    span = layouts.extent_bytes(shape, strides, 1)[1]
    return DeviceArray(Memory(int(device.partition(":")[2]), span * dtype.bytes), dtype, shape, strides)


def _as_strided(array: DeviceArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
    return replace(array, shape=shape, strides=strides)


def _to_numpy(array: DeviceArray) -> np.ndarray[Any, Any]:
    """A copy on the host; waits for the device's work."""
    core = libraries.open_driver()
    flat = np.empty(array.span, array.dtype.numpy)
    core.copy(array.memory.index, flat.ctypes.data, array.memory.address, flat.nbytes)
    core.synchronize(array.memory.index)
    return np.ndarray(array.shape, array.dtype.numpy, flat, 0, tuple(s * array.dtype.bytes for s in array.strides))


def _to_device(array: np.ndarray[Any, Any], device: str) -> DeviceArray:
    dense = array.copy(order="K")  # keeps the order of the axes; broadcast and negative strides become dense
    row = dtypes.DTYPES[dense.dtype.name]
    found = _empty(dense.shape, tuple(s // row.bytes for s in dense.strides), row, device)
    core = libraries.open_driver()
    core.copy(found.memory.index, found.memory.address, dense.ctypes.data, dense.nbytes)
    core.synchronize(found.memory.index)  # `dense` may go
    return found


def _no_host_memory(array: Any) -> Any:
    raise AssertionError("memory of a GPU is no host array's")


def _default_stream(device: str) -> int:
    return 0


def _any_stream(device: str, stream: int | None) -> AbstractContextManager[Any]:
    return nullcontext()  # memory is given back when the host has waited for its use


tensors.LIBRARIES[DEVICE] = Library(_wrap, _empty, _as_strided, _to_numpy, _no_host_memory, _to_device, _default_stream, _any_stream)


def to_device(arguments: Arguments, index: int) -> Arguments:
    """The arguments with every tensor copied to a GPU.

    Args:
        arguments: tensors on the CPU.
        index: the device.
    """

    count = libraries.open_driver().device_count()
    if index >= count:
        raise errors.engine_unavailable("cuda", f"there is no GPU {index}; the driver finds {count}", "Take one of those.")

    def moved(tensor: Tensor) -> Tensor:
        array = tensor.numpy().conj() if tensor.conjugate else tensor.numpy()
        return _wrap(_to_device(array, f"cuda:{index}"), "operand")

    scales = {name: _host_scale(value) for name, value in vars(arguments.scales).items()}
    return replace(
        arguments,
        a=moved(arguments.a),
        b=tuple(moved(b) for b in arguments.b),
        c=None if arguments.c is None else moved(arguments.c),
        out=None if arguments.out is None else moved(arguments.out),
        inputs={name: moved(tensor) for name, tensor in arguments.inputs.items()},
        scales=replace(arguments.scales, **scales),
    )


def _host_scale(value: Any) -> Any:
    return float(tensors.wrap(value, "scale").numpy().reshape(())) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def to_host(result: Any, original: Arguments, *, inplace: bool, stream: int = 0) -> Any:
    """What `Prepared.execute` returned on a stream, copied into arrays of the user's package, D into `out` or C where asked for."""
    d, extras = result if isinstance(result, tuple) else (result, None)
    libraries.open_driver().synchronize(d.memory.index, stream)  # the copies are on the default stream, which waits for no other
    target = original.c if inplace else original.out
    back = tensors.LIBRARIES[original.a.library].from_numpy
    if target is None:
        host = back(_to_numpy(d))
    else:
        target.numpy()[...] = _to_numpy(d)
        host = target.array
    return host if extras is None else (host, {name: back(_to_numpy(array)) for name, array in extras.items()})
