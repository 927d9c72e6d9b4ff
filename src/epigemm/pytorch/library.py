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

from epigemm.pytorch import fused, shapes
from epigemm.pytorch.autograd import gradients, hold, rows_of_shape
from epigemm.pytorch.network import decode, place
from epigemm.pytorch.recipe import Recipe, flowing, of_text, recipe, text

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
    return fused.backward(made, dict(zip(made.held, held, strict=True)), dict(zip(_flowing(made), cotangents, strict=True)))


def _flowing(made: Recipe) -> list[str]:
    return ["d", *flowing(made.network.last)]


# ---------------------------------------------------------------- on shapes


def _layer_fake(x: Tensor, weights: list[Tensor], inputs: list[Tensor], network: str, needs: list[bool]) -> list[Tensor]:
    made = _recipe(x, inputs, network, needs)
    visible, fresh = shapes.of_forward(made, x, weights)
    lead = x.shape[:-1]
    tall = [((*lead, shape[1]) if is_tall else shape, dtype) for (shape, dtype), is_tall in zip(visible, made.tall, strict=True)]
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in (*tall, *fresh)]


def _backward_fake(cotangents: list[Tensor], held: list[Tensor], written: str) -> list[Tensor]:
    made, g = of_text(written), cotangents[0]
    forms = shapes.of_backward(made, g, dict(zip(made.held, held, strict=True)))
    return [g.new_empty(shape, dtype=dtype) for shape, dtype in forms]


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
