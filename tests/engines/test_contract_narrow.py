"""Contracts on 8-bit operands and results: scales, saturation, amax, and the dtype that a cast gives an output."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm.options import CudaDataType
from epigemm.testing import numeric
from epigemm.testing.formats import rounded
from epigemm.testing.reference import Product, evaluate

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]


def operands(rng: np.random.Generator, kind_a: Any, kind_b: Any) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(17, 48)).astype(kind_a), rng.normal(size=(48, 9)).astype(kind_b)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "x".join(x.__name__ for x in p))
@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales_multiply_operands_and_result(library: Any, pair: tuple[Any, Any], as_tensor: bool) -> None:
    """D = d * epilog(alpha * (a * A) @ (b * B) + beta * (c * C)), rounded once."""
    rng = np.random.default_rng(0)
    a, b = operands(rng, *pair)
    c = rng.normal(size=(17, 9)).astype(E4M3)
    scales = {"a": 0.5, "b": 3.0, "c": 2.0, "d": 0.0625}
    given = {k: library.of(np.array([v], "f4")) if as_tensor else v for k, v in scales.items()}
    options = {"result_type": CudaDataType.CUDA_R_8F_E4M3}
    d = eg.matmul(
        library.of(a), library.of(b), library.of(c), alpha=2.0, beta=0.5, epilog="relu", quantization_scales=given, options=options
    )
    product = Product(a, (b,), c, 2.0, 0.5, scale_ab=1.5, scale_c=2.0, scale_d=0.0625, d_dtype="float8_e4m3fn")
    numeric.assert_close(library.numpy(d), evaluate(product, "relu")[0].bounded, "float8_e4m3fn", "d")


@pytest.mark.parametrize(("result", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_results_saturate_and_nan_stays_nan(library: Any, result: Any, largest: float) -> None:
    a = np.array([[400.0], [-400.0], [np.nan], [1.0]]).astype(E4M3)
    b = np.array([[400.0, 1.0]]).astype(E4M3)
    name = np.dtype(result).name
    kind = CudaDataType.CUDA_R_8F_E4M3 if result is E4M3 else CudaDataType.CUDA_R_8F_E5M2
    scales = {"a": 1.0, "b": 1.0, "d": 1.0}
    d = library.numpy(eg.matmul(library.of(a), library.of(b), quantization_scales=scales, options={"result_type": kind})).astype(float)
    wide = a.astype(float) @ b.astype(float)
    assert np.array_equal(d, rounded(wide, name), equal_nan=True)
    assert d[0, 0] == largest
    assert d[1, 0] == -largest
    assert np.isnan(d[2]).all()


def test_amax_is_of_the_result_before_its_scale(library: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = operands(rng, E4M3, E4M3)
    options = {"result_type": CudaDataType.CUDA_R_8F_E4M3, "result_amax": True}
    scales = {"a": 1.0, "b": 1.0, "d": 0.125}
    _, extra = eg.matmul(library.of(a), library.of(b), quantization_scales=scales, options=options)
    amax = library.numpy(extra["result_amax"])
    assert amax.shape == (1,)
    assert amax.dtype == np.float32
    plain = evaluate(Product(a, (b,)), None)[0].bounded
    largest = np.abs(plain.value).max()
    assert abs(amax[0] - largest) <= plain.error.max()


def test_an_eight_bit_gelu_aux_has_its_own_scale_and_amax(library: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = operands(rng, E4M3, E4M3)
    preferences = {"epilog": {"aux_type": CudaDataType.CUDA_R_8F_E4M3, "aux_amax": True}}
    options = {"result_type": CudaDataType.CUDA_R_16F}
    inputs = {"aux_quantization_scale": library.of(np.array(2.0, "f4"))}
    d, extra = eg.matmul(
        *(library.of(x) for x in (a, b)),
        epilog="gelu_aux",
        epilog_inputs=inputs,
        preferences=preferences,
        options=options,
        quantization_scales={"a": 0.25, "b": 1.0},
    )
    product = Product(a, (b,), scale_ab=0.25, d_dtype="float16")
    gelu, aux = evaluate(product, "gelu_aux")
    numeric.assert_close(library.numpy(d), gelu.bounded, "float16", "d")
    doubled = type(aux.bounded)(2 * aux.bounded.value, 2 * aux.bounded.error)
    numeric.assert_close(library.numpy(extra["gelu_aux"])[:17], doubled, "float8_e4m3fn", "gelu_aux")
    largest = np.abs(aux.bounded.value).max()
    assert abs(library.numpy(extra["gelu_aux_amax"])[0] - largest) <= aux.bounded.error.max()


def test_scales_are_required_for_eight_bits_and_refused_else(library: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = map(library.of, operands(rng, E4M3, E4M3))
    with pytest.raises(ValueError, match="Scales are required for narrow-precision"):
        eg.matmul(a, b)
    with pytest.raises(ValueError, match="Scale for D is not specified"):
        eg.matmul(a, b, quantization_scales={"a": 1.0, "b": 1.0})
    plain = library.of(np.ones((2, 2), "f4"))
    with pytest.raises(ValueError, match="not supported for D"):
        eg.matmul(plain, plain, quantization_scales={"d": 1.0})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_cast_as_the_root_decides_ds_dtype(library: Any, dtype: str) -> None:
    a, b = library.of(np.full((2, 1), 1 / 3, "f4")), library.of(np.ones((1, 3), "f4"))
    d = library.numpy(eg.matmul(a, b, epilog=lambda acc: eg.cast(acc, dtype)))
    assert d.dtype.name == dtype
    assert np.array_equal(d.astype(float), rounded(np.full((2, 3), float(np.float32(1 / 3))), dtype))


def test_a_cast_inside_rounds_and_saturates(library: Any) -> None:
    a, b = library.of(np.array([[500.0], [-1e6], [np.nan], [1.06]], "f4")), library.of(np.ones((1, 1), "f4"))
    d = library.numpy(eg.matmul(a, b, epilog=lambda acc: eg.cast(acc, "float8_e4m3fn") + 1000.0)).ravel()
    assert np.array_equal(d, np.array([1448.0, 552.0, np.nan, 1001.0], "f4"), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_eager_rounding_rounds_where_an_unfused_model_stores(library: Any, dtype: str) -> None:
    """linear with bias is one step, then each activation and each product is one."""
    kind = getattr(ml_dtypes, dtype, dtype)
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (33, 20)).astype(kind), rng.integers(-3, 4, (20, 17)).astype(kind)
    bias, r = (rng.normal(size=s).astype(kind) for s in ((1, 17), (33, 17)))
    epilog = lambda acc, bias, r: eg.relu(acc + bias) * r + r
    inputs = {"bias": library.of(bias), "r": library.of(r)}
    given = {"epilog": epilog, "epilog_inputs": inputs}
    eager = library.numpy(eg.matmul(library.of(a), library.of(b), **given, options={"rounding": "eager"})).astype(float)
    wide = [x.astype(float) for x in (a, b, bias, r)]
    linear = rounded(rounded(wide[0] @ wide[1] + wide[2], "float32"), dtype)
    product = rounded(np.maximum(linear, 0) * wide[3], dtype)
    assert np.array_equal(eager, rounded(product + wide[3], dtype))
    once = library.numpy(eg.matmul(library.of(a), library.of(b), **given)).astype(float)
    assert not np.array_equal(eager, once)


def test_simplification_does_not_change_what_is_stored(library: Any) -> None:
    """cast(x) * 1.0 is no cast at the root, and operand_sum * 1.0 no operand sum: D's dtype holds for both."""
    a, b = library.of(np.full((2, 3), 0.1, ml_dtypes.bfloat16)), library.of(np.ones((3, 4), ml_dtypes.bfloat16))
    epilog = lambda acc: eg.outputs(eg.cast(acc, "float16") * 1.0, s=eg.operand_sum("a") * 1.0, c=eg.cast(acc, "float32") / 1.0)
    d, extra = eg.matmul(a, b, epilog=epilog)
    assert [library.numpy(x).dtype.name for x in (d, extra["s"], extra["c"])] == ["bfloat16"] * 3


def test_simplification_does_not_change_an_outputs_shape(library: Any) -> None:
    """where(c, x, x) has c's extent too."""
    a, b = library.of(np.ones((2, 3), "f4")), library.of(np.ones((3, 4), "f4"))
    epilog = lambda acc, x: eg.outputs(acc, same=eg.where(acc > 1.0, x, x))
    _, extra = eg.matmul(a, b, epilog=epilog, epilog_inputs={"x": library.of(np.array([[1.0], [2.0]], "f4"))})
    assert library.numpy(extra["same"]).tolist() == [[1.0] * 4, [2.0] * 4]
