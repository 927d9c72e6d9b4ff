"""The checks: a stored array against the range that the reference allows, element by element, and memory around it.

A number passes if it lies between the two ends of the reference's range, each rounded to the stored dtype. NaN must meet NaN and
infinity infinity. Only elements that the reference leaves undecided pass unseen, and a result may not consist of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from epigemm.testing.bounded import Bounded
from epigemm.testing.formats import Array, padding_bits, rounded, spacing, unpack

# A check that leaves more than this part of its elements undecided has checked too little.
UNDECIDED_SHARE = 0.05


def assert_close(actual: Array, expected: Bounded, dtype: str, what: str) -> None:
    """Asserts that every element of `actual` is one that the reference allows.

    Args:
        actual: in its stored dtype, of the reference's shape.
        expected: the values and their errors before rounding to `dtype`.
        dtype: name of the stored dtype.
        what: of what, for the message: "d of bias f16 m=5 n=3 k=7".

    Raises:
        AssertionError: the dtype or shape differs, or an element does; the message gives the first bad coordinate, both values, the
            allowed range, the distance in units in the last place and the number of bad elements.
    """
    if actual.dtype.name != dtype:
        raise AssertionError(f"{what}: the dtype is {actual.dtype.name}, it should be {dtype}")
    if actual.shape != expected.value.shape:
        raise AssertionError(f"{what}: the shape is {actual.shape}, it should be {expected.value.shape}")
    if actual.dtype.kind == "c":
        part = "float32" if dtype == "complex64" else "float64"
        expected = _finite_part(actual, expected, what)
        for name, got, want in (("real", actual.real, expected.value.real), ("imaginary", actual.imag, expected.value.imag)):
            _assert_real(got, Bounded(want, expected.error), part, f"{name} part of {what}")
    elif expected.value.dtype == bool:
        raise AssertionError(f"{what}: booleans are compared by assert_mask")
    else:
        _assert_real(actual, expected, dtype, what)


def _finite_part(actual: Array, expected: Bounded, what: str) -> Bounded:
    """A complex reference without its non-finite elements, where the result must not be finite either.

    Which of their parts is infinite and which NaN depends on how the products of parts are ordered, and is nobody's contract.
    """
    broken = ~np.isfinite(expected.value)
    bad = broken & np.isfinite(actual) & ~expected.undecided
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{what}: {int(bad.sum())} elements are finite that should not be; the first is at {where}: "
            f"got {actual[where]!r}, expected {expected.value[where]!r}"
        )
    return Bounded(np.where(broken, 0.0, expected.value), np.where(broken, np.inf, expected.error))


def check_decided(undecided: Array, what: str, allowed: float = UNDECIDED_SHARE) -> None:
    """Asserts that the reference decides enough of a result for the comparison to mean something."""
    share = undecided.mean() if undecided.size else 0.0
    if share > allowed:
        raise AssertionError(f"{what}: the reference leaves {share:.0%} of the elements undecided (at most {allowed:.0%})")


def _assert_real(actual: Array, expected: Bounded, dtype: str, what: str) -> None:
    got = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        low, high = rounded(expected.value - expected.error, dtype), rounded(expected.value + expected.error, dtype)
        value = rounded(expected.value, dtype)
        right = np.where(np.isnan(value), np.isnan(got), (low <= got) & (got <= high))
    bad = ~(right | expected.undecided)
    if bad.any():
        raise AssertionError(_report(got, value, low, high, bad, dtype, what))


def _report(got: Array, value: Array, low: Array, high: Array, bad: Array, dtype: str, what: str) -> str:
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    if np.isfinite(got[where]) and np.isfinite(value[where]):
        distance = abs(got[where] - value[where]) / spacing(value[where], dtype)
        off = f"off by {distance:.4g} ulp of {dtype}"
    else:
        off = "not a number where one is expected, or the reverse"
    return (
        f"{what}: {int(bad.sum())} of {bad.size} elements are wrong; the first is at {where}:\n"
        f"  got {got[where]!r}, expected {value[where]!r}, allowed [{low[where]!r}, {high[where]!r}]: {off}"
    )


def assert_mask(actual: Array, expected: Bounded, order: str, what: str) -> None:
    """Asserts that packed bits are those of a boolean (*batch, m, n); a bit may differ only where the reference leaves it undecided.

    Padding bits must be 0.
    """
    axis = -2 if order == "col" else -1
    length = expected.value.shape[axis]
    if actual.dtype != np.uint8:
        raise AssertionError(f"{what}: the dtype is {actual.dtype.name}, it should be uint8")
    shape = list(expected.value.shape)
    shape[axis] = (length + 127) // 128 * 16
    if actual.shape != tuple(shape):
        raise AssertionError(f"{what}: the mask's shape is {actual.shape}, it should be {tuple(shape)}")
    got = unpack(actual, order, length)
    bad = (got != expected.value) & ~expected.undecided
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} bits are wrong; the first is at {where}: "
            f"got {bool(got[where])}, expected {bool(expected.value[where])}"
        )
    if padding_bits(actual, order, length).any():
        raise AssertionError(f"{what}: padding bits are set; they are written as 0")


def assert_equal(actual: Array, expected: Array, what: str) -> None:
    """Asserts that two arrays have the same dtype, shape and bits."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(f"{what}: {actual.dtype}{actual.shape} is not {expected.dtype}{expected.shape}")
    bad = bytes_of(actual) != bytes_of(expected)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0][:-1])
        raise AssertionError(
            f"{what}: {int(bad.any(-1).sum())} elements differ; the first is at {where}: {actual[where]} is not {expected[where]}"
        )


