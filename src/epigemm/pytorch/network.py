"""Network: one fused layer, or an MLP's two, as a value; and its text, by which a registered op knows it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from epigemm.expression.nodes import COLUMN, MATRIX, ROW, SCALAR, Expression, Node, Output, walk

_KEPT = 512


@dataclass(frozen=True, slots=True)
class Network:
    """A layer with any epilogue and, in an MLP, a linear layer that takes its result.

    Args:
        first: over the products of x with the first weights; an MLP's has no outputs besides D.
        second: None, or over the product of the first's D with the last weight: acc plus inputs.
        recompute: compute in the backward again what the forward would save for it.
        result: dtype name of D, "" for x's.
        recipes: what `recipe.recipe` has made of it so far.
    """

    first: Expression
    second: Expression | None = None
    recompute: bool = False
    result: str = ""
    recipes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def weights(self) -> int:
        """How many weights it has, the second layer's last."""
        return self.first.accumulators + (self.second is not None)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of its inputs, the first layer's before the second's."""
        return self.first.input_names + (() if self.second is None else self.second.input_names)

    @property
    def last(self) -> Expression:
        """The expression that makes the network's D."""
        return self.first if self.second is None else self.second


def place(shape: tuple[Any, ...]) -> str:
    """The extent of an input of this shape beside an x of (*lead, k): "row" (n,), "column" (*lead, 1), "scalar", or "matrix" (*lead, n).

    It is told from the shape alone, so that a dynamic number of rows does not matter.

    Example:
        >>> place((48,)), place((1, 48)), place((2, 3, 48)), place((2, 3, 1)), place(())
        ('row', 'row', 'matrix', 'column', 'scalar')
    """
    flat = all(extent == 1 for extent in shape[:-1])
    if not shape or shape[-1] == 1:
        return SCALAR if flat else COLUMN
    return ROW if flat else MATRIX


# ---------------------------------------------------------------- text


def encode(network: Network) -> str:
    """The network as JSON: what a compiled graph carries, in this process and in others.

    Example:
        >>> from epigemm.expression import epilogue, relu
        >>> network = Network(epilogue(lambda acc, bias: relu(acc + bias)).expression())
        >>> decode(encode(network)) == network
        True
    """
    return _encoded(network)


@lru_cache(_KEPT)
def _encoded(network: Network) -> str:
    layers = [_as_data(x) for x in (network.first, network.second) if x is not None]
    return json.dumps({"layers": layers, "recompute": network.recompute, "result": network.result}, separators=(",", ":"))


@lru_cache(_KEPT)
def decode(text: str) -> Network:
    """The network that `encode` wrote."""
    data = json.loads(text)
    layers = [_of_data(x) for x in data["layers"]]
    return Network(layers[0], layers[1] if len(layers) > 1 else None, data["recompute"], data["result"])


def _as_data(expression: Expression) -> dict[str, Any]:
    nodes = list(walk(o.node for o in expression.outputs))
    number = {node: index for index, node in enumerate(nodes)}
    return {
        "nodes": [[node.op, [number[a] for a in node.args], dict(node.params)] for node in nodes],
        "outputs": [[o.name, number[o.node], o.dtype, o.extent, o.pad] for o in expression.outputs],
        "accumulators": expression.accumulators,
        "inputs": expression.input_names,
        "name": expression.name,
    }


def _of_data(data: dict[str, Any]) -> Expression:
    nodes: list[Node] = []
    for op, args, params in data["nodes"]:
        nodes.append(Node(op, *(nodes[i] for i in args), **params))
    outputs = tuple(Output(name, nodes[index], dtype, extent, pad) for name, index, dtype, extent, pad in data["outputs"])
    return Expression(outputs, data["accumulators"], tuple(data["inputs"]), data["name"])
