"""The shapes and dtypes of what a network's forward and backward return, without data: dynamic extents stay what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epigemm import layouts
from epigemm.expression.check import extent as extent_of
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, Node, Output, transform
from epigemm.expression.rules import REDUCTION, kind
from epigemm.pytorch.autograd import rows_of_shape
from epigemm.pytorch.fused import accumulator
from epigemm.pytorch.recipe import HIDDEN, Recipe, placed

# (rows, columns), dtype
Shaped = tuple[tuple[Any, Any], torch.dtype]


def _by_extent(extent: str, m: Any, n: Any) -> tuple[Any, Any]:
    return (m if extent in (COLUMN, MATRIX) else 1), (n if extent in (ROW, MATRIX) else 1)


def _output(output: Output, made: Recipe, m: Any, n: Any, stored: torch.dtype, wide: torch.dtype) -> Shaped:
    """An output of the first layer, as `check` would find it."""
    node = output.node
    cast = str(node.param("dtype")) if node.op == "cast" else output.dtype
    if kind(node) == BITS:
        return (m, layouts.mask_bytes(n)), torch.uint8
    summed = kind(node) == REDUCTION or node.op == "operand_sum"
    dtype = getattr(torch, cast) if cast else wide if summed else stored
    return ((m, n) if output.name == "d" else _by_extent(placed(node, made.network, made.extents), m, n)), dtype


def of_forward(made: Recipe, x: Any, weights: Sequence[Any]) -> tuple[list[Shaped], list[Shaped]]:
    """The outputs that the user gets, before they have x's leading dimensions, and the fresh slots."""
    network, m, n = made.network, rows_of_shape(x.shape), weights[0].shape[0]
    result = getattr(torch, network.result) if network.result else x.dtype
    stored = result if network.second is None else x.dtype
    first = {o.name: _output(o, made, m, n, stored, accumulator(x)) for o in made.forward.outputs}
    visible = [first[o.name] for o in network.first.outputs] if network.second is None else [((m, weights[-1].shape[0]), result)]
    return visible, [first["d"] if slot == HIDDEN else first[slot.removeprefix("made:")] for slot in made.fresh]


def of_backward(made: Recipe, g: Any, held: dict[str, Any]) -> list[Shaped]:
    """The gradients that `made.computed` names; `g` is D's cotangent, `held` by slot."""
    ways, dtype = made.network.first.accumulators, getattr(torch, made.dtype)
    m, width = g.shape
    n = width
    if made.network.second is not None:
        n = held[HIDDEN].shape[1] if HIDDEN in held else held[f"w{ways}"].shape[1]
    found: list[Shaped] = []
    for slot in made.computed:
        if slot == "x":
            found.append(((m, held["w0"].shape[1]), dtype))
        elif slot == f"w{ways}":
            found.append(((width, n), dtype))
        elif slot.startswith("w"):
            found.append(((n, held["x"].shape[-1]), dtype))
        elif slot in made.sums:
            found.append(((1, width), accumulator(g)))
        else:
            found.append(_of_input(made, int(slot[2:]), m, n, g.dtype if made.network.second is None else dtype))
    return found


def _of_input(made: Recipe, index: int, m: Any, n: Any, stored: torch.dtype) -> Shaped:
    assert made.backward is not None
    name = f"d_{made.network.first.input_names[index]}"
    node = next(o.node for o in made.backward.outputs if o.name == name)
    wide = torch.float64 if stored is torch.float64 else torch.float32
    return _by_extent(_backward_extent(node, made), m, n), wide if kind(node) == REDUCTION else stored


def _backward_extent(node: Node, made: Recipe) -> str:
    """The extent of a value of the backward expression."""
    assert made.gradient is not None
    first = made.network.first
    outputs = {o.name: o.node for o in first.outputs}
    places = dict(zip(first.input_names, made.extents, strict=False))
    places |= {s.name: s.extent for s in made.gradient.saved}
    places |= {name: placed(outputs[output], made.network, made.extents) for name, output in made.gradient.cotangents}

    def fill(x: Node) -> Node | None:
        return Node("input", name=x.param("name"), extent=places[str(x.param("name"))]) if x.op == "input" else None

    return extent_of(transform(node, fill))
