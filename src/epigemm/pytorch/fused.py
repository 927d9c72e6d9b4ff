"""A network through fused products: forward, and backward with the activation's and the bias gradient inside the products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from epigemm.expression.nodes import MATRIX, ROW, SCALAR, Expression, Node, Output, acc
from epigemm.pytorch.product import product
from epigemm.pytorch.recipe import HIDDEN, Recipe, reads

_WIDE = frozenset((torch.float64, torch.complex64, torch.complex128))

Tensors = Mapping[str, Tensor]

_PRODUCT = Expression((Output("d", acc(0)),))
# The gradient of a weight and, in the same kernel, the sum of its left operand over the rows: the bias gradient.
_WITH_SUM = replace(_PRODUCT, outputs=(*_PRODUCT.outputs, Output("sum", Node("operand_sum", operand="a"))))


def flat(tensor: Tensor, rows: int, extent: str = MATRIX) -> Tensor:
    """An x, D or input of N dimensions as the product reads it: of two, or of fewer where it does not vary along the rows."""
    if extent in (ROW, SCALAR):
        return tensor if tensor.ndim < 2 else tensor.reshape(tensor.shape[-1:] if extent == ROW else ())
    return tensor if tensor.ndim == 2 else tensor.reshape(rows, tensor.shape[-1] if tensor.ndim else 1)


def rows_of(x: Tensor) -> int:
    """The number of rows of x as a matrix."""
    return x.shape[0] if x.ndim == 2 else prod(x.shape[:-1])


def _named(names: Sequence[str], inputs: Sequence[Tensor], extents: Sequence[str], rows: int) -> dict[str, Tensor]:
    """A layer's inputs by name, as the product reads them."""
    return {name: t if t.ndim < 2 else flat(t, rows, extent) for name, t, extent in zip(names, inputs, extents, strict=False)}


