"""Each op's NumPy callable computes its formula, in the arrays' own precision, into `out` when it is given."""

from __future__ import annotations

import math

import numpy as np
import pytest

from epigemm.expression import numeric
from epigemm.expression.ops import OPS
from epigemm.expression.philox import philox, uniform
from epigemm.expression.special import erf

SPREAD = np.array([-30.0, -7.5, -3.0, -2.0, -1.0, -0.4, -1e-3, 1e-3, 0.4, 0.9, 1.0, 2.0, 3.0, 5.0, 7.5, 30.0])
POSITIVE = np.abs(SPREAD)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


FORMULAS = {
    "square": lambda x: x * x,
    "neg": lambda x: -x,
    "abs": abs,
    "exp": math.exp,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "softplus": _softplus,
    "mish": lambda x: x * math.tanh(_softplus(x)),
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
}
WITH_PARAMETERS = [
    ("gelu", {"approximate": "none"}, lambda x: x / 2 * math.erfc(-x / math.sqrt(2))),
    ("gelu", {"approximate": "tanh"}, lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ("leaky_relu", {"slope": 0.1}, lambda x: x if x > 0 else 0.1 * x),
    ("leaky_relu", {"slope": 1.5}, lambda x: x if x > 0 else 1.5 * x),
    ("leaky_relu", {"slope": -0.5}, lambda x: x if x > 0 else -0.5 * x),
]
OF_POSITIVE = [
    ("log", {}, math.log),
    ("sqrt", {}, math.sqrt),
    ("rsqrt", {}, lambda x: x**-0.5),
    ("power", {"exponent": 2.5}, lambda x: x**2.5),
]
CASES = [
    *((name, {}, formula, SPREAD) for name, formula in FORMULAS.items()),
    *((*case, SPREAD) for case in WITH_PARAMETERS),
    *((*case, POSITIVE) for case in OF_POSITIVE),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "params", "formula", "points"), CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_unary_ops_compute_their_formula(name, params, formula, points, dtype):
    x = points.astype(dtype)
    got = OPS[name].numpy(x, **params)
    expected = np.array([formula(float(v)) for v in x])
    # Eight roundings at most stand between argument and result; 1 + tanh and 1 + erf cancel, so a unit is of |x| too.
    allowed = 8 * np.finfo(dtype).eps * np.maximum(np.abs(expected), np.abs(x) if name in ("gelu", "mish") else 0)
    assert got.dtype == dtype
    np.testing.assert_array_less(np.abs(got.astype(np.float64) - expected), allowed + np.finfo(dtype).tiny)


@pytest.mark.parametrize("name", [n for n, row in OPS.items() if row.numpy and row.result == "value" and row.domain == "real"])
def test_out_may_be_the_argument_itself(name):
    row = OPS[name]
    params = {"exponent": 2.5, "slope": 0.1, "approximate": "tanh"}
    params = {key: params[key] for key in row.params}
    rng = np.random.default_rng(1)
    arrays = [np.abs(rng.standard_normal((5, 7))).astype(np.float32) + 0.5 for _ in range(row.arity)]
    expected = row.numpy(*arrays, **params)
    elsewhere = np.full((5, 7), np.nan, np.float32)
    assert row.numpy(*arrays, out=elsewhere, **params) is elsewhere
    np.testing.assert_array_equal(elsewhere, expected)
    assert row.numpy(*arrays, out=arrays[0], **params) is arrays[0]
    np.testing.assert_array_equal(arrays[0], expected)


@pytest.mark.parametrize(
    ("name", "least"), [("relu", 0), ("gelu", 0), ("silu", 0), ("mish", 0), ("hardswish", 0), ("softplus", 0), ("sigmoid", 0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activations_at_infinity_and_nan(name, least, dtype):
    x = np.array([-np.inf, np.inf, np.nan], dtype)
    for params in [{"approximate": "none"}, {"approximate": "tanh"}] if name == "gelu" else [{}]:
        with np.errstate(all="ignore"):
            got = OPS[name].numpy(x, **params)
        assert got[0] == least
        assert got[1] == (1 if name == "sigmoid" else np.inf)
        assert np.isnan(got[2])


@pytest.mark.parametrize("name", [n for n, row in OPS.items() if row.numpy and row.result == "value" and row.domain == "real"])
def test_a_single_number_is_computed_too(name):
    row = OPS[name]
    params = {key: {"exponent": 2.5, "slope": 0.1, "approximate": "none"}[key] for key in row.params}
    x = np.array([[0.75, 0.5]], np.float32)
    whole = row.numpy(*[x] * row.arity, **params)
    for shape in ((), (1, 1)):
        one = row.numpy(*[x[0, 0].reshape(shape)] * row.arity, **params)
        assert np.shape(one) == shape
        assert np.ravel(one)[0] == whole[0, 0]


def test_extrema_pass_nan_on_against_numbers_and_arrays():
    x = np.array([np.nan, -1.0, 3.0, -np.inf, np.inf], np.float32)
    for other in (1.0, np.full(5, 1.0, np.float32)):
        np.testing.assert_array_equal(numeric.maximum(x, other), np.array([np.nan, 1, 3, 1, np.inf], np.float32))
        np.testing.assert_array_equal(numeric.minimum(x, other), np.array([np.nan, -1, 1, -np.inf, 1], np.float32))
    assert np.isnan(numeric.maximum(np.ones(3, np.float32), float("nan"))).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shapes", [((4, 6), (4, 6), (4, 6)), ((4, 6), (4, 1), (1, 6)), ((4, 1), (4, 6), ()), ((1, 6), (), (4, 6))])
def test_where_selects_bits_and_broadcasts(shapes, dtype):
    rng = np.random.default_rng(3)
    cond = rng.random(shapes[0]) < 0.5
    x, y = (np.asarray(rng.standard_normal(s), dtype) for s in shapes[1:])
    expected = np.where(cond, x, y)
    np.testing.assert_array_equal(numeric.where(cond, x, y), expected)
    out = np.full(expected.shape, np.nan, dtype)
    assert numeric.where(cond, x, y, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_where_never_lets_the_other_side_through():
    bad = np.array([np.inf, np.nan, -np.inf, 1.0], np.float32)
    cond = np.array([False, False, False, True])
    np.testing.assert_array_equal(numeric.where(cond, bad, 0.0), [0, 0, 0, 1])
    np.testing.assert_array_equal(numeric.where(~cond, 0.0, bad), [0, 0, 0, 1])
    assert np.signbit(numeric.where(np.array([False]), np.ones(1, np.float32), -0.0))[0]


@pytest.mark.parametrize(("dtype", "units"), [(np.float32, 6), (np.float64, 4)])
def test_erf_is_accurate_everywhere(dtype, units):
    x = np.concatenate([np.linspace(-7, 7, 40001), 10.0 ** np.linspace(-30, 0, 500), [0.0]]).astype(dtype)
    expected = np.array([math.erf(v) for v in x])
    error = np.abs(erf(x).astype(np.float64) - expected) / np.spacing(np.abs(expected).astype(dtype)).astype(np.float64)
    worst = int(np.argmax(error))
    assert error[worst] <= units, f"erf({x[worst]}) is {error[worst]} units off"
    assert erf(x).dtype == dtype
    assert np.abs(erf(x)).max() == 1


def test_cast_rounds_to_even_and_saturates_eight_bits():
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1e9, -1e9, np.nan, np.inf], np.float32)
    assert numeric.cast(x, dtype="bfloat16")[:2].tolist() == [1.0, 1.015625]
    assert numeric.cast(x, dtype="float8_e4m3fn")[[2, 3, 5]].tolist() == [448.0, -448.0, 448.0]
    assert numeric.cast(x, dtype="float8_e5m2")[[2, 3, 5]].tolist() == [57344.0, -57344.0, 57344.0]
    assert np.isnan(numeric.cast(x, dtype="float8_e4m3fn")[4])
    assert numeric.cast(x, dtype="bfloat16").dtype == np.float32


def test_masks_pack_least_significant_first_and_ignore_padding():
    cond = np.array([[True, False, True, False, False, False, False, False, True]])
    packed = numeric.bitmask(cond)
    assert packed.tolist() == [[5, 1]]
    np.testing.assert_array_equal(numeric.unbitmask(packed | np.array([[0, 0xFE]], np.uint8), count=9), cond)


def test_reductions_keep_both_dimensions():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert numeric.sum_(x, axis="n").tolist() == [[3], [12]]
    assert numeric.sum_(x, axis="m").tolist() == [[3, 5, 7]]
    assert numeric.amax(x, axis="mn").tolist() == [[5]]


def test_philox_gives_its_published_words():
    """Known answers of the authors' library (Random123, kat_vectors: philox4x32 10)."""
    ones = np.array(0xFFFFFFFF, np.uint32)
    assert [int(w) for w in philox((ones,) * 4, (0xFFFFFFFF, 0xFFFFFFFF))] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = tuple(np.array(c, np.uint32) for c in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert [int(w) for w in philox(counter, (0xA4093822, 0x299F31D0))] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniform_depends_on_the_element_alone():
    rows, columns = np.arange(9)[:, None], np.arange(13)[None, :]
    whole = uniform(7, rows, columns, 2)
    assert whole.dtype == np.float32
    assert whole.shape == (9, 13)
    np.testing.assert_array_equal(uniform(7, rows[3:5], columns[:, 6:], 2), whole[3:5, 6:])
    assert 0 <= whole.min() < whole.max() < 1
    assert not np.array_equal(uniform(8, rows, columns, 2), whole)
    assert not np.array_equal(uniform(7, rows, columns, 3), whole)
    assert not np.array_equal(uniform(7 + 2**32, rows, columns, 2), whole)
    many = uniform(5, np.arange(300)[:, None], np.arange(300)[None, :])
    # The mean of 90,000 uniform numbers has a standard deviation of 0.00096.
    assert abs(float(many.mean()) - 0.5) < 5 * 0.00096


def test_every_row_is_complete():
    for name, row in OPS.items():
        assert row.name == name
        assert row.domain == "leaf" or row.numpy is not None or row.result == "gradient", name
        generated = ("cast", "bitmask", "unbitmask", "sum", "amax", "uniform", "sum_like")
        assert bool(row.cuda) == bool(row.triton) == (row.domain != "leaf" and name not in generated), name
        for spelling in (row.cuda, row.triton):
            for index in range(row.arity if spelling else 0):
                assert f"{{{index}}}" in spelling, name
