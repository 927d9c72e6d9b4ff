"""How D is cut: blocks of columns, panels whose product fits a thread's share of the cache, strips whose epilogue fits a core's own.

The right operands of a block are widened once, where they are narrow, for all the panels of the block. Panels are what threads share out.
Each product call packs its operands anew, so panels want to be large; an epilogue of several passes wants its values near, so a panel
is finished in strips. Measured on two cores of an AMD EPYC (Zen 5), float32 with bias and ReLU: m=2048 n=4096 k=1024 takes 163 to 216 ms
with panels of 256x4096 up to 1024x4096 where 64x256 takes 345 (other jobs running), m=8192 n=2048 k=256 27 ms with 256x2048 and 46
with 64x256.
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

_LEAST_COLUMNS = 256
_LEAST_DEPTH = 512
_LINE_BYTES = 64 * 1024  # longest line of a panel: a strip then has at least four
_ROWS = 256
_LEAST_ELEMENTS = 1 << 14
_MOST_ELEMENTS = 1 << 20
_PANELS_A_THREAD = 4  # so that threads end together


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes in elements.

    Args:
        block: columns of D for which the right operands are made ready at a time.
        rows, columns, depth: a panel is [rows, columns] of D within a block, summed over k in steps of `depth`.
        strip: rows that the epilogue finishes at a time.
        group: batch items computed together, where a whole matrix is one strip.
        keep_right: the right operands' columns of a block are widened whole, once for all its panels.
        threads: how many share out the panels; with one, BLAS uses threads of its own.
    """

    block: int
    rows: int
    columns: int
    depth: int
    strip: int
    group: int
    keep_right: bool
    threads: int


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


def tiling(walk: Walk, threads: int, rows: int | None = None, columns: int | None = None) -> Tiling:
    """The cut for a walk.

    Args:
        walk: what is cut.
        threads: how many share out the panels.
        rows, columns: size of a panel, None for the one expected to be fastest. Memory bounds it in any case.
    """
    dtype = walk.problem.acc_dtype.numpy
    size = dtype.itemsize
    copied_left = sum(copies(x, dtype) for x in walk.left)
    copied_right = sum(copies(x, dtype) for x in walk.right)
    m, n, k = max(walk.m, 1), max(walk.n, 1), max(walk.k, 1)

    block, keep_right = n, False
    if copied_right:
        fitting = RIGHT_BYTES // (copied_right * size * k)
        keep_right = fitting >= min(n, _LEAST_COLUMNS)
        block = _part_of(n, fitting, 64) if keep_right else n
    high, wide = _panel(walk, size, threads)
    columns = _part_of(block, min(columns or wide, _LINE_BYTES // size), 64)
    rows = rows or high
    if copied_left:
        rows = min(rows, LEFT_BYTES // threads // (copied_left * size * min(k, _LEAST_DEPTH)))
    if not acc_in_d(walk) or len(walk.problem.b) > 1:
        rows = min(rows, ACC_BYTES // threads // (columns * size * len(walk.problem.b)))
    rows = _part_of(m, rows, 8)

    depth = k
    if copied_left:
        depth = min(depth, max(1, LEFT_BYTES // threads // (copied_left * size * rows)))
    if copied_right and not keep_right:
        depth = min(depth, max(1, RIGHT_BYTES // threads // (copied_right * size * columns)))
    strip = min(rows, max(1, _strip_bytes() // (columns * size)))
    group = _group(walk, size) if (rows, columns, depth) == (m, n, k) else 1
    return Tiling(block, rows, columns, depth, rows if group > 1 else strip, group, keep_right, threads)


def _part_of(whole: int, part: int, multiple: int) -> int:
    """`part`, at most the whole and a multiple where it is less."""
    return whole if part >= whole else min(whole, max(multiple, part // multiple * multiple))


def _panel(walk: Walk, size: int, threads: int) -> tuple[int, int]:
    """(rows, columns) of a panel. With one thread BLAS has threads of its own, which want few, tall panels."""
    last_level = cache_bytes()[1]
    if threads == 1:
        wide = min(walk.n, _LINE_BYTES // size)
        return max(64, min(last_level, 2 * ACC_BYTES) // (max(wide, 1) * size)), wide
    elements = min(last_level // (2 * threads * size), _MOST_ELEMENTS, walk.m * walk.n // (_PANELS_A_THREAD * threads))
    elements = max(elements, _LEAST_ELEMENTS)
    high = min(walk.m, _ROWS)
    wide = min(walk.n, max(_LEAST_COLUMNS, elements // max(high, 1)))
    return max(high, elements // 4 // max(wide, 1)), wide


def _strip_bytes() -> int:
    """Bytes of one value over a strip: a few of them live in the second-level cache at a time."""
    return min(max(cache_bytes()[0] // 4, 64 * 1024), 256 * 1024)


def _group(walk: Walk, size: int) -> int:
    """Matrices of the last batch axis that one strip holds."""
    batch = walk.problem.batch
    matrix = size * max(walk.m * walk.n, walk.m * walk.k // 4, walk.k * walk.n // 4, 1)
    return max(1, min(batch[-1], _strip_bytes() // matrix)) if batch else 1
