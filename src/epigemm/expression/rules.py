"""What may be an argument of what: asked when a node is traced, and again when an expression is checked."""

from __future__ import annotations

from epigemm.errors import ExpressionError
from epigemm.errors.types import say
from epigemm.expression.format import text
from epigemm.expression.nodes import Node
from epigemm.expression.ops import OPS, REDUCTIONS

VALUE, BOOL, MASK, REDUCTION = "value", "bool", "bits", "reduction"


def kind(node: Node) -> str:
    """What a node is: "value", "bool" (a condition), "bits" (a packed mask, terminal) or "reduction" (terminal, also under a cast)."""
    while node.op == "cast":
        node = node.args[0]
    result = OPS[node.op].result
    if node.op == "constant" and isinstance(node.param("value"), bool):
        return BOOL
    return VALUE if result == "gradient" else result


_WANTED = {
    "any": (VALUE, VALUE, VALUE),
    "real": (VALUE, VALUE, VALUE),
    "bool": (BOOL, BOOL),
    "where": (BOOL, VALUE, VALUE),
    "bits": (VALUE,),
    "seed": (VALUE,),
}

# (given, wanted): what to write instead
_REMEDIES = {
    (BOOL, VALUE): "It is a condition, not a number: write eg.where(condition, 1.0, 0.0).",
    (VALUE, BOOL): "It is a number, not a condition: compare it first, as in x > 0.",
    (MASK, VALUE): "A bitmask is only stored: use the condition it was made of.",
    (MASK, BOOL): "A bitmask is only stored: use the condition it was made of.",
    (REDUCTION, VALUE): "A reduction is only complete when the kernel ends: return it with eg.outputs, and use it in a second call.",
    (REDUCTION, BOOL): "A reduction is only complete when the kernel ends: return it with eg.outputs, and use it in a second call.",
}


def verify(node: Node) -> Node:
    """The node, once its op, its arity and the kinds of its arguments are found right.

    Raises:
        ExpressionError: they are not; the message names the node and the argument.
    """
    row = OPS.get(node.op)
    if row is None or len(node.args) != row.arity:
        raise ExpressionError(say(f"`{node!r}` is not an op of the epilogue language.", f"Its ops are {', '.join(OPS)}."))
    if row.domain == "leaf":
        return node
    if row.domain in ("bits", "seed"):
        _verify_input(node, row.domain)
        return node
    for argument, wanted in zip(node.args, _WANTED[row.domain], strict=False):
        given = kind(argument)
        if given != wanted and not (node.op == "cast" and argument.op in REDUCTIONS):
            what = f"`{node.op}` cannot take `{text(argument)}` in `{text(node)}`."
            raise ExpressionError(say(what, _REMEDIES.get((given, wanted), f"It is a {given}; a {wanted} is wanted.")))
    return node


def _verify_input(node: Node, domain: str) -> None:
    argument = node.args[0]
    if argument.op == "input":
        return
    if domain == "bits":
        what = f"`unbitmask` reads an input of packed bits, not `{text(argument)}`."
        raise ExpressionError(say(what, "Make the mask a parameter of the epilogue."))
    if argument.op != "constant" or type(argument.param("value")) is not int:
        what = f"The seed of `{text(node)}` must be an integer or a scalar integer input, not `{text(argument)}`."
        raise ExpressionError(say(what, "Make the seed a parameter of the epilogue, or a keyword-only constant."))
