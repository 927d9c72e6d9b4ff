"""Which arithmetic goes with which operands: compute and scale types, the result's dtype, alpha and beta, cuBLASLt's own table.

Source: the "Datatypes Supported" tables of cublasLtMatmul() in NVIDIA's cuBLAS manual, and `nvmath.linalg.advanced`.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from epigemm import dtypes, errors
from epigemm.dtypes import DType
from epigemm.enums import CudaDataType, MatmulComputeType

_C = MatmulComputeType
_R_16F, _R_16BF, _R_32F, _R_64F = CudaDataType.CUDA_R_16F, CudaDataType.CUDA_R_16BF, CudaDataType.CUDA_R_32F, CudaDataType.CUDA_R_64F
_C_32F, _C_64F = CudaDataType.CUDA_C_32F, CudaDataType.CUDA_C_64F

# ---------------------------------------------------------------- compute and scale types of a pair of operands


@dataclass(frozen=True, slots=True)
class ComputeRule:
    """What one pair of operand dtypes may be computed in.

    Args:
        scale: scale type that goes with `computes`, and the default.
        computes: allowed compute types; the first is the default.
        half: compute types that go with a float16 scale instead.
        aliases: compute types that mean the default for this pair, because its operands have that type already.
    """

    scale: CudaDataType
    computes: tuple[MatmulComputeType, ...]
    half: tuple[MatmulComputeType, ...] = ()
    aliases: tuple[MatmulComputeType, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[MatmulComputeType, CudaDataType], ...]:
        """Every allowed (compute type, scale type), the default first."""
        return (*((compute, self.scale) for compute in self.computes), *((compute, _R_16F) for compute in self.half))


_PLAIN = (_C.COMPUTE_32F, _C.COMPUTE_32F_PEDANTIC)
_SINGLE = (*_PLAIN, _C.COMPUTE_32F_FAST_16F, _C.COMPUTE_32F_FAST_16BF, _C.COMPUTE_32F_FAST_TF32, _C.COMPUTE_32F_EMULATED_16BFX9)
_DOUBLE = (_C.COMPUTE_64F, _C.COMPUTE_64F_PEDANTIC, _C.COMPUTE_64F_EMULATED_FIXEDPOINT)
_HALF = (_C.COMPUTE_16F, _C.COMPUTE_16F_PEDANTIC)

COMPUTE_RULES: dict[tuple[str, str], ComputeRule] = {
    ("float16", "float16"): ComputeRule(_R_32F, _PLAIN, half=_HALF, aliases=(_C.COMPUTE_32F_FAST_16F,)),
    ("bfloat16", "bfloat16"): ComputeRule(_R_32F, _PLAIN, aliases=(_C.COMPUTE_32F_FAST_16BF,)),
    ("float32", "float32"): ComputeRule(_R_32F, _SINGLE),
    ("complex64", "complex64"): ComputeRule(_C_32F, _SINGLE),
    ("float64", "float64"): ComputeRule(_R_64F, _DOUBLE),
    ("complex128", "complex128"): ComputeRule(_C_64F, _DOUBLE),
    ("float8_e4m3fn", "float8_e4m3fn"): ComputeRule(_R_32F, _PLAIN),
    ("float8_e4m3fn", "float8_e5m2"): ComputeRule(_R_32F, _PLAIN[:1]),
    ("float8_e5m2", "float8_e4m3fn"): ComputeRule(_R_32F, _PLAIN[:1]),
}
"""(dtype of A, dtype of B) -> what it may be computed in. Pairs that are not here are not computed."""

# The compute type that a scale type alone asks for. R_16BF leads to 32F, which no pair allows with it: an error that says so.
_COMPUTE_OF_SCALE = {
    _R_16F: _C.COMPUTE_16F,
    _R_16BF: _C.COMPUTE_32F,
    _R_32F: _C.COMPUTE_32F,
    _C_32F: _C.COMPUTE_32F,
    _R_64F: _C.COMPUTE_64F,
    _C_64F: _C.COMPUTE_64F,
}

_INTEGER_COMPUTE = (_C.COMPUTE_32I, _C.COMPUTE_32I_PEDANTIC)

# The peer names these types among its own and then refuses every product of them.
_KNOWN_UNPAIRED = ("complex32",)
_FOUR_BIT = ("float4_e2m1fn", "float4_e2m1fn_x2")


def _name(dtype: DType | str) -> str:
    return dtype.name if isinstance(dtype, DType) else dtype


def _shown(member: MatmulComputeType | CudaDataType) -> str:
    """A member as the peer's errors show it."""
    kind = "ComputeType" if isinstance(member, MatmulComputeType) else "CudaDataType"
    return f"<{kind}.{member.name}: {member.value}>"


