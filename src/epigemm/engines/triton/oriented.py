"""A problem as the kernels see it: D row-major, the batch with as few axes as its tensors allow, every tensor as strides along D's axes.

A column-major D is computed as its transpose: m and n, rows and columns, left and right operands change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from epigemm import dtypes, layouts
from epigemm.dtypes import DType
from epigemm.engines import outputs
from epigemm.engines.cuda.codegen import reduction
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR, Expression, Node, Output
from epigemm.problem import Operand, Problem

# Which way a value varies once rows and columns have changed places.
_TURNED = {COLUMN: ROW, ROW: COLUMN, "m": "n", "n": "m"}


def turned(extent: str) -> str:
    """An extent, or an axis, with m and n exchanged."""
    return _TURNED.get(extent, extent)


@dataclass(frozen=True, slots=True)
class Side:
    """One operand of the product.

    Args:
        name: "a", "b0", "b1".
        dtype: of its elements.
        lines: its stride along m (of a left operand) or n (of a right one).
        k: its stride along k.
        batch: its strides over the batch.
        alignment_bytes: what divides the address of each of its lines.
    """

    name: str
    dtype: DType
    lines: int
    k: int
    batch: tuple[int, ...]
    alignment_bytes: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the epilogue.

    Args:
        role: "c", "input", "sum" (of an operand over k), "output".
        name: of the input or output; of the operand summed.
        dtype: of its elements; uint8 for packed bits.
        extent: where it varies: "scalar", "column" (along m), "row" (along n), "matrix", "bits".
        m, n: strides, 0 along what it does not vary; of packed bits `n` steps bytes.
        batch: strides over the batch.
        alignment_bytes: what divides the address of each of its lines.
        reduction: the node that sums it, None where it is stored element by element.
    """

    role: str
    name: str
    dtype: DType
    extent: str
    m: int
    n: int
    batch: tuple[int, ...]
    alignment_bytes: int
    reduction: Node | None = None


@dataclass(frozen=True, slots=True)
class Oriented:
    """The problem in the kernels' orientation.

    Args:
        swapped: whether m and n have changed places.
        m, n, k: extents.
        batch: extents of the batch's axes.
        lefts, rights: the operands; one of the two tuples may have several, one for each accumulator.
        tensors: C, the inputs, sums of operands and outputs that the epilogue uses; D is the last.
    """

    swapped: bool
    m: int
    n: int
    k: int
    batch: tuple[int, ...]
    lefts: tuple[Side, ...]
    rights: tuple[Side, ...]
    tensors: tuple[Tensor, ...]

    @property
    def items(self) -> int:
        """Matrices of the batch."""
        return prod(self.batch)

    @property
    def accumulators(self) -> int:
        return max(len(self.lefts), len(self.rights))

    @property
    def writes_bits(self) -> bool:
        """Whether a mask is written, whose padding reaches past n."""
        return any(t.role == "output" and t.extent == BITS for t in self.tensors)

    @property
    def padded_n(self) -> int:
        """What the tiles must cover along n: a mask's padding is written too."""
        return layouts.mask_bytes(self.n) * 8 if self.writes_bits else self.n

    def tensor(self, role: str, name: str) -> Tensor:
        """The tensor of this role and name."""
        return next(t for t in self.tensors if (t.role, t.name) == (role, name))

    def operand(self, name: str) -> tuple[Side, int]:
        """The operand of an `operand_sum` ("a", "b", "b1") and how many lines it has."""
        index = 0 if name == "a" else int(name[1:] or 0)
        is_left = (name == "a") != self.swapped
        sides = self.lefts if is_left else self.rights
        return sides[index], self.m if is_left else self.n

    @property
    def reductions(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.reduction is not None)


