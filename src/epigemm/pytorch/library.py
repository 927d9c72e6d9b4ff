"""The registered ops: what `torch.compile`, FakeTensor, the flop counter and every other dispatch mode see of a network.

    epigemm::layer(x, weights, inputs, network, needs) -> [outputs..., what is held for the backward...]
    epigemm::layer_backward(cotangents, held, recipe) -> [gradients...]

`network` and `recipe` are texts, so that a graph that holds them means the same in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from epigemm import layouts
from epigemm.expression.check import extent as extent_of
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, Expression, Node, Output, transform
from epigemm.expression.rules import REDUCTION, kind
from epigemm.pytorch import fused
from epigemm.pytorch.autograd import gradients, hold, rows_of_shape
from epigemm.pytorch.fused import accumulator
from epigemm.pytorch.network import decode, place
from epigemm.pytorch.recipe import HIDDEN, Recipe, flowing, of_text, placed, recipe, text

NAMESPACE = "epigemm"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("layer(Tensor x, Tensor[] weights, Tensor[] inputs, str network, bool[] needs) -> Tensor[]")
_library.define("layer_backward(Tensor[] cotangents, Tensor[] held, str recipe) -> Tensor[]")


def _recipe(x: Tensor, inputs: Sequence[Tensor], network: str, needs: Sequence[bool]) -> Recipe:
    places = tuple(place(tuple(t.shape)) for t in inputs)
    return recipe(decode(network), places, tuple(needs), x.dtype)


# ---------------------------------------------------------------- on data


def _layer(x: Tensor, weights: list[Tensor], inputs: list[Tensor], network: str, needs: list[bool]) -> list[Tensor]:
    visible, fresh = fused.forward(_recipe(x, inputs, network, needs), x, weights, inputs)
    return [*visible, *fresh]


def _layer_backward(cotangents: list[Tensor], held: list[Tensor], written: str) -> list[Tensor]:
    made = of_text(written)
    found = fused.backward(made, dict(zip(made.held, held, strict=True)), dict(zip(_flowing(made), cotangents, strict=True)))
    # Two gradients may be one tensor (a bias used twice); a functional op returns each of its own.
    return [t.clone() if any(t is other for other in found[:i]) else t for i, t in enumerate(found)]


def _flowing(made: Recipe) -> list[str]:
    return ["d", *flowing(made.network.last)]


# ---------------------------------------------------------------- on shapes


Form = tuple[tuple[Any, Any], torch.dtype]


def _output_form(
    output: Output, made: Recipe, m: Any, n: Any, stored: torch.dtype, wide: torch.dtype
) -> tuple[tuple[Any, Any], torch.dtype]:
    """Shape and dtype of an output of the first layer, as `check` would find them."""
    node = output.node
    cast = str(node.param("dtype")) if node.op == "cast" else output.dtype
    dtype = getattr(torch, cast) if cast else stored
    if kind(node) == BITS:
        return (m, layouts.mask_bytes(n)), torch.uint8
    if output.name == "d":
        return (m, n), dtype
    if kind(node) == REDUCTION or node.op == "operand_sum":
        dtype = getattr(torch, cast) if cast else wide
    extent = placed(node, made.network, made.extents)
    return ((m if extent in (COLUMN, MATRIX) else 1), (n if extent in (ROW, MATRIX) else 1)), dtype


def _forms(made: Recipe, x: Any, weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(shape, dtype) of the visible outputs, two-dimensional, and of the fresh slots."""
    network, m, wide = made.network, rows_of_shape(x.shape), accumulator(x)
    stored = getattr(torch, network.result) if network.result else x.dtype
    n = weights[0].shape[0]
    first = {o.name: _output_form(o, made, m, n, stored if network.second is None else x.dtype, wide) for o in made.forward.outputs}
    if network.second is None:
        visible = [first[o.name] for o in network.first.outputs]
    else:
        visible = [((m, weights[-1].shape[0]), stored)]
    return visible, [first["d"] if slot == HIDDEN else first[slot.removeprefix("made:")] for slot in made.fresh]


def _layer_fake(x: Tensor, weights: list[Tensor], inputs: list[Tensor], network: str, needs: list[bool]) -> list[Tensor]:
    made = _recipe(x, inputs, network, needs)
    visible, fresh = _forms(made, x, weights)
    lead = x.shape[:-1]
    shaped = [
        x.new_empty((*lead, shape[1]) if tall else shape, dtype=dtype) for (shape, dtype), tall in zip(visible, made.tall, strict=True)
    ]
    return [*shaped, *(x.new_empty(shape, dtype=dtype) for shape, dtype in fresh)]


def _backward_fake(cotangents: list[Tensor], held: list[Tensor], written: str) -> list[Tensor]:
    made = of_text(written)
    return [cotangents[0].new_empty(shape, dtype=dtype) for shape, dtype in _gradient_forms(made, cotangents, held)]


