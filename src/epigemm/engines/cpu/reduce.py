"""Reductions over D: float64 partial results a panel, put together in the order of the walk whatever thread made them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from epigemm.engines.cpu import narrow
from epigemm.engines.cpu.evaluate import Strip
from epigemm.engines.cpu.narrow import Array

_UFUNC: dict[str, Any] = {"sum": np.add, "amax": np.maximum}
_START = {"sum": 0.0, "amax": -np.inf}
_AXES: dict[str, Any] = {"m": -2, "n": -1, "mn": (-2, -1)}


class Total:
    """One reduction of one matrix (or group of them).

    Args:
        op: "sum" or "amax".
        axis: what is reduced: "m" (down the rows of the walk), "n" (along them), "mn".
        target: where the result goes, (..., m | 1, n | 1).
        whole_rows: a panel has all columns of its rows, so that their sums are final.
        empty: there is nothing to reduce; the result is 0, of amax too.
    """

    def __init__(self, op: str, axis: str, target: Array, whole_rows: bool, empty: bool) -> None:
        self.op, self.ufunc, self.axis, self.target = op, _UFUNC[op], axis, target
        self.direct, self.empty = whole_rows and axis == "n", empty
        self.wide = np.dtype(np.complex128 if target.dtype.kind == "c" else np.float64)
        self.options: dict[str, Any] = {"keepdims": True} | ({"dtype": self.wide} if op == "sum" else {})
        self.total = None if self.direct else self.start(target.shape)
        self.lock, self.waiting, self.next = threading.Lock(), dict[int, "Part"](), 0

    def start(self, shape: tuple[int, ...]) -> Array:
        return np.full(shape, _START[self.op], self.wide)

    def finish(self, index: int, part: Part) -> None:
        """Take in the panel with this number: at once if it is the next, else when those before it are in."""
        if self.total is None:
            return
        with self.lock:
            self.waiting[index] = part
            while self.next in self.waiting:
                done = self.waiting.pop(self.next)
                place = self.total[done.place]
                self.ufunc(place, done.values, out=place)
                self.next += 1

    def end(self) -> None:
        """Store the result."""
        if self.empty:
            self.target[...] = 0
        elif self.total is not None:
            narrow.store(self.target, self.total)


class Part:
    """A panel's share of a Total: its strips come in order, from one thread."""

    def __init__(self, total: Total, rows: range, columns: range) -> None:
        self.total, self.first = total, rows.start
        lines = slice(None) if total.axis != "n" else slice(rows.start, rows.stop)
        across = slice(None) if total.axis != "m" else slice(columns.start, columns.stop)
        self.place = (..., lines, across)
        if total.total is not None:
            self.values = total.start(total.total[self.place].shape)

    def add(self, value: Any, strip: Strip) -> None:
        """Take in the strip's values."""
        total = self.total
        if total.empty:
            return
        x = np.broadcast_to(value, (*total.target.shape[:-2], len(strip.rows), len(strip.columns)))
        part = total.ufunc.reduce(x, axis=_AXES[total.axis], **total.options)
        if total.direct:
            narrow.store(total.target[..., strip.rows.start : strip.rows.stop, :], part)
        elif total.axis == "n":
            self.values[..., strip.rows.start - self.first : strip.rows.stop - self.first, :] = part
        else:
            total.ufunc(self.values, part, out=self.values)
