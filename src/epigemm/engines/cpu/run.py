"""One call of an executable: the loops over blocks of columns, panels and strips."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from epigemm.engines.base import Call
from epigemm.engines.cpu import narrow, threads
from epigemm.engines.cpu.evaluate import Strip
from epigemm.engines.cpu.narrow import Array
from epigemm.engines.cpu.product import Side
from epigemm.engines.cpu.reduce import Part, Total
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR

if TYPE_CHECKING:
    from epigemm.engines.cpu.panels import CpuExecutable


@dataclass(slots=True)
class Item:
    """One matrix of the batch, or a group of them: its arrays in the walk's orientation."""

    left: list[Array]
    right: list[Array]
    right_index: list[tuple[int, ...]]  # which matrix of the operand: equal indices are the same data
    c: Array | None
    inputs: list[Array]
    outputs: list[Array]
    batch: range


@dataclass(slots=True)
class Block:
    """A block of columns: what its panels share."""

    item: Item
    columns: range
    values: list[Any]
    stores: list[Any]
    sums: list[tuple[int, int, Array]]  # operand sums that are columns
    totals: list[tuple[int, Total]]


class _Scratch(threading.local):
    """Pieces of memory of a thread, kept from run to run and grown to what is asked."""

    KEPT_BYTES = 16 << 20

    def __init__(self) -> None:
        self.free: list[Array] = []

    def take(self, count: int, dtype: np.dtype[Any]) -> Array:
        """`count` elements of this dtype; give the piece back when done."""
        size = count * dtype.itemsize
        piece = self.free.pop() if self.free else np.empty(0, np.uint8)
        if piece.size < size:
            piece = np.empty(size, np.uint8)
        return piece[:size].view(dtype)

    def give(self, pieces: list[Array]) -> None:
        """Take pieces back."""
        for piece in pieces:
            whole = piece.base
            if isinstance(whole, np.ndarray) and whole.size + sum(f.size for f in self.free) <= self.KEPT_BYTES:
                self.free.append(whole)


_scratch = _Scratch()


class Worker:
    """One thread's scratch memory: a panel's accumulators, a partial product, blocks of the operands, a strip's buffers."""

    def __init__(self, plan: CpuExecutable) -> None:
        *panel, right = plan.block_elements
        sizes = [*panel, 0 if plan.cut.keep_right else right]
        self.taken = [_scratch.take(size, plan.acc) for size in sizes if size]
        pieces = iter(self.taken)
        self.acc, self.partial, self.left, self.right = (next(pieces) if size else None for size in sizes)
        strip = plan.cut.group * plan.cut.strip * plan.cut.columns
        self.buffers = [_scratch.take(strip, kind) for kind in plan.kinds]

    def close(self) -> None:
        _scratch.give([*self.taken, *self.buffers])


