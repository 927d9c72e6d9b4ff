"""Cases on a GPU: guarded tensors copied there with their gaps, their memory checked afterwards, and the bounds of tensor cores.

copies = Copies("torch", "cuda:0", out=mode == "out")
run_case(case, "cublaslt", mode=mode, moved=copies, corrupt=copies.check, arithmetic=tensor_cores(case))
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epigemm import layouts
from epigemm.testing import conformance
from epigemm.testing.bounded import Arithmetic
from epigemm.testing.cases import NARROW, Case
from epigemm.testing.formats import Array

CANARY_BYTE = 0x5A
GUARD_BYTES = 512


@dataclass(slots=True)
class _Copy:
    """One tensor on the device.

    Args:
        raw: its buffer there, a 1-D array of bytes.
        start: where the copied bytes begin.
        before: the bytes that were copied.
        address: where they came from on the host.
    """

    raw: Any
    start: int
    before: Array
    address: int


@dataclass(slots=True)
class Copies:
    """Makes a device's tensors of NumPy arrays, with their strides and the bytes between their elements, and checks their memory.

    Args:
        library: "torch" or "cupy".
        device: as PyTorch names it.
        out: whether the last array is to be written: its bytes go back to the host when they are checked.
    """

    library: str = "torch"
    device: str = "cuda:0"
    out: bool = False
    copies: list[_Copy] = field(default_factory=list)

    def __call__(self, array: Array) -> Any:
        size = array.itemsize
        strides = tuple(s // size for s in array.strides)
        low, high = layouts.extent_bytes(array.shape, strides, size)
        pointer = array.__array_interface__["data"][0]
        before = np.frombuffer(ctypes.string_at(pointer + low, high - low), np.uint8)
        host = np.full(2 * GUARD_BYTES + 256 + before.size, CANARY_BYTE, np.uint8)
        raw = self._upload(host)
        start = GUARD_BYTES + (pointer + low - self._address(raw)) % 256
        host[start : start + before.size] = before
        self._write(raw, host)
        self.copies.append(_Copy(raw, start, before, pointer + low))
        return self._view(raw, start - low, array, strides)

    def check(self, outputs: dict[str, Array]) -> None:
        """Asserts that nothing but what was to be written has changed; fits `run_case(corrupt=)`.

        Raises:
            AssertionError: a byte around a tensor, or of an operand, has changed.
        """
        for index, copy in enumerate(self.copies):
            host = self._download(copy.raw)
            end = copy.start + copy.before.size
            outside = np.concatenate((host[: copy.start], host[end:]))
            if (outside != CANARY_BYTE).any():
                raise AssertionError(f"{int((outside != CANARY_BYTE).sum())} bytes around tensor {index} of the call were written")
            found = np.ascontiguousarray(host[copy.start : end])
            if self.out and index == len(self.copies) - 1:
                ctypes.memmove(copy.address, found.ctypes.data, found.size)
            elif (found != copy.before).any():
                raise AssertionError(f"{int((found != copy.before).sum())} bytes of tensor {index} of the call have changed")

    def _upload(self, host: Array) -> Any:
        if self.library == "cupy":
            import cupy

            return cupy.asarray(host)
        import torch

        return torch.from_numpy(host).clone().to(self.device)

    def _write(self, raw: Any, host: Array) -> None:
        if self.library == "cupy":
            raw.set(host)
        else:
            raw.copy_(self._upload(host))

    def _download(self, raw: Any) -> Array:
        return np.asarray(raw.get() if self.library == "cupy" else raw.cpu().numpy())

    def _address(self, raw: Any) -> int:
        return int(raw.data.ptr if self.library == "cupy" else raw.data_ptr())

    def _view(self, raw: Any, first: int, array: Array, strides: tuple[int, ...]) -> Any:
        if self.library == "cupy":
            import cupy

            return cupy.ndarray(array.shape, array.dtype, raw.data + first, array.strides)
        import torch

        view = torch.empty((), dtype=getattr(torch, array.dtype.name), device=raw.device)
        return view.set_(raw.untyped_storage(), first // array.itemsize, array.shape, strides)


# An 8-bit product is accumulated with about 13 bits between promotions; cuBLASLt's GELU is within 5.3e-6 of the tanh form
# (both measured on an H200, see results/).
_NARROW_SUM_UNIT = 2.0**-13
_GELU_UNITS = 128.0


def tensor_cores(case: Case) -> Arithmetic:
    """The arithmetic of cuBLASLt on tensor cores, which truncate, for a case."""
    plain = conformance.arithmetic_of(case)
    product_unit = plain.product_unit
    if case.epilogue.startswith("DGELU") and case.stored_dtype in ("float16", "bfloat16"):
        # It may round the product to D's dtype first: `engines/cublaslt/epilogs.DEVIATIONS`.
        product_unit = max(product_unit, 2.0**-11 if case.stored_dtype == "float16" else 2.0**-8)
    sum_unit = _NARROW_SUM_UNIT if case.dtype in NARROW else plain.sum_unit
    units = _GELU_UNITS if "GELU" in case.epilogue.upper() else plain.function_units
    return Arithmetic(plain.accumulator, units, product_unit, sum_unit, to_nearest=False)
