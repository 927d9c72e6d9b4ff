"""The predefined epilogs as expressions, one row each, and the way back: which of them an expression is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from epigemm.enums import MatmulEpilog
from epigemm.expression.check import AS_D
from epigemm.expression.derivatives import gelu_slope
from epigemm.expression.nodes import COLUMN, MATRIX, ROW, Expression, Node, Output, acc, constant, input_
from epigemm.expression.simplify import simplify

# gelu_aux's rows are padded to a multiple of 8 by the peer.
GELU_AUX_PAD = 8

_ZERO = constant(0.0)


@dataclass(frozen=True, slots=True)
class Named:
    """One predefined epilog.

    Args:
        epilog: the enum's member.
        inputs: its input names.
        order: the order of D that the peer gives: "col", or "any" (A's).
        outputs: D, then the aux outputs under the peer's names.
    """

    epilog: MatmulEpilog
    inputs: tuple[str, ...]
    order: str
    outputs: tuple[Output, ...]

    @property
    def aux_names(self) -> tuple[str, ...]:
        """The names of what is returned besides D."""
        return tuple(o.name for o in self.outputs[1:])


def _relu(x: Node) -> Node:
    return Node("relu", x)


def _gelu(x: Node) -> Node:
    return Node("gelu", x, approximate="tanh")


def _relu_aux(x: Node) -> Output:
    return Output("relu_aux", Node("bitmask", Node("ge", x, _ZERO)))


def _gelu_aux(x: Node) -> Output:
    return Output("gelu_aux", x, pad=GELU_AUX_PAD)


def _bgrad(name: str, x: Node) -> Output:
    return Output(name, Node("sum", x, axis="n"), dtype=AS_D)


_ACC = acc()
_BIASED = Node("add", _ACC, input_("bias"))
_DRELU = Node("where", Node("unbitmask", input_("relu_aux")), _ACC, _ZERO)
_DGELU = Node("mul", _ACC, gelu_slope(input_("gelu_aux"), "tanh"))


def _row(epilog: MatmulEpilog, inputs: tuple[str, ...], order: str, d: Node, *aux: Output) -> tuple[MatmulEpilog, Named]:
    return epilog, Named(epilog, inputs, order, (Output("d", d), *aux))


NAMED: dict[MatmulEpilog, Named] = dict(
    (
        _row(MatmulEpilog.RELU, (), "any", _relu(_ACC)),
        _row(MatmulEpilog.RELU_AUX, (), "col", _relu(_ACC), _relu_aux(_ACC)),
        _row(MatmulEpilog.BIAS, ("bias",), "col", _BIASED),
        _row(MatmulEpilog.RELU_BIAS, ("bias",), "col", _relu(_BIASED)),
        _row(MatmulEpilog.RELU_AUX_BIAS, ("bias",), "col", _relu(_BIASED), _relu_aux(_BIASED)),
        _row(MatmulEpilog.DRELU, ("relu_aux",), "col", _DRELU),
        _row(MatmulEpilog.DRELU_BGRAD, ("relu_aux",), "col", _DRELU, _bgrad("drelu_bgrad", _DRELU)),
        _row(MatmulEpilog.GELU, (), "any", _gelu(_ACC)),
        _row(MatmulEpilog.GELU_AUX, (), "col", _gelu(_ACC), _gelu_aux(_ACC)),
        _row(MatmulEpilog.GELU_BIAS, ("bias",), "col", _gelu(_BIASED)),
        _row(MatmulEpilog.GELU_AUX_BIAS, ("bias",), "col", _gelu(_BIASED), _gelu_aux(_BIASED)),
        _row(MatmulEpilog.DGELU, ("gelu_aux",), "col", _DGELU),
        _row(MatmulEpilog.DGELU_BGRAD, ("gelu_aux",), "col", _DGELU, _bgrad("dgelu_bgrad", _DGELU)),
        _row(MatmulEpilog.BGRADA, (), "any", _ACC, Output("bgrada", Node("operand_sum", operand="a"), dtype=AS_D)),
        _row(MatmulEpilog.BGRADB, (), "col", _ACC, Output("bgradb", Node("operand_sum", operand="b"), dtype=AS_D)),
    )
)


def named(epilog: MatmulEpilog | int, aux_dtype: str = "") -> Expression:
    """The expression of a predefined epilog.

    Args:
        epilog: a member other than DEFAULT.
        aux_dtype: the dtype in which gelu_aux is stored; "" is D's.

    Raises:
        KeyError: DEFAULT, which has no epilog.

    Example:
        >>> from epigemm.expression.format import text
        >>> print(text(named(MatmulEpilog.RELU_AUX_BIAS)))
        t0 = acc + bias
        d = relu(t0)
        relu_aux = bitmask(t0 >= 0)
    """
    row = NAMED[MatmulEpilog(epilog)]
    outputs = tuple(replace(o, dtype=aux_dtype or o.dtype) if o.name == "gelu_aux" else o for o in row.outputs)
    return Expression(outputs, 1, row.inputs, row.epilog.name)


@dataclass(frozen=True, slots=True)
class Recognised:
    """Which predefined epilog an expression is, under whose names.

    Args:
        epilog: DEFAULT where D is the accumulator alone.
        inputs: (the peer's name, the expression's name) of each input.
        outputs: (the peer's name, the expression's name) of each aux output.
        bias_extent: "column" (along m, the peer's), "row" (along n), or "" without a bias.
        sum_axis: the axis that a bias gradient sums over: "n" (the peer's), "m", or "".
    """

    epilog: MatmulEpilog
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    bias_extent: str = ""
    sum_axis: str = ""


# Where the expression's input may vary for it to be the peer's.
_EXTENTS = {"bias": (COLUMN, ROW), "gelu_aux": (MATRIX,), "relu_aux": ("bits",)}
_COMMUTES = frozenset(("add", "mul", "minimum", "maximum", "eq", "ne", "logical_and", "logical_or"))

Binding = dict[str, Any]


def recognise(expression: Expression) -> Recognised | None:
    """The predefined epilog that a checked expression computes, however it is written; None if it is none of them.

    Stored dtypes are not compared: the engine that asks knows what its library writes.
    """
    if expression.accumulators != 1:
        return None
    plain = simplify(expression)
    outputs = [replace(o, node=_uncast(o)) for o in plain.outputs]
    if len(outputs) == 1 and outputs[0].node is _ACC:
        return Recognised(MatmulEpilog.DEFAULT)
    for row in NAMED.values():
        binding = _match_outputs(simplify(Expression(row.outputs)).outputs, outputs)
        if binding is not None:
            return _recognised(row, binding)
    return None


def _uncast(output: Output) -> Node:
    """The value before the cast that only says how it is stored."""
    node = output.node
    return node.args[0] if node.op == "cast" and node.param("dtype") == output.dtype else node


def _recognised(row: Named, binding: Binding) -> Recognised:
    extents = {str(node.param("name")): str(node.param("extent")) for key, node in binding.items() if key in row.inputs}
    inputs = tuple((name, str(binding[name].param("name"))) for name in row.inputs)
    bias = extents[dict(inputs)["bias"]] if "bias" in row.inputs else ""
    outputs = tuple((o.name, binding["output " + o.name]) for o in row.outputs[1:])
    return Recognised(row.epilog, inputs, outputs, bias, str(binding.get("axis", "")))


def _match_outputs(patterns: tuple[Output, ...], outputs: list[Output]) -> Binding | None:
    """Every pattern's output with one output of the expression; D with D. At most one extra exists in the table."""
    if len(patterns) != len(outputs):
        return None
    binding = _match(patterns[0].node, outputs[0].node, {})
    for pattern, output in zip(patterns[1:], outputs[1:], strict=True):
        if binding is not None:
            binding = _match(pattern.node, output.node, binding)
        if binding is not None:
            binding = {**binding, "output " + pattern.name: output.name}
    return binding


def _match(pattern: Node, node: Node, binding: Binding) -> Binding | None:
    """The binding of the pattern's inputs under which it is the node, or None."""
    if pattern.op == "input":
        return _bind(str(pattern.param("name")), node, binding)
    if pattern.op != node.op or len(pattern.args) != len(node.args):
        return None
    if pattern.op == "sum":
        binding = {**binding, "axis": node.param("axis")}
        if binding["axis"] not in ("m", "n"):
            return None
    elif pattern.op == "constant":
        return binding if _same_number(pattern, node) else None
    elif pattern.params != node.params:
        return None
    orders = [pattern.args, pattern.args[::-1]] if pattern.op in _COMMUTES else [pattern.args]
    return next((found for order in orders if (found := _match_all(order, node.args, binding)) is not None), None)


def _match_all(patterns: tuple[Node, ...], nodes: tuple[Node, ...], binding: Binding) -> Binding | None:
    found: Binding | None = binding
    for pattern, node in zip(patterns, nodes, strict=True):
        if found is not None:
            found = _match(pattern, node, found)
    return found


def _bind(name: str, node: Node, binding: Binding) -> Binding | None:
    if node.op != "input" or node.param("extent") not in _EXTENTS[name] or binding.get(name, node) is not node:
        return None
    return {**binding, name: node}


def _same_number(pattern: Node, node: Node) -> bool:
    """0 and 0.0 are one number in the accumulator's type."""
    return pattern.param("value") == node.param("value")
