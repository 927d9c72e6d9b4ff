"""A checked expression as a program over strips of D: steps that write into few buffers, reused as values die.

The values of an epilogue vary nowhere, along a row, along a column, or everywhere. The first are computed once a matrix,
the second once a block of columns, the others once a strip, which is what the buffers are for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epigemm import dtypes
from epigemm.engines.cpu import masks, narrow, random
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR, Expression, Node, Output, walk
from epigemm.expression.ops import OPS, REDUCTIONS

# Computed here rather than by the op table's callable. Like those, safe where `out` is an argument.
_OWN: dict[str, Callable[..., Any]] = {"cast": lambda x, dtype, out=None: narrow.rounded(np.asarray(x), dtypes.of(dtype).numpy, out)}

# Ops whose step makes its own array.
_FRESH = frozenset({"uniform", "unbitmask"})

Step = Callable[["Strip"], None]


@dataclass(slots=True)
class Strip:
    """What the steps of one strip work on.

    Args:
        values: the value of each node, by slot.
        stores: where values may be written: accumulators, then outputs, then buffers.
        rows, columns: the strip's place in the walk.
        batch: flattened batch indices, one an item of the group.
    """

    values: list[Any]
    stores: list[Any]
    rows: range
    columns: range
    batch: range


@dataclass(frozen=True, slots=True)
class Load:
    """An input to place in a slot before the steps run."""

    slot: int
    name: str
    extent: str
    raw: bool  # bits and seeds are used as they are stored


@dataclass(slots=True)
class Program:
    """What `Compiler` makes: see `run.py` for who runs which part when.

    Args:
        slots: how many values there are.
        constants: (slot, value), filled in once.
        loads: the inputs.
        acc_slots: the slot of each accumulator, None where the expression does not use it.
        row_slots: slots whose values vary along a row only; they are computed for a block of columns and cut for its panels.
        operand_sums: (slot of the value, slot of the float64 sum, operand's name).
        once, each_block, each_strip: steps a matrix, a block of columns, a strip.
        buffers: dtype of each scratch buffer of a strip.
        reductions: index of the output -> (op, axis).
        weight: the strip's work in passes over memory.
    """

    slots: int = 0
    constants: list[tuple[int, Any]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    acc_slots: list[int | None] = field(default_factory=list)
    row_slots: list[int] = field(default_factory=list)
    operand_sums: list[tuple[int, int, str]] = field(default_factory=list)
    once: list[Step] = field(default_factory=list)
    each_block: list[Step] = field(default_factory=list)
    each_strip: list[Step] = field(default_factory=list)
    buffers: list[np.dtype[Any]] = field(default_factory=list)
    reductions: dict[int, tuple[str, str]] = field(default_factory=dict)
    weight: float = 0.0


# Passes over memory that an op is worth where it is more than one.
_WEIGHTS = {
    "tanh": 3,
    "exp": 3,
    "log": 3,
    "erf": 15,
    "gelu": 12,
    "silu": 6,
    "sigmoid": 5,
    "softplus": 8,
    "mish": 12,
    "power": 20,
    "uniform": 100,
}


def extent_of(node: Node, memo: dict[Node, str], column_sums: frozenset[str]) -> str:
    """Where a node's value varies. `column_sums` names the operands whose sum over k is a column of the walk."""
    if node not in memo:
        for below in walk([node]):
            memo[below] = _extent(below, [memo[a] for a in below.args], column_sums)
    return memo[node]


def _extent(node: Node, below: list[str], column_sums: frozenset[str]) -> str:
    if node.op in ("acc", "uniform", "unbitmask"):
        return MATRIX
    if node.op == "input":
        return str(node.param("extent"))
    if node.op == "operand_sum":
        return COLUMN if node.param("operand") in column_sums else ROW
    if node.op in REDUCTIONS:
        return {"m": ROW, "n": COLUMN}.get(str(node.param("axis")), SCALAR)
    kinds = set(below) - {SCALAR}
    if not kinds:
        return SCALAR
    return kinds.pop() if len(kinds) == 1 else MATRIX


def stored_value(output: Output) -> Node:
    """What is rounded into the output: the value below a root cast to the output's own dtype, which storing it does."""
    node = output.node
    return node.args[0] if node.op == "cast" and node.param("dtype") == output.dtype else node


class Compiler:
    """Builds a Program; used once."""

    def __init__(
        self,
        expression: Expression,
        acc_dtype: np.dtype[Any],
        *,
        column_sums: frozenset[str],
        flipped: bool,
        pinned: frozenset[int],
        acc_in_d: bool,
        conjugated: frozenset[str],
        whole_inputs: frozenset[str],
    ) -> None:
        self.expression = expression
        self.acc_dtype = acc_dtype
        self.column_sums = column_sums
        self.flipped = flipped
        self.pinned = pinned
        self.acc_in_d = acc_in_d
        self.conjugated = conjugated
        self.whole_inputs = whole_inputs
        self.program = Program()
        self.slot: dict[Node, int] = {}
        self.extents: dict[Node, str] = {}
        self.store: dict[Node, int] = {}  # matrix values that lie in a store
        self.pins: dict[Node, int] = {}  # roots that may be computed right into their output
        self.d_written = False
        self.exact: dict[Node, int] = {}  # slots of operand sums before they are rounded to the accumulator's type
        self.free: list[tuple[np.dtype[Any], int]] = []
        self.uses: dict[Node, int] = {}
        self.first_output = expression.accumulators
        self.first_buffer = expression.accumulators + len(expression.outputs)

    def compile(self) -> Program:
        """The program. Outputs besides D are stored as soon as they are known, D last: it may lie on an input."""
        outputs = self.expression.outputs
        order = [*range(1, len(outputs)), 0]
        self.program.acc_slots = [None] * self.expression.accumulators
        roots = [self._computed_root(outputs[i]) for i in order]
        for node in walk(roots):
            for argument in node.args:
                self.uses[argument] = self.uses.get(argument, 0) + 1
        for root in roots:
            self.uses[root] = self.uses.get(root, 0) + 1
        self.pins = {root: i for i, root in zip(order, roots, strict=True) if i in self.pinned and root is stored_value(outputs[i])}
        for index, root in zip(order, roots, strict=True):
            for node in walk([root]):
                if node not in self.slot:
                    self._emit(node, index)
            self._emit_store(index, root)
            self._release(root)
        return self.program

    def _computed_root(self, output: Output) -> Node:
        """The node to compute for an output: below the cast, the reduction or the packing, which happen when storing."""
        node = stored_value(output)
        return node.args[0] if node.op in (*REDUCTIONS, "bitmask") else node

    # --- nodes

    def _emit(self, node: Node, phase: int) -> None:
        slot = self.slot[node] = self._new_slot()
        extent = extent_of(node, self.extents, self.column_sums)
        if extent == ROW:
            self.program.row_slots.append(slot)
        leaf = {"acc": self._acc, "constant": self._constant, "input": self._input, "operand_sum": self._operand_sum}.get(node.op)
        if leaf is not None:
            leaf(node, slot)
            return
        if extent == MATRIX:
            target = None if node.op in _FRESH else self._target(node, phase)
            self.program.each_strip.append(self._step(node, slot, target))
            self.program.weight += _WEIGHTS.get(node.op, 1)
        else:
            stage = {SCALAR: self.program.once, ROW: self.program.each_block, COLUMN: self.program.each_strip}[extent]
            stage.append(_typed(self._step(node, slot, None), slot, self._dtype_of(node)))
        for argument in node.args:
            self._release(argument)

    def _acc(self, node: Node, slot: int) -> None:
        index = node.param("index") or 0
        assert isinstance(index, int)
        self.program.acc_slots[index] = slot
        self.store[node] = self.first_output if self.acc_in_d and index == 0 else index

    def _constant(self, node: Node, slot: int) -> None:
        self.program.constants.append((slot, node.param("value")))  # a Python number takes the type of the arrays it meets

    def _input(self, node: Node, slot: int) -> None:
        name, extent, dtype = str(node.param("name")), str(node.param("extent")), dtypes.of(str(node.param("dtype")))
        seed = any(user.op == "uniform" and node in user.args for user in self.expression.nodes())
        self.program.loads.append(Load(slot, name, extent, raw=extent == BITS or seed))
        if extent == MATRIX and (dtype.numpy != self.acc_dtype or name in self.conjugated):
            store = self._buffer(self.acc_dtype)
            self.store[node] = store
            conjugate = name in self.conjugated

            def load(strip: Strip) -> None:
                into = strip.stores[store]
                strip.values[slot] = narrow.widen(np.broadcast_to(strip.values[slot], into.shape), into)
                if conjugate:
                    np.conjugate(into, out=into)

            self.program.each_strip.append(load)
            self.program.weight += 2

    def _operand_sum(self, node: Node, slot: int) -> None:
        exact = self.exact[node] = self._new_slot()
        if node.param("operand") not in self.column_sums:
            self.program.row_slots.append(exact)
        self.program.operand_sums.append((slot, exact, str(node.param("operand"))))

    def _new_slot(self) -> int:
        self.program.slots += 1
        return self.program.slots - 1

    # --- where a matrix value goes

    def _target(self, node: Node, phase: int) -> int:
        """The store for a matrix value: the output it is the root of, the place of an argument that dies here, or a buffer."""
        dtype = self._dtype_of(node)
        output = self.pins.get(node)
        if output is not None and dtype == self.acc_dtype and self._may_pin(node, output, phase):
            self.d_written |= output == 0
            return self._keep(node, self.first_output + output)
        for argument in node.args:
            store = self.store.get(argument)
            dying = self.uses[argument] == node.args.count(argument)
            if store is not None and dying and self._reusable(store) and self._dtype_of(argument) == dtype:
                del self.store[argument]
                return self._keep(node, store)
        return self._keep(node, self._buffer(dtype))

    def _keep(self, node: Node, store: int) -> int:
        self.store[node] = store
        return store

    def _may_pin(self, node: Node, output: int, phase: int) -> bool:
        """Whether a root may be computed right into its output."""
        if output != 0:
            return True
        if self.whole_inputs and phase != 0:
            return False  # D may lie on an input that other outputs still read
        occupied = any(s == self.first_output and self.uses[n] > node.args.count(n) for n, s in self.store.items())
        aliased = any(a.op == "input" and a.param("name") in self.whole_inputs for a in node.args)
        # A ufunc reads each element before it writes it; a kernel of several passes knows `out` only as the same array.
        return not occupied and (not aliased or isinstance(OPS[node.op].numpy, np.ufunc))

    def _reusable(self, store: int) -> bool:
        """Whether a later value may overwrite this store: no output, but D while it only holds the accumulator."""
        return store < self.first_output or store >= self.first_buffer or (store == self.first_output and not self.d_written)

    def _dtype_of(self, node: Node) -> np.dtype[Any]:
        return np.dtype(np.bool_) if node.op in OPS and OPS[node.op].result == "bool" else self.acc_dtype

    def _buffer(self, dtype: np.dtype[Any]) -> int:
        for position, (kind, store) in enumerate(self.free):
            if kind == dtype:
                del self.free[position]
                return store
        self.program.buffers.append(dtype)
        return self.first_buffer + len(self.program.buffers) - 1

    def _release(self, node: Node) -> None:
        self.uses[node] -= 1
        if self.uses[node] == 0:
            store = self.store.pop(node, None)
            if store is not None and (store < self.first_output or store >= self.first_buffer):
                self.free.append((self._dtype_of(node), store))

    # --- steps

    def _step(self, node: Node, slot: int, target: int | None) -> Step:
        if node.op == "uniform":
            return self._uniform(node, slot)
        if node.op == "unbitmask":
            source = self.slot[node.args[0]]

            def unbitmask(strip: Strip) -> None:
                strip.values[slot] = masks.unpack(strip.values[source], strip.columns.start, len(strip.columns))

            return unbitmask
        function = _OWN.get(node.op) or OPS[node.op].numpy
        assert function is not None
        return _step(function, [self.slot[a] for a in node.args], slot, target, dict(node.params))

    def _uniform(self, node: Node, slot: int) -> Step:
        seed = node.args[0]
        given: Any = seed.param("value")
        source, flipped, dtype = self.slot[seed], self.flipped, self.acc_dtype

        def uniform(strip: Strip) -> None:
            if given is None:
                seeds = [int(s) for s in np.broadcast_to(np.asarray(strip.values[source]).reshape(-1), len(strip.batch))]
            else:
                seeds = [int(given)] * len(strip.batch)
            rows, columns = (strip.columns, strip.rows) if flipped else (strip.rows, strip.columns)
            items = [random.uniform(s, rows, columns, b) for s, b in zip(seeds, strip.batch, strict=True)]
            value = items[0] if len(items) == 1 else np.stack(items)
            strip.values[slot] = (value.swapaxes(-1, -2) if flipped else value).astype(dtype, copy=False)

        return uniform

    def _emit_store(self, index: int, root: Node) -> None:
        output = self.expression.outputs[index]
        kind, source, target = stored_value(output).op, self.exact.get(root, self.slot[root]), self.first_output + index
        if kind in REDUCTIONS:
            self.program.reductions[index] = (kind, str(stored_value(output).param("axis")))
            self.program.each_strip.append(_reduce_step(source, target))
            self.program.weight += 3
        elif kind == "bitmask":
            self.program.each_strip.append(_bitmask_step(source, target))
            self.program.weight += 1
        elif index == 0 or output.extent == MATRIX:
            if self.store.get(root) != target:
                self.program.each_strip.append(_matrix_store_step(source, target))
                self.program.weight += 4 if dtypes.of(output.dtype).bytes < 4 else 1
        else:
            stage = {SCALAR: self.program.once, ROW: self.program.each_block, COLUMN: self.program.each_strip}[output.extent]
            stage.append(_vector_store_step(source, target, output.extent == COLUMN))


def _step(function: Callable[..., Any], sources: list[int], slot: int, target: int | None, params: dict[str, Any]) -> Step:
    """values[slot] = function(values[sources]..., out=stores[target])."""
    if params:
        plain = function

        def function(*arrays: Any, out: Any = None) -> Any:
            return plain(*arrays, out=out, **params)

    def unary(strip: Strip) -> None:
        values = strip.values
        values[slot] = function(values[first], out=None if target is None else strip.stores[target])

    def binary(strip: Strip) -> None:
        values = strip.values
        values[slot] = function(values[first], values[second], out=None if target is None else strip.stores[target])

    def many(strip: Strip) -> None:
        values = strip.values
        values[slot] = function(*[values[s] for s in sources], out=None if target is None else strip.stores[target])

    first, second = sources[0], sources[-1]
    return {1: unary, 2: binary}.get(len(sources), many)


def _typed(step: Step, slot: int, dtype: np.dtype[Any]) -> Step:
    """The step, its value in `dtype`: of Python numbers alone NumPy makes float64, which would widen what it meets."""

    def typed(strip: Strip) -> None:
        step(strip)
        strip.values[slot] = np.asarray(strip.values[slot], dtype)

    return typed


def _matrix_store_step(source: int, target: int) -> Step:
    def store(strip: Strip) -> None:
        narrow.store(strip.stores[target], np.asarray(strip.values[source]))

    return store


def _vector_store_step(source: int, target: int, column: bool) -> Step:
    def store(strip: Strip) -> None:
        if not column or strip.columns.start == 0:
            narrow.store(strip.stores[target], np.asarray(strip.values[source]))

    return store


def _bitmask_step(source: int, target: int) -> Step:
    def store(strip: Strip) -> None:
        bits, length = strip.stores[target]
        shape = (*bits.shape[:-1], len(strip.columns))
        masks.pack(bits, np.broadcast_to(strip.values[source], shape), strip.columns.start, length)

    return store


def _reduce_step(source: int, target: int) -> Step:
    def reduce(strip: Strip) -> None:
        strip.stores[target].add(strip.values[source], strip)

    return reduce
