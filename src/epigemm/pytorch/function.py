"""The direct path with a gradient: an autograd.Function whose forward and backward call the products themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm.pytorch import fused
from epigemm.pytorch.autograd import gradients, hold
from epigemm.pytorch.library import through_op
from epigemm.pytorch.recipe import Recipe

_dispatch_modes = torch._C._len_torch_dispatch_stack


class Fused(torch.autograd.Function):
    """The direct path with a gradient: (recipe, forms of the operands, x, *weights, *inputs) -> D, or the outputs as a tuple."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, forms: Sequence[Any], x: Tensor, *rest: Tensor) -> Any:
        weights = recipe.network.weights
        visible, fresh = fused.forward(recipe, x, rest[:weights], rest[weights:])
        hold(ctx, recipe, forms, (x, *rest, *visible, *fresh), visible)
        return visible[0] if len(visible) == 1 else tuple(visible)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *gradients(ctx, grads, through_op if _dispatch_modes() else fused.backward))


# Function.apply spends 3 us on functorch's wrappers, of which there are none on the direct path.
apply: Callable[..., Any] = super(torch.autograd.Function, Fused).apply
