"""What a Matmul is after an error, and what the plan cache may not skip: a mistake is the same mistake the second time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm.linalg.advanced import MatmulQuantizationScales, matrix_qualifiers_dtype

Array = np.ndarray[Any, Any]


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


A, B, C, BIAS = normal(1, 4, 3), normal(2, 3, 5), normal(3, 4, 5), normal(4, 4)


def biased() -> eg.Matmul:
    mm = eg.Matmul(A, B, C, beta=1.0)
    mm.plan(epilog="bias", epilog_inputs={"bias": BIAS})
    return mm


WRONG_PLANS: list[dict[str, Any]] = [
    {"epilog": "bias", "epilog_inputs": {"bias": BIAS[:2]}},
    {"epilog": "bias", "epilog_inputs": [BIAS]},
    {"epilog": "no_such_epilog"},
    {"epilog": lambda acc: acc if acc > 0 else -acc},
    {"options": {"result_amax": True}},
    {"engine": "no_such_engine"},
    {"engine": ["cpu"]},
    {"preferences": {"limit": 0}},
    {"algorithms": []},
    {"stream": "text"},
]


@pytest.mark.parametrize("wrong", WRONG_PLANS, ids=lambda wrong: "-".join(map(str, wrong)))
def test_after_a_plan_that_fails_the_old_one_runs(wrong: dict[str, Any]) -> None:
    mm = biased()
    before = mm.execute()
    algorithms, text = mm.algorithms, mm.explain()
    with pytest.raises(eg.errors.EpigemmError):
        mm.plan(**wrong)
    assert mm.algorithms is algorithms and mm.explain() == text
    np.testing.assert_array_equal(mm.execute(), before)
    np.testing.assert_array_equal(mm.execute(out=np.empty((4, 5), np.float32)), before)
    mm.reset_operands(epilog_inputs={"bias": BIAS + 1})
    np.testing.assert_allclose(mm.execute(), before + 1, rtol=1e-5)


WRONG_RESETS: list[dict[str, Any]] = [
    {"a": normal(5, 4, 7)},
    {"a": A + 1, "b": normal(5, 3, 6)},
    {"a": A + 1, "epilog_inputs": {"bias": BIAS[:2]}},
    {"a": A + 1, "alpha": "two"},
    {"a": A + 1, "beta": 1j},
    {"a": A + 1, "epilog_inputs": [BIAS]},
]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("wrong", WRONG_RESETS, ids=lambda wrong: "-".join(wrong))
def test_after_a_reset_that_fails_the_old_operands_are_there(wrong: dict[str, Any], checked: bool) -> None:
    mm = biased()
    before = mm.execute()
    with pytest.raises(eg.errors.EpigemmError):
        (mm.reset_operands if checked else mm.reset_operands_unchecked)(**wrong)
    np.testing.assert_array_equal(mm.execute(), before)


def test_scalars_are_read_when_they_are_given() -> None:
    alpha = np.array(2.0)
    mm = eg.Matmul(A, B, alpha=alpha)
    mm.plan()
    alpha[...] = 5
    np.testing.assert_allclose(mm.execute(), 2 * (A @ B), rtol=1e-5)
    mm.reset_operands(alpha=alpha)
    alpha[...] = 7
    np.testing.assert_allclose(mm.execute(), 5 * (A @ B), rtol=1e-5)


def test_c_without_beta_is_refused_beside_a_cached_plan_with_it() -> None:
    eg.matmul(A, B, C, beta=1.0)
    with pytest.raises(ValueError, match="beta must be provided"):
        eg.matmul(A, B, C)


WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"qualifiers": np.zeros(3, [("x", "<i4")])}, ValueError, "length 3"),
    ({"qualifiers": np.zeros((), matrix_qualifiers_dtype)}, ValueError, "length 3"),
    ({"qualifiers": np.zeros((3, 1), matrix_qualifiers_dtype)}, ValueError, "length 3"),
    ({"qualifiers": BIAS}, ValueError, "length 3"),
    ({"engine": []}, ValueError, "engine"),
    ({"engine": None}, ValueError, "engine"),
    ({"epilog": "bias", "epilog_inputs": [BIAS]}, TypeError, "by name"),
    ({"epilog": "bias", "epilog_inputs": "bias"}, TypeError, "by name"),
]

WRONG_SCALARS = [2**63, 2**64, -(2**63) - 1, np.uint64(2**63), 1j, np.complex64(1j), 1e300, np.str_("x"), np.datetime64(1, "s")]


@pytest.mark.parametrize("repeat", range(2))
@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG_ARGUMENTS)
def test_wrong_arguments_have_an_error_of_ours(wrong: dict[str, Any], kind: type[Exception], words: str, repeat: int) -> None:
    with pytest.raises(eg.errors.EpigemmError, match=words) as caught:
        eg.matmul(A, B, **wrong)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize("value", WRONG_SCALARS, ids=repr)
def test_scalar_inputs_that_are_no_number_of_the_type(value: Any) -> None:
    with pytest.raises(eg.errors.OptionError, match="scale"):
        eg.matmul(A, B, epilog=lambda acc, scale: acc * scale, epilog_inputs={"scale": value})


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.int64(2), np.array(2, np.float32)], ids=repr)
def test_scales_are_any_number(scale: Any) -> None:
    x = np.ones((16, 16), ml_dtypes.float8_e4m3fn)
    d = eg.matmul(x, x, quantization_scales={"a": scale, "b": 1, "d": scale})
    assert (d.astype(np.float32) == 64).all()


@pytest.mark.parametrize("scale", [object(), 10**400, np.complex64(1), "2", [2.0]], ids=lambda scale: type(scale).__name__)
def test_scales_that_are_no_number(scale: Any) -> None:
    with pytest.raises(ValueError, match="quantization scale for A"):
        MatmulQuantizationScales(a=scale)


def test_the_amax_of_an_empty_batch_is_zero() -> None:
    x = np.zeros((0, 16, 16), ml_dtypes.float8_e4m3fn)
    d, aux = eg.matmul(x, x, quantization_scales={"a": 1, "b": 1, "d": 1}, options={"result_amax": True})
    assert d.shape == (0, 16, 16)
    np.testing.assert_array_equal(aux["result_amax"], np.zeros(1, np.float32))


@pytest.mark.parametrize("value", ["wide", [64], None, 2.5])
def test_a_setting_of_an_algorithm_is_checked_when_it_is_set(value: Any) -> None:
    mm = biased()
    algorithm = mm.algorithms[0]  # type: ignore[index]
    with pytest.raises(ValueError, match="panel_rows"):
        algorithm.panel_rows = value
    mm.execute()


@pytest.mark.parametrize("limit", [-1, "8", None])
def test_the_number_of_ids_is_checked(limit: Any) -> None:
    with pytest.raises(ValueError, match="limit"):
        biased().applicable_algorithm_ids(limit)
