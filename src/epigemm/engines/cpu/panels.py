"""The executable: walks D in panels, product and epilogue per panel, with no full-size intermediate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product as cartesian
from math import prod
from typing import Any

import numpy as np

from epigemm.engines.base import AbstractExecutable, Call
from epigemm.engines.cpu import narrow, threads
from epigemm.engines.cpu.evaluate import Compiler, Load, Program, Strip
from epigemm.engines.cpu.narrow import Array
from epigemm.engines.cpu.product import Side
from epigemm.engines.cpu.reduce import Total
from epigemm.engines.cpu.tiling import Tiling, acc_in_d, copies, whole_inputs
from epigemm.engines.cpu.walk import Walk
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR
from epigemm.problem import Operand

# Passes times elements of a panel from which other threads are worth waking: about 0.2 ms of work.
_PARALLEL_WORK = 1 << 20


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


class Scratch(threading.local):
    """Blocks of memory of a thread, kept from run to run and grown to what is asked."""

    KEPT_BYTES = 16 << 20

    def __init__(self) -> None:
        self.free: list[Array] = []

    def take(self, count: int, dtype: np.dtype[Any]) -> Array:
        """`count` elements of this dtype; give the block back when done."""
        size = count * dtype.itemsize
        block = self.free.pop() if self.free else np.empty(0, np.uint8)
        if block.size < size:
            block = np.empty(size, np.uint8)
        return block[:size].view(dtype)

    def give(self, *blocks: Array) -> None:
        """Take blocks back."""
        for block in blocks:
            whole = block.base
            if isinstance(whole, np.ndarray) and whole.size + sum(b.size for b in self.free) <= self.KEPT_BYTES:
                self.free.append(whole)


_scratch = Scratch()


def compile_walk(walk: Walk) -> Program:
    """The program of a walk's expression."""
    problem, expression = walk.problem, walk.expression
    acc = problem.acc_dtype.numpy
    plain = {i for i, o in enumerate(walk.outputs) if o.dtype.numpy == acc and expression.outputs[i].extent == MATRIX}
    if walk.d.dtype.numpy == acc:
        plain.add(0)
    return Compiler(
        expression,
        acc,
        column_sums=frozenset(walk.column_sums),
        flipped=walk.flipped,
        pinned=frozenset(plain),
        acc_in_d=acc_in_d(walk),
        conjugated=frozenset(name for name, x in problem.inputs if x.conjugate and x.dtype.is_complex),
        whole_inputs=whole_inputs(walk),
    ).compile()


def workspace_bytes(walk: Walk, program: Program, cut: Tiling, workers: int) -> int:
    """The most that a run allocates besides the outputs."""
    dtype = walk.problem.acc_dtype.numpy
    blocks = sum(_block_elements(walk, cut)) * dtype.itemsize
    strips = workers * sum(cut.group * cut.strip * cut.columns * kind.itemsize for kind in _buffer_kinds(walk, program))
    lengths = {"m": walk.n, "n": walk.m, "mn": 1}
    totals = 8 * cut.group * sum(lengths[axis] for _, axis in program.reductions.values())
    return blocks + strips + totals


def _buffer_kinds(walk: Walk, program: Program) -> list[np.dtype[Any]]:
    """Dtypes of a strip's buffers: the program's, and one for C where it is a whole matrix."""
    return program.buffers + ([walk.problem.acc_dtype.numpy] if walk.problem.c is not None else [])


def _block_elements(walk: Walk, cut: Tiling) -> tuple[int, int, int, int]:
    """Elements of the accumulators outside D, of a partial product, of the left blocks, of the right blocks."""
    dtype = walk.problem.acc_dtype.numpy
    panel = cut.group * cut.rows * cut.columns
    panels = panel * (len(walk.problem.b) - acc_in_d(walk))
    right_depth = walk.k if cut.keep_right else cut.depth
    left = sum(cut.group * cut.rows * cut.depth for x in walk.left if copies(x, dtype))
    right = sum(cut.group * cut.columns * right_depth for x in walk.right if copies(x, dtype))
    return panels, panel if cut.depth < walk.k else 0, left, right


