"""Contracts on values: what is computed, what is read, and what special values become."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm.testing import numeric
from epigemm.testing.placing import place
from epigemm.testing.reference import Product, evaluate

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


@pytest.mark.parametrize("dtype", DTYPES)
def test_twelve(library: Any, dtype: str) -> None:
    """alpha * ab + beta * c + bias with ab = 2, alpha = 0.5, c = 4, beta = 0.25, bias = 10."""
    kind = DTYPES[dtype]
    a, b = np.ones((3, 2), kind), np.ones((2, 5), kind)
    c, bias = np.full((3, 5), 4, kind), np.full((3, 1), 10, kind)
    a, b, c, bias = map(library.of, (a, b, c, bias))
    d = eg.matmul(a, b, c, alpha=0.5, beta=0.25, epilog="bias", epilog_inputs={"bias": bias})
    assert library.numpy(d).astype(float).tolist() == [[12.0] * 5] * 3
    row = library.of(np.full(5, 10, kind))
    d = eg.matmul(a, b, c, alpha=0.5, beta=0.25, epilog=lambda acc, bias: acc + bias, epilog_inputs={"bias": row})
    assert library.numpy(d).astype(float).tolist() == [[12.0] * 5] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (3, 1), (1, 5)])
def test_beta_zero_does_not_read_c(library: Any, dtype: str, shape: tuple[int, int]) -> None:
    kind = DTYPES[dtype]
    a, b, c = np.ones((3, 2), kind), np.ones((2, 5), kind), np.full(shape, np.nan, kind)
    d = eg.matmul(*map(library.of, (a, b, c)), beta=0.0)
    assert library.numpy(d).astype(float).tolist() == [[2.0] * 5] * 3
    d = eg.matmul(*map(library.of, (a, b, c)), beta=0, epilog="relu")
    assert library.numpy(d).astype(float).tolist() == [[2.0] * 5] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_alpha_zero_reads_neither_a_nor_b(library: Any, dtype: str) -> None:
    kind = DTYPES[dtype]
    a, b = np.full((3, 2), np.nan, kind), np.full((2, 5), np.inf, kind)
    c = np.full((3, 5), 3, kind)
    d = eg.matmul(*map(library.of, (a, b, c)), alpha=0.0, beta=2.0)
    assert library.numpy(d).astype(float).tolist() == [[6.0] * 5] * 3
    assert not library.numpy(eg.matmul(library.of(a), library.of(b), alpha=0)).astype(float).any()


@pytest.mark.parametrize("epilog", ["bias", "relu_bias", "gelu_bias", "relu_aux_bias"])
@pytest.mark.parametrize("bias_dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bias_of_another_dtype(library: Any, dtype: str, bias_dtype: str, epilog: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(6, 8)).astype(DTYPES[dtype]), rng.normal(size=(8, 5)).astype(DTYPES[dtype])
    # Not a number of the narrow types: a bias first rounded to D's dtype would show.
    bias = (1000 + rng.normal(size=(6, 1))).astype(DTYPES[bias_dtype])
    result = eg.matmul(library.of(a), library.of(b), epilog=epilog, epilog_inputs={"bias": library.of(bias)}, options={"result_type": 0})
    d = result[0] if isinstance(result, tuple) else result
    expected = evaluate(Product(a, (b,), inputs={"bias": bias}, order="col"), epilog)[0]
    numeric.assert_close(library.numpy(d), expected.bounded, "float32", f"{epilog} with a {bias_dtype} bias")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("epilog", ["BIAS", "user"])
@pytest.mark.parametrize("at", ["start", "end"])
def test_bias_at_the_edge_of_a_guarded_buffer(library: Any, dtype: str, epilog: str, at: str) -> None:
    """One element past either end is NaN: it must not be read, however wide the loads are."""
    m, n = 37, 23
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(m, 4)).astype("f4"), rng.normal(size=(4, n)).astype("f4")
    values = rng.normal(size=m if epilog == "BIAS" else n).astype(getattr(ml_dtypes, dtype, dtype))
    whole = np.full(values.size + 1, np.nan, values.dtype)
    bias = whole[:-1] if at == "end" else whole[1:]
    bias[...] = values
    guard = place(values)
    function = eg.MatmulEpilog.BIAS if epilog == "BIAS" else (lambda acc, bias: acc + bias)
    placed = values[:, None] if epilog == "BIAS" else values[None, :]
    expected = evaluate(Product(a, (b,), inputs={"bias": placed}), "bias")[0]
    for own in (bias, guard.array):
        d = eg.matmul(library.of(a), library.of(b), epilog=function, epilog_inputs={"bias": library.of(own)})
        numeric.assert_close(library.numpy(d), expected.bounded, "float32", "d")
    guard.assert_intact("bias")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilog", ["relu", "relu_aux", "user"])
def test_relu_of_nan_is_nan(library: Any, dtype: str, epilog: str) -> None:
    a = np.array([[np.nan], [-1.0], [2.0], [-np.inf], [np.inf]], DTYPES[dtype])
    one = np.ones((1, 2), DTYPES[dtype])
    result = eg.matmul(library.of(a), library.of(one), epilog=(lambda acc: eg.relu(acc)) if epilog == "user" else epilog)
    d = library.numpy(result[0] if isinstance(result, tuple) else result).astype(float)
    assert np.array_equal(d, [[np.nan] * 2, [0, 0], [2, 2], [0, 0], [np.inf] * 2], equal_nan=True)
    if epilog == "relu_aux":
        mask = library.numpy(result[1]["relu_aux"])
        assert [mask[0, 0] >> i & 1 for i in range(5)] == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish", "hardswish"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_units_at_the_infinities(name: str, dtype: str) -> None:
    function = {
        "gelu": lambda acc: eg.gelu(acc),
        "gelu_tanh": lambda acc: eg.gelu(acc, approximate="tanh"),
        "silu": lambda acc: eg.silu(acc),
        "mish": lambda acc: eg.mish(acc),
        "hardswish": lambda acc: eg.hardswish(acc),
    }[name]
    a = np.array([[-np.inf], [np.inf], [np.nan], [-1e4]], DTYPES[dtype])
    d = eg.matmul(a, np.ones((1, 1), DTYPES[dtype]), epilog=function).astype(float).ravel()
    assert np.array_equal(d, [0, np.inf, np.nan, 0], equal_nan=True)


def test_gelu_means_what_was_written() -> None:
    """The predefined epilogs mean the tanh form, a user's gelu() the erf form; at 2.7 they differ by 4e-4."""
    x = np.array([[2.7]])
    one = np.ones((1, 1))
    erf = 1.35 * (1 + math.erf(2.7 / math.sqrt(2)))
    tanh = 1.35 * (1 + math.tanh(math.sqrt(2 / math.pi) * (2.7 + 0.044715 * 2.7**3)))
    assert abs(erf - tanh) > 4e-4
    assert eg.matmul(x, one, epilog="gelu")[0, 0] == pytest.approx(tanh, abs=1e-14)
    assert eg.matmul(x, one, epilog=lambda acc: eg.gelu(acc))[0, 0] == pytest.approx(erf, abs=1e-14)
    assert eg.matmul(x, one, epilog=lambda acc: eg.gelu(acc, approximate="tanh"))[0, 0] == pytest.approx(tanh, abs=1e-14)