def forward(recipe: Recipe, x: Tensor, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs as the user gets them, and what `recipe.fresh` names."""
    network, ndim = recipe.network, x.ndim
    rows = rows_of(x)
    matrix = x if ndim == 2 else flat(x, rows)
    first = _named(network.first.input_names, inputs, recipe.extents, rows)
    if network.second is None:
        d, extras = product(matrix, weights, recipe.forward, first, result=network.result, turned=True)
        visible = [d, *(extras[o.name] for o in network.first.extras)]
        fresh = [extras[slot[5:]] for slot in recipe.fresh]  # "made:<name>"
    else:
        count = len(first)
        hidden, extras = product(matrix, weights[:-1], recipe.forward, first, turned=True)
        second = _named(network.second.input_names, inputs[count:], recipe.extents[count:], rows)
        d, _ = product(hidden, weights[-1:], network.second, second, result=network.result, turned=True)
        visible = [d]
        fresh = [hidden if slot == HIDDEN else extras[slot[5:]] for slot in recipe.fresh]
    if ndim != 2:
        lead = x.shape[:-1]
        visible = [t.view(*lead, t.shape[1]) if tall else t for t, tall in zip(visible, recipe.tall, strict=True)]
    return visible, fresh


def backward(recipe: Recipe, held: dict[str, Tensor], cotangents: Tensors) -> list[Tensor]:
    """The gradients that `recipe.computed` names, of two dimensions at most; bias gradients in float32.

    Args:
        recipe: with a gradient.
        held: by slot, of two dimensions at most; emptied of what is done with, so that it can be freed.
        cotangents: of the outputs by name, of two dimensions.
    """
    network, dtype = recipe.network, getattr(torch, recipe.dtype)
    ways, second = network.first.accumulators, network.second is not None
    if recipe.recomputing is not None:
        held.update(_made_again(recipe, held))
    g = cotangents["d"].to(dtype) if second else cotangents["d"]
    found: dict[str, Tensor] = {}
    d, total = g, None
    if recipe.gradient is not None and (second or not _needs_no_pass(recipe)):
        d = _through_first(recipe, held, g, cotangents, found)
    if second and recipe.needs.weights[-1]:
        found[f"w{ways}"], total = weight_gradient(g, found.pop(HIDDEN) if HIDDEN in found else held.pop(HIDDEN), bool(recipe.sums))
    for slot in [slot for slot in held if slot not in ("x", *(f"w{i}" for i in range(ways)))]:
        del held[slot]
    # One whose formula varies less than D (an accumulator that is not used) is broadcast.
    steps = [d.to(dtype), *(found.pop(f"d_acc{i}").to(dtype).expand(d.shape) for i in range(1, ways))]
    for index, (step, want) in enumerate(zip(steps, recipe.needs.weights, strict=False)):
        if want:
            found[f"w{index}"], part = weight_gradient(step, held["x"], bool(recipe.sums) and not second and index == 0)
            total = total if part is None else part
    if recipe.needs.x:
        found["x"] = _x_gradient(steps, [held[f"w{i}"] for i in range(ways)])
    if recipe.sums:
        total = g.sum(0, keepdim=True, dtype=accumulator(g)) if total is None else total
        found.update((slot, total.view(1, -1) if slot == recipe.sums[0] else total.clone().view(1, -1)) for slot in recipe.sums)
    return [found[slot] for slot in recipe.computed]


def accumulator(tensor: Tensor) -> torch.dtype:
    """The type in which a tensor's sums are accumulated."""
    return tensor.dtype if tensor.dtype in _WIDE else torch.float32


def _needs_no_pass(recipe: Recipe) -> bool:
    """Whether D's cotangent is the accumulator's and every input's gradient is it or its sum: nothing comes before the products."""
    if not recipe.is_plain:
        return False
    inputs = {f"in{i}" for i, want in enumerate(recipe.needs.inputs) if want}
    return inputs <= {*recipe.passed, *recipe.sums}


def _through_first(recipe: Recipe, held: Tensors, g: Tensor, cotangents: Tensors, found: dict[str, Tensor]) -> Tensor:
    """The cotangent of the first accumulator; the other results go to `found`.

    In an MLP it is the epilogue of the product that makes the cotangent of the hidden result, else one pass over D's: a product of
    K = 0 with C = the cotangent.
    """
    network, backward = recipe.network, recipe.backward
    assert backward is not None
    assert recipe.gradient is not None
    inputs = {name: held[slot] for name, slot in reads(recipe).items()}
    inputs |= {name: cotangents[output] for name, output in recipe.gradient.cotangents}
    if network.second is not None:
        d, extras = product(g, [held[f"w{network.first.accumulators}"]], backward, inputs)
    else:
        d, extras = product(g[:, :0], [g[:0]], backward, inputs, c=g)
    slots = {f"d_{name}": f"in{i}" for i, name in enumerate(network.first.input_names)}
    found.update({slots.get(name, name): tensor for name, tensor in extras.items()})
    return d


def _made_again(recipe: Recipe, held: Tensors) -> dict[str, Tensor]:
    """What the forward did not save."""
    network, again = recipe.network, recipe.recomputing
    assert again is not None
    ways = network.first.accumulators
    slots = {name: f"in{i}" for i, name in enumerate(network.first.input_names)}
    inputs = {name: held[slots[name]] for name in again.input_names}
    result = network.result if network.second is None else ""
    d, extras = product(held["x"], [held[f"w{i}"] for i in range(ways)], _with_d(again), inputs, result=result, turned=True)
    name = again.d.name
    return {HIDDEN if name == "d" else f"made:{name}": d, **{f"made:{key}": tensor for key, tensor in extras.items()}}


def _with_d(expression: Expression) -> Expression:
    """With its first output called D."""
    return replace(expression, outputs=(replace(expression.d, name="d"), *expression.extras))


def weight_gradient(g: Tensor, x: Tensor, with_sum: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient (n, k) of a weight from its layer's cotangent (m, n) and input (m, k); and the cotangent's sum over m, if asked for."""
    d, extras = product(g.t(), [x], _WITH_SUM if with_sum else _PRODUCT, {})
    return d, extras.get("sum")


def _x_gradient(steps: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """The sum of each way's cotangent (m, n) times its weight (n, k): each product adds to what the ones before it made."""
    total: Tensor | None = None
    for step, weight in zip(steps, weights, strict=True):
        total, _ = product(step, [weight], _PRODUCT, {}, c=total)
    assert total is not None
    return total