@lru_cache(maxsize=256)
def orient(problem: Problem, expression: Expression) -> Oriented:
    """The problem with its checked expression as the kernels see it."""
    swapped = problem.order == layouts.COL
    left = [_side(problem, "a", problem.a, lines=-2)]
    right = [_side(problem, f"b{i}", b, lines=-1) for i, b in enumerate(problem.b)]
    lefts, rights = (right, left) if swapped else (left, right)
    m, n = (problem.n, problem.m) if swapped else (problem.m, problem.n)
    tensors = [_turn(t) if swapped else t for t in _tensors(problem, expression)]
    batch, strides = _collapsed(problem.batch, [s.batch for s in (*lefts, *rights)] + [t.batch for t in tensors])
    walked = iter(strides)
    return Oriented(
        swapped,
        m,
        n,
        problem.k,
        batch,
        tuple(replace(side, batch=next(walked)) for side in lefts),
        tuple(replace(side, batch=next(walked)) for side in rights),
        tuple(replace(tensor, batch=next(walked)) for tensor in tensors),
    )


def _side(problem: Problem, name: str, operand: Operand, lines: int) -> Side:
    batch = layouts.broadcast_strides(operand.batch, operand.strides[:-2], problem.batch)
    along = -1 if lines == -2 else -2
    return Side(name, operand.dtype, operand.strides[lines], operand.strides[along], batch, _alignment(operand))


def _alignment(operand: Operand) -> int:
    """What divides the address of every line, whichever way `alignment_bytes` was found."""
    steps = (abs(s) * operand.dtype.bytes for s, e in zip(operand.strides, operand.shape, strict=True) if e > 1 and abs(s) != 1)
    step = gcd(operand.alignment_bytes, *steps)
    return step & -step


def _tensors(problem: Problem, expression: Expression) -> Iterator[Tensor]:
    """What the epilogue reads and writes, D last: it may lie on an input."""
    nodes = expression.nodes()
    if problem.c is not None:
        yield _tensor(problem, "c", "c", problem.c, _extent_of_c(problem, problem.c))
    for node in nodes:
        if node.op == "operand_sum":
            name = str(node.param("operand"))
            extent = COLUMN if name == "a" else ROW
            shape = (problem.m, 1) if name == "a" else (1, problem.n)
            yield _tensor(problem, "sum", name, Operand.dense("float32", (*problem.batch, *shape)), extent)
    used = {str(node.param("name")): node for node in nodes if node.op == "input"}
    for name, operand in problem.inputs:
        if name in used:
            yield _tensor(problem, "input", name, operand, str(used[name].param("extent")))
    for output in expression.extras:
        yield _output(problem, output, outputs.operand(problem, output))
    yield _output(problem, replace(expression.d, extent=MATRIX), problem.d)


def _extent_of_c(problem: Problem, c: Operand) -> str:
    along_m, along_n = c.rows == problem.m, c.columns == problem.n
    return {(True, True): MATRIX, (True, False): COLUMN, (False, True): ROW, (False, False): SCALAR}[along_m, along_n]


def _output(problem: Problem, output: Output, operand: Operand) -> Tensor:
    return _tensor(problem, "output", output.name, operand, output.extent, reduction(output.node))


def _tensor(problem: Problem, role: str, name: str, operand: Operand, extent: str, node: Node | None = None) -> Tensor:
    batch = layouts.broadcast_strides(operand.batch, operand.strides[:-2], problem.batch)
    m = operand.strides[-2] if extent in (COLUMN, MATRIX, BITS) else 0
    n = operand.strides[-1] if extent in (ROW, MATRIX, BITS) else 0
    return Tensor(role, name, dtypes.of(operand.dtype), extent, m, n, batch, _alignment(operand), node)


def _turn(tensor: Tensor) -> Tensor:
    node = tensor.reduction
    if node is not None:
        node = Node(node.op, *node.args, axis=turned(str(node.param("axis"))))
    return replace(tensor, extent=turned(tensor.extent), m=tensor.n, n=tensor.m, reduction=node)


def _collapsed(batch: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The batch with as few axes as possible: extents of 1 dropped, axes merged that every tensor walks as one."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for i, extent in enumerate(batch):
        steps = tuple(s[i] for s in strides)
        if extent == 1:
            continue
        if axes and all(slow == fast * extent for slow, fast in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * extent, steps)
        else:
            axes.append((extent, steps))
    return tuple(extent for extent, _ in axes), [tuple(steps[i] for _, steps in axes) for i in range(len(strides))]