def check_operand(name: str, dtype: DType | str) -> None:
    """Checks that operand `name` ("A", "B" or "C") has a dtype that products are computed in.

    Raises:
        errors.DTypeError: it has not; 4-bit types need a Blackwell GPU.
    """
    given = _name(dtype)
    if given in _FOUR_BIT:
        raise errors.needs_blackwell(f"Operand {name} of dtype {given}")
    if given not in dtypes.OPERAND_DTYPES and given not in _KNOWN_UNPAIRED:
        raise errors.unsupported_dtype(name, given, dtypes.OPERAND_DTYPES)


def compute_rule(a: DType | str, b: DType | str) -> ComputeRule:
    """The row of `COMPUTE_RULES` for A's and B's dtype.

    Raises:
        errors.DTypeError: one of them is not supported, or not with the other.
    """
    check_operand("A", a)
    check_operand("B", b)
    rule = COMPUTE_RULES.get((_name(a), _name(b)))
    if rule is None:
        raise errors.unsupported_dtypes(_name(a), _name(b))
    return rule


def resolve_compute(
    a: DType | str,
    b: DType | str,
    compute_type: MatmulComputeType | int | None = None,
    scale_type: CudaDataType | int | None = None,
) -> tuple[MatmulComputeType, CudaDataType]:
    """The compute type and the scale type of a product.

    The first of these that applies:
      1. both are given: they must be an allowed pair.
      2. only the scale type is given: the compute type that it asks for (float16 asks for COMPUTE_16F).
      3. only the compute type is given: the scale type that goes with it for these operands.
      4. neither: the pair's default, which for float32 uses no TF32.
    COMPUTE_32F_FAST_16F on float16 operands and COMPUTE_32F_FAST_16BF on bfloat16 ones mean COMPUTE_32F.

    Args:
        a, b: dtypes of A and B, as rows or names.
        compute_type, scale_type: what the options ask for, or None.

    Raises:
        errors.DTypeError: the operands' dtypes, or the types asked for, do not go together; the message lists what does.

    Example:
        >>> compute, scale = resolve_compute("float16", "float16", MatmulComputeType.COMPUTE_32F_FAST_16F)
        >>> compute.name, scale.name
        ('COMPUTE_32F', 'CUDA_R_32F')
    """
    rule = compute_rule(a, b)
    scale = None if scale_type is None else CudaDataType(scale_type)
    if scale is not None and scale not in _COMPUTE_OF_SCALE:
        raise errors.unsupported_scale_type(_shown(scale))
    if compute_type is None:
        compute = rule.computes[0] if scale is None else _COMPUTE_OF_SCALE[scale]
    else:
        compute = MatmulComputeType(compute_type)
    if compute in _INTEGER_COMPUTE:
        raise errors.unsupported_compute_type(_shown(compute))
    if compute in rule.aliases:
        compute = rule.computes[0]
    if scale is None:
        scale = _R_16F if compute in _HALF else rule.scale
    if (compute, scale) not in rule.pairs:
        allowed = (f"{c.name} with {s.name}" for c, s in rule.pairs)
        raise errors.unsupported_types(_shown(scale), _shown(compute), _name(a), _name(b), allowed)
    return compute, scale


# ---------------------------------------------------------------- dtypes of C and D


