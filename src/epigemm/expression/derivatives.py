"""The derivative of each op, in nodes: `f(node, d)` gives one node an argument, or None where nothing flows.

`d` is the cotangent of `node`. Masks select with `where`: multiplying would make inf * 0.
Broadcasting needs no care here: what an input is broadcast along is summed once, at the input, by `sum_like`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

from epigemm.expression.nodes import Node, constant

Derivative = Callable[[Node, Node], tuple[Node | None, ...]]

# Beyond these the derivative is its limit to the last bit, and a clamped argument keeps inf * 0 away.
_GELU_END = 40.0
_EXP_END = 1000.0


def _c(value: float) -> Node:
    return constant(value)


def _mul(x: Node, y: Node) -> Node:
    return Node("mul", x, y)


def _add(x: Node, y: Node) -> Node:
    return Node("add", x, y)


def _sub(x: Node, y: Node) -> Node:
    return Node("sub", x, y)


def _where(cond: Node, x: Node, y: Node) -> Node:
    return Node("where", cond, x, y)


def _clamped(x: Node, end: float) -> Node:
    return Node("minimum", Node("maximum", x, _c(-end)), _c(end))


ZERO = constant(0.0)


def none(node: Node, d: Node) -> tuple[Node | None, ...]:
    """Nothing flows: comparisons, masks, random numbers."""
    return (None,) * len(node.args)


def add(node: Node, d: Node) -> tuple[Node | None, ...]:
    return d, d


def sub(node: Node, d: Node) -> tuple[Node | None, ...]:
    return d, Node("neg", d)


def mul(node: Node, d: Node) -> tuple[Node | None, ...]:
    x, y = node.args
    return _mul(d, y), _mul(d, x)


def div(node: Node, d: Node) -> tuple[Node | None, ...]:
    _, y = node.args
    along = Node("div", d, y)
    return along, Node("neg", _mul(along, node))


def neg(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (Node("neg", d),)


def square(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(d, _mul(_c(2.0), node.args[0])),)


def power(node: Node, d: Node) -> tuple[Node | None, ...]:
    exponent = float(node.param("exponent"))  # type: ignore[arg-type]
    return (_mul(d, _mul(_c(exponent), Node("power", node.args[0], exponent=exponent - 1))),)


def abs_(node: Node, d: Node) -> tuple[Node | None, ...]:
    x = node.args[0]
    return (_where(Node("gt", x, ZERO), d, _where(Node("lt", x, ZERO), Node("neg", d), ZERO)),)


def exp(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(d, node),)


def log(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (Node("div", d, node.args[0]),)


def sqrt_(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (Node("div", _mul(d, _c(0.5)), node),)


def rsqrt(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(_mul(d, _c(-0.5)), _mul(node, Node("square", node))),)


def tanh(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(d, _sub(_c(1.0), Node("square", node))),)


def erf(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(d, _mul(_c(2 / sqrt(pi)), Node("exp", Node("neg", Node("square", node.args[0]))))),)


def sigmoid(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(d, _mul(node, _sub(_c(1.0), node))),)


def where(node: Node, d: Node) -> tuple[Node | None, ...]:
    cond = node.args[0]
    return None, _where(cond, d, ZERO), _where(cond, ZERO, d)


def _extremum(node: Node, d: Node, loses: str) -> tuple[Node | None, ...]:
    """Against a number the other argument takes all at a tie (as `clamp` does in PyTorch), else the tie is shared."""
    x, y = node.args
    if y.op == "constant":
        return _where(Node(loses, x, y), ZERO, d), None
    if x.op == "constant":
        return None, _where(Node(loses, y, x), ZERO, d)
    tie = Node("eq", x, y)
    half = _mul(d, _c(0.5))
    return _where(tie, half, _where(Node(loses, x, y), ZERO, d)), _where(tie, half, _where(Node(loses, y, x), ZERO, d))


def maximum(node: Node, d: Node) -> tuple[Node | None, ...]:
    return _extremum(node, d, "lt")


def minimum(node: Node, d: Node) -> tuple[Node | None, ...]:
    return _extremum(node, d, "gt")


def relu(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_where(Node("logical_not", Node("le", node.args[0], ZERO)), d, ZERO),)


def leaky_relu(node: Node, d: Node) -> tuple[Node | None, ...]:
    slope = float(node.param("slope"))  # type: ignore[arg-type]
    return (_where(Node("gt", node.args[0], ZERO), d, _mul(d, _c(slope))),)


def gelu(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(d, gelu_slope(node.args[0], str(node.param("approximate")))),)


def gelu_slope(x: Node, approximate: str) -> Node:
    """gelu'(x). The tanh form is x * s with s = sigmoid(2 u): s + x s (1 - s) 2 u'."""
    if approximate == "tanh":
        x = _clamped(x, _GELU_END)
        scale, cubic = 2 * sqrt(2 / pi), 2 * sqrt(2 / pi) * 0.044715
        z = Node("square", x)
        s = Node("sigmoid", _mul(x, _add(_c(scale), _mul(_c(cubic), z))))
        step = _mul(_mul(s, _sub(_c(1.0), s)), _mul(x, _add(_c(scale), _mul(_c(3 * cubic), z))))
        return _add(s, step)
    x = _clamped(x, _GELU_END)
    half = _mul(_c(0.5), _add(_c(1.0), Node("erf", _mul(x, _c(sqrt(0.5))))))
    bell = _mul(_c(1 / sqrt(2 * pi)), Node("exp", _mul(_c(-0.5), Node("square", x))))
    return _add(half, _mul(x, bell))


def silu(node: Node, d: Node) -> tuple[Node | None, ...]:
    x = _clamped(node.args[0], _EXP_END)
    s = Node("sigmoid", x)
    return (_mul(d, _mul(s, _add(_c(1.0), _mul(x, _sub(_c(1.0), s))))),)


def softplus(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (_mul(d, Node("sigmoid", node.args[0])),)


def mish(node: Node, d: Node) -> tuple[Node | None, ...]:
    x = _clamped(node.args[0], _EXP_END)
    t = Node("tanh", Node("softplus", x))
    return (_mul(d, _add(t, _mul(_mul(x, Node("sigmoid", x)), _sub(_c(1.0), Node("square", t))))),)


def hardswish(node: Node, d: Node) -> tuple[Node | None, ...]:
    x = node.args[0]
    inside = _mul(d, _add(_mul(x, _c(1 / 3)), _c(0.5)))
    return (_where(Node("le", x, _c(-3.0)), ZERO, _where(Node("lt", x, _c(3.0)), inside, d)),)


def cast(node: Node, d: Node) -> tuple[Node | None, ...]:
    """Rounding passes the gradient on unchanged."""
    return (d,)


def sum_(node: Node, d: Node) -> tuple[Node | None, ...]:
    """`d` is a column, row or scalar, and is broadcast where it is used."""
    return (d,)
