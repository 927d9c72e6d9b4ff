"""Numbers with an error: a float64 value and how far a correct engine may be from it.

Every operation carries the error of its arguments on and adds what one rounding in the accumulator's type may add. So the
tolerance of a result follows from its dtypes, K and its epilogue, element by element, and is never typed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from epigemm.testing.formats import FORMATS, Array, Format, fits, quantum, rounded


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of an engine, as the bounds see it.

    Args:
        accumulator: "float32" or "float64".
        function_units: how many units (`Format.unit`) an elementary function may be off by.
        product_unit: relative error of one product a * b, for compute types that round the operands first.
        sum_unit: relative error of one addition in the product's sum; None is the accumulator's.
        to_nearest: whether additions round to nearest; matrix units that truncate do not, and their errors do not cancel.
    """

    accumulator: str = "float32"
    function_units: float = 8.0
    product_unit: float = 0.0
    sum_unit: float | None = None
    to_nearest: bool = True

    def sum_units(self, length: int) -> float:
        """How many units a sum of `length` numbers may be off by, relative to the sum of their magnitudes.

        `length`, the bound for any roundings; where they are to nearest, 8 * sqrt(length) if that is less: it is passed once in 10^13.

        Source: Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019, theorem 3.1.
        """
        return min(float(length), 8.0 * math.sqrt(length)) if self.to_nearest else float(length)

    @property
    def form(self) -> Format:
        return FORMATS[self.accumulator]

    @property
    def unit(self) -> float:
        # The reference itself computes in float64 and rounds as often as a float64 engine does.
        return 2 * self.form.unit if self.accumulator == "float64" else self.form.unit

    @property
    def exact_digits(self) -> int:
        """Results of this many bits are taken to come from arithmetic that did not round."""
        return 44 if self.accumulator == "float64" else self.form.digits


@dataclass(frozen=True, slots=True)
class Bounded:
    """An array of numbers or booleans with their errors.

    Args:
        value: float64, complex128 or bool.
        error: float64: absolute, 0 where the value is exact, infinite where it is undecided: anything may come out.
    """

    value: Array
    error: Array

    @staticmethod
    def exact(value: Array | float | bool) -> Bounded:
        """A value that every engine has."""
        array = np.asarray(value)
        if array.dtype != bool:
            array = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        return Bounded(array, np.zeros(array.shape))

    @property
    def undecided(self) -> Array:
        return np.isinf(self.error)

    def broadcast_to(self, shape: tuple[int, ...]) -> Bounded:
        return Bounded(np.broadcast_to(self.value, shape), np.broadcast_to(self.error, shape))


def settle(arithmetic: Arithmetic, value: Array, error: Array, units: float, scale: Array | None = None) -> Bounded:
    """A result rounded to the accumulator's type: the error of up to `units` roundings is added, and overflow happens.

    Args:
        value: what exact arithmetic gives for the arguments' values.
        error: how far the arguments' errors can move it.
        units: 1 for an operation that IEEE 754 rounds correctly: if its arguments are exact and its result fits, so is it.
        scale: the magnitude that the roundings are relative to, if not the result's.
    """
    form = arithmetic.form
    with np.errstate(all="ignore"):
        magnitude = np.abs(value)
        relative_to = magnitude if scale is None else np.maximum(scale, magnitude)
        added = units * arithmetic.unit * relative_to + form.smallest_normal * (relative_to != 0)
        if units <= 1:
            parts = (value.real, value.imag) if value.dtype.kind == "c" else (value,)
            exact = (error == 0) & np.logical_and.reduce([fits(p, arithmetic.exact_digits) & (np.abs(p) <= form.largest) for p in parts])
            added = np.where(exact & ((magnitude >= form.smallest_normal) | (magnitude == 0)), 0.0, added)
        error = error + np.where(np.isfinite(value), added, 0.0)
        over = np.isfinite(value) & (magnitude - error > form.largest * (1 + form.unit))
        near = np.isfinite(value) & ~over & (magnitude + error > form.largest)
        if value.dtype.kind != "c":
            value = np.where(over, np.copysign(np.inf, value), value)
        error = np.where(near | np.isnan(error) & np.isfinite(value), np.inf, error)
        # A NaN or an infinity has no error of its own; one that hangs on something undecided is undecided.
        return Bounded(value, np.where(np.isfinite(value) | np.isinf(error), error, 0.0))


def _spread(reference: Array, *others: Array) -> Array:
    """How far `others` lie from `reference`: 0 where equal (also NaN and NaN), infinite where one alone is NaN or infinite."""
    with np.errstate(all="ignore"):
        spreads = [np.where((o == reference) | (np.isnan(o) & np.isnan(reference)), 0.0, np.abs(o - reference)) for o in others]
    return np.asarray(np.maximum.reduce([np.where(np.isnan(s), np.inf, s) for s in spreads]))


# ---------------------------------------------------------------- functions of one number

_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    return np.asarray(_erf(x), dtype=np.float64)


def sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)) + 0 * np.where(np.isnan(x), x, 0)


def softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _with_zero_tail(formula: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A gated unit x * gate(x): 0 at -inf, where the formula has 0 * inf, and inf at inf."""

    def function(x: Array) -> Array:
        inside = formula(np.where(np.isinf(x), 0.0, x))
        return np.where(np.isinf(x), np.where(x > 0, np.inf, 0.0), inside)

    return function


def _erfc_half(x: Array) -> Array:
    """(1 + erf(x / sqrt 2)) / 2 without cancellation for negative x."""
    return np.asarray(np.frompyfunc(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)), 1, 1)(x), dtype=np.float64)


def _tanh_gate(x: Array) -> Array:
    # (1 + tanh z) / 2 is the logistic function of 2 z.
    return sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


gelu_erf = _with_zero_tail(lambda x: x * _erfc_half(x))
gelu_tanh = _with_zero_tail(lambda x: x * _tanh_gate(x))
silu = _with_zero_tail(lambda x: x * sigmoid(x))
mish = _with_zero_tail(lambda x: x * np.tanh(softplus(x)))
hardswish = _with_zero_tail(lambda x: np.where(x <= -3, 0.0, np.where(x >= 3, x, x * (x + 3) / 6)) + 0 * x)


def gelu_tanh_derivative(x: Array) -> Array:
    """d/dx of gelu in its tanh form; its limits at the infinities are 0 and 1."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    t = np.tanh(inner)
    formula = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    return np.where(np.abs(x) > 50, np.where(x > 0, 1.0, 0.0), formula)


def relu(x: Array) -> Array:
    return np.where(x < 0, 0.0, x)


def unary(
    arithmetic: Arithmetic, x: Bounded, formula: Callable[[Array], Array], units: float, scale: Callable[[Array], Array] | None = None
) -> Bounded:
    """A function of one number: its error follows from its values at both ends of the argument's range.

    `scale` gives the magnitude that the function's own roundings are relative to, where its spellings cancel.
    """
    with np.errstate(all="ignore"):
        value = formula(x.value)
        error = np.where(np.isinf(x.error), np.inf, _spread(value, formula(x.value - x.error), formula(x.value + x.error)))
        error = np.where(x.error == 0, 0.0, error)
        return settle(arithmetic, value, error, units, None if scale is None else np.abs(scale(x.value)))


# ---------------------------------------------------------------- arithmetic


def _units(x: Bounded) -> float:
    return 4.0 if x.value.dtype.kind == "c" else 1.0


def add(arithmetic: Arithmetic, x: Bounded, y: Bounded) -> Bounded:
    with np.errstate(all="ignore"):
        return settle(arithmetic, x.value + y.value, x.error + y.error, 1.0)


def subtract(arithmetic: Arithmetic, x: Bounded, y: Bounded) -> Bounded:
    return add(arithmetic, x, Bounded(-y.value, y.error))


def multiply(arithmetic: Arithmetic, x: Bounded, y: Bounded) -> Bounded:
    with np.errstate(all="ignore"):
        value = x.value * y.value
        one, other = _times(np.abs(x.value), y.error), _times(np.abs(y.value), x.error)
        error = one + other + _times(x.error, y.error)
        # An infinity times a number that is surely not zero, and a NaN times anything, are what they are.
        sure = np.isinf(value) & (np.abs(x.value) > x.error) & (np.abs(y.value) > y.error) & np.isfinite(x.error + y.error)
        sure |= (np.isnan(x.value) & np.isfinite(x.error)) | (np.isnan(y.value) & np.isfinite(y.error))
        return settle(arithmetic, value, np.where(sure, 0.0, error), _units(Bounded(value, value)))


def _times(magnitude: Array, error: Array) -> Array:
    """magnitude * error where no error is no error (inf * 0) and an undecided factor stays undecided (0 * inf)."""
    return np.where(error == 0, 0.0, np.where(np.isinf(error), np.inf, magnitude * error))


def divide(arithmetic: Arithmetic, x: Bounded, y: Bounded) -> Bounded:
    with np.errstate(all="ignore"):
        value = x.value / y.value
        least = np.abs(y.value) - y.error
        error = (x.error + _times(np.abs(value), y.error)) / least
        error = np.where((x.error == 0) & (y.error == 0), 0.0, error)
        error = np.where(~np.isfinite(value) & np.isfinite(x.error + y.error), 0.0, error)
        # A divisor that may be zero: infinity of either sign, or NaN.
        error = np.where(least <= 0, np.inf, error)
        return settle(arithmetic, value, error, _units(Bounded(value, value)))


def power(arithmetic: Arithmetic, x: Bounded, exponent: float) -> Bounded:
    return unary(arithmetic, x, lambda v: np.power(v, exponent), arithmetic.function_units + abs(exponent))


# ---------------------------------------------------------------- comparison, logic, selection

_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compare(op: str, x: Bounded, y: Bounded) -> Bounded:
    """A comparison; undecided where the two are within their errors of each other and not both exact."""
    with np.errstate(all="ignore"):
        error = x.error + y.error
        close = np.abs(x.value - y.value) <= error
    undecided = np.isinf(error) | (close & (error > 0))
    return _boolean(_COMPARISONS[op](x.value, y.value), undecided)


def _boolean(value: Array, undecided: Array) -> Bounded:
    return Bounded(np.asarray(value, dtype=bool), np.where(undecided, np.inf, 0.0))


def logical_and(x: Bounded, y: Bounded) -> Bounded:
    settled = (~x.value & ~x.undecided) | (~y.value & ~y.undecided)
    return _boolean(x.value & y.value, (x.undecided | y.undecided) & ~settled)


def logical_not(x: Bounded) -> Bounded:
    return _boolean(~x.value, x.undecided)


def logical_or(x: Bounded, y: Bounded) -> Bounded:
    return logical_not(logical_and(logical_not(x), logical_not(y)))


def where(condition: Bounded, x: Bounded, y: Bounded) -> Bounded:
    """A selection; where the condition is undecided, either may come out."""
    taken = np.where(condition.value, x.value, y.value)
    error = np.where(condition.value, x.error, y.error)
    left = np.where(condition.value, y.value, x.value)
    left_error = np.where(condition.value, y.error, x.error)
    either = np.maximum(error, _spread(taken, left) + left_error)
    return Bounded(taken, np.where(condition.undecided, either, error))


def _extreme(choose: Callable[[Array, Array], Array], x: Bounded, y: Bounded) -> Bounded:
    value = choose(x.value, y.value)
    shape = value.shape
    error_x, error_y = np.broadcast_to(x.error, shape), np.broadcast_to(y.error, shape)
    with np.errstate(all="ignore"):
        apart = np.abs(x.value - y.value) > error_x + error_y
    chosen = np.where(value == x.value, error_x, error_y)
    error = np.where(apart, chosen, np.maximum(error_x, error_y))
    return Bounded(value, np.where(np.isfinite(value) | np.isinf(error), error, 0.0))


def minimum(x: Bounded, y: Bounded) -> Bounded:
    return _extreme(np.minimum, x, y)


def maximum(x: Bounded, y: Bounded) -> Bounded:
    return _extreme(np.maximum, x, y)


# ---------------------------------------------------------------- storage and reductions


def cast(x: Bounded, dtype: str) -> Bounded:
    """x rounded to a stored type. Rounding is monotone: the ends of the range round to the ends of the result's."""
    if x.value.dtype.kind == "c":
        real, imaginary = (cast(Bounded(part, x.error), dtype) for part in (x.value.real, x.value.imag))
        return Bounded(real.value + 1j * imaginary.value, np.hypot(real.error, imaginary.error))
    value = rounded(x.value, dtype)
    with np.errstate(all="ignore"):
        error = _spread(value, rounded(x.value - x.error, dtype), rounded(x.value + x.error, dtype))
    return Bounded(value, np.where(np.isinf(x.error), np.inf, np.where(x.error == 0, 0.0, error)))


def total(arithmetic: Arithmetic, x: Bounded, axes: tuple[int, ...]) -> Bounded:
    """The sum over `axes`, kept with extent 1: exact where every partial sum in any order is, else bounded by its length."""
    length = math.prod(x.value.shape[axis] for axis in axes)
    with np.errstate(all="ignore"):
        value = np.sum(x.value, axis=axes, keepdims=True)
        magnitude = np.sum(np.abs(x.value), axis=axes, keepdims=True)
        error = np.sum(x.error, axis=axes, keepdims=True)
        exact = (error == 0) & (magnitude <= quantum(_parts(x.value)) * 2.0**arithmetic.exact_digits)
        added = arithmetic.sum_units(length) * arithmetic.unit * magnitude + arithmetic.form.smallest_normal * length
        return settle(arithmetic, value, error + np.where(exact | ~np.isfinite(value), 0.0, added), 1.0)


def _parts(value: Array) -> Array:
    return np.stack([value.real, value.imag]) if value.dtype.kind == "c" else value


def largest(x: Bounded, axes: tuple[int, ...]) -> Bounded:
    """The maximum over `axes`, NaN if there is one; 0 over nothing."""
    shape = tuple(1 if axis - x.value.ndim in axes or axis in axes else extent for axis, extent in enumerate(x.value.shape))
    if math.prod(x.value.shape[axis] for axis in axes) == 0:
        return Bounded.exact(np.zeros(shape))
    with np.errstate(all="ignore"):
        value = np.max(x.value, axis=axes, keepdims=True)
        error = _spread(value, np.max(x.value - x.error, axis=axes, keepdims=True), np.max(x.value + x.error, axis=axes, keepdims=True))
    undecided = np.any(x.undecided, axis=axes, keepdims=True)
    error = np.where(np.isfinite(value), error, 0.0)
    return Bounded(value, np.where(undecided, np.inf, error))
