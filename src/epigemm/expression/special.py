"""erf for arrays, which NumPy lacks.

The coefficients are our own fits: Lawson-weighted least squares of P(z) / Q(z) for the least relative error, in 50-digit arithmetic.
Largest relative errors of the fits: float32 1.9e-8 on |x| < 3.92; float64 8.3e-17 on |x| < 1, and of erfc(x) exp(x^2) 1.5e-18 on [1, 6].
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

# erf(x) / x over z = x * x
_SINGLE_P = (1.1283791462864345, 0.1903951516144694, 0.05274715724128600, 0.003765105022773105, 0.0002848667448450812, 2.050119984007086e-6)
_SINGLE_Q = (1.0, 0.5020660541546160, 0.1141043686647458, 0.01496820552868230, 0.001162402440184564, 3.809120914049469e-5)
_NEAR_P = (
    1.128379167095512481,
    0.08822340568057201719,
    0.03818027169976930266,
    -0.0001621014697708600356,
    0.0001188109300949178657,
    -3.086578098938235591e-6,
)
_NEAR_Q = (1.0, 0.4115192909025807191, 0.07100948176956594877, 0.006183763280503845088, 0.000234048476338979236)
# erfc(x) exp(x * x) over x
_FAR_P = (
    0.99999999221902902,
    1.845508023745207623,
    1.679575508764120158,
    0.9464926772597750718,
    0.3533202765881398876,
    0.08739942041562617192,
    0.01339414248961661083,
    0.001009476248233709696,
)
_FAR_Q = (
    1.0,
    2.973887106007282431,
    4.035248209745109852,
    3.278146859331496748,
    1.754183214654080818,
    0.638113563876923481,
    0.1558060949999863272,
    0.02374049839253181859,
    0.001789250080399607131,
)

# From here on erf rounds to 1.
_SINGLE_END = 3.92
_DOUBLE_END = 6.0


def erf(x: Array, out: Array = None) -> Array:
    """The error function, within 2 units in the last place in float32 and float64."""
    x = np.asarray(x)
    return _erf_double(x, out) if x.dtype == np.float64 else _erf_single(x, out)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    total = np.multiply(x, coefficients[-1])
    for c in coefficients[-2:0:-1]:
        total += c
        total *= x
    total += coefficients[0]
    return total


def _erf_single(x: Array, out: Array) -> Array:
    x = np.clip(x, -_SINGLE_END, _SINGLE_END)
    z = x * x
    p = _polynomial(_SINGLE_P, z)
    p /= _polynomial(_SINGLE_Q, z)
    p *= x
    return np.clip(p, -1, 1, out=out)


def _erf_double(x: Array, out: Array) -> Array:
    size = np.minimum(np.abs(x), _DOUBLE_END)
    z = size * size
    inner = np.minimum(z, 1)
    near = size * (_polynomial(_NEAR_P, inner) / _polynomial(_NEAR_Q, inner))
    far = 1 - np.exp(-z) * (_polynomial(_FAR_P, size) / _polynomial(_FAR_Q, size))
    return np.copysign(np.where(size < 1, near, far), x, out=out)
