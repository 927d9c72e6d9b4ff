"""The ops in NumPy: `f(*arrays, out=None, **params)`, in the arrays' own precision, in few passes over memory.

`out` has the broadcast shape and may be one of the arrays itself (not another view of its memory). Python scalars stay weak, so float32
stays float32. Callers run these under `np.errstate(all="ignore")`: infinities and NaN are values here, not events.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import numpy as np

from epigemm import dtypes
from epigemm.expression.special import erf

Array = Any

GELU_SCALE = sqrt(2 / pi)
GELU_CUBIC = 0.044715
# Below this, gelu's and silu's factor is 0 in float64 too, so a clamped argument gives 0 where -inf would give -inf * 0.
FAR = -1000.0
# Below this, silu(x) is x * exp(x) to the last bit.
TAIL = -80.0

_INTEGERS = {4: np.int32, 8: np.int64}


def _fresh(x: Array, out: Array) -> Array:
    """Memory for a step that still needs `x` afterwards: `out` unless it is `x` itself."""
    return np.empty_like(x) if out is None or out is x else out


def _finite_below(x: Array, least: float) -> Array:
    """`x` with -inf raised to `least`; costs one reading pass where there is nothing to raise."""
    if x.size and not x.min() >= least:
        return np.clip(x, least, np.inf)
    return x


def where(cond: Array, x: Array, y: Array, out: Array = None) -> Array:
    """Selection by bits: np.where branches on every element and is 8 times slower on random masks."""
    cond = np.asarray(cond)
    kind = np.result_type(x, y) if out is None else out.dtype
    if kind.kind != "f" or kind.itemsize not in _INTEGERS:
        return _store(np.where(cond, x, y), out)
    whole = _INTEGERS[kind.itemsize]
    bytes_ = cond.view(np.int8)
    if _is_zero(y):
        return _masked(x, np.negative(bytes_, dtype=whole), kind, out)
    if _is_zero(x):
        return _masked(y, np.subtract(bytes_, 1, dtype=whole), kind, out)
    xs, ys = np.asarray(x, kind).view(whole), np.asarray(y, kind).view(whole)
    mask = np.negative(bytes_, dtype=whole)
    chosen = np.bitwise_and(np.bitwise_xor(xs, ys), mask)
    if out is None:
        return np.bitwise_xor(chosen, ys).view(kind)
    np.bitwise_xor(chosen, ys, out=out.view(whole))
    return out


def _masked(x: Array, mask: Array, kind: np.dtype[Any], out: Array) -> Array:
    bits = np.asarray(x, kind).view(mask.dtype)
    if out is None:
        return np.bitwise_and(bits, mask).view(kind)
    np.bitwise_and(bits, mask, out=out.view(mask.dtype))
    return out


def _is_zero(x: Array) -> bool:
    return isinstance(x, (int, float)) and x == 0 and str(x)[0] != "-"


def _store(x: Array, out: Array) -> Array:
    if out is None:
        return x
    np.copyto(out, x)
    return out


def power(x: Array, out: Array = None, *, exponent: float) -> Array:
    return np.power(x, exponent, out=out)


def rsqrt(x: Array, out: Array = None) -> Array:
    root = np.sqrt(x, out=out)
    return np.reciprocal(root, out=out)


def sigmoid(x: Array, out: Array = None) -> Array:
    t = negative(x, out)
    t = np.exp(t, out=out)
    t = np.add(t, 1, out=out)
    return np.reciprocal(t, out=out)


def negative(x: Array, out: Array = None) -> Array:
    """-x. NumPy 2.4.6's own leaves elements unwritten where x has a stride of 16 bytes (float32) or 64 (float64) and `out` is strided."""
    x = np.asarray(x)
    return np.negative(x, out=out) if x.dtype.kind == "c" else np.subtract(-0.0, x, out=out)


def maximum(x: Array, y: Array, out: Array = None) -> Array:
    """Against a number by `clip`, whose loop is vectorised; np.maximum's against a scalar is not, and takes 4 times as long."""
    if isinstance(y, (int, float)) and y == y:
        return np.clip(x, y, np.inf, out=out)
    return np.maximum(x, y, out=out)


def minimum(x: Array, y: Array, out: Array = None) -> Array:
    if isinstance(y, (int, float)) and y == y:
        return np.clip(x, -np.inf, y, out=out)
    return np.minimum(x, y, out=out)


def relu(x: Array, out: Array = None) -> Array:
    return np.clip(x, 0, np.inf, out=out)


