"""The seam to NumPy, PyTorch, CuPy and DLPack: a tensor becomes a `Tensor`, new tensors are allocated, streams are found.

Nothing else in the library knows these packages' classes. A package is loaded only when one of its tensors arrives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from epigemm import dtypes, errors, layouts
from epigemm.dtypes import DType
from epigemm.problem import Operand

CPU = "cpu"


@dataclass(slots=True)
class Tensor:
    """A user's tensor and what is known of it.

    Args:
        array: the user's object.
        library: "numpy", "torch", "cupy" or "dlpack": a row of `LIBRARIES`.
        device: "cpu" or "cuda:<index>".
        dtype: row of the dtype table.
        shape: as the user gave it.
        strides: in elements.
        pointer: address of the first element.
        conjugate: torch's lazy conjugate bit.
        copied: whether `array` is a copy of the user's, which could not be read in place: nothing may be written into it.
    """

    array: Any
    library: str
    device: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pointer: int
    conjugate: bool = False
    copied: bool = False

    @property
    def signature(self) -> tuple[object, ...]:
        """What of it decides a plan: everything but the address, of which the alignment counts, on a GPU."""
        align = 0 if self.device == CPU else self.alignment_bytes
        return self.library, self.device, self.dtype.name, self.shape, self.strides, align, self.conjugate

    @property
    def alignment_bytes(self) -> int:
        """Of every line; on a GPU at most 16, the widest access there is, so that plans fit all tensors that can be read so."""
        found = layouts.alignment_bytes(self.pointer, self.shape, self.strides, self.dtype.bytes)
        return found if self.device == CPU else min(found, 16)

    def operand(self) -> Operand:
        """The value that stands for it in a Problem; it must have at least two dimensions."""
        return Operand(self.dtype, self.shape, self.strides, self.alignment_bytes, self.conjugate)

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """The same memory from the same first element with another shape and strides (in elements)."""
        array = LIBRARIES[self.library].as_strided(self.array, shape, strides)
        return Tensor(array, self.library, self.device, self.dtype, shape, strides, self.pointer, self.conjugate)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A NumPy array over the same memory, the stored values (a lazy conjugate bit is not applied)."""
        return LIBRARIES[self.library].to_numpy(self.array)


@dataclass(frozen=True, slots=True)
class Library:
    """One array package.

    Args:
        wrap: (array, name for errors) -> Tensor.
        empty: (shape, strides in elements, dtype, device) -> new array, uninitialised.
        as_strided: (array, shape, strides in elements) -> view.
        to_numpy: array on the CPU -> NumPy view.
        from_numpy: NumPy array -> this package's array over the same memory.
        to_device: (NumPy array, device) -> a copy there.
        stream: device -> the raw handle of the caller's current stream; 0 on the CPU.
        on_stream: (device, raw handle or None) -> a context in which new arrays belong to that stream; None is the current one.
    """

    wrap: Callable[[Any, str], Tensor]
    empty: Callable[[tuple[int, ...], tuple[int, ...], DType, str], Any]
    as_strided: Callable[[Any, tuple[int, ...], tuple[int, ...]], Any]
    to_numpy: Callable[[Any], np.ndarray[Any, Any]]
    from_numpy: Callable[[np.ndarray[Any, Any]], Any]
    to_device: Callable[[np.ndarray[Any, Any], str], Any]
    stream: Callable[[str], int]
    on_stream: Callable[[str, int | None], AbstractContextManager[Any]]


def wrap(array: Any, name: str) -> Tensor:
    """What is known of a user's tensor, without copying it.

    Args:
        array: a NumPy array, a PyTorch tensor, a CuPy array, or an object with `__dlpack__`.
        name: the argument's name, for errors.

    Raises:
        errors.OperandTypeError: it is none of these.
        errors.DTypeError: its dtype has no row in the dtype table.
    """
    return LIBRARIES[library_of(array, name)].wrap(array, name)


def library_of(array: Any, name: str) -> str:
    """The row of `LIBRARIES` for a user's object."""
    if isinstance(array, np.ndarray):
        return "numpy"
    found = _library_of_class(type(array))  # type: ignore[arg-type]
    if not found:
        raise errors.unsupported_package(type(array).__module__.partition(".")[0], name)
    return found


@cache
def _library_of_class(cls: Any) -> str:
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("numpy", "torch", "cupy") and base.__name__ in ("ndarray", "Tensor"):
            return package
    return "dlpack" if hasattr(cls, "__dlpack__") and not issubclass(cls, np.generic) else ""


def _row(name: str, dtype: Any, what: str) -> DType:
    row = dtypes.DTYPES.get(name)
    if row is None:
        raise errors.unsupported_dtype(what, str(dtype))
    return row


# ---------------------------------------------------------------- NumPy


@cache
def _numpy_row(dtype: np.dtype[Any]) -> DType | None:
    return dtypes.DTYPES.get(dtype.name) if dtype.isnative else None


