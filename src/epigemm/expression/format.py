"""Expressions as a person would write them: infix, one line an output, shared parts named once."""

from __future__ import annotations

from collections import Counter

from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, Expression, Node, walk

# op: (symbol, how tightly it binds); Python's order, in which `&` binds tighter than a comparison.
_INFIX = {
    "eq": ("==", 1),
    "ne": ("!=", 1),
    "lt": ("<", 1),
    "le": ("<=", 1),
    "gt": (">", 1),
    "ge": (">=", 1),
    "logical_or": ("|", 2),
    "logical_and": ("&", 3),
    "add": ("+", 4),
    "sub": ("-", 4),
    "mul": ("*", 5),
    "div": ("/", 5),
}
_PREFIX = {"neg": ("-", 6), "logical_not": ("~", 6)}
_POWER, _ATOM = 7, 8

_PLACES = {COLUMN: "[m]", ROW: "[n]", MATRIX: "[m, n]", BITS: "[bits]"}
_LONGEST = 240


def text(value: Node | Expression) -> str:
    """A node as one formula, or an expression as one line an output.

    Example:
        >>> from epigemm.expression.nodes import acc, input_
        >>> text(Node("gelu", Node("add", acc(), input_("bias")), approximate="tanh"))
        'gelu_tanh(acc + bias)'
    """
    if isinstance(value, Node):
        known: _Known = {}
        for node in walk([value]):  # arguments first, so that no call goes deeper than one
            whole = _text(node, {}, 0, known)
        return whole if len(whole) <= _LONGEST else whole[: _LONGEST - 3] + "..."
    return "\n".join(f"{name} = {formula}" for name, formula in lines(value))


def lines(expression: Expression) -> list[tuple[str, str]]:
    """(name, formula) of each shared part, then of each output."""
    roots = [o.node for o in expression.outputs]
    used = Counter(roots)
    for node in walk(roots):
        used.update(node.args)
    taken = {o.name for o in expression.outputs} | set(expression.input_names)
    names: dict[Node, str] = {}
    known: dict[Node, tuple[str, int]] = {}
    result: list[tuple[str, str]] = []
    for output in expression.outputs:
        for node in walk([output.node]):
            if used[node] > 1 and node.args and node not in names and node is not output.node:
                name = _free_name(taken)
                result.append((name, _text(node, names, 0, known)))
                names[node] = name
            else:
                _text(node, names, 0, known)
        result.append((output.name, _text(output.node, names, 0, known)))
        if output.node.args:
            names.setdefault(output.node, output.name)
    return result


def _free_name(taken: set[str]) -> str:
    index = 0
    while f"t{index}" in taken:
        index += 1
    taken.add(f"t{index}")
    return f"t{index}"


def number(value: object) -> str:
    """A constant, without a needless `.0`."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e9:
        return str(int(value)) if str(value) != "-0.0" else "-0.0"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# Formulas already written, without which a shared part would be written 2^depth times.
_Known = dict[Node, tuple[str, int]]


def _text(node: Node, names: dict[Node, str], binding: int, known: _Known) -> str:
    if node in names:
        return names[node]
    if node not in known:
        formula, own = _formula(node, names, known)
        known[node] = formula[: 4 * _LONGEST], own
    formula, own = known[node]
    return f"({formula})" if own < binding else formula


def _formula(node: Node, names: dict[Node, str], known: _Known) -> tuple[str, int]:
    op, args = node.op, node.args
    if op in _INFIX:
        symbol, level = _INFIX[op]
        left = _text(args[0], names, level + (level == 1), known)
        return f"{left} {symbol} {_text(args[1], names, level + 1, known)}", level
    if op in _PREFIX:
        symbol, level = _PREFIX[op]
        return symbol + _text(args[0], names, level, known), level
    if op == "power":
        return f"{_text(args[0], names, _POWER + 1, known)} ** {number(node.param('exponent'))}", _POWER
    if not args:
        return _leaf(node)
    inside = [_text(a, names, 0, known) for a in args]
    name = op
    if op == "gelu":
        name = "gelu_tanh" if node.param("approximate") == "tanh" else "gelu"
    else:
        inside += [f"{key}={number(value)}" for key, value in node.params]
    return f"{name}({', '.join(inside)})", _ATOM


def _leaf(node: Node) -> tuple[str, int]:
    if node.op == "acc":
        return "acc" + (str(node.param("index")) if node.param("index") else ""), _ATOM
    if node.op == "input":
        return str(node.param("name")) + _PLACES.get(str(node.param("extent")), ""), _ATOM
    if node.op == "constant":
        value = number(node.param("value"))
        return value, _PREFIX["neg"][1] if value.startswith("-") else _ATOM
    return f"{node.op}({', '.join(str(v) for _, v in node.params)})", _ATOM