def leaky_relu(x: Array, out: Array = None, *, slope: float = 0.01) -> Array:
    t = np.multiply(x, slope, out=_fresh(x, out))
    if 0 < slope <= 1:
        return np.maximum(x, t, out=out)
    return where(np.greater(x, 0), x, t, out=out)


def gelu(x: Array, out: Array = None, *, approximate: str = "none") -> Array:
    x = np.asarray(x)
    finite = _finite_below(x, FAR)
    t = _fresh(finite, out)
    if approximate == "tanh":
        # x / 2 * (1 + tanh(x * (scale + scale * cubic * x * x)))
        np.multiply(finite, finite, out=t)
        t *= GELU_SCALE * GELU_CUBIC
        t += GELU_SCALE
        t *= finite
        np.tanh(t, out=t)
    else:
        np.multiply(finite, sqrt(0.5), out=t)
        erf(t, out=t)
    t += 1
    t *= finite
    return np.multiply(t, 0.5, out=t if out is None else out)


def silu(x: Array, out: Array = None) -> Array:
    x = np.asarray(x)
    finite = _finite_below(x, TAIL)
    if finite is not x:
        finite = np.maximum(x, FAR)
    t = negative(finite, _fresh(finite, out))
    np.exp(t, out=t)
    t += 1
    t = np.divide(finite, t, out=t if out is None else out)
    if finite is not x:  # exp(-x) overflows float32 where x * exp(x) is still a normal number
        np.copyto(t, finite * np.exp(finite), where=finite < TAIL)
    return t


def softplus(x: Array, out: Array = None) -> Array:
    """max(x, 0) + log1p(exp(-|x|)): neither overflows nor loses the tail."""
    x = np.asarray(x)
    t = np.abs(x, out=_fresh(x, out))
    np.negative(t, out=t)
    np.exp(t, out=t)
    np.log1p(t, out=t)
    return np.add(t, relu(x), out=t if out is None else out)


def mish(x: Array, out: Array = None) -> Array:
    """x * tanh(log1p(e)) with e = exp(x) is x * n / (n + 2) with n = e * (e + 2); beyond 20 the factor is 1."""
    x = np.asarray(x)
    finite = _finite_below(x, FAR)
    t = _fresh(finite, out)
    minimum(finite, 20, out=t)
    np.exp(t, out=t)
    t *= t + 2
    np.divide(t, t + 2, out=t)
    return np.multiply(t, finite, out=t if out is None else out)


def hardswish(x: Array, out: Array = None) -> Array:
    x = np.asarray(maximum(x, -3))
    t = np.add(x, 3, out=np.empty_like(x))
    minimum(t, 6, out=t)
    t *= 1 / 6
    return np.multiply(t, x, out=t if out is None else out)


def cast(x: Array, out: Array = None, *, dtype: str) -> Array:
    """`x` rounded to `dtype` and widened again; 8-bit floats saturate at their largest finite value."""
    row = dtypes.of(dtype)
    x = np.asarray(x)
    return _store(narrowed(x, dtype).astype(x.dtype if row.is_complex == (x.dtype.kind == "c") else row.acc.numpy), out)


def narrowed(x: Array, dtype: str) -> Array:
    """`x` as an array of `dtype`: round to nearest even, NaN kept, 8-bit floats saturating."""
    row = dtypes.of(dtype)
    if row.is_narrow:
        largest = LARGEST_NARROW[row.name]
        x = np.clip(x, -largest, largest)
    return x.astype(row.numpy)


LARGEST_NARROW = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def bitmask(cond: Array, *, axis: int = -1) -> Array:
    """The bits packed along `axis`, least significant first (without padding to 16 bytes, which is the layout's affair)."""
    return np.packbits(cond, axis=axis, bitorder="little")


def unbitmask(packed: Array, *, axis: int = -1, count: int | None = None) -> Array:
    """The first `count` bits along `axis` as booleans."""
    return np.unpackbits(packed, axis=axis, count=count, bitorder="little").view(np.bool_)


AXES = {"m": (-2,), "n": (-1,), "mn": (-2, -1)}


def sum_(x: Array, out: Array = None, *, axis: str = "mn") -> Array:
    return np.sum(x, axis=AXES[axis], keepdims=True, out=out)


def amax(x: Array, out: Array = None, *, axis: str = "mn") -> Array:
    return np.max(x, axis=AXES[axis], keepdims=True, out=out)
