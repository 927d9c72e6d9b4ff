"""Reductions over D: float64 partial sums a strip, added in the order of the walk whatever thread made them."""

from __future__ import annotations

from typing import Any

import numpy as np

from epigemm.engines.cpu import narrow
from epigemm.engines.cpu.evaluate import Strip
from epigemm.engines.cpu.narrow import Array

_UFUNC = {"sum": np.add, "amax": np.maximum}
_START = {"sum": 0.0, "amax": -np.inf}


class Total:
    """One reduction of one matrix (or group of them).

    Args:
        op: "sum" or "amax".
        axis: what is reduced: "m" (down the rows of the walk), "n" (along them), "mn".
        target: where the result goes, (..., m | 1, n | 1).
        single: the walk has one block of columns, so that a strip's row sums are final.
    """

    def __init__(self, op: str, axis: str, target: Array, single: bool) -> None:
        self.ufunc: Any = _UFUNC[op]
        self.axis, self.target, self.direct = axis, target, single and axis == "n"
        self.options: dict[str, Any] = {"keepdims": True}
        wide = np.dtype(np.complex128 if target.dtype.kind == "c" else np.float64)
        if op == "sum":
            self.options["dtype"] = wide
        self.total = None if self.direct else np.full(target.shape, _START[op], wide)
        self.partials: dict[int, tuple[int, int, Array]] = {}

    def add(self, value: Any, strip: Strip) -> None:
        """Take in the strip's values."""
        x = np.broadcast_to(value, (*self.target.shape[:-2], len(strip.rows), len(strip.columns)))
        axes = {"m": -2, "n": -1, "mn": (-2, -1)}[self.axis]
        part = self.ufunc.reduce(x, axis=axes, **self.options)
        if self.axis != "n":
            self.partials[strip.index] = (strip.columns.start, strip.columns.stop, part)
        elif self.direct:
            narrow.store(self.target[..., strip.rows.start : strip.rows.stop, :], part)
        else:
            assert self.total is not None
            lines = self.total[..., strip.rows.start : strip.rows.stop, :]
            self.ufunc(lines, part, out=lines)

    def end_panel(self) -> None:
        """Add the panel's partial sums in the order of its strips."""
        for index in sorted(self.partials):
            start, stop, part = self.partials[index]
            assert self.total is not None
            total = self.total[..., start:stop] if self.axis == "m" else self.total
            self.ufunc(total, part, out=total)
        self.partials.clear()

    def end(self) -> None:
        """Store the result."""
        if self.total is not None:
            narrow.store(self.target, self.total)