class CpuExecutable(AbstractExecutable):
    """A walk, its program and its cut, ready to run."""

    def __init__(self, walk: Walk, program: Program, cut: Tiling, workers: int) -> None:
        self.walk, self.program, self.cut, self.workers = walk, program, cut, workers
        self.acc = walk.problem.acc_dtype.numpy
        self.in_d = acc_in_d(walk)
        self.accumulators = len(walk.problem.b)
        self.left_sides = [Side.of(x, self.acc) for x in walk.left]
        self.right_sides = [Side.of(x, self.acc) for x in walk.right]
        self.kinds = _buffer_kinds(walk, program)
        self.block_elements = _block_elements(walk, cut)
        self.at_once = _loads(program, SCALAR)
        self.per_block = _loads(program, ROW)
        self.per_strip = [
            (i, load, load.extent == COLUMN, load.extent == BITS)
            for i, load in enumerate(program.loads)
            if load.extent in (MATRIX, COLUMN, BITS)
        ]
        self.extents = [program.reductions[i][0] if i in program.reductions else o.extent for i, o in enumerate(walk.expression.outputs)]
        self.extents[0] = MATRIX
        self.empty = 0 in (*walk.problem.batch, walk.m, walk.n)

    # --- the batch

    def run(self, call: Call) -> None:
        if self.empty:
            for index in self.program.reductions:
                call.outputs[self.walk.expression.outputs[index].name][...] = 0
            return
        with np.errstate(all="ignore"):
            run = _Run(self, call)
            try:
                for item in self._items(call):
                    run.matrix(item)
            finally:
                run.close()

    def _items(self, call: Call) -> Iterator[Item]:
        walk, problem = self.walk, self.walk.problem
        left, right = (call.b, (call.a,)) if walk.flipped else ((call.a,), call.b)
        inputs = [_trimmed(call.inputs[load.name], load, walk) for load in self.program.loads]
        outputs = [call.d, *(call.outputs[o.name] for o in walk.expression.extras)]
        c = [call.c] if problem.c is not None and call.beta != 0 else []
        arrays = [*left, *right, *c, *inputs, *outputs]
        if walk.flipped:
            arrays = [x.swapaxes(-1, -2) for x in arrays]
        parts = (len(left), len(right), len(c), len(inputs), len(outputs))
        if not problem.batch:
            yield self._item(arrays, parts, [()] * len(arrays), range(1))
            return
        yield from self._batched(arrays, parts)

    def _item(self, arrays: list[Array], parts: tuple[int, ...], where: list[tuple[int, ...]], batch: range) -> Item:
        ends = [sum(parts[: i + 1]) for i in range(5)]
        left, right, c, inputs, outputs = (arrays[end - size : end] for size, end in zip(parts, ends, strict=True))
        return Item(left, right, where[ends[0] : ends[1]], c[0] if c else None, inputs, outputs, batch)

    def _batched(self, arrays: list[Array], parts: tuple[int, ...]) -> Iterator[Item]:
        *outer, last = self.walk.problem.batch
        rank, group = len(outer) + 1, self.cut.group
        full = [_batch_view(x, rank) for x in arrays]
        flat = 0
        for index in cartesian(*(range(extent) for extent in outer)):
            for first in range(0, last, group):
                count = min(group, last - first)
                wheres, items = [], []
                for x in full:
                    where = tuple(i if extent > 1 else 0 for i, extent in zip((*index, first), x.shape, strict=False))
                    wheres.append(where)
                    one = x[where[:-1]]
                    if group == 1:
                        items.append(one[where[-1]])
                    else:
                        items.append(one if one.shape[0] == 1 else one[first : first + count])
                yield self._item(items, parts, wheres, range(flat + first, flat + first + count))
            flat += last


def _loads(program: Program, extent: str) -> list[tuple[int, Load]]:
    return [(i, load) for i, load in enumerate(program.loads) if load.extent == extent]


def _batch_view(x: Array, rank: int) -> Array:
    """`x` with `rank` batch axes, broadcast ones (stride 0 too) of extent 1."""
    x = x[(None,) * (rank + 2 - x.ndim)]
    return x[tuple(slice(0, 1) if x.strides[axis] == 0 else slice(None) for axis in range(rank))]