def _gradient_forms(made: Recipe, cotangents: Sequence[Any], held: Sequence[Any]) -> list[Any]:
    network, by_slot, g = made.network, dict(zip(made.held, held, strict=True)), cotangents[0]
    ways, dtype = network.first.accumulators, getattr(torch, made.dtype)
    m, width = g.shape
    n = width if network.second is None else (by_slot[HIDDEN].shape[1] if HIDDEN in by_slot else by_slot[f"w{ways}"].shape[1])
    forms: list[Any] = []
    for slot in made.computed:
        if slot == "x":
            forms.append(((m, by_slot["w0"].shape[1]), dtype))
        elif slot == f"w{ways}":
            forms.append(((width, n), dtype))
        elif slot.startswith("w"):
            forms.append(((n, by_slot["x"].shape[-1]), dtype))
        elif slot in made.sums:
            forms.append(((1, width), accumulator(g)))
        else:
            forms.append(_input_gradient_form(made, int(slot[2:]), m, n, dtype if network.second is not None else g.dtype))
    return forms


def _input_gradient_form(made: Recipe, index: int, m: Any, n: Any, stored: torch.dtype) -> Any:
    assert made.backward is not None
    name = f"d_{made.network.first.input_names[index]}"
    output = next(o for o in made.backward.outputs if o.name == name)
    wide = torch.float64 if stored is torch.float64 else torch.float32
    extent = _backward_extent(output.node, made)
    dtype = wide if kind(output.node) == REDUCTION else stored
    return ((m if extent in (COLUMN, MATRIX) else 1), (n if extent in (ROW, MATRIX) else 1)), dtype


def _backward_extent(node: Node, made: Recipe) -> str:
    assert made.gradient is not None
    saved = {s.name: s.extent for s in made.gradient.saved}
    given = dict(zip(made.network.first.input_names, made.extents, strict=False))
    first = made.network.first
    outputs = {name: placed(_output(first, output).node, made.network, made.extents) for name, output in made.gradient.cotangents}
    places = {**given, **saved, **outputs}

    def fill(x: Node) -> Node | None:
        return Node("input", name=x.param("name"), extent=places[str(x.param("name"))]) if x.op == "input" else None

    return extent_of(transform(node, fill))


def _output(expression: Expression, name: str) -> Output:
    return next(o for o in expression.outputs if o.name == name)


# ---------------------------------------------------------------- gradient


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, given, network, needs = inputs
    made = _recipe(x, given, network, needs)
    operands = (x, *weights, *given)
    forms = [(t.shape, t.dtype) for t in operands]
    hold(ctx, made, forms, (*operands, *output), output[: len(made.network.last.outputs)])


def _differentiated(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    made: Recipe = ctx.recipe
    found = gradients(ctx, list(grads)[: len(made.network.last.outputs)], through_op)
    weights = 1 + made.network.weights
    return found[0], found[1:weights], found[weights:], None, None


def through_op(made: Recipe, held: dict[str, Tensor], cotangents: dict[str, Tensor]) -> list[Tensor]:
    """`fused.backward`, as a registered op."""
    return torch.ops.epigemm.layer_backward([cotangents[name] for name in _flowing(made)], [held[slot] for slot in made.held], text(made))


def _not_again(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("epigemm::layer_backward is not differentiated: a backward that is to be runs in PyTorch's own operations")


# ---------------------------------------------------------------- flops


def _flops(x: Any, weights: Any, inputs: Any, network: str, needs: Any, *, out_shape: Any = None, **_: Any) -> int:
    """2 m n k of each product."""
    return 2 * rows_of_shape(x) * sum(n * k for n, k in weights)


def _backward_flops(cotangents: Any, held: Any, written: str, *, out_shape: Any = None, **_: Any) -> int:
    made = of_text(written)
    slots = dict(zip(made.held, held, strict=True))
    m, ways = cotangents[0][0], made.network.first.accumulators
    sizes = dict(zip(made.computed, out_shape, strict=True)) if out_shape is not None else {}
    total = sum(n * k for slot, (n, k) in sizes.items() if slot.startswith("w"))
    total += sum(slots[f"w{i}"][0] * slots[f"w{i}"][1] for i in range(ways)) * (made.needs.x + (made.recomputing is not None))
    if made.network.second is not None and made.gradient is not None:
        total += slots[f"w{ways}"][0] * slots[f"w{ways}"][1]
    return 2 * m * total


def _register() -> None:
    for name, run, fake in (("layer", _layer, _layer_fake), ("layer_backward", _layer_backward, _backward_fake)):
        _library.impl(name, run, "CPU")
        _library.impl(name, run, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::layer", _differentiated, setup_context=_setup, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::layer_backward", _not_again, lib=_library)
    register_flop_formula(torch.ops.epigemm.layer)(_flops)
    register_flop_formula(torch.ops.epigemm.layer_backward)(_backward_flops)


_register()
LAYER = torch.ops.epigemm.layer.default
