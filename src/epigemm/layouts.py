"""Order, leading dimension, batch stride, alignment and overlap: pure integer functions over shapes and strides.

Strides are in elements everywhere. A matrix is the last two dimensions, everything before them is batch.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd, prod

ROW = "row"
COL = "col"

MAX_ALIGNMENT_BYTES = 256


def dense_strides(shape: tuple[int, ...], order: str, batch_axes: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of a new dense tensor (*batch, rows, columns).

    Args:
        shape: (*batch, rows, columns).
        order: "row" or "col", of each matrix.
        batch_axes: the batch axes from the slowest to the fastest in memory; None is their natural order.

    Example:
        >>> dense_strides((3, 64, 48), "col")
        (3072, 1, 64)
    """
    *batch, rows, columns = shape
    # A column step of 2 tells a 1 x 1 matrix in column order from one in row order (`order_of`); nothing is there to be stepped to.
    matrix = (max(columns, 1), 1) if order == ROW else (1, max(rows, 1 if columns > 1 else 2))
    strides = [0] * len(batch)
    step = max(rows, 1) * max(columns, 1)
    for axis in reversed(batch_axes if batch_axes is not None else range(len(batch))):
        strides[axis] = step
        step *= max(batch[axis], 1)
    return (*strides, *matrix)


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """ "row" or "col" if a kernel with a leading dimension can read the matrix in place, else None.

    Row order means unit stride along columns and a row stride of at least the row's length. Vectors (one row or one column)
    take the order whose strides they have in full, as `dense_strides` gives them, else the one in which they are contiguous,
    "row" first.

    Example:
        >>> order_of((64, 48), (48, 1)), order_of((64, 48), (1, 64)), order_of((64, 48), (0, 1)), order_of((1, 48), (1, 1))
        ('row', 'col', None, 'col')
    """
    rows, columns = shape[-2:]
    row_stride, column_stride = strides[-2:]
    if column_stride == 1 and row_stride >= columns:
        return ROW
    if row_stride == 1 and column_stride >= rows:
        return COL
    if (column_stride == 1 or columns <= 1) and (row_stride >= columns or rows <= 1):
        return ROW
    if (row_stride == 1 or rows <= 1) and (column_stride >= rows or columns <= 1):
        return COL
    return None


def leading_dimension(shape: tuple[int, ...], strides: tuple[int, ...], order: str) -> int:
    """The leading dimension in elements of a matrix whose order is `order` (see `order_of`).

    Example:
        >>> leading_dimension((64, 48), (50, 1), "row")
        50
    """
    rows, columns = shape[-2:]
    slow, lines, length = (strides[-2], rows, columns) if order == ROW else (strides[-1], columns, rows)
    return max(slow, length, 1) if lines > 1 else max(length, 1)


def transposed(values: tuple[int, ...]) -> tuple[int, ...]:
    """A shape or strides with the last two exchanged.

    Example:
        >>> transposed((7, 2, 3))
        (7, 3, 2)
    """
    return (*values[:-2], values[-1], values[-2])


def is_injective(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two indices share an address: a tensor that may be written.

    Sufficient test: with dimensions sorted by stride, each stride passes the extent spanned by all faster ones.

    Example:
        >>> is_injective((4, 3), (3, 1)), is_injective((4, 3), (0, 1)), is_injective((4, 3), (1, 1))
        (True, False, False)
    """
    if 0 in shape:
        return True
    span = 0
    for stride, extent in sorted((abs(s), e) for s, e in zip(strides, shape, strict=True) if e > 1):
        if stride <= span:
            return False
        span += stride * (extent - 1)
    return True


def extent_bytes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Offsets in bytes, from the first element's address, of the lowest byte touched and one past the highest.

    Example:
        >>> extent_bytes((4, 3), (3, 1), 4), extent_bytes((4,), (-1,), 4)
        ((0, 48), (-12, 4))
    """
    if 0 in shape:
        return (0, 0)
    reaches = [stride * (extent - 1) for stride, extent in zip(strides, shape, strict=True)]
    return sum(r for r in reaches if r < 0) * itemsize, (sum(r for r in reaches if r > 0) + 1) * itemsize


def alignment_bytes(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """The largest power of two up to 256 that divides the address of each line (row or column) of each matrix.

    Example:
        >>> alignment_bytes(4096, (64, 48), (48, 1), 2), alignment_bytes(4096, (64, 48), (49, 1), 2)
        (32, 2)
    """
    steps = [abs(s) * itemsize for s, e in zip(strides, shape, strict=True) if e > 1 and abs(s) != 1]
    step = gcd(pointer, MAX_ALIGNMENT_BYTES, *steps)
    return step & -step


def broadcast_batches(*batches: tuple[int, ...]) -> tuple[int, ...] | None:
    """The common batch shape by NumPy's rule, or None where the shapes do not broadcast.

    Example:
        >>> broadcast_batches((3, 1), (2,)), broadcast_batches((3,), (2,))
        ((3, 2), None)
    """
    rank = max((len(b) for b in batches), default=0)
    padded = [(1,) * (rank - len(b)) + tuple(b) for b in batches]
    result = []
    for extents in zip(*padded, strict=True):
        wide = {e for e in extents if e != 1}
        if len(wide) > 1:
            return None
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with which a tensor of `shape` is read as `target`: 0 along each broadcast dimension.

    Example:
        >>> broadcast_strides((1, 48), (48, 1), (5, 64, 48))
        (0, 0, 1)
    """
    lead = len(target) - len(shape)
    own = (s if e == t else 0 for s, e, t in zip(strides, shape, target[lead:], strict=True))
    return (0,) * lead + tuple(own)


def batch_axes(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The batch axes of (*batch, rows, columns) from the slowest to the fastest in memory.

    Example:
        >>> batch_axes((12, 36, 4, 1), (3, 2, 3, 4))
        (1, 0)
    """
    return tuple(sorted(range(len(shape) - 2), key=lambda axis: (-abs(strides[axis]), axis)))


def collapsed_batch(batch: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int] | None:
    """(count, stride) if the batch dimensions walk memory with one stride in row-major order, else None.

    Example:
        >>> collapsed_batch((3, 2), (24, 12)), collapsed_batch((3, 2), (0, 0)), collapsed_batch((3, 2), (0, 12))
        ((6, 12), (6, 0), None)
    """
    axes = [(e, s) for e, s in zip(batch, strides, strict=True) if e != 1]
    if not axes:
        return prod(batch), 0
    for (_, slow), (extent, fast) in pairwise(axes):
        if slow != fast * extent:
            return None
    return prod(batch), axes[-1][1]


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`.

    Example:
        >>> round_up(65, 16)
        80
    """
    return -(-value // multiple) * multiple


def mask_bytes(length: int) -> int:
    """Bytes of a packed mask along D's contiguous axis of `length` elements: one bit each, padded to 16 bytes.

    Source: the peer's relu_aux, roundup(ceil(m / 8), 16); cuBLASLt wants a leading dimension that is a multiple of 128 bits.

    Example:
        >>> [mask_bytes(m) for m in (1, 127, 128, 129)]
        [16, 16, 16, 32]
    """
    return round_up(-(-length // 8), 16)
