"""Contracts on memory and state: `out`, overlap, in-place, ownership, and planning one object again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm.testing import numeric
from epigemm.testing.bounded import Bounded
from epigemm.testing.placing import LAYOUTS, NEGATIVE, SHARED, place

WRITABLE = [kind for kind in LAYOUTS if kind not in SHARED and not kind.startswith("batch")]


def pair(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(-3, 4, (m, k)).astype("f4"), rng.integers(-3, 4, (k, n)).astype("f4")


@pytest.mark.parametrize("kind", WRITABLE)
def test_out_of_any_strides_is_written_whole_and_nothing_else(library: Any, kind: str) -> None:
    if library.name == "torch" and kind in NEGATIVE:
        return  # torch has no negative strides
    a, b = pair(np.random.default_rng(0), 9, 7, 5)
    out = place(np.full((9, 7), np.nan, "f4"), kind)
    target = library.of(out.array)
    assert eg.matmul(library.of(a), library.of(b), epilog=lambda acc: eg.relu(acc), out=target) is target
    assert np.array_equal(out.array, np.maximum(a @ b, 0))
    out.assert_intact("out")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_out_may_be_exactly_c(library: Any, dtype: str) -> None:
    kind = getattr(ml_dtypes, dtype, dtype)
    a, b = (x.astype(kind) for x in pair(np.random.default_rng(0), 70, 33, 5))
    c = np.random.default_rng(1).integers(-3, 4, (70, 33)).astype(kind)
    expected = np.maximum(a.astype(float) @ b.astype(float) + 2 * c.astype(float), 0)
    target = library.of(c)
    result = eg.matmul(library.of(a), library.of(b), target, beta=2.0, epilog=lambda acc: eg.relu(acc), out=target)
    assert result is target
    assert np.array_equal(c.astype(float), expected)


def test_inplace_writes_into_c(library: Any) -> None:
    a, b = pair(np.random.default_rng(0), 9, 7, 5)
    c = np.ones((9, 7), "f4")
    target = library.of(c)
    result = eg.matmul(library.of(a), library.of(b), target, beta=3.0, options={"inplace": True})
    assert result is target
    assert np.array_equal(c, a @ b + 3)


def test_out_may_be_exactly_a_full_input(library: Any) -> None:
    a, b = pair(np.random.default_rng(0), 70, 33, 5)
    residual = np.random.default_rng(1).integers(-3, 4, (70, 33)).astype("f4")
    expected = np.maximum(a @ b, 0) + residual
    target = library.of(residual)
    eg.matmul(library.of(a), library.of(b), epilog=lambda acc, r: eg.relu(acc) + r, epilog_inputs={"r": target}, out=target)
    assert np.array_equal(residual, expected)


def overlapping(what: str, buffer: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(the operands, an `out` of shape (6, 6) that shares memory with one of them)."""
    fresh = {"a": np.ones((6, 6), "f4"), "b": np.ones((6, 6), "f4"), "c": np.ones((6, 6), "f4"), "r": np.ones((6, 6), "f4")}
    square = buffer[:36].reshape(6, 6)
    cases = {
        "a itself": ("a", square, square),
        "b itself": ("b", square, square),
        "a one row on": ("a", square, buffer[6:42].reshape(6, 6)),
        "c one row on": ("c", square, buffer[6:42].reshape(6, 6)),
        "c transposed": ("c", square, square.T),
        "input one element on": ("r", square, buffer[1:37].reshape(6, 6)),
        "input transposed": ("r", square, square.T),
        "input row": ("r", buffer[6:12].reshape(1, 6), square),
        "input column": ("r", buffer[:36:6].reshape(6, 1), square),
        "c row": ("c", buffer[6:12].reshape(1, 6), square),
    }
    name, operand, out = cases[what]
    return {**fresh, name: operand}, out


OVERLAPS = (
    *("a itself", "b itself", "a one row on", "c one row on", "c transposed"),
    *("input one element on", "input transposed", "input row", "input column", "c row"),
)


@pytest.mark.parametrize("what", OVERLAPS)
def test_any_other_overlap_of_out_is_refused(library: Any, what: str) -> None:
    buffer = np.arange(64, dtype="f4")
    operands, out = overlapping(what, buffer)
    a, b, c, r = (library.of(operands[name]) for name in "abcr")
    before = buffer.copy()
    with pytest.raises(ValueError, match="overlaps") as caught:
        eg.matmul(a, b, c, beta=1.0, epilog=lambda acc, r: acc + r, epilog_inputs={"r": r}, out=library.of(out))
    assert isinstance(caught.value, eg.OverlapError)
    assert np.array_equal(buffer, before), "refused after writing"


def test_neighbours_without_a_common_element_are_no_overlap(library: Any) -> None:
    """Left and right half of one buffer, and interleaved rows: the byte ranges overlap, no element does."""
    buffer = np.ones((12, 12), "f4")
    a, out = buffer[:6, :6], buffer[:6, 6:]
    eg.matmul(library.of(a), library.of(np.ones((6, 6), "f4")), out=library.of(out))
    assert out.tolist() == [[6.0] * 6] * 6
    rows = np.ones((12, 6), "f4")
    eg.matmul(library.of(rows[::2]), library.of(np.ones((6, 6), "f4")), out=library.of(rows[1::2]))
    assert rows[1::2].tolist() == [[6.0] * 6] * 6
    assert rows[::2].tolist() == [[1.0] * 6] * 6


