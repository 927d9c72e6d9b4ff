"""Rewrites that keep every result to the bit, NaN and infinities included (but for the sign of a ReLU's zero); and eager rounding."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

from epigemm.expression.nodes import Expression, Node, Output, constant, transform, walk
from epigemm.expression.rules import VALUE, kind

Rewrite = Callable[[Node], Node | None]

# Exact in every precision, so they may be done before the precision is known.
_FOLDS: dict[str, Callable[..., object]] = {
    "neg": operator.neg,
    "abs": abs,
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_not": operator.not_,
    "logical_and": lambda x, y: x and y,
    "logical_or": lambda x, y: x or y,
}


def _value(node: Node) -> object:
    return node.param("value") if node.op == "constant" else None


def _is(node: Node, number: float) -> bool:
    """Whether a node is this number, with its sign."""
    value = _value(node)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number and repr(float(value)) == repr(float(number))


def _is_zero(node: Node) -> bool:
    value = _value(node)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def fold(node: Node) -> Node | None:
    """An exact function of constants."""
    if node.op not in _FOLDS or not all(a.op == "constant" for a in node.args):
        return None
    return constant(_FOLDS[node.op](*(a.param("value") for a in node.args)))  # type: ignore[arg-type]


def identity(node: Node) -> Node | None:
    """x * 1, x / 1, x - 0, x + -0.0 are x; x + 0.0 is not at x = -0.0."""
    if node.op == "mul":
        x, y = node.args
        return x if _is(y, 1.0) else y if _is(x, 1.0) else None
    if node.op == "div" and _is(node.args[1], 1.0):
        return node.args[0]
    if node.op == "sub" and _is(node.args[1], 0.0):
        return node.args[0]
    if node.op == "add":
        x, y = node.args
        return x if _is(y, -0.0) else y if _is(x, -0.0) else None
    return None


def negation(node: Node) -> Node | None:
    """--x is x, ~~c is c, x + (-y) is x - y, x - (-y) is x + y. ~(x < y) is not x >= y at NaN."""
    if node.op in ("neg", "logical_not") and node.args[0].op == node.op:
        return node.args[0].args[0]
    if node.op in ("add", "sub") and node.args[1].op == "neg":
        return Node("sub" if node.op == "add" else "add", node.args[0], node.args[1].args[0])
    return None


def selection(node: Node) -> Node | None:
    """where with a known condition, with equal branches, or with a negated condition."""
    if node.op != "where":
        return None
    cond, x, y = node.args
    if isinstance(_value(cond), bool):
        return x if _value(cond) else y
    if x is y and _is_matrix(x):
        return x
    return Node("where", cond.args[0], y, x) if cond.op == "logical_not" else None


def _is_matrix(node: Node) -> bool:
    """Whether a value varies along both axes whatever its inputs are: what is dropped beside it cannot have widened it."""
    return any(x.op in ("acc", "uniform", "unbitmask") for x in walk([node]))


def relu_idiom(node: Node) -> Node | None:
    """maximum(x, 0), where(x < 0, 0, x) and the like are relu(x), NaN included; where(x > 0, x, 0) turns NaN into 0 and is not."""
    if node.op == "maximum":
        x, y = node.args
        return Node("relu", x) if _is_zero(y) else Node("relu", y) if _is_zero(x) else None
    if node.op == "where":
        cond, x, y = node.args
        if cond.op in ("lt", "le") and _is_zero(cond.args[1]) and _is(x, 0.0) and cond.args[0] is y:
            return Node("relu", y)
        if cond.op in ("gt", "ge") and _is_zero(cond.args[0]) and _is(x, 0.0) and cond.args[1] is y:
            return Node("relu", y)
    return None


def square_idiom(node: Node) -> Node | None:
    """x * x is square(x)."""
    return Node("square", node.args[0]) if node.op == "mul" and node.args[0] is node.args[1] else None


def recast(node: Node) -> Node | None:
    """Rounding twice to one dtype is rounding once."""
    if node.op == "cast" and node.args[0].op == "cast" and node.params == node.args[0].params:
        return node.args[0]
    return None


RULES: tuple[Rewrite, ...] = (fold, identity, negation, selection, relu_idiom, square_idiom, recast)


def simplify(expression: Expression) -> Expression:
    """The expression with every rule applied until none applies.

    Example:
        >>> from epigemm.expression.format import text
        >>> from epigemm.expression.trace import epilogue
        >>> from epigemm.expression.vocabulary import maximum
        >>> print(text(simplify(epilogue(lambda acc, bias: maximum(acc * 1.0 + bias, 0)).expression())))
        d = relu(acc + bias)
    """
    memo: dict[Node, Node] = {}

    def rewrite(node: Node) -> Node | None:
        found = next((new for rule in RULES if (new := rule(node)) is not None), None)
        return transform(found, rewrite, memo) if found is not None else None

    simple = expression.map(rewrite)
    return replace(simple, outputs=tuple(map(_stored_alike, expression.outputs, simple.outputs)))


# As an output's root these decide what it is stored in.
_STORAGE_OPS = ("cast", "operand_sum")


def _stored_alike(written: Output, simple: Output) -> Output:
    """The simplified output; where a rule has bared such an op, cast(x) * 1.0, the factor comes back."""
    bared = simple.node.op in _STORAGE_OPS and written.node.op not in _STORAGE_OPS
    return replace(simple, node=Node("mul", simple.node, constant(1.0))) if bared else simple


def eager(expression: Expression, dtype: str) -> Expression:
    """The expression rounded to `dtype` wherever an unfused model would store a tensor.

    That is after every op on values; a product with its bias added is one such op (linear). Conditions, constants, inputs, the last
    value of an output (stored anyway) and reductions are not rounded.

    Args:
        expression: checked.
        dtype: D's.
    """
    linear = {n for n in expression.nodes() if n.op == "add" and any(a.op == "acc" for a in n.args) and any(_is_bias(a) for a in n.args)}

    def rounded(node: Node) -> Node:
        return node if node.op in ("constant", "input", "cast", "uniform") or kind(node) != VALUE else Node("cast", node, dtype=dtype)

    memo: dict[Node, Node] = {}

    def build(node: Node) -> Node:
        if node not in memo:
            args = tuple(build(a) if node in linear else rounded(build(a)) for a in node.args)
            memo[node] = Node(node.op, *args, **dict(node.params))
        return memo[node]

    return replace(expression, outputs=tuple(replace(o, node=build(o.node)) for o in expression.outputs))


def _is_bias(node: Node) -> bool:
    return node.op == "input" and node.param("extent") in ("column", "row")