def _trimmed(x: Array, load: Load, walk: Walk) -> Array:
    """An input as a matrix: a number with two axes, lines without their padding."""
    if load.extent != MATRIX:
        return x if x.ndim >= 2 else x.reshape(1, 1)
    problem = walk.problem
    return x if x.shape[-2:] == (problem.m, problem.n) else x[..., : problem.m, : problem.n]


class _Run:
    """One call of an executable: its scratch memory and the loops over panels and strips."""

    def __init__(self, plan: CpuExecutable, call: Call) -> None:
        self.plan, self.cut, self.program = plan, plan.cut, plan.program
        self.alpha, self.beta = (_scalar(v, plan.acc) for v in (call.alpha, call.beta))
        self.reads_operands = call.alpha != 0 and plan.walk.k > 0
        self.blocks = [_scratch.take(size, plan.acc) if size else None for size in plan.block_elements]
        self.kept: list[Array | None] = [None] * len(plan.walk.right)
        self.kept_index: list[object] = [None] * len(plan.walk.right)

    def close(self) -> None:
        _scratch.give(*(b for b in self.blocks if b is not None))

    # --- one matrix

    def matrix(self, item: Item) -> None:
        plan, program, walk = self.plan, self.program, self.plan.walk
        values: list[Any] = [None] * program.slots
        stores: list[Any] = [None] * (plan.accumulators + len(item.outputs) + len(program.buffers))
        for slot, number in program.constants:
            values[slot] = number
        for index, load in plan.at_once:
            values[load.slot] = item.inputs[index] if load.raw else narrow.widened(item.inputs[index], plan.acc)
        totals = self._totals(item, stores)
        self._pad(item)
        sums = self._operand_sums(item)
        strip = Strip(values, stores, range(walk.m), range(walk.n), 0, item.batch)
        for index, extent in enumerate(plan.extents):
            if extent == SCALAR:
                stores[plan.accumulators + index] = item.outputs[index]
        for step in program.once:
            step(strip)
        for start in range(0, walk.n, self.cut.columns):
            self._block(item, values, stores, sums, totals, range(start, min(start + self.cut.columns, walk.n)))
        for total in totals:
            total.end()

    def _totals(self, item: Item, stores: list[Any]) -> list[Total]:
        totals = []
        for index, (op, axis) in self.program.reductions.items():
            total = Total(op, axis, item.outputs[index], self.cut.columns >= self.plan.walk.n)
            stores[self.plan.accumulators + index] = total
            totals.append(total)
        return totals

    def _pad(self, item: Item) -> None:
        """Zero the padding at the end of each line of a padded output."""
        for output, array in zip(self.plan.walk.expression.outputs, item.outputs, strict=True):
            if output.pad > 1 and output.extent == MATRIX:
                array[..., self.plan.walk.n :] = 0

    def _operand_sums(self, item: Item) -> list[tuple[int, int, Array, bool]]:
        """(slot, slot of the exact sum, sums, whether they are a column) of each `operand_sum`."""
        walk, plan = self.plan.walk, self.plan
        sums = []
        for slot, exact, name in self.program.operand_sums:
            column = name in walk.column_sums
            if column:
                index = walk.column_sums[name]
                total = plan.left_sides[index].sum_over_k(item.left[index], -1, plan.acc)
            else:
                index = walk.row_sums[name]
                total = plan.right_sides[index].sum_over_k(item.right[index], -2, plan.acc)
            sums.append((slot, exact, total, column))
        return sums

    # --- one block of columns

    def _block(self, item: Item, base: list[Any], base_stores: list[Any], sums: list[Any], totals: list[Total], columns: range) -> None:
        plan, walk, cut = self.plan, self.plan.walk, self.cut
        values, stores, lines = base.copy(), base_stores.copy(), slice(columns.start, columns.stop)
        for index, load in plan.per_block:
            values[load.slot] = narrow.widened(item.inputs[index][..., lines], plan.acc)
        for index, extent in enumerate(plan.extents):
            if extent == ROW:
                stores[plan.accumulators + index] = item.outputs[index][..., lines]
        for slot, exact, total, column in sums:
            if not column:
                values[exact] = total[..., lines]
                values[slot] = values[exact].astype(plan.acc)
        strip = Strip(values, stores, range(walk.m), columns, 0, item.batch)
        for step in self.program.each_block:
            step(strip)
        if cut.keep_right and self.reads_operands:
            self._keep_right(item, columns)
        for start in range(0, walk.m, cut.rows):
            rows = range(start, min(start + cut.rows, walk.m))
            panels = self._product(item, rows, columns)
            self._finish(item, values, stores, sums, panels, rows, columns)
            for total in totals:
                total.end_panel()

    def _keep_right(self, item: Item, columns: range) -> None:
        """Widen the right operands' columns for all panels; what the previous matrix of the batch left is used again."""
        taken = 0
        for index, side in enumerate(self.plan.right_sides):
            block = item.right[index][..., columns.start : columns.stop]
            label = (item.right_index[index], columns.start)
            scratch = None
            if side.copied:
                assert self.blocks[3] is not None
                scratch, taken = self.blocks[3][taken : taken + block.size], taken + block.size
            if not side.copied or self.kept_index[index] != label:
                self.kept[index], self.kept_index[index] = side.fetch(block, scratch), label

    # --- one panel

    def _product(self, item: Item, rows: range, columns: range) -> list[Array]:
        """The accumulators of a panel, not yet scaled; their content is undefined where the operands are not read."""
        plan, walk, cut = self.plan, self.plan.walk, self.cut
        lead = item.outputs[0].shape[:-2]
        shape = (*lead, len(rows), len(columns))
        count, panels = prod(shape), []
        for index in range(plan.accumulators):
            if plan.in_d and index == 0:
                panels.append(item.outputs[0][..., rows.start : rows.stop, columns.start : columns.stop])
            else:
                assert self.blocks[0] is not None
                first = (index - plan.in_d) * count
                panels.append(self.blocks[0][first : first + count].reshape(shape))
        if not self.reads_operands:
            return panels
        for start in range(0, walk.k, cut.depth):
            depth = range(start, min(start + cut.depth, walk.k))
            left = self._left(item, rows, depth)
            right = self._right(item, columns, depth)
            for index, panel in enumerate(panels):
                x, y = left[walk.left_of[index]], right[walk.right_of[index]]
                if start == 0:
                    np.matmul(x, y, out=panel)
                else:
                    assert self.blocks[1] is not None
                    panel += np.matmul(x, y, out=self.blocks[1][:count].reshape(shape))
        return panels

    def _left(self, item: Item, rows: range, depth: range) -> list[Array]:
        blocks, taken = [], 0
        for side, x in zip(self.plan.left_sides, item.left, strict=True):
            block = x[..., rows.start : rows.stop, depth.start : depth.stop]
            scratch = None
            if side.copied:
                assert self.blocks[2] is not None
                scratch, taken = self.blocks[2][taken : taken + block.size], taken + block.size
            blocks.append(side.fetch(block, scratch))
        return blocks

    def _right(self, item: Item, columns: range, depth: range) -> list[Array]:
        if self.cut.keep_right:
            return [kept[..., depth.start : depth.stop, :] for kept in self.kept if kept is not None]
        blocks, taken = [], 0
        for side, x in zip(self.plan.right_sides, item.right, strict=True):
            block = x[..., depth.start : depth.stop, columns.start : columns.stop]
            scratch = None
            if side.copied:
                assert self.blocks[3] is not None
                scratch, taken = self.blocks[3][taken : taken + block.size], taken + block.size
            blocks.append(side.fetch(block, scratch))
        return blocks

    # --- its strips

    def _finish(
        self, item: Item, values: list[Any], stores: list[Any], sums: list[Any], panels: list[Array], rows: range, columns: range
    ) -> None:
        """The epilogue of a panel, strip by strip, on several threads where that pays."""
        height = self.cut.strip
        starts = range(rows.start, rows.stop, height)
        work = self.program.weight * prod(panels[0].shape)
        workers = min(self.plan.workers, len(starts)) if work >= _PARALLEL_WORK else 1
        pending = iter(enumerate(starts))

        def finish() -> None:
            with np.errstate(all="ignore"):
                buffers = [_scratch.take(prod((*panels[0].shape[:-2], height, len(columns))), kind) for kind in self.plan.kinds]
                for index, start in pending:
                    part = range(start, min(start + height, rows.stop))
                    self._strip(item, Strip(values.copy(), stores.copy(), part, columns, index, item.batch), panels, sums, rows, buffers)
                _scratch.give(*buffers)

        threads.together(finish, min(workers, threads.count()) if workers > 1 else 1)

    def _strip(self, item: Item, strip: Strip, panels: list[Array], sums: list[Any], rows: range, buffers: list[Array]) -> None:
        plan, values, stores = self.plan, strip.values, strip.stores
        lines, columns = slice(strip.rows.start, strip.rows.stop), slice(strip.columns.start, strip.columns.stop)
        shape = (*panels[0].shape[:-2], len(strip.rows), len(strip.columns))
        within = slice(strip.rows.start - rows.start, strip.rows.stop - rows.start)
        accs = [panel[..., within, :] for panel in panels]
        stores[: plan.accumulators] = accs
        for index, (extent, output) in enumerate(zip(plan.extents, item.outputs, strict=True), plan.accumulators):
            if extent == MATRIX:
                stores[index] = output[..., lines, columns]
            elif extent == BITS:
                stores[index] = (output[..., lines, :], plan.walk.n)
            elif extent == COLUMN:
                stores[index] = output[..., lines, :]
        if plan.in_d:
            stores[plan.accumulators] = accs[0]
        scratch = [b[: prod(shape)].reshape(shape) for b in buffers]
        stores[plan.accumulators + len(item.outputs) :] = scratch[: len(self.program.buffers)]
        self._scale(item, accs, lines, columns, scratch)
        for slot, acc in zip(self.program.acc_slots, accs, strict=True):
            if slot is not None:
                values[slot] = acc
        for index, load, column, bits in plan.per_strip:
            x = item.inputs[index]
            values[load.slot] = (
                x[..., lines, :] if bits else narrow.widened(x[..., lines, :], plan.acc) if column else x[..., lines, columns]
            )
        for slot, exact, total, is_column in sums:
            if is_column:
                values[exact] = total[..., lines, :]
                values[slot] = values[exact].astype(plan.acc)
        for step in self.program.each_strip:
            step(strip)

    def _scale(self, item: Item, accs: list[Array], lines: slice, columns: slice, scratch: list[Array]) -> None:
        """alpha * product + beta * C."""
        for acc in accs:
            if not self.reads_operands:
                acc[...] = 0
            elif self.alpha != 1:
                np.multiply(acc, self.alpha, out=acc)
        if item.c is None:
            return
        c, operand = item.c, self.plan.walk.problem.c
        assert operand is not None
        part = c[..., lines if c.shape[-2] > 1 else slice(None), columns if c.shape[-1] > 1 else slice(None)]
        into = scratch[-1] if part.shape == accs[0].shape else np.empty(part.shape, self.plan.acc)
        narrow.widen(part, into)
        if operand.conjugate:
            np.conjugate(into, out=into)
        np.multiply(into, self.beta, out=into)
        np.add(accs[0], into, out=accs[0])


def _scalar(value: complex | float, dtype: np.dtype[Any]) -> Any:
    """A host scalar in the accumulator's type; of a real problem its real part."""
    return dtype.type(value if dtype.kind == "c" else complex(value).real)


def copied(walk: Walk) -> list[tuple[str, Operand]]:
    """The operands that are copied or widened a block at a time, in the problem's own orientation, by name."""
    problem = walk.problem
    names = ["a", *(f"b{i}" if len(problem.b) > 1 else "b" for i in range(len(problem.b)))]
    return [(name, x) for name, x in zip(names, (problem.a, *problem.b), strict=True) if copies(x, problem.acc_dtype.numpy)]