def bytes_of(array: Array) -> Array:
    """The bytes of each element, (*shape, itemsize)."""
    dense = np.ascontiguousarray(array)
    return dense.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


# ---------------------------------------------------------------- guarded memory

# All bits set is a NaN in every floating format and a set bit in every mask; 0xAA is an ordinary small number.
NAN_BYTE, CANARY_BYTE = 0xFF, 0xAA
GUARD_BYTES = 512


@dataclass(slots=True)
class Guarded:
    """A tensor in the middle of a buffer whose other bytes are poison: before, behind and between its elements.

    Args:
        array: the view to pass on.
        buffer: all bytes.
        inside: which bytes belong to elements.
        poison: the value of all others.
    """

    array: Array
    buffer: Array
    inside: Array
    poison: int

    def assert_intact(self, what: str) -> None:
        """Asserts that no byte outside the elements has changed."""
        bad = (self.buffer != self.poison) & ~self.inside
        if bad.any():
            first = int(np.argmax(bad))
            start = int(np.argmax(self.inside)) if self.inside.any() else GUARD_BYTES
            raise AssertionError(
                f"{what}: {int(bad.sum())} bytes outside the tensor were written, the first {first - start} bytes from its start"
            )


def guarded(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], *, offset: int = 0, poison: int = NAN_BYTE) -> Guarded:
    """A tensor of these strides (in elements) in poisoned memory; its own elements are poison too until they are filled.

    Args:
        offset: by how many elements its lowest address is moved from a 256-byte boundary.
    """
    size = dtype.itemsize
    reach = [stride * (extent - 1) for stride, extent in zip(strides, shape, strict=True)] if 0 not in shape else []
    below, above = -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    count = below + above + 1
    raw = np.full(2 * GUARD_BYTES + (count + offset) * size + 256, poison, np.uint8)
    start = -raw.__array_interface__["data"][0] % 256 + GUARD_BYTES + offset * size
    # np.ndarray rather than as_strided, which does not know the 8-bit types.
    array: Array = np.ndarray(shape, dtype, raw, start + below * size, tuple(s * size for s in strides))
    inside = np.zeros(raw.shape, bool)
    marks = np.lib.stride_tricks.as_strided(inside[start + below * size :], (*shape, size), (*(s * size for s in strides), 1))
    marks[...] = True
    return Guarded(array, raw, inside, poison)
