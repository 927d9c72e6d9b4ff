"""Contracts on one-dimensional and expanded inputs: which axis they lie along, and the error where they do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import epigemm as eg


def add(acc: Any, bias: Any) -> Any:
    return acc + bias


def operands(library: Any, m: int, n: int) -> tuple[Any, Any]:
    return library.of(np.zeros((m, 2), "f4")), library.of(np.zeros((2, n), "f4"))


def test_one_dimension_where_m_equals_n(library: Any) -> None:
    """Along m in a predefined epilog (the peer's rule), along n in a user epilogue (NumPy's)."""
    a, b = operands(library, 3, 3)
    bias = np.array([1, 2, 3], "f4")
    peer = library.numpy(eg.matmul(a, b, epilog="bias", epilog_inputs={"bias": library.of(bias)}))
    assert peer.tolist() == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]
    own = library.numpy(eg.matmul(a, b, epilog=add, epilog_inputs={"bias": library.of(bias)}))
    assert own.tolist() == [[1, 2, 3], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("epilog", ["bias", "relu_bias", "gelu_bias", "relu_aux_bias", "gelu_aux_bias"])
def test_a_predefined_bias_that_fits_only_along_n(library: Any, epilog: str) -> None:
    a, b = operands(library, 3, 5)
    bias = library.of(np.ones(5, "f4"))
    with pytest.raises(ValueError, match=r"The M dimension of the bias vector \(5\) must match the M dimension of A") as caught:
        eg.matmul(a, b, epilog=epilog, epilog_inputs={"bias": bias})
    assert "(1, N)" in str(caught.value) or "(1, 5)" in str(caught.value)


def test_a_users_input_that_fits_only_along_m(library: Any) -> None:
    a, b = operands(library, 3, 5)
    with pytest.raises(ValueError, match=r"\((m|3), 1\)"):
        eg.matmul(a, b, epilog=add, epilog_inputs={"bias": library.of(np.ones(3, "f4"))})
    with pytest.raises(ValueError, match="4"):
        eg.matmul(a, b, epilog=add, epilog_inputs={"bias": library.of(np.ones(4, "f4"))})


def test_two_dimensions_say_which_axis(library: Any) -> None:
    a, b = operands(library, 3, 5)
    column, row = np.array([[1], [2], [3]], "f4"), np.array([[1, 2, 3, 4, 5]], "f4")
    for epilog in ("bias", add):
        down = library.numpy(eg.matmul(a, b, epilog=epilog, epilog_inputs={"bias": library.of(column)}))
        assert down.tolist() == [[i] * 5 for i in (1, 2, 3)]
        along = library.numpy(eg.matmul(a, b, epilog=epilog, epilog_inputs={"bias": library.of(row)}))
        assert along.tolist() == [[1, 2, 3, 4, 5]] * 3


def test_one_element_is_broadcast_in_a_user_epilogue(library: Any) -> None:
    a, b = operands(library, 3, 5)
    for bias in (np.array(7, "f4"), np.array([7], "f4"), np.array([[7]], "f4")):
        d = eg.matmul(a, b, epilog=add, epilog_inputs={"bias": library.of(bias)})
        assert library.numpy(d).tolist() == [[7] * 5] * 3


@pytest.mark.parametrize("step", [2, 3])
def test_a_strided_bias_is_read_by_its_strides(library: Any, step: int) -> None:
    a, b = operands(library, 3, 5)
    wide = np.arange(5 * step, dtype="f4")
    d = eg.matmul(a, b, epilog=add, epilog_inputs={"bias": library.of(wide[::step])})
    assert library.numpy(d).tolist() == [(step * np.arange(5.0)).tolist()] * 3
    d = eg.matmul(a, b, epilog="bias", epilog_inputs={"bias": library.of(wide[: 3 * step : step])})
    assert library.numpy(d).tolist() == [[step * i] * 5 for i in range(3)]


def test_c_may_be_an_expanded_bias() -> None:
    """Strides (0, 1) and (1, 0): no leading dimension describes them, and the peer reads past their end."""
    torch = pytest.importorskip("torch")
    m, n = 3, 5
    a, b = torch.zeros(m, 2), torch.zeros(2, n)
    row, column = torch.arange(5.0), torch.arange(3.0)
    along = eg.matmul(a, b, row.expand(m, n), beta=2.0)
    assert along.tolist() == [[0, 2, 4, 6, 8]] * m
    down = eg.matmul(a, b, column[:, None].expand(m, n), beta=1.0)
    assert down.tolist() == [[0] * n, [1] * n, [2] * n]
    batched = eg.matmul(torch.zeros(4, m, 2), b, row.expand(4, m, n), beta=1.0)
    assert batched.tolist() == [[[0, 1, 2, 3, 4]] * m] * 4


def test_c_may_be_broadcast_by_numpy() -> None:
    a, b = np.zeros((3, 2), "f4"), np.zeros((2, 5), "f4")
    c = np.broadcast_to(np.arange(5, dtype="f4"), (3, 5))
    assert eg.matmul(a, b, c, beta=2.0).tolist() == [[0, 2, 4, 6, 8]] * 3


@pytest.mark.parametrize("epilog", ["bias", add], ids=["predefined", "user"])
def test_names_must_be_the_epilogs(library: Any, epilog: Any) -> None:
    a, b = operands(library, 3, 5)
    with pytest.raises(ValueError, match=r"requires the following input tensors: \{'bias'\}"):
        eg.matmul(a, b, epilog=epilog, epilog_inputs={"offset": library.of(np.ones((3, 1), "f4"))})


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_integer_input_is_a_number(library: Any, n: int, dtype: str) -> None:
    """Also where it is one number alone, as a seed is."""
    a, b = operands(library, 3, n)
    w = library.of(np.full((1, n), 2, dtype))
    d = eg.matmul(a, b, epilog=lambda acc, w: acc + eg.exp(w), epilog_inputs={"w": w})
    assert library.numpy(d) == pytest.approx(np.full((3, n), np.exp(2)), rel=1e-6)
