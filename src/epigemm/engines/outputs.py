"""Where an expression's outputs lie: the operand of each, from the problem and the output's extent."""

from __future__ import annotations

from epigemm import dtypes, layouts
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR, Output
from epigemm.problem import Operand, Problem


def operand(problem: Problem, output: Output) -> Operand:
    """The dense operand that a new tensor for `output` has.

    Matrices take D's order and `output.pad`; masks are bytes along D's contiguous axis, padded to 16; reductions are
    (*batch, m, 1), (*batch, 1, n) or (*batch, 1, 1).

    Args:
        problem: gives m, n, batch and D's order.
        output: a checked output (dtype and extent filled in).

    Example:
        >>> from epigemm.expression.nodes import acc
        >>> operand(Problem.of("f16", m=65, n=48, k=8, order="col"), Output("relu_aux", acc(), "uint8", "bits")).shape
        (16, 48)
    """
    order = problem.order
    return Operand.dense(dtypes.of(output.dtype), (*problem.batch, *_matrix_shape(problem, output, order)), order)


def _matrix_shape(problem: Problem, output: Output, order: str) -> tuple[int, int]:
    m, n = problem.m, problem.n
    if output.extent == BITS:
        return (layouts.mask_bytes(m), n) if order == layouts.COL else (m, layouts.mask_bytes(n))
    if output.extent == MATRIX and output.pad > 1:
        return (layouts.round_up(m, output.pad), n) if order == layouts.COL else (m, layouts.round_up(n, output.pad))
    return {MATRIX: (m, n), COLUMN: (m, 1), ROW: (1, n), SCALAR: (1, 1)}[output.extent]
