"""From a traced expression and a problem to a checked one: extents, dtypes, and every rule that an engine relies on."""

from __future__ import annotations

from dataclasses import replace

from epigemm import dtypes, errors, layouts
from epigemm.errors import DTypeError, ExpressionError
from epigemm.errors.types import listed, say
from epigemm.expression.format import text
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR, Expression, Node, Output, walk
from epigemm.expression.ops import COMPLEX_OPS, OPS
from epigemm.expression.rules import BOOL, MASK, REDUCTION, VALUE, kind, verify
from epigemm.problem import Operand, Problem

# As an Output's dtype: D's, also for a reduction (the peer's bias gradients).
AS_D = "d"

_AXES_OF = {SCALAR: frozenset(), COLUMN: frozenset("m"), ROW: frozenset("n"), MATRIX: frozenset("mn"), BITS: frozenset("mn")}
_EXTENT_OF = {axes: extent for extent, axes in _AXES_OF.items() if extent != BITS}
SUMMED = {SCALAR: "mn", COLUMN: "n", ROW: "m"}
_REAL = {"complex64": "float32", "complex128": "float64"}


def check(expression: Expression, problem: Problem, written: Expression | None = None) -> Expression:
    """The expression with every extent and dtype filled in, and each `sum_like` resolved.

    Args:
        expression: traced, named or derived.
        problem: gives the inputs' shapes and dtypes, D's dtype and order.
        written: the expression before it was simplified: an input that nothing reads any more (where(mask, x, x)) is checked as
            what it was read as there.

    Raises:
        EpilogInputError: an input is missing or unknown.
        ShapeError: an input does not broadcast to (m, n).
        DTypeError: an input has a dtype that is not read where it is used.
        ExpressionError: an op is given what it does not take; the message names the node.
    """
    for node in expression.nodes():
        verify(node)
        _check_domain(node, problem)
    _check_arity(expression, problem)
    usage = input_usage(written or expression)
    inputs = {name: _checked_input(name, operand, usage.get(name, VALUE), problem) for name, operand in problem.inputs}

    def fill(node: Node) -> Node | None:
        if node.op == "input":
            return inputs[str(node.param("name"))]
        if node.op == "sum_like":
            return _summed(node.args[0], inputs[str(node.param("name"))])
        return None

    filled = expression.map(fill)
    return replace(filled, outputs=tuple(_checked_output(o, index == 0, problem) for index, o in enumerate(filled.outputs)))


def _check_arity(expression: Expression, problem: Problem) -> None:
    name = expression.name or text(expression.d.node)
    if expression.accumulators != len(problem.b):
        what = f"The epilogue `{name}` takes {expression.accumulators} accumulators, and {len(problem.b)} products are given."
        raise ExpressionError(say(what, "Pass one B for each: matmul(a, (b0, b1), ...)."))
    given = [input_name for input_name, _ in problem.inputs]
    used = {str(node.param("name")) for node in expression.nodes() if node.op == "input"}
    if set(given) != set(expression.input_names) or not used <= set(given):
        raise errors.wrong_input_names(name, {*expression.input_names, *used}, given)
    names = [o.name for o in expression.outputs]
    if len(set(names)) != len(names):
        raise ExpressionError(say(f"Two outputs of `{name}` have one name: {listed(names)}.", "Name them apart."))


