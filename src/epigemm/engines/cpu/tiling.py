"""How D is cut: panels of rows whose product fits the last-level cache, strips whose epilogue fits a core's own.

One product call packs its operands anew, so panels want to be tall (on an AMD EPYC, Zen 5, two cores, m=2048 n=4096 k=1024 float32:
102, 56, 44 and 41 ms for panels of 32, 128, 512 and 1024 rows); an epilogue of several passes wants its values near, so a panel
is finished in strips.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from epigemm import layouts
from epigemm.engines.cpu.walk import Walk
from epigemm.problem import Operand

_MIB = 1 << 20

# The most that widened or copied blocks of the right operands, of the left ones, and accumulators outside D may take.
RIGHT_BYTES = 16 * _MIB
LEFT_BYTES = 8 * _MIB
ACC_BYTES = 8 * _MIB

_LEAST_ROWS = 64
_LEAST_COLUMNS = 256
_LEAST_DEPTH = 512
_LINE_BYTES = 64 * 1024  # longest line of a panel: a strip then has at least four


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes in elements.

    Args:
        rows, columns, depth: a panel is [rows, columns] of D, summed over k in steps of `depth`.
        strip: rows that the epilogue finishes at a time.
        group: batch items computed together, where a whole matrix is one strip.
        keep_right: the right operands' columns of a panel are widened whole, once for all panels below each other.
    """

    rows: int
    columns: int
    depth: int
    strip: int
    group: int
    keep_right: bool


@cache
def cache_bytes() -> tuple[int, int]:
    """Sizes of the second- and last-level caches; 1 MiB and 16 MiB where the system does not say."""
    return _cache_bytes(2) or _MIB, _cache_bytes(3) or 16 * _MIB


def _cache_bytes(level: int) -> int:
    # Linux; sysconf's SC_LEVEL3_CACHE_SIZE is 0 on AMD processors.
    file = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size")
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    number, unit = text.rstrip("KMG"), text.lstrip("0123456789")
    return int(number or 0) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit, 0)


def copies(operand: Operand, dtype: np.dtype[np.generic]) -> bool:
    """Whether BLAS cannot read the operand in place: another type, strides without a leading dimension, misaligned, conjugated."""
    unlike = operand.dtype.numpy != dtype or (operand.conjugate and operand.dtype.is_complex)
    return unlike or operand.order is None or operand.alignment_bytes < operand.dtype.bytes


def acc_in_d(walk: Walk) -> bool:
    """Whether the first product is computed right in D: D has its type and lies on nothing that the epilogue reads."""
    d, problem = walk.d, walk.problem
    fits = d.dtype.numpy == problem.acc_dtype.numpy and d.order == layouts.ROW and d.alignment_bytes >= d.dtype.bytes
    return fits and problem.c is None and not whole_inputs(walk)


def whole_inputs(walk: Walk) -> frozenset[str]:
    """The inputs that D may be: full (m, n) ones."""
    problem = walk.problem
    return frozenset(name for name, x in problem.inputs if x.rows == problem.m and x.columns == problem.n)


def tiling(walk: Walk, rows: int | None = None) -> Tiling:
    """The cut for a walk; `rows` overrides the panel's height."""
    dtype = walk.problem.acc_dtype.numpy
    size, last_level = dtype.itemsize, cache_bytes()[1]
    copied_left = sum(copies(x, dtype) for x in walk.left)
    copied_right = sum(copies(x, dtype) for x in walk.right)
    m, n, k = max(walk.m, 1), max(walk.n, 1), max(walk.k, 1)

    columns = min(n, _LINE_BYTES // size)
    keep_right = False
    if copied_right:
        fitting = RIGHT_BYTES // (copied_right * size * k)
        keep_right = fitting >= min(n, _LEAST_COLUMNS)
        columns = min(columns, fitting if keep_right else 4 * _LEAST_COLUMNS)
    columns = columns if columns >= n else max(64, columns // 64 * 64)

    panel_bytes = min(max(last_level, 8 * _MIB), 2 * ACC_BYTES if acc_in_d(walk) else ACC_BYTES)
    if rows is None:
        rows = panel_bytes // (columns * size * len(walk.problem.b))
    rows = m if rows >= m else min(m, max(_LEAST_ROWS, rows // 8 * 8))
    depth = k
    if copied_left:
        depth = min(depth, max(_LEAST_DEPTH, LEFT_BYTES // (copied_left * size * rows)))
    if copied_right and not keep_right:
        depth = min(depth, max(1, RIGHT_BYTES // (copied_right * size * columns)))
    strip = min(rows, max(1, _strip_bytes() // (columns * size)))
    group = _group(walk, size) if (rows, columns, depth) == (m, n, k) else 1
    return Tiling(rows, columns, depth, rows if group > 1 else strip, group, keep_right)


def _strip_bytes() -> int:
    """Bytes of one value over a strip: a few of them live in the second-level cache at a time."""
    return min(max(cache_bytes()[0] // 4, 64 * 1024), 256 * 1024)


def _group(walk: Walk, size: int) -> int:
    """Matrices of the last batch axis that one strip holds."""
    batch = walk.problem.batch
    matrix = size * max(walk.m * walk.n, walk.m * walk.k // 4, walk.k * walk.n // 4, 1)
    return max(1, min(batch[-1], _strip_bytes() // matrix)) if batch else 1