@pytest.mark.parametrize("order", ["row", "col"])
def test_bias_gradient_over_5000_rows_of_ones_in_bf16(library: Any, order: str) -> None:
    """Summed in bfloat16 it would stop at 256."""
    n = 5000
    a, b = np.ones((3, 1), ml_dtypes.bfloat16), np.ones((1, n), ml_dtypes.bfloat16)
    shape = (16, n) if order == "col" else (3, 640)
    mask = np.full(shape, 0xFF, np.uint8)
    mask = np.asfortranarray(mask) if order == "col" else mask
    options = {"result_order": order}
    inputs = {"relu_aux": library.of(mask)}
    d, extra = eg.matmul(library.of(a), library.of(b), epilog="drelu_bgrad", epilog_inputs=inputs, options=options)
    # 5000 is no bfloat16; its neighbours are 4992 and 5024.
    assert library.numpy(extra["drelu_bgrad"]).astype(float).tolist() == [4992.0] * 3
    assert library.numpy(d).astype(float).sum() == 3 * n
    rows = np.ones((n, 2), ml_dtypes.bfloat16)
    summed = lambda acc: eg.outputs(acc, bias=eg.sum(acc, axis="m"), stored=eg.cast(eg.sum(acc, axis="m"), "bf16"))
    _, extra = eg.matmul(library.of(rows), library.of(np.eye(2).astype(ml_dtypes.bfloat16)), epilog=summed)
    assert library.numpy(extra["bias"]).tolist() == [[5000.0, 5000.0]]
    assert library.numpy(extra["stored"]).astype(float).tolist() == [[4992.0, 4992.0]]
    _, extra = eg.matmul(library.of(np.ascontiguousarray(rows.T)), library.of(rows), epilog="bgrada")
    assert library.numpy(extra["bgrada"]).astype(float).tolist() == [4992.0, 4992.0]


def test_float32_products_do_not_round_their_operands() -> None:
    """1 + 2**-12 is lost by TF32 and kept by float32."""
    a = np.full((4, 8), 1 + 2.0**-12, np.float32)
    assert eg.matmul(a, np.ones((8, 4), np.float32)).tolist() == [[8 + 2.0**-9] * 4] * 4


def test_k_zero_gives_the_epilogue_of_beta_c(library: Any) -> None:
    a, b, c = np.ones((3, 0), "f4"), np.ones((0, 2), "f4"), np.full((3, 2), -4, "f4")
    d = eg.matmul(*map(library.of, (a, b, c)), beta=0.5, epilog=lambda acc: acc * acc)
    assert library.numpy(d).tolist() == [[4.0, 4.0]] * 3
    bias = library.of(np.array([1, 2, 3], "f4"))
    d = eg.matmul(library.of(a), library.of(b), epilog="bias", epilog_inputs={"bias": bias})
    assert library.numpy(d).tolist() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0)])
def test_an_empty_d_has_zero_reductions(library: Any, m: int, n: int) -> None:
    a, b = library.of(np.ones((m, 2), "f4")), library.of(np.ones((2, n), "f4"))
    stats = lambda acc: eg.outputs(acc, rows=eg.sum(acc, axis="n"), columns=eg.sum(acc, axis="m"), all=eg.sum(acc), most=eg.amax(acc))
    d, extra = eg.matmul(a, b, epilog=stats)
    assert tuple(d.shape) == (m, n)
    found = {name: library.numpy(value) for name, value in extra.items()}
    assert {name: value.shape for name, value in found.items()} == {"rows": (m, 1), "columns": (1, n), "all": (1, 1), "most": (1, 1)}
    assert not any(value.any() for value in found.values())