def result_dtypes(
    a: DType | str,
    c: DType | str | None = None,
    result_type: CudaDataType | int | None = None,
    *,
    inplace: bool = False,
) -> tuple[DType, DType]:
    """The dtypes of C and of D.

    D has `result_type`, else C's dtype, else A's. Without C, C counts as of D's dtype, or as float16 where D has 8 bits
    (what cuBLASLt is told; nothing of it is read). In place, D is C, and `result_type` is ignored with a warning.

    Args:
        a: dtype of A.
        c: dtype of C, or None where there is none.
        result_type: the option of this name.
        inplace: the option of this name.

    Raises:
        errors.DTypeError: C's or D's dtype is none that products are stored in, or is real where A is complex, or the reverse.

    Example:
        >>> [row.name for row in result_dtypes("float8_e4m3fn")]
        ['float16', 'float8_e4m3fn']
    """
    row_a = dtypes.of(a)
    row_c = None
    if c is not None:
        check_operand("C", c)
        row_c = dtypes.of(c)
    if inplace and result_type is not None:
        message = f"The provided result type {CudaDataType(result_type).name} in options is ignored since the operation is in-place."
        warnings.warn(message, errors.EpigemmWarning, stacklevel=2)
        result_type = None
    row_d = (row_c or row_a) if result_type is None else _result_row(CudaDataType(result_type), row_a)
    for name, row in (("C", row_c), ("D", row_d)):
        if row is not None and row.is_complex != row_a.is_complex:
            raise errors.unsupported_dtype(name, row.name, _same_kind(row_a))
    return row_c or (dtypes.of("float16") if row_d.is_narrow else row_d), row_d


def _result_row(result_type: CudaDataType, a: DType) -> DType:
    if result_type == CudaDataType.CUDA_R_4F_E2M1:
        raise errors.needs_blackwell(f"A result of type {result_type.name}")
    row = dtypes.from_cuda(result_type)
    if row is None or row.name not in dtypes.OPERAND_DTYPES or row.is_complex != a.is_complex:
        raise errors.unsupported_result_type(_shown(result_type), a.name)
    return row


def _same_kind(row: DType) -> Iterator[str]:
    return (name for name in dtypes.OPERAND_DTYPES if dtypes.of(name).is_complex == row.is_complex)


# ---------------------------------------------------------------- alpha and beta


def scale_dtype(scale_type: CudaDataType | int) -> str:
    """The name of a scale type's dtype, "float32" for CUDA_R_32F.

    Raises:
        errors.DTypeError: alpha and beta cannot be of this type.
    """
    scale = CudaDataType(scale_type)
    row = dtypes.from_cuda(scale)
    if scale not in _COMPUTE_OF_SCALE or row is None:
        raise errors.unsupported_scale_type(_shown(scale))
    return row.name


def scalar(value: Any, scale_type: CudaDataType | int, name: str) -> np.generic:
    """alpha or beta as a NumPy scalar of the scale type.

    Args:
        value: a number, a NumPy scalar, or a one-element array or tensor on the CPU.
        scale_type: what `resolve_compute` returned.
        name: "alpha" or "beta", for errors.

    Raises:
        errors.OptionError: it is no number, is complex where the scale type is real, overflows it, or lies on a GPU.

    Example:
        >>> scalar(2, CudaDataType.CUDA_R_32F, "alpha")
        np.float32(2.0)
    """
    return number(value, scale_dtype(scale_type), name)


def number(value: Any, dtype_name: str, name: str) -> np.generic:
    """A host number as a NumPy scalar of a dtype; `name` is what it is called in errors.

    Raises:
        errors.OptionError: as `scalar`.
    """
    dtype = dtypes.of(dtype_name).numpy
    found = python_number(value)
    if found is None or (isinstance(found, complex) and dtype.kind != "c"):
        raise errors.not_convertible(name, value, dtype_name)
    try:
        with np.errstate(over="ignore"):
            converted: np.generic = dtype.type(found)
    except (OverflowError, TypeError, ValueError):  # an int beyond float64
        raise errors.not_convertible(name, value, dtype_name) from None
    if _is_finite(found) and not _is_finite(complex(converted)):
        raise errors.not_convertible(name, value, dtype_name)
    return converted


def _is_finite(number: complex) -> bool:
    try:
        return math.isfinite(number.real) and math.isfinite(number.imag)
    except OverflowError:  # an int beyond float64
        return True


