"""The product of a panel: blocks of the operands as BLAS can read them, and NumPy's matmul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from epigemm import layouts
from epigemm.engines.cpu import narrow
from epigemm.engines.cpu.narrow import Array
from epigemm.engines.cpu.tiling import copies
from epigemm.problem import Operand

# Elements of an operand that `sum_over_k` widens at a time.
_SUM_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Side:
    """How blocks of one operand reach BLAS.

    Args:
        copied: into a scratch block of the accumulator's type.
        by_columns: the operand's columns are its lines in memory, and the copy's too.
        conjugate: the copy is conjugated.
    """

    copied: bool
    by_columns: bool
    conjugate: bool

    @staticmethod
    def of(operand: Operand, dtype: np.dtype[Any]) -> Side:
        """The side for an operand of the walk."""
        fast = operand.order
        by_columns = fast == layouts.COL or (fast is None and 0 < abs(operand.strides[-2]) < abs(operand.strides[-1]))
        return Side(copies(operand, dtype), by_columns, operand.conjugate and operand.dtype.is_complex)

    def fetch(self, block: Array, scratch: Array | None) -> Array:
        """The block itself, or its copy in `scratch`."""
        if not self.copied:
            return block
        assert scratch is not None
        flat = scratch[: block.size]
        if self.by_columns:
            copy = flat.reshape(*block.shape[:-2], block.shape[-1], block.shape[-2]).swapaxes(-1, -2)
        else:
            copy = flat.reshape(block.shape)
        narrow.widen(block, copy)
        if self.conjugate:
            np.conjugate(copy, out=copy)
        return copy

    def sum_over_k(self, matrix: Array, axis: int, dtype: np.dtype[Any]) -> Array:
        """float64 (complex128) sums of the operand over k, which is axis -1 of a left operand and -2 of a right one."""
        wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
        lines = matrix if axis == -1 else matrix.swapaxes(-1, -2)  # (..., lines, k)
        total = np.zeros((*lines.shape[:-1], 1), wide)
        items = max(1, int(np.prod(lines.shape[:-2])))
        k_step = max(1, min(lines.shape[-1], _SUM_ELEMENTS // items))
        line_step = max(1, _SUM_ELEMENTS // (items * k_step))
        for first in range(0, lines.shape[-2], line_step):
            part = total[..., first : first + line_step, :]
            for start in range(0, lines.shape[-1], k_step):
                block = lines[..., first : first + line_step, start : start + k_step]
                part += np.add.reduce(narrow.widened(block, dtype), axis=-1, dtype=wide, keepdims=True)
        if self.conjugate:
            np.conjugate(total, out=total)
        return total if axis == -1 else total.swapaxes(-1, -2)