def _check_domain(node: Node, problem: Problem) -> None:
    """Complex numbers have no order, and no activation here."""
    is_complex = problem.acc_dtype.is_complex
    if is_complex and node.op not in COMPLEX_OPS:
        what = f"`{node.op}` is not defined for {problem.acc_dtype.name}, in `{text(node)}`."
        raise ExpressionError(say(what, f"Complex epilogues have {listed(sorted(n for n in COMPLEX_OPS if OPS[n].arity))}."))
    if node.op == "cast" and dtypes.of(str(node.param("dtype"))).is_complex != is_complex:
        what = f"`{text(node)}` casts between real and complex; the accumulator is {problem.acc_dtype.name}."
        raise ExpressionError(say(what, "Cast to a type of the accumulator's kind."))
    if node.op == "constant" and isinstance(node.param("value"), complex) and not is_complex:
        raise ExpressionError(say(f"A {problem.acc_dtype.name} epilogue cannot hold {node.param('value')}.", "Use its real part."))
    if node.op == "operand_sum":
        index = int(str(node.param("operand"))[1:] or 0)
        if index >= len(problem.b):
            raise ExpressionError(say(f"`{text(node)}` names an operand that is not there; B has {len(problem.b)}.", "Use 'a' or 'b'."))


def input_usage(expression: Expression) -> dict[str, str]:
    """How each input is read: "value", "bits" (through unbitmask) or "seed" (of uniform).

    Raises:
        ExpressionError: one is read in two ways.
    """
    usage: dict[str, str] = {}
    roots = [(o.node, VALUE) for o in expression.outputs if o.node.op == "input"]
    edges = [(a, OPS[node.op].domain) for node in expression.nodes() for a in node.args if a.op == "input"]
    for argument, domain in [*roots, *edges]:
        name, way = str(argument.param("name")), domain if domain in (BITS, "seed") else VALUE
        if usage.setdefault(name, way) != way:
            what = f"The input `{name}` is read both as {usage[name]} and as {way}."
            raise ExpressionError(say(what, "Give it two parameters."))
    return usage


def _checked_input(name: str, operand: Operand, way: str, problem: Problem) -> Node:
    batch = layouts.broadcast_batches(operand.batch, problem.batch)
    if batch is None or batch != problem.batch:
        raise errors.input_shape(name, operand.shape, problem.m, problem.n, problem.batch)
    extent = input_extent(name, operand.shape, problem.m, problem.n, way == BITS, problem.order)
    row = operand.dtype
    if way == BITS and row.name != "uint8":
        raise DTypeError(say(f"The packed bits `{name}` must be 'uint8'; the dtype is '{row.name}'.", "Pass what bitmask returned."))
    if way == "seed" and (row.kind != "integer" or extent != SCALAR):
        what = f"The seed `{name}` must be one integer (int32 or int64); it is a {extent} of dtype {row.name}."
        raise DTypeError(say(what, "Pass an integer tensor of shape (1, 1), or () ."))
    if way == VALUE and (row.kind == "bits" or (row.is_complex and not problem.acc_dtype.is_complex)):
        what = f"The input `{name}` of dtype {row.name} cannot be read as a {problem.acc_dtype.name} number."
        raise DTypeError(say(what, "Read packed bits by eg.unbitmask." if row.kind == "bits" else "Pass its real part."))
    return Node("input", name=name, extent=extent, dtype=row.name)


def input_extent(name: str, shape: tuple[int, ...], m: int, n: int, bits: bool = False, order: str = layouts.ROW) -> str:
    """Along which axes an input of at least two dimensions varies: "scalar", "column", "row", "matrix" or "bits".

    Args:
        name: for errors.
        shape: (*batch, rows, columns).
        m, n: D's.
        bits: whether it holds packed bits; these lie along D's contiguous axis, by `order`.

    Raises:
        ShapeError: it does not broadcast to (m, n).

    Example:
        >>> input_extent("bias", (1, 48), 64, 48), input_extent("mask", (16, 48), 64, 48, bits=True, order="col")
        ('row', 'bits')
    """
    rows, columns = shape[-2:] if len(shape) >= 2 else (-1, -1)
    if bits:
        expected = (layouts.mask_bytes(m), n) if order == layouts.COL else (m, layouts.mask_bytes(n))
        if (rows, columns) != expected:
            raise errors.aux_shape(name, shape, expected)
        return BITS
    if rows not in (1, m) or columns not in (1, n):
        raise errors.input_shape(name, shape, m, n)
    return _EXTENT_OF[frozenset("m" * (rows == m != 1) + "n" * (columns == n != 1))]