def test_an_out_that_overlaps_itself_is_refused(library: Any) -> None:
    a, b = pair(np.random.default_rng(0), 3, 4, 5)
    out = np.lib.stride_tricks.as_strided(np.zeros(4, "f4"), (3, 4), (0, 4))
    with pytest.raises(eg.OverlapError):
        eg.matmul(library.of(a), library.of(b), out=library.of(out))


def test_out_of_another_shape_or_dtype_is_refused(library: Any) -> None:
    a, b = map(library.of, pair(np.random.default_rng(0), 3, 4, 5))
    with pytest.raises(ValueError, match=r"shape of `out` \(\(4, 3\)\) must be that of the result \(\(3, 4\)\)"):
        eg.matmul(a, b, out=library.of(np.zeros((4, 3), "f4")))
    with pytest.raises(ValueError, match=r"dtype of `out` \(float64\) must be that of the result \(float32\)"):
        eg.matmul(a, b, out=library.of(np.zeros((3, 4))))


def test_planning_again_replaces_the_epilog(library: Any) -> None:
    """The peer keeps the old one: its mask output, its bias pointer, its order."""
    a, b = pair(np.random.default_rng(0), 9, 7, 5)
    x = a @ b
    bias = np.arange(9, dtype="f4")
    saved = np.full((16, 7), 0xFF, np.uint8, order="F")
    with eg.Matmul(library.of(a), library.of(b)) as product:
        product.plan(epilog="relu_aux")
        d, extra = product.execute()
        assert set(extra) == {"relu_aux"}
        product.plan()
        d = product.execute()
        assert np.array_equal(library.numpy(d), x)
        assert library.numpy(d).flags.c_contiguous
        product.plan(epilog="bgradb")
        assert set(product.execute()[1]) == {"bgradb"}
        product.plan(epilog="bias", epilog_inputs={"bias": library.of(bias)})
        assert np.array_equal(library.numpy(product.execute()), x + bias[:, None])
        product.plan(epilog="gelu")
        assert not isinstance(product.execute(), tuple)
        product.plan(epilog="drelu", epilog_inputs={"relu_aux": library.of(saved)})
        assert np.array_equal(library.numpy(product.execute()), x)
        product.plan(epilog=lambda acc, r: eg.outputs(acc * r, s=eg.sum(acc)), epilog_inputs={"r": library.of(bias[:7])})
        d, extra = product.execute()
        assert np.array_equal(library.numpy(d), x * bias[:7])
        assert library.numpy(extra["s"]).tolist() == [[x.sum()]]
        product.plan(epilog="relu")
        assert np.array_equal(library.numpy(product.execute()), np.maximum(x, 0))


def test_results_of_two_executions_do_not_share_memory(library: Any) -> None:
    a, b = map(library.of, pair(np.random.default_rng(0), 9, 7, 5))
    with eg.Matmul(a, b) as product:
        product.plan(epilog="relu_aux")
        (d1, aux1), (d2, aux2) = product.execute(), product.execute()
    assert not np.shares_memory(library.numpy(d1), library.numpy(d2))
    assert not np.shares_memory(library.numpy(aux1["relu_aux"]), library.numpy(aux2["relu_aux"]))


def test_no_cache_holds_a_users_tensor() -> None:
    a, b, r = (np.ones(s, "f4") for s in ((5, 6), (6, 7), (5, 7)))
    holders = [weakref.ref(x) for x in (a, b, r)]
    d = eg.matmul(a, b, epilog=lambda acc, r: acc + r, epilog_inputs={"r": r})
    result = weakref.ref(d)
    del a, b, r, d
    gc.collect()
    assert [one() for one in (*holders, result)] == [None] * 4


def test_a_second_call_sees_the_new_data_of_the_same_shapes(library: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        a, b = pair(rng, 9, 7, 5)
        bias = rng.integers(-3, 4, 7).astype("f4")
        beta = float(rng.integers(1, 5))
        c = rng.integers(-3, 4, (9, 7)).astype("f4")
        inputs = {"bias": library.of(bias)}
        d = eg.matmul(library.of(a), library.of(b), library.of(c), beta=beta, epilog=lambda acc, bias: acc + bias, epilog_inputs=inputs)
        numeric.assert_close(library.numpy(d), Bounded.exact(a @ b + beta * c + bias), "float32", "d")


@pytest.mark.parametrize("step", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", ["neg", "sigmoid", "silu", "tanh", "exp"])
def test_a_strided_out_column_is_written_whole(function: str, dtype: str, step: int) -> None:
    """NumPy 2.4.6's negative skips elements of such a column, for 16-byte strides of float32 and 64-byte ones of float64."""
    epilog = {
        "neg": lambda acc: -acc,
        "sigmoid": lambda acc: eg.sigmoid(acc),
        "silu": lambda acc: eg.silu(acc),
        "tanh": lambda acc: eg.tanh(acc),
        "exp": lambda acc: eg.exp(acc),
    }[function]
    a, b = (x.astype(dtype) / 4 for x in pair(np.random.default_rng(0), 30, 1, 5))
    out = np.full((30, step), np.nan, dtype)[:, :1]
    eg.matmul(a, b, epilog=epilog, out=out)
    np.testing.assert_allclose(out, eg.matmul(a, b, epilog=epilog), rtol=1e-6)
