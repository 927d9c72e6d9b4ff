"""The uniform numbers of dropout: Philox4x32-10 on an element's batch, row and column, so that every engine draws the same.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORDS = 4

Array = Any


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Four words of 32 random bits for each counter.

    Args:
        counter: four uint32 arrays that broadcast against each other.
        key: two 32-bit integers.

    Example:
        >>> zero = np.zeros((), np.uint32)
        >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (np.asarray(c, np.uint32) for c in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        low0, high0 = _product(c0, MULTIPLIERS[0])
        low1, high1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint32(k0), low1, high0 ^ c3 ^ np.uint32(k1), low0
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _product(x: Array, multiplier: int) -> tuple[Array, Array]:
    whole = x.astype(np.uint64) * np.uint64(multiplier)
    return whole.astype(np.uint32), (whole >> np.uint64(32)).astype(np.uint32)


def uniform(seed: int, rows: Array, columns: Array, batch: Array = 0) -> Array:
    """float32 in [0, 1), one for each element, by the row, the column and the flattened batch index.

    Args:
        seed: a 64-bit integer; a negative one counts by its two's complement.
        rows, columns, batch: integer arrays that broadcast against each other.
    """
    columns = np.asarray(columns)
    seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    words = philox((columns // WORDS, rows, batch, np.uint32(0)), (seed & 0xFFFFFFFF, seed >> 32))
    which = columns % WORDS
    chosen = words[0]
    for index in range(1, WORDS):
        chosen = np.where(which == index, words[index], chosen)
    return (chosen >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
