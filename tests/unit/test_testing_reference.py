"""The reference itself: against formulas that were never traced, known random numbers, and cases worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm.testing import bounded as b
from epigemm.testing import formats
from epigemm.testing.bounded import Arithmetic, Bounded
from epigemm.testing.cases import Case
from epigemm.testing.conformance import expected, reference_product
from epigemm.testing.epilogues import EPILOGUES, Row
from epigemm.testing.reference import Product, accumulator, evaluate, wide

WITH_FORMULA = [row for row in EPILOGUES.values() if row.formula is not None]


@pytest.mark.parametrize("row", WITH_FORMULA, ids=lambda row: row.name)
def test_traced_epilogue_is_its_formula(row: Row) -> None:
    """The reference walks what was traced; the formula beside the row was not."""
    dtype = "complex128" if row.name == "complex_affine" else "float64"
    case = Case("formula", 5, 7, 4, row.name, dtype=dtype)
    tensors = case.build(np.random.default_rng(3))
    product = reference_product(case, tensors)
    accumulators = [wide(product.a) @ wide(one) for one in product.b]
    wanted = row.formula(*accumulators, **{name: wide(value) for name, value in product.inputs.items()})  # type: ignore[misc]
    got = expected(case, tensors)[0].bounded.value
    np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=1e-12, atol=1e-12)


def test_predefined_epilogs_by_hand() -> None:
    """A is the identity, so that the accumulator is B."""
    x = np.array([[-1.0, 0.0, 2.0], [3.0, -0.5, -4.0]])
    bias = np.array([[1.0], [-3.0]])
    product = Product(np.eye(2), (x,), inputs={"bias": bias}, order="col", d_dtype="float64", arithmetic=Arithmetic("float64"))
    d, mask = evaluate(product, "relu_aux_bias")
    assert d.bounded.value.tolist() == [[0, 1, 3], [0, 0, 0]]
    assert mask.bounded.value.tolist() == [[True, True, True], [True, False, False]]
    assert evaluate(product, "bgrada")[1].bounded.value.tolist() == [[1], [1]]
    assert evaluate(product, "bgradb")[1].bounded.value.tolist() == [[2], [-0.5], [-2]]
    packed = formats.pack(np.array([[True, False, True], [False, True, True]]), "col")
    product = Product(np.eye(2), (x,), inputs={"relu_aux": packed}, order="col", d_dtype="float64", arithmetic=Arithmetic("float64"))
    d, sums = evaluate(product, "drelu_bgrad")
    assert d.bounded.value.tolist() == [[-1, 0, 2], [0, -0.5, -4]]
    assert sums.bounded.value.tolist() == [[1], [-4.5]]


def test_gelu_derivative_is_that_of_gelu() -> None:
    x = np.linspace(-6, 6, 241)
    step = 1e-5
    slope = (b.gelu_tanh(x + step) - b.gelu_tanh(x - step)) / (2 * step)
    np.testing.assert_allclose(b.gelu_tanh_derivative(x), slope, atol=1e-9)


@pytest.mark.parametrize("formula", [b.gelu_erf, b.gelu_tanh, b.silu, b.mish, b.hardswish], ids=lambda f: getattr(f, "__name__", "f"))
def test_gated_units_at_infinity_and_nan(formula) -> None:  # type: ignore[no-untyped-def]
    with np.errstate(all="ignore"):
        got = formula(np.array([-np.inf, np.inf, np.nan, 0.0]))
    assert got[0] == 0
    assert got[1] == np.inf
    assert np.isnan(got[2])
    assert got[3] == 0


def test_philox_known_answers() -> None:
    """Source: kat_vectors of Random123."""
    ones = 0xFFFFFFFF
    assert formats.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert formats.philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert formats.philox(counter, key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_is_the_dtypes_own(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4000) * 10.0 ** rng.integers(-12, 12, 4000)).astype(np.float32).astype(np.float64)
    x = np.concatenate([x, [np.inf, -np.inf, 0.0, 65519.99, 65520.0, 1.00390625]])
    with np.errstate(all="ignore"):
        assert formats.rounded(x, dtype).tolist() == x.astype(np.float32).astype(getattr(ml_dtypes, dtype, dtype)).astype(float).tolist()


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_eight_bit_rounding_saturates_and_is_else_the_dtypes_own(dtype: str, largest: float) -> None:
    x = np.random.default_rng(0).normal(size=4000).astype(np.float32) * 50
    assert formats.rounded(x.astype(float), dtype).tolist() == x.astype(getattr(ml_dtypes, dtype)).astype(float).tolist()
    assert formats.rounded(np.array([1e9, -np.inf]), dtype).tolist() == [largest, -largest]


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 127, 128, 129])
def test_packing_is_numpys_little_endian_packing(order: str, length: int) -> None:
    shape = (2, length, 3) if order == "col" else (2, 3, length)
    bits = np.random.default_rng(length).integers(0, 2, shape).astype(bool)
    axis = -2 if order == "col" else -1
    packed = formats.pack(bits, order)
    assert packed.shape[axis] == {1: 16, 7: 16, 8: 16, 9: 16, 127: 16, 128: 16, 129: 32}[length]
    used = -(-length // 8)
    assert np.array_equal(np.take(packed, range(used), axis), np.packbits(bits, axis=axis, bitorder="little"))
    for padding in (0, 1):
        assert np.array_equal(formats.unpack(formats.pack(bits, order, padding), order, length), bits)
        assert (formats.padding_bits(formats.pack(bits, order, padding), order, length) == bool(padding)).all()


def test_small_integers_have_no_error_and_others_have() -> None:
    rng = np.random.default_rng(0)
    whole = Product(rng.integers(-3, 4, (4, 50)).astype("f4"), (rng.integers(-3, 4, (50, 3)).astype("f4"),))
    assert not accumulator(whole, 0).error.any()
    broken = Product(rng.normal(size=(4, 50)).astype("f4"), (rng.normal(size=(50, 3)).astype("f4"),))
    error = accumulator(broken, 0).error
    magnitude = np.abs(wide(broken.a)) @ np.abs(wide(broken.b[0]))
    assert (error > 0).all()
    assert (error < 60 * 2.0**-24 * magnitude).all()


def test_the_error_bound_holds_for_float32_arithmetic() -> None:
    """Random expressions of float32 steps stay within the bounds, and the bounds are not more than a hundred units wide."""
    rng = np.random.default_rng(1)
    arithmetic = Arithmetic()
    x32, y32 = rng.normal(size=5000).astype("f4"), rng.uniform(0.5, 2, 5000).astype("f4")
    x, y = Bounded.exact(x32.astype(float)), Bounded.exact(y32.astype(float))
    bounded = b.add(arithmetic, b.divide(arithmetic, b.multiply(arithmetic, x, x), y), b.unary(arithmetic, x, np.tanh, 8.0))
    single = x32 * x32 / y32 + np.tanh(x32)
    assert (np.abs(single - bounded.value) <= bounded.error).all()
    assert (bounded.error <= 100 * 2.0**-24 * (np.abs(x32 * x32 / y32) + np.abs(np.tanh(x32))) + 1e-37).all()


def test_comparisons_are_undecided_within_the_error_alone() -> None:
    x = Bounded(np.array([1.0, 1.0, 1.0, np.nan, 1.0]), np.array([0.1, 0.1, 0.0, 0.0, np.inf]))
    y = Bounded(np.array([1.05, 1.2, 1.0, 1.0, 5.0]), np.zeros(5))
    assert b.compare("ge", x, y).undecided.tolist() == [True, False, False, False, True]
    chosen = b.where(b.compare("ge", x, y), Bounded.exact(np.full(5, 10.0)), Bounded.exact(np.full(5, 20.0)))
    assert chosen.error.tolist() == [10.0, 0.0, 0.0, 0.0, 10.0]


def test_overflow_happens_where_float32_overflows() -> None:
    big = Bounded.exact(np.array([2.0**127, 2.0**70]))
    product = b.multiply(Arithmetic(), big, big)
    assert product.value.tolist() == [np.inf, np.inf]
    assert not product.error.any()
    assert b.multiply(Arithmetic("float64"), big, big).value.tolist() == [2.0**254, 2.0**140]


def test_alpha_zero_reads_neither_operand_and_beta_zero_not_c() -> None:
    poison = np.full((3, 4), np.nan, "f4")
    ones = np.ones((3, 2), "f4")
    assert accumulator(Product(poison, (poison.T.copy(),), np.ones((3, 3), "f4"), alpha=0.0, beta=2.0), 0).value.tolist() == [[2.0] * 3] * 3
    assert accumulator(Product(ones, (ones.T.copy(),), np.full((3, 3), np.nan, "f4"), beta=0.0), 0).value.tolist() == [[2.0] * 3] * 3


def test_dropout_numbers_depend_on_batch_row_and_column() -> None:
    numbers = formats.uniform(0x1_0000_0007, 2, 3, 6)
    block = formats.philox((1, 2, 1, 0), (7, 1))
    assert numbers[1, 2, 5] == (block[1] >> 8) / 2**24
    assert len(np.unique(numbers)) == numbers.size


def test_reductions_of_nothing_are_zero() -> None:
    case = Case("empty", 0, 3, 4, "largest")
    results = {r.name: r.bounded.value for r in expected(case, case.build(np.random.default_rng(0)))}
    assert results["columns"].tolist() == [[0.0, 0.0, 0.0]]
    assert results["all"].tolist() == [[0.0]]
    assert results["rows"].shape == (0, 1)


def test_every_rule_is_of_an_op_and_every_op_has_a_rule() -> None:
    from epigemm.expression.ops import OPS
    from epigemm.testing.reference import RULES

    assert set(RULES) == set(OPS)


def test_sum_like_sums_what_the_input_is_broadcast_along() -> None:
    from epigemm.expression.nodes import Expression, Node, Output, acc

    x = np.arange(6.0).reshape(2, 3)
    for shape, wanted in (((2, 1), [[3.0], [12.0]]), ((1, 3), [[3.0, 5.0, 7.0]]), ((2, 3), x.tolist()), ((1, 1), [[15.0]])):
        product = Product(np.eye(2), (x,), inputs={"w": np.zeros(shape)}, d_dtype="float64", arithmetic=Arithmetic("float64"))
        expression = Expression((Output("d", acc()), Output("g", Node("sum_like", acc(), name="w"))))
        assert evaluate(product, expression)[1].bounded.value.tolist() == wanted


def test_constant_and_wide_inputs_are_rounded_to_the_accumulators_type() -> None:
    tenth = eg.epilogue(lambda acc, w: acc * 0.1 + w).expression()
    product = Product(np.ones((1, 1), "f4"), (np.ones((1, 1), "f4"),), inputs={"w": np.array([[1 / 3]])})
    bounded = evaluate(product, tenth)[0].bounded
    single = np.float32(0.1) + np.float32(1 / 3)
    assert abs(float(single) - bounded.value[0, 0]) <= bounded.error[0, 0] < 1e-6
