"""Where a product may be stored before the epilogue: in which types an accumulator can lie in memory without changing any output."""

from __future__ import annotations

from epigemm.compute_types import cublaslt_supports
from epigemm.dtypes import DTYPES, DType, of
from epigemm.enums import CudaDataType, MatmulComputeType
from epigemm.expression.nodes import MATRIX, Expression, Node, Output, walk
from epigemm.problem import Problem

EXACT, IN_PLACE = "exact", "in_place"

# Of these, rounding before is rounding after: they keep the order of magnitudes and both signs.
_COMMUTE = ("relu", "neg", "abs")


def lossless(expression: Expression, dtype: str) -> bool:
    """Whether accumulators rounded to `dtype` before the epilogue give the same outputs as ones that were not.

    So it is where every path from an accumulator to an output rounds to `dtype` anyway before it computes anything: D is the plain
    product, its relu or a selection of it, or the expression casts first, as one that was rounded eagerly does.

    Example:
        >>> from epigemm.expression.nodes import acc
        >>> plain, halved = acc(), Node("mul", acc(), Node("constant", value=0.5))
        >>> [lossless(Expression((Output("d", x, "bfloat16", "matrix"),)), "bfloat16") for x in (plain, Node("relu", plain), halved)]
        [True, True, False]
    """
    exact: dict[Node, bool] = {}
    rounded: dict[Node, bool] = {}
    for node in walk(o.node for o in expression.outputs):
        kept = [exact[a] for a in node.args]
        narrow = [exact[a] or rounded[a] for a in node.args]
        cast = node.op == "cast" and node.param("dtype") == dtype
        exact[node] = node.op != "acc" and (all(kept) or (cast and all(narrow)))
        if node.op == "where":
            rounded[node] = kept[0] and all(rounded[a] or _is_zero(a) for a in node.args[1:])
        else:
            rounded[node] = node.op == "acc" or (node.op in _COMMUTE and all(rounded[a] for a in node.args)) or (cast and all(narrow))
    return all(exact[o.node] or (rounded[o.node] and _stored_as(o, dtype)) for o in expression.outputs)


def _is_zero(node: Node) -> bool:
    return node.op == "constant" and node.param("value") == 0 and not isinstance(node.param("value"), bool)


def _stored_as(output: Output, dtype: str) -> bool:
    return output.extent == MATRIX and output.dtype == dtype


def stores(problem: Problem, dtype: DType) -> bool:
    """Whether cuBLASLt stores this product in `dtype`."""
    compute = MatmulComputeType(problem.compute.compute_type)
    scale = CudaDataType(of(problem.compute.scale_type).cuda_type)
    names = problem.a.dtype.name, problem.b[0].dtype.name
    return cublaslt_supports(compute, scale, *names, c=_c_of(problem, dtype).name, d=dtype.name)


def _c_of(problem: Problem, dtype: DType) -> DType:
    """What C counts as beside a product in `dtype`."""
    return DTYPES["float16"] if dtype.is_narrow else dtype


def accumulator_types(problem: Problem, expression: Expression) -> dict[str, DType]:
    """way -> the type in which the product is stored: `EXACT` always first, `IN_PLACE` where it is another.

    `EXACT` stores the accumulator's type, or D's where that changes nothing. `IN_PLACE` stores a 16-bit D, which is then finished
    where it lies: one more rounding, the one that any library makes that computes step by step. `strict` rules it out.

    Args:
        problem: A and B as cuBLASLt will read them.
        expression: checked.
    """
    d, accumulator = problem.d.dtype, problem.acc_dtype
    narrow = d.bytes == 2 and d != accumulator and stores(problem, d)
    if d == accumulator or (narrow and lossless(expression, d.name)):
        return {EXACT: d}
    exact = accumulator if stores(problem, accumulator) else problem.a.dtype  # a 16-bit compute type accumulates in 16 bits
    if narrow and exact != d and not problem.compute.strict:
        return {EXACT: exact, IN_PLACE: d}
    return {EXACT: exact}
