"""The walk: a problem turned so that D's lines in memory are its rows.

A column-major D is walked as its transpose, D' = B' A': the left and right operands exchange roles, rows become columns in every
extent and axis, and stores are contiguous either way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from epigemm import layouts
from epigemm.engines import outputs
from epigemm.expression.nodes import COLUMN, ROW, Expression, Node
from epigemm.problem import Operand, Problem

_TURNED_EXTENT = {ROW: COLUMN, COLUMN: ROW}
_TURNED_AXIS = {"m": "n", "n": "m"}


@dataclass(frozen=True, slots=True)
class Walk:
    """D[m, n] = epilogue(left[m, k] @ right[k, n]) with D's rows contiguous.

    Args:
        problem: the problem it was made of, not turned.
        flipped: whether everything else here is transposed against it.
        m, n: rows and columns of the walk.
        left, right: the distinct operands; one of the two sides has a single one.
        left_of, right_of: for each accumulator the index of its operands.
        column_sums, row_sums: operand name of `operand_sum` -> index into left, right.
        outputs: where each output lies.
        expression: with extents and axes turned.
    """

    problem: Problem
    flipped: bool
    m: int
    n: int
    left: tuple[Operand, ...]
    right: tuple[Operand, ...]
    left_of: tuple[int, ...]
    right_of: tuple[int, ...]
    column_sums: dict[str, int]
    row_sums: dict[str, int]
    outputs: tuple[Operand, ...]
    expression: Expression

    @property
    def k(self) -> int:
        return self.problem.k

    @property
    def d(self) -> Operand:
        return self.outputs[0]


def walk_of(problem: Problem, expression: Expression) -> Walk:
    """The walk of a problem with its checked expression."""
    flipped = problem.order == layouts.COL
    turn = Operand.transposed if flipped else _same
    single, several = (turn(problem.a),), tuple(turn(b) for b in problem.b)
    first, each = (0,) * len(several), tuple(range(len(several)))
    of_a = {"a": 0}
    of_b = {"b": 0} | {f"b{i}": i for i in each}
    places = (turn(problem.d), *(turn(outputs.operand(problem, o)) for o in expression.extras))
    return Walk(
        problem=problem,
        flipped=flipped,
        m=problem.n if flipped else problem.m,
        n=problem.m if flipped else problem.n,
        left=several if flipped else single,
        right=single if flipped else several,
        left_of=each if flipped else first,
        right_of=first if flipped else each,
        column_sums=of_b if flipped else of_a,
        row_sums=of_a if flipped else of_b,
        outputs=places,
        expression=_turned(expression) if flipped else expression,
    )


def _same(operand: Operand) -> Operand:
    return operand


def _turned(expression: Expression) -> Expression:
    """Rows for columns in extents and axes."""
    swapped = expression.map(_turned_node)
    exchanged = tuple(replace(o, extent=_TURNED_EXTENT.get(o.extent, o.extent)) for o in swapped.outputs)
    return replace(swapped, outputs=exchanged)


def _turned_node(node: Node) -> Node | None:
    params = dict(node.params)
    if node.op == "input" and params.get("extent") in _TURNED_EXTENT:
        return Node("input", **(params | {"extent": _TURNED_EXTENT[str(params["extent"])]}))
    if node.op in ("sum", "amax") and params.get("axis") in _TURNED_AXIS:
        return Node(node.op, *node.args, axis=_TURNED_AXIS[str(params["axis"])])
    return None
