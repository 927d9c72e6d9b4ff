"""Compute types, result dtypes, alpha and beta, and what cuBLASLt documents."""

from __future__ import annotations

import decimal
import fractions
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from epigemm import compute_types, dtypes, errors
from epigemm.enums import CudaDataType, MatmulComputeType

DTYPES = dtypes.OPERAND_DTYPES
R_16F, R_16BF, R_32F, R_64F = CudaDataType.CUDA_R_16F, CudaDataType.CUDA_R_16BF, CudaDataType.CUDA_R_32F, CudaDataType.CUDA_R_64F
C_32F, C_64F = CudaDataType.CUDA_C_32F, CudaDataType.CUDA_C_64F

# The peer's own rule, restated apart from the module: compute types without COMPUTE_, by (A, B) and scale type.
ALLOWED: dict[tuple[str, str], dict[CudaDataType, str]] = {
    ("float16", "float16"): {R_16F: "16F 16F_PEDANTIC", R_32F: "32F 32F_PEDANTIC"},
    ("bfloat16", "bfloat16"): {R_32F: "32F 32F_PEDANTIC"},
    ("float32", "float32"): {R_32F: "32F 32F_PEDANTIC 32F_FAST_16F 32F_FAST_16BF 32F_FAST_TF32 32F_EMULATED_16BFX9"},
    ("complex64", "complex64"): {C_32F: "32F 32F_PEDANTIC 32F_FAST_16F 32F_FAST_16BF 32F_FAST_TF32 32F_EMULATED_16BFX9"},
    ("float64", "float64"): {R_64F: "64F 64F_PEDANTIC 64F_EMULATED_FIXEDPOINT"},
    ("complex128", "complex128"): {C_64F: "64F 64F_PEDANTIC 64F_EMULATED_FIXEDPOINT"},
    ("float8_e4m3fn", "float8_e4m3fn"): {R_32F: "32F 32F_PEDANTIC"},
    ("float8_e4m3fn", "float8_e5m2"): {R_32F: "32F"},
    ("float8_e5m2", "float8_e4m3fn"): {R_32F: "32F"},
}
# What we accept beyond it: the fast types that are the operands' own.
ALIASES = {("float16", "float16", "32F_FAST_16F"), ("bfloat16", "bfloat16", "32F_FAST_16BF")}


def _short(compute: MatmulComputeType) -> str:
    return compute.name.removeprefix("COMPUTE_")


@pytest.mark.parametrize(("a", "b"), list(itertools.product(DTYPES, repeat=2)))
def test_every_pair_with_every_compute_and_scale_type(a: str, b: str) -> None:
    allowed = ALLOWED.get((a, b), {})
    for compute, scale in itertools.product(MatmulComputeType, CudaDataType):
        direct = _short(compute) in allowed.get(scale, "").split()
        alias = (a, b, _short(compute)) in ALIASES and scale == R_32F
        if direct or alias:
            expected = MatmulComputeType.COMPUTE_32F if alias else compute
            assert compute_types.resolve_compute(a, b, compute, scale) == (expected, scale)
        else:
            with pytest.raises(errors.DTypeError):
                compute_types.resolve_compute(a, b, compute, scale)


@pytest.mark.parametrize(
    ("a", "b", "compute", "scale"),
    [
        ("float16", "float16", 68, 0),
        ("bfloat16", "bfloat16", 68, 0),
        ("float32", "float32", 68, 0),
        ("complex64", "complex64", 68, 4),
        ("float64", "float64", 70, 1),
        ("complex128", "complex128", 70, 5),
        ("float8_e4m3fn", "float8_e4m3fn", 68, 0),
        ("float8_e4m3fn", "float8_e5m2", 68, 0),
        ("float8_e5m2", "float8_e4m3fn", 68, 0),
    ],
)
def test_defaults(a: str, b: str, compute: int, scale: int) -> None:
    assert compute_types.resolve_compute(a, b) == (compute, scale)
    assert compute_types.resolve_compute(dtypes.of(a), dtypes.of(b)) == (compute, scale)


