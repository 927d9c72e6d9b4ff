"""Packed masks: bit i % 8 of byte i // 8 along D's contiguous axis, which is the last axis of the walk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack(bits: NDArray[Any], condition: NDArray[np.bool_], start: int, length: int) -> None:
    """Store the bits of `condition`; padding bits and bytes are written as zero.

    Args:
        bits: (..., rows, bytes) of the rows at hand.
        condition: (..., rows, columns from `start`), broadcast to the rows of `bits`.
        start: first column, a multiple of 8.
        length: columns of the whole row: the block that reaches it writes the padding too.
    """
    packed = np.packbits(condition, axis=-1, bitorder="little")
    first = start // 8
    bits[..., first : first + packed.shape[-1]] = packed
    if start + condition.shape[-1] >= length:
        bits[..., first + packed.shape[-1] :] = 0


def unpack(bits: NDArray[np.uint8], start: int, count: int) -> NDArray[np.bool_]:
    """`count` columns from `start` (a multiple of 8) of packed rows, as booleans."""
    first = start // 8
    lines = bits[..., first : first + -(-count // 8)]
    return np.unpackbits(lines, axis=-1, count=count, bitorder="little").view(np.bool_)
