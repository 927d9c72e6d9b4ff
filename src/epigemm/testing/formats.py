"""Number formats and packed bits, written again from their definitions: nothing here shares code with the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format.

    Args:
        digits: bits of the significand, the hidden one counted.
        least_exponent: of the smallest normal number, 2 ** least_exponent.
        largest: the largest finite number.
        saturates: whether a value beyond `largest` is stored as `largest` (the 8-bit formats) instead of infinity.
    """

    digits: int
    least_exponent: int
    largest: float
    saturates: bool = False

    @property
    def unit(self) -> float:
        """The largest relative error of rounding a normal number: half the distance from 1 to the next number."""
        return 2.0**-self.digits

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.least_exponent


FORMATS = {
    "float16": Format(11, -14, 65504.0),
    "bfloat16": Format(8, -126, 2.0**127 * (2 - 2**-7)),
    "float32": Format(24, -126, 2.0**127 * (2 - 2**-23)),
    "float64": Format(53, -1022, 1.7976931348623157e308),
    "float8_e4m3fn": Format(4, -6, 448.0, saturates=True),
    "float8_e5m2": Format(3, -14, 57344.0, saturates=True),
}
FORMATS["complex64"] = FORMATS["float32"]
FORMATS["complex128"] = FORMATS["float64"]


def spacing(values: Array, dtype: str) -> Array:
    """The distance between neighbouring numbers of a format around each value: one unit in the last place."""
    form = FORMATS[dtype]
    _, exponents = np.frexp(np.where(np.isfinite(values), values, 1.0))
    return np.ldexp(1.0, np.maximum(exponents - form.digits, form.least_exponent - form.digits + 1))


def rounded(values: Array, dtype: str) -> Array:
    """float64 values rounded to a format, to nearest with ties to even, as float64.

    Example:
        >>> rounded(np.array([5000.0, 1e5, 3e38]), "bfloat16").tolist()[0], rounded(np.array([1e5]), "float16").tolist()
        (4992.0, [inf])
    """
    form = FORMATS[dtype]
    values = np.asarray(values, dtype=np.float64)
    if dtype in ("float64", "complex128"):
        return values
    step = spacing(values, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        nearest = np.where(np.isfinite(values), np.rint(values / step) * step, values)
        beyond = form.largest if form.saturates else np.inf
        return np.where(np.abs(nearest) > form.largest, np.copysign(beyond, nearest), nearest)


def fits(values: Array, digits: int) -> Array:
    """Whether each value needs no more than `digits` bits of significand."""
    fraction, _ = np.frexp(np.where(np.isfinite(values), values, 0.0))
    scaled = np.ldexp(fraction, digits)
    return np.asarray(scaled == np.rint(scaled))


def quantum(values: Array) -> float:
    """The largest power of two of which every value is a multiple; infinity where all are zero."""
    values = np.asarray(values, dtype=np.float64).ravel()
    values = values[np.isfinite(values) & (values != 0)]
    if values.size == 0:
        return float("inf")
    fraction, exponents = np.frexp(values)
    whole = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    return float(np.min(np.ldexp((whole & -whole).astype(np.float64), exponents - 53)))


def mask_length(length: int) -> int:
    """Bytes of `length` packed bits: a whole number of 16-byte groups."""
    return (length + 127) // 128 * 16


def pack(bits: Array, order: str, padding: int = 0) -> Array:
    """Mask bytes of a boolean (*batch, m, n): along m for "col", along n for "row"; unused bits are `padding` (0 or 1).

    Example:
        >>> pack(np.ones((1, 9, 1), bool), "col")[0, :3, 0].tolist()
        [255, 1, 0]
    """
    axis = -2 if order == "col" else -1
    moved = np.moveaxis(np.asarray(bits, dtype=bool), axis, -1)
    full = np.full((*moved.shape[:-1], 8 * mask_length(moved.shape[-1])), bool(padding))
    full[..., : moved.shape[-1]] = moved
    groups = full.reshape(*full.shape[:-1], full.shape[-1] // 8, 8)
    weights = np.left_shift(1, np.arange(8))
    return np.moveaxis((groups * weights).sum(axis=-1).astype(np.uint8), -1, axis)


def unpack(packed: Array, order: str, length: int) -> Array:
    """The first `length` bits of each line of a mask as booleans: the reverse of `pack`."""
    axis = -2 if order == "col" else -1
    lines = np.moveaxis(np.asarray(packed), axis, -1)
    position = np.arange(length)
    bits = (lines[..., position // 8] >> (position % 8).astype(np.uint8)) & 1
    return np.moveaxis(bits.astype(bool), -1, axis)


def padding_bits(packed: Array, order: str, length: int) -> Array:
    """The bits of each line past the first `length`, as booleans."""
    axis = -2 if order == "col" else -1
    return np.take(unpack(packed, order, 8 * packed.shape[axis]), range(length, 8 * packed.shape[axis]), axis=axis)


# Philox4x32-10. Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


Word = Any  # an integer, or an array of uint64 that hold one each


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """The four words of a Philox4x32-10 block, or of one for each element of array-valued counters.

    Example:
        >>> [hex(word) for word in philox((0, 0, 0, 0), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(_MULTIPLIERS[0] * x0, 1 << 32)
        high1, low1 = divmod(_MULTIPLIERS[1] * x2, 1 << 32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return x0, x1, x2, x3


def uniform(seed: int, batches: int, m: int, n: int) -> Array:
    """The numbers in [0, 1) that `dropout` compares with, (batches, m, n): a block serves four columns of one row."""
    blocks = -(-n // 4)
    batch, row, block = np.indices((batches, m, blocks)).astype(np.uint64)
    words = philox((block, row, batch, np.zeros_like(block)), (seed & _WORD, (seed >> 32) & _WORD))
    return (np.stack(words, axis=-1).reshape(batches, m, 4 * blocks)[..., :n] >> np.uint64(8)) / 2.0**24
