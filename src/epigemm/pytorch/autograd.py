"""What a forward holds for its backward, and what the backward makes of it: shared by the direct path and by the registered op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epigemm.pytorch import composite
from epigemm.pytorch.fused import flat
from epigemm.pytorch.recipe import Recipe, flowing

_transforms = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by grad(is_grads_batched=True)

Backward = Callable[[Recipe, dict[str, Tensor], dict[str, Tensor]], list[Tensor]]


def hold(ctx: Any, recipe: Recipe, forms: Sequence[Any], everything: Sequence[Tensor], visible: Sequence[Tensor]) -> None:
    """Keeps on `ctx` what `recipe.held` names, through save_for_backward alone.

    Args:
        ctx: the Function's.
        recipe: with a gradient.
        forms: (shape, dtype) of each operand: its gradient's.
        everything: x, the weights, the inputs, the outputs and what the forward made for the backward.
        visible: the outputs.
    """
    ctx.save_for_backward(*[everything[i] for i in recipe.kept])
    ctx.recipe, ctx.forms = recipe, forms
    ctx.outputs = None if len(visible) == 1 else [(t.shape, t.dtype, t.device) for t in visible]
    ctx.set_materialize_grads(False)
    if ctx.outputs is not None:
        last = recipe.network.last
        stopped = {o.name for o in last.extras} - set(flowing(last))
        ctx.mark_non_differentiable(*(t for o, t in zip(last.outputs, visible, strict=True) if o.name in stopped))


def gradients(ctx: Any, grads: Sequence[Tensor | None], run: Backward) -> list[Tensor | None]:
    """The gradient of x, of each weight and of each input; None for those that want none.

    Args:
        ctx: as `hold` left it.
        grads: the cotangents of the visible outputs.
        run: computes what `recipe.computed` names; where the backward is itself differentiated or mapped, the composite path does.
    """
    recipe: Recipe = ctx.recipe
    if all(g is None for g in grads):
        return [None] * len(ctx.forms)
    rows = rows_of_shape(ctx.forms[0][0])
    held = {slot: _flat(slot, t, recipe, rows) for slot, t in zip(recipe.held, ctx.saved_tensors, strict=True)}
    cotangents = _cotangents(ctx, grads, rows)
    if torch.is_grad_enabled() or _transforms() is not None or any(g is not None and _is_batched(g) for g in grads):
        run = composite.backward
    else:
        ctx.maybe_clear_saved_tensors()  # what `run` is done with is freed then, not when all is over; nothing under retain_graph
    found: dict[str, Tensor] = dict(zip(recipe.computed, run(recipe, held, cotangents), strict=True))
    # Of each its own: a leaf takes its gradient over without a copy.
    found.update((slot, cotangents["d"] if slot == recipe.passed[0] else cotangents["d"].clone()) for slot in recipe.passed)
    slots = ("x", *(f"w{i}" for i in range(recipe.network.weights)), *(f"in{i}" for i in range(len(recipe.extents))))
    return [_formed(found.get(slot), *form) for slot, form in zip(slots, ctx.forms, strict=True)]


def rows_of_shape(shape: Sequence[int]) -> int:
    """The number of rows of an x of this shape as a matrix."""
    count = 1
    for extent in shape[:-1]:
        count *= extent
    return count


def _flat(slot: str, tensor: Tensor, recipe: Recipe, rows: int) -> Tensor:
    if slot.startswith("in"):
        return flat(tensor, rows, recipe.extents[int(slot[2:])])
    return tensor if slot.startswith("w") or tensor.ndim == 2 else flat(tensor, rows)


def _cotangents(ctx: Any, grads: Sequence[Tensor | None], rows: int) -> dict[str, Tensor]:
    """The cotangents of D and of the outputs that one flows through, of two dimensions; zeros where none arrived."""
    if ctx.outputs is None:
        (g,) = grads
        assert g is not None
        return {"d": g if g.ndim == 2 else flat(g, rows)}
    last = ctx.recipe.network.last
    wanted = {"d", *flowing(last)}
    found = {}
    for output, grad, (shape, dtype, device) in zip(last.outputs, grads, ctx.outputs, strict=True):
        if output.name in wanted:
            full = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            found[output.name] = full if full.ndim == 2 else flat(full, rows)
    columns = found["d"].shape[1]
    for name, (over_rows, over_columns) in ctx.recipe.once:
        if name in found:
            # The backward sums over all of D what stands there once.
            found[name] = found[name] / max((rows if over_rows else 1) * (columns if over_columns else 1), 1)
    return found


def _formed(gradient: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """A gradient in its tensor's shape and dtype; a formula that varies less than its tensor is broadcast."""
    if gradient is None:
        return None
    gradient = gradient.to(dtype)
    matrix = (rows_of_shape(shape), shape[-1] if shape else 1)
    # Not torch.Size.numel: it would turn a dynamic extent into a number.
    if gradient.ndim == 2 and gradient.shape[0] * gradient.shape[1] != matrix[0] * matrix[1]:
        gradient = gradient.expand(matrix)
    return gradient.reshape(shape)
