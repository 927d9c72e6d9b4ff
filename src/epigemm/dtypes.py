"""The dtype table: one row a type, with its size, its accumulator and each library's spelling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from epigemm import errors


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table.

    Args:
        name: the library's spelling, NumPy's where NumPy has the type ("float16", "float8_e4m3fn").
        short: for printing ("f16").
        bytes: size of one element.
        kind: "real", "complex", "narrow" (8-bit floats), "bits" (packed mask bytes) or "integer".
        accumulator: name of the type in which products and epilogues of this type are computed.
        cuda_type: cudaDataType's number, -1 where CUDA has none.
        cuda_name: spelling in CUDA C++.
        triton_name: spelling in `triton.language`, "" where it has none.
    """

    name: str
    short: str
    bytes: int
    kind: str
    accumulator: str
    cuda_type: int
    cuda_name: str
    triton_name: str

    def __str__(self) -> str:
        return self.short

    @property
    def is_complex(self) -> bool:
        return self.kind == "complex"

    @property
    def is_narrow(self) -> bool:
        return self.kind == "narrow"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (from ml_dtypes where NumPy has none)."""
        return _numpy_dtype(self.name)

    @property
    def acc(self) -> DType:
        """The row of the accumulator type."""
        return DTYPES[self.accumulator]


_ROWS = (
    # name, short, bytes, kind, accumulator, cudaDataType, CUDA C++, Triton
    DType("float16", "f16", 2, "real", "float32", 2, "__half", "float16"),
    DType("bfloat16", "bf16", 2, "real", "float32", 14, "__nv_bfloat16", "bfloat16"),
    DType("float32", "f32", 4, "real", "float32", 0, "float", "float32"),
    DType("float64", "f64", 8, "real", "float64", 1, "double", "float64"),
    DType("complex64", "c64", 8, "complex", "complex64", 4, "float2", ""),
    DType("complex128", "c128", 16, "complex", "complex128", 5, "double2", ""),
    DType("float8_e4m3fn", "e4m3", 1, "narrow", "float32", 28, "__nv_fp8_e4m3", "float8e4nv"),
    DType("float8_e5m2", "e5m2", 1, "narrow", "float32", 29, "__nv_fp8_e5m2", "float8e5"),
    DType("uint8", "u8", 1, "bits", "float32", 8, "unsigned char", "uint8"),
    DType("int32", "i32", 4, "integer", "float32", 10, "int", "int32"),
    DType("int64", "i64", 8, "integer", "float64", 24, "long long", "int64"),
)

DTYPES: dict[str, DType] = {row.name: row for row in _ROWS}
_BY_SHORT = {row.short: row for row in _ROWS}
_BY_CUDA = {row.cuda_type: row for row in _ROWS}

# What A, B, C and D may be; the others serve as epilogue inputs and outputs.
OPERAND_DTYPES = tuple(row.name for row in _ROWS if row.kind in ("real", "complex", "narrow"))


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def of(name: str | DType) -> DType:
    """The row for a name, long ("float16") or short ("f16").

    Raises:
        errors.DTypeError: no row has this name.

    Example:
        >>> of("bf16").acc.name
        'float32'
    """
    if isinstance(name, DType):
        return name
    row = DTYPES.get(name) or _BY_SHORT.get(name)
    if row is None:
        raise errors.DTypeError(f"The dtype {name!r} is not supported.\n  Known: {', '.join(DTYPES)}.")
    return row


def from_cuda(cuda_type: int) -> DType | None:
    """The row for a cudaDataType number, or None where this library has no such type."""
    return _BY_CUDA.get(int(cuda_type))