class Run:
    """One call: `matrix` for each item of the batch, then `close`."""

    def __init__(self, plan: CpuExecutable, call: Call) -> None:
        self.plan, self.cut, self.program, self.walk = plan, plan.cut, plan.program, plan.walk
        self.alpha, self.beta = (_scalar(v, plan.acc) for v in (call.alpha, call.beta))
        self.reads_operands = call.alpha != 0 and plan.walk.k > 0
        self.worker: Worker | None = None
        self.right = _scratch.take(plan.block_elements[3], plan.acc) if self.cut.keep_right else None
        self.kept: list[Array] = [np.empty(0)] * len(plan.walk.right)
        self.kept_index: list[object] = [None] * len(plan.walk.right)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        if self.right is not None:
            _scratch.give([self.right])

    # --- one matrix

    def matrix(self, item: Item) -> None:
        plan, program, walk = self.plan, self.program, self.walk
        values: list[Any] = [None] * program.slots
        stores: list[Any] = [None] * (plan.accumulators + len(item.outputs) + len(program.buffers))
        for slot, number in program.constants:
            values[slot] = number
        for index, load in plan.at_once:
            values[load.slot] = item.inputs[index] if load.raw else narrow.widened(item.inputs[index], plan.acc)
        for index, (extent, output) in enumerate(zip(plan.extents, walk.expression.outputs, strict=True)):
            if extent == SCALAR:
                stores[plan.accumulators + index] = item.outputs[index]
            elif output.pad > 1 and extent == MATRIX:
                item.outputs[index][..., walk.n :] = 0
        if program.once:
            strip = Strip(values, stores, range(walk.m), range(walk.n), item.batch)
            for step in program.once:
                step(strip)
        totals = [
            (plan.accumulators + index, Total(op, axis, item.outputs[index], self.cut.columns >= walk.n, 0 in (walk.m, walk.n)))
            for index, (op, axis) in program.reductions.items()
        ]
        columns, rows = self._operand_sums(item)
        first_panel = 0
        for start in range(0, walk.n, self.cut.block) or (0,):  # without columns, what varies along m only is still stored
            block = Block(item, range(start, min(start + self.cut.block, walk.n)), values.copy(), stores.copy(), columns, totals)
            self._row_values(block, rows)
            first_panel += self._panels(block, first_panel)
        for _, total in totals:
            total.end()

    def _operand_sums(self, item: Item) -> tuple[list[tuple[int, int, Array]], list[tuple[int, int, Array]]]:
        """(slot, slot of the exact sum, sums) of each `operand_sum`: those that are columns, those that are rows."""
        plan, walk = self.plan, self.walk
        columns, rows = [], []
        for slot, exact, name in self.program.operand_sums:
            if name in walk.column_sums:
                index = walk.column_sums[name]
                columns.append((slot, exact, plan.left_sides[index].sum_over_k(item.left[index], -1, plan.acc)))
            else:
                index = walk.row_sums[name]
                rows.append((slot, exact, plan.right_sides[index].sum_over_k(item.right[index], -2, plan.acc)))
        return columns, rows

    # --- one block of columns

    def _row_values(self, block: Block, sums: list[tuple[int, int, Array]]) -> None:
        """What varies along the row only, and the right operands if they are to be kept."""
        plan, item, columns = self.plan, block.item, block.columns
        lines = slice(columns.start, columns.stop)
        for index, load in plan.per_block:
            block.values[load.slot] = narrow.widened(item.inputs[index][..., lines], plan.acc)
        for index, extent in enumerate(plan.extents):
            if extent == ROW:
                block.stores[plan.accumulators + index] = item.outputs[index][..., lines]
        for slot, exact, total in sums:
            block.values[exact] = total[..., lines]
            block.values[slot] = block.values[exact].astype(plan.acc)
        if self.program.each_block:
            strip = Strip(block.values, block.stores, range(self.walk.m), columns, item.batch)
            for step in self.program.each_block:
                step(strip)
        if self.cut.keep_right and self.reads_operands:
            self._keep_right(item, columns)

    def _keep_right(self, item: Item, columns: range) -> None:
        """Widen the right operands' columns for all panels; what the previous matrix of the batch left is used again."""
        taken = 0
        for index, side in enumerate(self.plan.right_sides):
            part = item.right[index][..., columns.start : columns.stop]
            scratch, taken = _piece(side, part, self.right, taken)
            label = (item.right_index[index], columns.start)
            if not side.copied or self.kept_index[index] != label:
                self.kept[index], self.kept_index[index] = side.fetch(part, scratch), label

    def _panels(self, block: Block, first: int) -> int:
        """All panels of a block, shared out to threads where that pays; returns their number."""
        cut, columns = self.cut, block.columns
        panels = [
            (range(i, min(i + cut.rows, self.walk.m)), range(j, min(j + cut.columns, columns.stop)))
            for i in range(0, self.walk.m, cut.rows)
            for j in range(columns.start, columns.stop, cut.columns) or (columns.start,)
        ]
        workers = min(cut.threads, len(panels), threads.count()) if self.plan.shares == "panels" else 1
        if workers == 1:
            self.worker = self.worker or Worker(self.plan)
            for index, (rows, part) in enumerate(panels, first):
                self._panel(block, rows, part, index, self.worker)
            return len(panels)

        def share(pending: Iterator[tuple[int, tuple[range, range]]]) -> None:
            worker = Worker(self.plan)
            try:
                with np.errstate(all="ignore"):
                    for index, (rows, part) in pending:
                        self._panel(block, rows, part, index, worker)
            finally:
                worker.close()

        threads.together(share, enumerate(panels, first), workers)
        return len(panels)

    # --- one panel

    def _panel(self, block: Block, rows: range, columns: range, index: int, worker: Worker) -> None:
        accs = self._product(block, rows, columns, worker)
        values, stores = block.values.copy(), block.stores.copy()
        if len(columns) < len(block.columns):
            part = slice(columns.start - block.columns.start, columns.stop - block.columns.start)
            for slot in self.program.row_slots:
                values[slot] = values[slot][..., part]
        parts = [(total, Part(total, rows, columns)) for _, total in block.totals]
        for (store, _), (_, part_) in zip(block.totals, parts, strict=True):
            stores[store] = part_
        height = self.cut.strip
        for start in range(rows.start, rows.stop, height):
            lines = range(start, min(start + height, rows.stop))
            whole = len(lines) == len(rows)
            strip = Strip(values if whole else values.copy(), stores if whole else stores.copy(), lines, columns, block.item.batch)
            cut = accs if whole else [acc[..., start - rows.start : lines.stop - rows.start, :] for acc in accs]
            self._strip(block, strip, cut, worker)
        for total, part_ in parts:
            total.finish(index, part_)

    def _product(self, block: Block, rows: range, columns: range, worker: Worker) -> list[Array]:
        """The accumulators of a panel, not yet scaled; their content is undefined where the operands are not read."""
        plan, walk, item, depth = self.plan, self.walk, block.item, self.cut.depth
        d = item.outputs[0]
        shape = (*d.shape[:-2], len(rows), len(columns))
        count, accs = prod(shape), []
        for index in range(plan.accumulators):
            if plan.in_d and index == 0:
                accs.append(d[..., rows.start : rows.stop, columns.start : columns.stop])
            else:
                assert worker.acc is not None
                first = (index - plan.in_d) * count
                accs.append(worker.acc[first : first + count].reshape(shape))
        if not self.reads_operands:
            return accs
        for start in range(0, walk.k, depth):
            steps = range(start, min(start + depth, walk.k))
            left = _blocks(plan.left_sides, item.left, rows, steps, worker.left)
            right = self._right(block, steps, columns, worker)
            for index, acc in enumerate(accs):
                x, y = left[walk.left_of[index]], right[walk.right_of[index]]
                if start == 0:
                    np.matmul(x, y, out=acc)
                else:
                    assert worker.partial is not None
                    acc += np.matmul(x, y, out=worker.partial[:count].reshape(shape))
        return accs

    def _right(self, block: Block, depth: range, columns: range, worker: Worker) -> list[Array]:
        if not self.cut.keep_right:
            return _blocks(self.plan.right_sides, block.item.right, depth, columns, worker.right)
        part = slice(columns.start - block.columns.start, columns.stop - block.columns.start)
        return [kept[..., depth.start : depth.stop, part] for kept in self.kept]

    # --- one strip

    def _strip(self, block: Block, strip: Strip, accs: list[Array], worker: Worker) -> None:
        plan, item, values, stores = self.plan, block.item, strip.values, strip.stores
        lines, columns = slice(strip.rows.start, strip.rows.stop), slice(strip.columns.start, strip.columns.stop)
        shape = accs[0].shape
        stores[: plan.accumulators] = accs
        for index, (extent, output) in enumerate(zip(plan.extents, item.outputs, strict=True), plan.accumulators):
            if extent == MATRIX:
                stores[index] = output[..., lines, columns]
            elif extent == BITS:
                stores[index] = (output[..., lines, :], self.walk.n)
            elif extent == COLUMN:
                stores[index] = output[..., lines, :]
        if plan.in_d:
            stores[plan.accumulators] = accs[0]
        buffers = [b[: prod(shape)].reshape(shape) for b in worker.buffers]
        stores[plan.accumulators + len(item.outputs) :] = buffers[: len(self.program.buffers)]
        self._scale(item, accs, lines, columns, buffers)
        for slot, acc in zip(self.program.acc_slots, accs, strict=True):
            if slot is not None:
                values[slot] = acc
        for index, load in plan.per_strip:
            x = item.inputs[index]
            if load.extent == MATRIX:
                values[load.slot] = x[..., lines, columns]
            else:
                values[load.slot] = x[..., lines, :] if load.raw else narrow.widened(x[..., lines, :], plan.acc)
        for slot, exact, total in block.sums:
            values[exact] = total[..., lines, :]
            values[slot] = values[exact].astype(plan.acc)
        for step in self.program.each_strip:
            step(strip)

    def _scale(self, item: Item, accs: list[Array], lines: slice, columns: slice, buffers: list[Array]) -> None:
        """alpha * product + beta * C."""
        for acc in accs:
            if not self.reads_operands:
                acc[...] = 0
            elif self.alpha != 1:
                np.multiply(acc, self.alpha, out=acc)
        if item.c is None:
            return
        c, operand = item.c, self.walk.problem.c
        assert operand is not None
        part = c[..., lines if c.shape[-2] > 1 else slice(None), columns if c.shape[-1] > 1 else slice(None)]
        into = buffers[-1] if part.shape == accs[0].shape else np.empty(part.shape, self.plan.acc)
        narrow.widen(part, into)
        if operand.conjugate:
            np.conjugate(into, out=into)
        np.multiply(into, self.beta, out=into)
        np.add(accs[0], into, out=accs[0])


def _piece(side: Side, part: Array, memory: Array | None, taken: int) -> tuple[Array | None, int]:
    """The piece of `memory` from `taken` on that a copy of `part` needs, and where the next begins."""
    if not side.copied:
        return None, taken
    assert memory is not None
    return memory[taken : taken + part.size], taken + part.size


def _blocks(sides: list[Side], operands: list[Array], rows: range, columns: range, memory: Array | None) -> list[Array]:
    """One block of each operand, as BLAS reads it."""
    blocks, taken = [], 0
    for side, x in zip(sides, operands, strict=True):
        part = x[..., rows.start : rows.stop, columns.start : columns.stop]
        scratch, taken = _piece(side, part, memory, taken)
        blocks.append(side.fetch(part, scratch))
    return blocks


def _scalar(value: complex | float, dtype: np.dtype[Any]) -> Any:
    """A host scalar in the accumulator's type; of a real problem its real part."""
    return dtype.type(value if dtype.kind == "c" else complex(value).real)
