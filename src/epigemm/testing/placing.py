"""How a tensor may lie in memory: the stride kinds of the table of cases."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from epigemm.testing.formats import Array
from epigemm.testing.numeric import NAN_BYTE, Guarded, guarded

# (rows, columns) -> (row stride, column stride, elements that one matrix spans), in elements.
_MATRIX: dict[str, Callable[[int, int], tuple[int, int, int]]] = {
    "row": lambda r, c: (c, 1, r * c),
    "col": lambda r, c: (1, r, r * c),
    "padded": lambda r, c: (c + 3, 1, r * (c + 3)),
    "padded_col": lambda r, c: (1, r + 5, c * (r + 5)),
    "stepped": lambda r, c: (2 * (2 * c + 1), 2, 2 * r * (2 * c + 1)),
    "broadcast_rows": lambda r, c: (0, 1, c),
    "broadcast_columns": lambda r, c: (1, 0, r),
    "broadcast": lambda r, c: (0, 0, 1),
    "negative": lambda r, c: (-c, -1, r * c),
    "negative_rows": lambda r, c: (-c, 1, r * c),
    "negative_columns": lambda r, c: (1, -r, r * c),
    "overlapping": lambda r, c: (1, 1, r + c),
    "misaligned": lambda r, c: (c, 1, r * c),
    "misaligned_col": lambda r, c: (1, r, r * c),
    "batch_last": lambda r, c: (c, 1, r * c),
    "batch_reversed": lambda r, c: (c, 1, r * c),
    "batch_swapped": lambda r, c: (c, 1, r * c),
    "batch_broadcast": lambda r, c: (c, 1, r * c),
}

LAYOUTS = tuple(_MATRIX)
NEGATIVE = frozenset({"negative", "negative_rows", "negative_columns", "batch_reversed"})  # NumPy alone has them
SHARED = frozenset({"broadcast_rows", "broadcast_columns", "broadcast", "overlapping", "batch_broadcast"})  # to be read, not written


def strides(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides in elements of a tensor (*batch, rows, columns) of this kind.

    Example:
        >>> strides("padded", (2, 4, 5)), strides("batch_last", (2, 4, 5)), strides("negative", (4, 5))
        ((32, 8, 1), (1, 10, 2), (-5, -1))
    """
    *batch, rows, columns = shape
    row, column, span = _MATRIX[kind](max(rows, 1), max(columns, 1))
    if kind == "batch_last":
        count = max(prod(batch), 1)
        return (*_nested(batch, 1), row * count, column * count)
    outer = _nested(batch, max(span, 1))
    if kind == "batch_reversed":
        outer = tuple(-s for s in outer)
    if kind == "batch_swapped":
        outer = _nested(batch[::-1], max(span, 1))[::-1]
    if kind == "batch_broadcast":
        outer = (0,) * len(batch)
    return (*outer, row, column)


def order_of(kind: str, shape: tuple[int, ...]) -> str | None:
    """The order of a matrix of this kind as the contract counts it, None where no leading dimension describes it.

    A vector has the order whose strides it has in full, "row" first, else the one in which it is contiguous.
    """
    rows, columns = shape[-2:]
    down, along = strides(kind, shape)[-2:]
    if along == 1 and down >= columns:
        return "row"
    if down == 1 and along >= rows:
        return "col"
    if (along == 1 or columns <= 1) and (down >= columns or rows <= 1):
        return "row"
    if (down == 1 or rows <= 1) and (along >= rows or columns <= 1):
        return "col"
    return None


def _nested(batch: list[int], step: int) -> tuple[int, ...]:
    found = []
    for extent in reversed(batch):
        found.append(step)
        step *= max(extent, 1)
    return tuple(reversed(found))


def place(values: Array, kind: str = "row", poison: int = NAN_BYTE) -> Guarded:
    """A copy of `values` lying as `kind`, in poisoned memory. Where elements share memory, the last one written counts."""
    if values.ndim < 2:
        step = {"stepped": 2, "negative": -1, "negative_columns": -1}.get(kind, 1) if values.ndim else 0
        found = guarded(values.shape, (step,) * values.ndim, values.dtype, offset=int(kind.startswith("misaligned")), poison=poison)
    else:
        offset = int(kind.startswith("misaligned"))
        found = guarded(values.shape, strides(kind, values.shape), values.dtype, offset=offset, poison=poison)
    found.array[...] = values
    return found


def torch_view(array: Array) -> Any:
    """A torch tensor over the same memory, also of the dtypes that torch's own conversion does not know."""
    import torch

    carriers = {"bfloat16": ("int16", torch.bfloat16)}
    carriers |= {name: ("uint8", getattr(torch, name)) for name in ("float8_e4m3fn", "float8_e5m2")}
    carrier, dtype = carriers.get(array.dtype.name, (None, None))
    if carrier is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(carrier)).view(dtype)


def numpy_view(tensor: Any) -> Array:
    """A NumPy array over the memory of a torch tensor, or the array itself."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import ml_dtypes
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    carrier = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}.get(name)
    if carrier is None:
        return tensor.detach().numpy()  # type: ignore[no-any-return]
    return tensor.detach().view(carrier).numpy().view(getattr(ml_dtypes, name))  # type: ignore[no-any-return]