@pytest.mark.parametrize(
    ("a", "compute", "scale", "expected"),
    [
        ("float16", None, 2, (64, 2)),  # only a scale: it asks for a compute type
        ("float16", None, 0, (68, 0)),
        ("complex64", None, 4, (68, 4)),
        ("complex128", None, 5, (70, 5)),
        ("float16", 65, None, (65, 2)),  # only a compute type: its scale for these operands
        ("float16", 69, None, (69, 0)),
        ("complex64", 77, None, (77, 4)),
        ("float64", 79, None, (79, 1)),
        ("float16", 74, None, (68, 0)),  # fast types that are the operands' own
        ("bfloat16", 75, None, (68, 0)),
    ],
)
def test_one_given(a: str, compute: int | None, scale: int | None, expected: tuple[int, int]) -> None:
    assert compute_types.resolve_compute(a, a, compute, scale) == expected


@pytest.mark.parametrize(
    ("a", "b", "compute", "scale", "text"),
    [
        ("float16", "float32", None, None, "Unsupported combination of dtypes for operands A float16 and B float32."),
        ("float8_e5m2", "float8_e5m2", None, None, "Unsupported combination of dtypes for operands A float8_e5m2 and B float8_e5m2."),
        ("float8_e4m3fn", "float16", None, None, "Unsupported combination of dtypes for operands A float8_e4m3fn and B float16."),
        ("complex32", "complex32", None, None, "Unsupported combination of dtypes for operands A complex32 and B complex32."),
        ("int8", "int8", None, None, "The dtype of operand A (int8) is not supported."),
        ("float16", "int32", None, None, "The dtype of operand B (int32) is not supported."),
        ("uint8", "uint8", None, None, "The dtype of operand A (uint8) is not supported."),
        ("float16", "float16", 72, None, "Unsupported compute type. The compute type '<ComputeType.COMPUTE_32I: 72>' is currently not"),
        ("float16", "float16", None, 3, "Unsupported scale type. The data type '<CudaDataType.CUDA_R_8I: 3>' is currently not supported."),
        (
            "float16", "float16", 70, 1,
            ("Selected scale_type=<CudaDataType.CUDA_R_64F: 1> compute_type=<ComputeType.COMPUTE_64F: 70> are not supported for data "
             "types float16 (A) and float16 (B)."),
        ),
        ("float16", "float16", 75, None, "Selected scale_type="),  # a fast type that is not theirs
        ("bfloat16", "bfloat16", 74, None, "Selected scale_type="),
        ("bfloat16", "bfloat16", 77, None, "Selected scale_type="),
        ("bfloat16", "bfloat16", None, 14, "Selected scale_type=<CudaDataType.CUDA_R_16BF: 14>"),
        ("complex64", "complex64", None, 0, "Selected scale_type="),
        ("float4_e2m1fn_x2", "float4_e2m1fn_x2", None, None, "need a Blackwell GPU"),
    ],
)  # fmt: skip
def test_refusals(a: str, b: str, compute: int | None, scale: int | None, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        compute_types.resolve_compute(a, b, compute, scale)
    assert text in str(caught.value).splitlines()[0]


def test_a_refused_combination_names_the_allowed_ones() -> None:
    with pytest.raises(errors.DTypeError) as caught:
        compute_types.resolve_compute("float8_e4m3fn", "float8_e5m2", MatmulComputeType.COMPUTE_32F_PEDANTIC)
    assert "Supported for these: COMPUTE_32F with CUDA_R_32F." in str(caught.value)


# ---------------------------------------------------------------- C and D


@pytest.mark.parametrize(
    ("a", "c", "result_type", "expected"),
    [
        ("float16", None, None, ("float16", "float16")),
        ("float16", None, 0, ("float32", "float32")),
        ("bfloat16", "float16", None, ("float16", "float16")),  # the peer's rule: D follows C
        ("float16", "float32", 2, ("float32", "float16")),
        ("float8_e4m3fn", None, None, ("float16", "float8_e4m3fn")),
        ("float8_e5m2", None, None, ("float16", "float8_e5m2")),
        ("float8_e4m3fn", "bfloat16", None, ("bfloat16", "bfloat16")),
        ("float8_e4m3fn", "bfloat16", 29, ("bfloat16", "float8_e5m2")),
        ("float8_e4m3fn", None, 14, ("bfloat16", "bfloat16")),
        ("complex64", None, 5, ("complex128", "complex128")),
    ],
)
def test_result_dtypes(a: str, c: str | None, result_type: int | None, expected: tuple[str, str]) -> None:
    made = compute_types.result_dtypes(a, c, result_type)
    assert tuple(row.name for row in made) == expected


def test_inplace_ignores_the_result_type_with_a_warning() -> None:
    with pytest.warns(errors.EpigemmWarning, match="The provided result type CUDA_R_32F in options is ignored since the operation is"):
        c, d = compute_types.result_dtypes("float16", "float16", 0, inplace=True)
    assert (c.name, d.name) == ("float16", "float16")


@pytest.mark.parametrize(
    ("a", "c", "result_type", "text"),
    [
        ("float16", "int32", None, "The dtype of operand C (int32) is not supported."),
        ("float16", "complex64", None, "The dtype of operand C (complex64) is not supported."),
        ("complex64", "float32", None, "The dtype of operand C (float32) is not supported."),
        ("float16", None, 3, "The result type '<CudaDataType.CUDA_R_8I: 3>' is not supported for operands of dtype float16."),
        ("float16", None, 8, "The result type '<CudaDataType.CUDA_R_8U: 8>'"),
        ("float32", None, 4, "The result type '<CudaDataType.CUDA_C_32F: 4>'"),
        ("complex64", None, 0, "The result type '<CudaDataType.CUDA_R_32F: 0>'"),
        ("float8_e4m3fn", None, 33, "need a Blackwell GPU"),
    ],
)
def test_wrong_result_dtypes(a: str, c: str | None, result_type: int | None, text: str) -> None:
    with pytest.raises(errors.DTypeError) as caught:
        compute_types.result_dtypes(a, c, result_type)
    assert text in str(caught.value)


# ---------------------------------------------------------------- alpha and beta


@pytest.mark.parametrize(
    ("scale_type", "dtype"),
    [(R_16F, "float16"), (R_16BF, "bfloat16"), (R_32F, "float32"), (R_64F, "float64"), (C_32F, "complex64"), (C_64F, "complex128")],
)
def test_scalars_have_the_scale_types_dtype(scale_type: CudaDataType, dtype: str) -> None:
    assert compute_types.scale_dtype(scale_type) == dtype
    values: list[Any] = [
        1.5, np.float16(1.5), np.float64(1.5), np.array(1.5), np.array([[1.5]]), ml_dtypes.bfloat16(1.5),
        np.array([1.5], ml_dtypes.bfloat16), torch.tensor(1.5), torch.tensor([1.5], dtype=torch.bfloat16),
        fractions.Fraction(3, 2), decimal.Decimal("1.5"),
    ]  # fmt: skip
    for value in values:
        made = compute_types.scalar(value, scale_type, "alpha")
        assert made.dtype == dtypes.of(dtype).numpy
        assert made == 1.5
    for value in (True, 2, np.int64(2), 0):
        assert compute_types.scalar(value, scale_type, "beta") == int(value)


def test_complex_scalars() -> None:
    assert compute_types.scalar(1 + 2j, C_32F, "alpha") == np.complex64(1 + 2j)
    assert compute_types.scalar(np.complex64(1 - 2j), C_64F, "alpha") == 1 - 2j


def test_special_values_pass_and_are_rounded_once() -> None:
    assert np.isnan(compute_types.scalar(float("nan"), R_32F, "alpha"))
    assert compute_types.scalar(-np.inf, R_16F, "alpha") == -np.inf
    assert compute_types.scalar(0.1, R_32F, "alpha") == np.float32(0.1)


@pytest.mark.parametrize("value", ["1", None, b"1", [1.0], (1,), np.ones(2), np.array("1"), np.array([1], object), torch.ones(2), object()])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(errors.OptionError, match=r"The value provided for beta .* is not convertible to dtype 'float32'"):
        compute_types.scalar(value, R_32F, "beta")


def test_complex_for_a_real_scale_type() -> None:
    with pytest.raises(ValueError) as caught:
        compute_types.scalar(1 + 2j, R_32F, "alpha")
    assert str(caught.value).splitlines()[0] == "The value provided for alpha (1+2j) is not convertible to dtype 'float32'."


@pytest.mark.parametrize(("value", "scale_type"), [(1e39, R_32F), (70_000, R_16F), (10**400, R_64F), (complex(0, 1e39), C_32F)])
def test_overflow_is_refused(value: Any, scale_type: CudaDataType) -> None:
    with pytest.raises(errors.OptionError, match="not convertible"):
        compute_types.scalar(value, scale_type, "alpha")


def test_scalars_on_another_device_are_not_read() -> None:
    with pytest.raises(errors.OptionError, match="not convertible"):
        compute_types.scalar(torch.ones((), device="meta"), R_32F, "alpha")


@pytest.mark.parametrize("scale_type", [CudaDataType.CUDA_R_8I, CudaDataType.CUDA_C_16F, CudaDataType.CUDA_R_8F_E4M3])
def test_wrong_scale_types(scale_type: CudaDataType) -> None:
    with pytest.raises(errors.DTypeError, match="Unsupported scale type"):
        compute_types.scale_dtype(scale_type)


# ---------------------------------------------------------------- cuBLASLt's table


def test_cublaslt_table_has_no_row_that_the_library_refuses() -> None:
    for compute, scale, a, b, c, d in compute_types.CUBLASLT_SUPPORTED:
        assert (compute, scale) in compute_types.compute_rule(a, b).pairs
        result_type = dtypes.of(d).cuda_type
        assert [row.name for row in compute_types.result_dtypes(a, c, result_type)] == [c, d]


def test_cublaslt_table_has_a_row_for_every_default() -> None:
    for a, b in compute_types.COMPUTE_RULES:
        compute, scale = compute_types.resolve_compute(a, b)
        c, d = compute_types.result_dtypes(a)
        assert compute_types.cublaslt_supports(compute, scale, a, b, c.name, d.name), (a, b)


@pytest.mark.parametrize(
    ("compute", "scale", "a", "b", "c", "d", "bias"),
    [
        (68, 0, "bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        (68, 0, "float16", "float16", "float32", "float32", "float32"),
        (64, 2, "float16", "float16", "float16", "float16", "float16"),
        (77, 0, "float32", "float32", "float32", "float32", "float32"),
        (68, 4, "complex64", "complex64", "complex64", "complex64", ""),
        (68, 0, "float8_e4m3fn", "float8_e4m3fn", "float32", "float32", "bfloat16"),
        (68, 0, "float8_e5m2", "float8_e4m3fn", "float16", "float8_e5m2", "float16"),
        (68, 0, "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "float8_e5m2", None),
        (69, 0, "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "bfloat16", None),
        (68, 0, "bfloat16", "bfloat16", "float16", "float16", None),
        (68, 0, "float16", "float16", "float32", "float16", None),
        (64, 2, "float16", "float16", "float32", "float32", None),
    ],
)
def test_cublaslt_rows(compute: int, scale: int, a: str, b: str, c: str, d: str, bias: str | None) -> None:
    key = (MatmulComputeType(compute), CudaDataType(scale), a, b, c, d)
    assert compute_types.cublaslt_supports(*key) is (bias is not None)
    assert compute_types.CUBLASLT_SUPPORTED.get(key) == bias


def test_cublaslt_table_size() -> None:
    # Rows of the manual's tables: 2 half, 2 x 4 mixed single, 6 + 6 single, 3 + 3 double; FP8 5 + 7 + 7.
    assert len(compute_types.CUBLASLT_SUPPORTED) == 2 + 8 + 12 + 6 + 19