def place_input(name: str, shape: tuple[int, ...], *, m: int, n: int, convention: str = "numpy") -> tuple[int, ...]:
    """The shape with at least two dimensions under which an input is read.

    Args:
        name: for errors.
        shape: as given: () is a scalar, 1-D lies along n ("numpy") or along m ("peer").
        m, n: D's.
        convention: "numpy" for a user's epilogue, "peer" for a predefined epilog.

    Raises:
        ShapeError: a 1-D length does not fit its rule, even where it would fit the other.

    Example:
        >>> place_input("bias", (48,), m=64, n=48), place_input("bias", (64,), m=64, n=48, convention="peer")
        ((1, 48), (64, 1))
    """
    if len(shape) >= 2:
        return shape
    if not shape:
        return (1, 1)
    length = shape[0]
    if convention == "peer":
        if length != m:
            raise errors.bias_extent("M", length, m)
        return (length, 1)
    if length not in (1, n):
        raise errors.input_length(name, length, m, n, along="n")
    return (1, length)


def extent(node: Node) -> str:
    """Along which axes a checked node varies."""
    return _extents([node])[node]


def _extents(roots: list[Node]) -> dict[Node, str]:
    found: dict[Node, str] = {}
    for node in walk(roots):
        axes = frozenset[str]().union(*(_AXES_OF[found[a]] for a in node.args))
        found[node] = _leaf_extent(node) or _EXTENT_OF[axes]
    return found


def _leaf_extent(node: Node) -> str | None:
    """The extent of a node that does not follow from its arguments; None where it does."""
    if node.op in ("acc", "uniform", "unbitmask"):
        return MATRIX
    if node.op == "operand_sum":
        return COLUMN if node.param("operand") == "a" else ROW
    if node.op == "input":
        return str(node.param("extent") or MATRIX)
    if OPS[node.op].result == REDUCTION:
        return {"m": ROW, "n": COLUMN, "mn": SCALAR}[str(node.param("axis"))]
    return BITS if node.op == "bitmask" else None


def _summed(x: Node, name: Node) -> Node:
    place = str(name.param("extent"))
    return x if place in (MATRIX, BITS) else Node("sum", x, axis=SUMMED[place])


def result_dtype(expression: Expression) -> str | None:
    """The dtype that the expression itself gives D (its root is a cast), else None."""
    root = expression.d.node
    return str(root.param("dtype")) if root.op == "cast" else None


def _checked_output(output: Output, is_d: bool, problem: Problem) -> Output:
    what = kind(output.node)
    accumulator = _REAL.get(problem.acc_dtype.name, problem.acc_dtype.name)
    if what == BOOL or (is_d and what != VALUE):
        remedy = "Store eg.where(condition, 1.0, 0.0), or eg.bitmask." if what == BOOL else "It can be a further output."
        raise ExpressionError(say(f"The output `{output.name}` = `{text(output.node)}` is a {what}.", remedy))
    cast = str(output.node.param("dtype")) if output.node.op == "cast" else ""
    if is_d:
        if cast and cast != problem.d.dtype.name:
            remedy = "Leave `out` and result_type away, or make them this type."
            raise ExpressionError(say(f"D is cast to {cast} and is to be stored as {problem.d.dtype.name}.", remedy))
        return replace(output, dtype=problem.d.dtype.name, extent=MATRIX)
    if what == MASK:
        return replace(output, dtype="uint8", extent=BITS)
    summed = what == REDUCTION or output.node.op == "operand_sum"
    default = accumulator if summed else problem.d.dtype.name
    if summed and problem.acc_dtype.is_complex:
        default = problem.acc_dtype.name
    asked = problem.d.dtype.name if output.dtype == AS_D else output.dtype
    return replace(output, dtype=cast or asked or default, extent=extent(output.node))
