"""`uniform` over a strip: each draw of Philox serves the four columns that share its counter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from epigemm.expression.philox import WORDS, philox


def uniform(seed: int, rows: range, columns: range, batch: int = 0) -> NDArray[Any]:
    """Numbers in [0, 1) for the elements of D at these rows and columns, float32 of shape (rows, columns).

    Args:
        seed: any integer; its lowest 64 bits, two's complement, are the key.
        rows, columns: D's logical m and n coordinates.
        batch: the flattened batch index.
    """
    seed &= 0xFFFFFFFFFFFFFFFF
    first, last = columns.start // WORDS, -(-columns.stop // WORDS)
    counters = np.arange(first, last, dtype=np.uint32)[None, :]
    lines = np.arange(rows.start, rows.stop, dtype=np.uint32)[:, None]
    words = philox((counters, lines, np.uint32(batch), np.uint32(0)), (seed & 0xFFFFFFFF, seed >> 32))
    drawn = np.empty((len(rows), last - first, WORDS), np.float32)
    for index, word in enumerate(words):
        np.right_shift(word, np.uint32(8), out=drawn[:, :, index], casting="unsafe")
    drawn *= np.float32(2.0**-24)
    skip = columns.start - WORDS * first
    return drawn.reshape(len(rows), (last - first) * WORDS)[:, skip : skip + len(columns)]