def _wrap_numpy(array: np.ndarray[Any, Any], name: str) -> Tensor:
    row = _numpy_row(array.dtype)
    if row is None:
        raise errors.unsupported_dtype(name, str(array.dtype))
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise errors.unsupported_package("numpy.ma", name)  # its mask would be passed over in silence
    size = row.bytes
    copied = any(s % size for s in array.strides)
    if copied:
        array = array.copy()  # a field of a structured array: its strides are no multiple of its size
    strides = tuple(s // size for s in array.strides)
    return Tensor(array, "numpy", CPU, row, array.shape, strides, array.__array_interface__["data"][0], False, copied)


def _empty_numpy(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: str) -> np.ndarray[Any, Any]:
    flat = np.empty(layouts.extent_bytes(shape, strides, 1)[1], dtype.numpy)
    return np.ndarray(shape, dtype.numpy, flat, 0, tuple(s * dtype.bytes for s in strides))


def _strided_numpy(array: np.ndarray[Any, Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if array.ndim == 1 and len(shape) == 2 and array.size in shape:
        return array[:, None] if shape[1] == 1 else array[None, :]  # as_strided takes eight times as long
    size = array.dtype.itemsize
    # as_strided knows neither float8_e5m2 nor float8_e4m3fn: they pass as bytes.
    carrier = array.view(np.uint8) if size == 1 else array
    view = np.lib.stride_tricks.as_strided(carrier, shape, tuple(s * size for s in strides))
    return view.view(array.dtype) if size == 1 else view


# ---------------------------------------------------------------- PyTorch


@cache
def _torch_dtypes() -> dict[Any, DType]:
    torch = sys.modules["torch"]
    return {getattr(torch, name): row for name, row in dtypes.DTYPES.items() if hasattr(torch, name)}


@cache
def torch_dtype(name: str) -> Any:
    """PyTorch's dtype of this name; torch is loaded."""
    return getattr(sys.modules["torch"], name)


def _wrap_torch(array: Any, name: str) -> Tensor:
    row = _torch_dtypes().get(array.dtype)
    if row is None:
        raise errors.unsupported_dtype(name, str(array.dtype).removeprefix("torch."))
    torch = sys.modules["torch"]
    if array.layout is not torch.strided or array.device.type not in (CPU, "cuda"):
        raise errors.unsupported_package(f"torch ({array.layout} on {array.device})", name)
    conjugate, negative = array.is_conj(), array.is_neg()
    if negative:
        array = array.resolve_neg()
    return Tensor(array, "torch", str(array.device), row, tuple(array.shape), array.stride(), array.data_ptr(), conjugate, negative)


def _empty_torch(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: str) -> Any:
    torch = sys.modules["torch"]
    return torch.empty_strided(shape, strides, dtype=torch_dtype(dtype.name), device=device)


# torch's numpy() knows neither bfloat16 nor fp8: they pass as integers of their size.
_TORCH_CARRIER = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def _numpy_of_torch(array: Any) -> np.ndarray[Any, Any]:
    row = _torch_dtypes()[array.dtype]
    array = array.detach()
    if array.is_conj():
        array = array.conj()
    carrier = _TORCH_CARRIER.get(row.name)
    if carrier is None:
        return array.numpy()  # type: ignore[no-any-return]
    return array.view(torch_dtype(carrier)).numpy().view(row.numpy)  # type: ignore[no-any-return]


def _torch_of_numpy(array: np.ndarray[Any, Any]) -> Any:
    import torch

    row = dtypes.DTYPES[array.dtype.name]
    carrier = _TORCH_CARRIER.get(row.name)
    if carrier is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(carrier)).view(torch_dtype(row.name))


def _torch_on_device(array: np.ndarray[Any, Any], device: str) -> Any:
    return _torch_of_numpy(array).to(device)


def _strided_torch(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return array.as_strided(shape, strides)


def _stream_torch(device: str) -> int:
    if device == CPU:
        return 0
    torch = sys.modules["torch"]
    return torch._C._cuda_getCurrentRawStream(int(device.partition(":")[2]))  # type: ignore[no-any-return]


def _on_stream_torch(device: str, stream: int | None) -> AbstractContextManager[Any]:
    if device == CPU or stream is None or stream == _stream_torch(device):
        return nullcontext()
    torch = sys.modules["torch"]
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- CuPy


def _wrap_cupy(array: Any, name: str) -> Tensor:
    row = _row(array.dtype.name, array.dtype, name)
    copied = any(s % row.bytes for s in array.strides)
    if copied:
        array = array.copy()
    strides = tuple(s // row.bytes for s in array.strides)
    return Tensor(array, "cupy", f"cuda:{array.device.id}", row, array.shape, strides, array.data.ptr, False, copied)


def _empty_cupy(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: str) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(int(device.partition(":")[2])):
        flat = cupy.empty(layouts.extent_bytes(shape, strides, 1)[1], dtype.numpy)
    return _strided_cupy(flat, shape, strides)


def _strided_cupy(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    size = array.dtype.itemsize
    return sys.modules["cupy"].lib.stride_tricks.as_strided(array, shape, tuple(s * size for s in strides))


def _numpy_of_cupy(array: Any) -> np.ndarray[Any, Any]:
    return sys.modules["cupy"].asnumpy(array)  # type: ignore[no-any-return]


def _cupy_on_device(array: np.ndarray[Any, Any], device: str) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(int(device.partition(":")[2])):
        return cupy.asarray(array)


def _stream_cupy(device: str) -> int:
    return sys.modules["cupy"].cuda.get_current_stream().ptr  # type: ignore[no-any-return]


def _on_stream_cupy(device: str, stream: int | None) -> AbstractContextManager[Any]:
    if stream is None or stream == _stream_cupy(device):
        return nullcontext()
    return sys.modules["cupy"].cuda.ExternalStream(stream, int(device.partition(":")[2]))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- DLPack

_DLPACK_CPU, _DLPACK_CUDA = 1, 2


def _wrap_dlpack(array: Any, name: str) -> Tensor:
    """A DLPack array on the CPU is read as NumPy's, on a GPU as torch's or CuPy's, whichever is loaded."""
    kind = array.__dlpack_device__()[0]
    if kind == _DLPACK_CPU:
        return wrap(_numpy_of_dlpack(array, name), name)
    package = next((p for p in ("torch", "cupy") if p in sys.modules), None)
    if kind != _DLPACK_CUDA or package is None:
        raise errors.unsupported_package(f"{type(array).__module__} (DLPack device type {kind})", name)
    return wrap(sys.modules[package].from_dlpack(array), name)


def _numpy_of_dlpack(array: Any, name: str) -> Any:
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError) as error:
        # NumPy's DLPack knows neither bfloat16 nor fp8 nor read-only exports; torch's does.
        if "torch" in sys.modules:
            return sys.modules["torch"].from_dlpack(array)
        raise errors.unsupported_package(f"{type(array).__module__} (DLPack: {error})", name) from error


def _unreachable(*_: Any) -> Any:
    raise AssertionError("no tensor of this library comes here: DLPack arrays become another's, NumPy's stay on the CPU, CuPy's on a GPU")


def _no_stream(device: str) -> int:
    return 0


def _any_stream(device: str, stream: int | None) -> AbstractContextManager[Any]:
    return nullcontext()


def _identity(array: Any) -> Any:
    return array


LIBRARIES: dict[str, Library] = {
    "numpy": Library(_wrap_numpy, _empty_numpy, _strided_numpy, _identity, _identity, _unreachable, _no_stream, _any_stream),
    "torch": Library(
        _wrap_torch, _empty_torch, _strided_torch, _numpy_of_torch, _torch_of_numpy, _torch_on_device, _stream_torch, _on_stream_torch
    ),
    "cupy": Library(_wrap_cupy, _empty_cupy, _strided_cupy, _numpy_of_cupy, _unreachable, _cupy_on_device, _stream_cupy, _on_stream_cupy),
    "dlpack": Library(_wrap_dlpack, *(_unreachable,) * 5, _no_stream, _any_stream),
}


def empty(like: Tensor, operand: Operand) -> Tensor:
    """A new, uninitialised tensor of `operand`'s shape, strides and dtype in the library and on the device of `like`."""
    array = LIBRARIES[like.library].empty(operand.shape, operand.strides, operand.dtype, like.device)
    return wrap(array, "result")


def check_writable(tensor: Tensor, name: str) -> None:
    """Raise unless what is written into `tensor` arrives in the user's object as it is.

    Raises:
        errors.LayoutError: it is read-only, lazily conjugated, was read through a copy, or is recorded by autograd.
    """
    if tensor.copied:
        raise errors.not_writable(name, "cannot be written in place (lazily negated, or its strides are no multiple of its element size)")
    if tensor.conjugate:
        raise errors.not_writable(name, "is lazily conjugated")
    if tensor.library == "numpy" and not tensor.array.flags.writeable:
        raise errors.not_writable(name, "is read-only")
    if tensor.library == "torch" and tensor.array.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise errors.not_writable(name, "requires grad, and autograd does not record what is written")


def mark_written(tensor: Tensor) -> None:
    """Tells autograd that a tensor has changed, so that a backward which needs its old values refuses."""
    if tensor.library == "torch" and not tensor.array.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor.array)


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have a byte in common. Where that is too hard to decide exactly, the answer is yes."""
    if x.device != y.device or 0 in x.shape or 0 in y.shape:
        return False
    (low_x, high_x), (low_y, high_y) = (
        tuple(t.pointer + offset for offset in layouts.extent_bytes(t.shape, t.strides, t.dtype.bytes)) for t in (x, y)
    )
    if high_x <= low_y or high_y <= low_x:
        return False
    try:
        return np.shares_memory(_addresses(x), _addresses(y), max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """An array interface over addresses that are never read: NumPy's overlap test needs nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.dtype.bytes
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "strides": tuple(s * size for s in tensor.strides),
            "typestr": f"|V{size}",
            "data": (tensor.pointer, True),
        }


def _addresses(tensor: Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(_Addresses(tensor))