def python_number(value: Any) -> complex | None:
    """The Python number in `value`, or None where there is none to be had on the host."""
    if isinstance(value, (bool, int, float, complex)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        if value.size != 1 or not _is_numeric(value.dtype):
            return None
        number: complex = value.item() if value.dtype.kind in "biufc" else float(value.astype(np.float64).item())
        return number
    if isinstance(value, numbers.Number):  # Fraction, Decimal
        return float(value)  # type: ignore[arg-type]
    # A one-element tensor of another library. One on a GPU is refused: reading it would wait for the stream.
    item, device = getattr(value, "item", None), getattr(value, "device", "cpu")
    if item is None or not str(device).startswith("cpu"):
        return None
    try:
        number = item()
    except (RuntimeError, ValueError):  # more elements than one
        return None
    return number if isinstance(number, (bool, int, float, complex)) else None


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes' types are of kind "V" (or "f"): those that this library knows are numbers.
    return dtype.kind in "biufc" or dtype.name in dtypes.DTYPES


# ---------------------------------------------------------------- what cuBLASLt documents

_BF16, _F16, _F32, _F64 = "bfloat16", "float16", "float32", "float64"
_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"

# compute types, scale type, A and B, C and D, bias ("" where no epilog is supported).
_EQUAL_TYPES: tuple[tuple[tuple[MatmulComputeType, ...], CudaDataType, str, str, str], ...] = (
    (_HALF, _R_16F, _F16, _F16, _F16),
    (_PLAIN, _R_32F, _BF16, _BF16, _BF16),
    (_PLAIN, _R_32F, _F16, _F16, _F16),
    (_PLAIN, _R_32F, _BF16, _F32, _F32),
    (_PLAIN, _R_32F, _F16, _F32, _F32),
    (_SINGLE, _R_32F, _F32, _F32, _F32),
    (_SINGLE, _C_32F, "complex64", "complex64", ""),
    (_DOUBLE, _R_64F, _F64, _F64, _F64),
    (_DOUBLE, _C_64F, "complex128", "complex128", ""),
)

# FP8, compute type 32F and scale type R_32F alone: A, B, C, D, bias.
_E4M3_RESULTS = ((_BF16, _BF16, _BF16), (_BF16, _E4M3, _BF16), (_F16, _F16, _F16), (_F16, _E4M3, _F16), (_F32, _F32, _BF16))
_MIXED_RESULTS = (*_E4M3_RESULTS, (_BF16, _E5M2, _BF16), (_F16, _E5M2, _F16))
_FP8_RESULTS = {(_E4M3, _E4M3): _E4M3_RESULTS, (_E4M3, _E5M2): _MIXED_RESULTS, (_E5M2, _E4M3): _MIXED_RESULTS}

CublasLtTypes = tuple[MatmulComputeType, CudaDataType, str, str, str, str]
"""(compute type, scale type, dtypes of A, B, C and D)."""


def _cublaslt_rows() -> Iterator[tuple[CublasLtTypes, str]]:
    for computes, scale, ab, cd, bias in _EQUAL_TYPES:
        for compute in computes:
            yield (compute, scale, ab, ab, cd, cd), bias
    for (a, b), results in _FP8_RESULTS.items():
        for c, d, bias in results:
            yield (_C.COMPUTE_32F, _R_32F, a, b, c, d), bias


CUBLASLT_SUPPORTED: dict[CublasLtTypes, str] = dict(_cublaslt_rows())
"""What cuBLASLt documents as supported -> the dtype of a bias there, "" where it takes no epilog. The CPU engine takes any."""


def cublaslt_supports(compute: MatmulComputeType, scale: CudaDataType, a: str, b: str, c: str, d: str) -> bool:
    """Whether cuBLASLt documents this combination of types.

    Example:
        >>> cublaslt_supports(MatmulComputeType.COMPUTE_32F, CudaDataType.CUDA_R_32F, "bfloat16", "bfloat16", "float16", "float16")
        False
    """
    return (compute, scale, a, b, c, d) in CUBLASLT_SUPPORTED
