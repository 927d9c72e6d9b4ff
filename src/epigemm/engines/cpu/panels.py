"""The executable: walks D in panels, product and epilogue per panel, with no full-size intermediate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as cartesian
from math import prod
from typing import Any

import numpy as np

from epigemm.engines.base import AbstractExecutable, Call
from epigemm.engines.cpu import threads
from epigemm.engines.cpu.evaluate import Compiler, Load, Program
from epigemm.engines.cpu.narrow import Array
from epigemm.engines.cpu.product import Side
from epigemm.engines.cpu.run import Item, Run
from epigemm.engines.cpu.tiling import RIGHT_BYTES, Tiling, acc_in_d, copies, whole_inputs
from epigemm.engines.cpu.walk import Walk
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR
from epigemm.problem import Operand

# Expected work in ns from which other threads are worth waking.
_PARALLEL_NS = 300_000


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


def workspace_bytes(walk: Walk, program: Program, cut: Tiling) -> int:
    """The most that a run allocates besides the outputs."""
    dtype = walk.problem.acc_dtype.numpy
    *panel, right = block_elements(walk, cut)
    shared = right if cut.keep_right and what_is_shared(walk, program, cut) != "items" else 0
    own = sum(panel) + right - shared
    # The kernels of `ops.py` and the conversions allocate up to four values of a strip themselves.
    kinds = [*_buffer_kinds(walk, program), *([dtype] * 4)]
    strip = sum(cut.group * cut.strip * cut.columns * kind.itemsize for kind in kinds)
    lengths = {"m": walk.n, "n": walk.m, "mn": 1}
    totals = 16 * cut.group * sum(lengths[axis] for _, axis in program.reductions.values())
    return shared * dtype.itemsize + cut.threads * (own * dtype.itemsize + strip) + totals


def _buffer_kinds(walk: Walk, program: Program) -> list[np.dtype[Any]]:
    """Dtypes of a strip's buffers: the program's, and one for C where it is a whole matrix."""
    return program.buffers + ([walk.problem.acc_dtype.numpy] if walk.problem.c is not None else [])


def block_elements(walk: Walk, cut: Tiling) -> tuple[int, int, int, int]:
    """Elements of a panel's accumulators outside D, of a partial product, of the left operands' blocks, of the right ones'."""
    dtype = walk.problem.acc_dtype.numpy
    panel = cut.group * cut.rows * cut.columns
    panels = panel * (len(walk.problem.b) - acc_in_d(walk))
    right_block = walk.k * cut.block if cut.keep_right else cut.depth * cut.columns
    left = sum(cut.group * cut.rows * cut.depth for x in walk.left if copies(x, dtype))
    right = sum(cut.group * right_block for x in walk.right if copies(x, dtype))
    return panels, panel if cut.depth < walk.k else 0, left, right


def what_is_shared(walk: Walk, program: Program, cut: Tiling) -> str:
    """What the threads share out: the "items" of a batch, the "panels" of each, or "nothing", where that would not pay."""
    # A multiplication and an addition take a core 0.02 ns, a pass of the epilogue 0.15 ns an element.
    work_ns = cut.group * walk.m * walk.n * (0.02 * walk.k * len(walk.problem.b) + 0.15 * program.weight)
    items = prod(walk.problem.batch) // cut.group
    right_bytes = block_elements(walk, cut)[3] * walk.problem.acc_dtype.bytes if cut.keep_right else 0
    if cut.threads > 1 and items >= 4 * cut.threads and work_ns * items > _PARALLEL_NS and right_bytes * cut.threads <= RIGHT_BYTES:
        return "items"
    return "panels" if cut.threads > 1 and work_ns > _PARALLEL_NS else "nothing"


class CpuExecutable(AbstractExecutable):
    """A walk, its program and its cut, ready to run."""

    def __init__(self, walk: Walk, program: Program, cut: Tiling) -> None:
        self.walk, self.program, self.cut = walk, program, cut
        self.acc = walk.problem.acc_dtype.numpy
        self.in_d = acc_in_d(walk)
        self.accumulators = len(walk.problem.b)
        self.left_sides = [Side.of(x, self.acc) for x in walk.left]
        self.right_sides = [Side.of(x, self.acc) for x in walk.right]
        self.kinds = _buffer_kinds(walk, program)
        self.block_elements = block_elements(walk, cut)
        loads = list(enumerate(program.loads))
        self.at_once = [(i, load) for i, load in loads if load.extent == SCALAR]
        self.per_block = [(i, load) for i, load in loads if load.extent == ROW]
        self.per_strip = [(i, load) for i, load in loads if load.extent in (MATRIX, COLUMN, BITS)]
        self.extents = [program.reductions[i][0] if i in program.reductions else o.extent for i, o in enumerate(walk.expression.outputs)]
        self.extents[0] = MATRIX
        self.shares = what_is_shared(walk, program, cut)

    # --- the batch

    def run(self, call: Call) -> None:
        with np.errstate(all="ignore"):
            if self.shares == "nothing":
                self._matrices(call, self._items(call))
                return
            with threads.blas_alone():
                if self.shares == "panels":
                    self._matrices(call, self._items(call))
                else:
                    threads.together(lambda items: self._matrices(call, items), self._items(call), min(self.cut.threads, threads.count()))

    def _matrices(self, call: Call, items: Iterator[Item]) -> None:
        with np.errstate(all="ignore"):  # it is each thread's own
            run = Run(self, call)
            try:
                for item in items:
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


def _batch_view(x: Array, rank: int) -> Array:
    """`x` with `rank` batch axes, broadcast ones (stride 0 too, which means nothing in an empty array) of extent 1."""
    x = x[(None,) * (rank + 2 - x.ndim)]
    return x[tuple(slice(0, 1) if x.strides[axis] == 0 else slice(None) for axis in range(rank))] if x.size else x


def _trimmed(x: Array, load: Load, walk: Walk) -> Array:
    """An input as a matrix: a number with two axes, lines without their padding."""
    if load.extent != MATRIX:
        return x if x.ndim >= 2 else x.reshape(1, 1)
    problem = walk.problem
    return x if x.shape[-2:] == (problem.m, problem.n) else x[..., : problem.m, : problem.n]


def copied(walk: Walk) -> list[tuple[str, Operand]]:
    """The operands that are copied or widened a block at a time, in the problem's own orientation, by name."""
    problem = walk.problem
    names = ["a", *(f"b{i}" if len(problem.b) > 1 else "b" for i in range(len(problem.b)))]
    return [(name, x) for name, x in zip(names, (problem.a, *problem.b), strict=True) if copies(x, problem.acc_dtype.numpy)]
