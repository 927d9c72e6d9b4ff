"""Which of three ways a call takes: straight to the product, through the registered op, or in PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from epigemm.pytorch import composite, function, fused
from epigemm.pytorch.library import LAYER
from epigemm.pytorch.network import Network, encode
from epigemm.pytorch.recipe import Form

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
# What stands for a plain tensor while a graph is made.
_TRACED = frozenset((*_PLAIN, FakeTensor, FunctionalTensor))

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def run(form: Form, x: Tensor, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...], plain: bool) -> Sequence[Tensor]:
    """The network's outputs, D first.

    The first of these that applies (torch.compile and torch.export call `traced` themselves):
      1. a functorch transform or forward-mode differentiation is active, an input is of a tensor subclass, x is on a device that no engine
         knows, or a complex gradient is wanted: PyTorch's operations.
      2. a dispatch or torch-function mode is active, or x is a meta tensor: the registered op.
      3. fused products, called directly; through an autograd.Function where a gradient is wanted.

    Args:
        form: of the call.
        x, weights, inputs: its operands.
        plain: whether `is_plain` is true of all of them.
    """
    if not plain or _dispatch_modes() or _function_modes() or _transforms() is not None or forward_ad._current_level >= 0:
        return _indirect(form.network, x, weights, inputs)
    if not (x.is_cuda or x.is_cpu):
        return _indirect(form.network, x, weights, inputs)
    if torch.is_grad_enabled():
        tensors = (x, *weights, *inputs)
        flags = tuple([t.requires_grad for t in tensors])
        if True in flags and x.dtype.is_complex:
            return composite.forward(form.network, x, weights, inputs)
        if True in flags:
            found = function.apply(form.recipe(flags), form.operands, *tensors)
            return found if isinstance(found, tuple) else (found,)
    return fused.forward(form.without, x, weights, inputs)[0]


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all are exactly Tensor or Parameter: no subclass has a say in what is done with them."""
    for tensor in tensors:  # noqa: SIM110 (a generator costs as much again)
        if tensor is not None and type(tensor) not in _PLAIN:
            return False
    return True


def _indirect(network: Network, x: Tensor, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Sequence[Tensor]:
    foreign = any(type(t) not in _TRACED for t in (x, *weights, *inputs))
    if foreign or x.device.type not in ("cpu", "cuda", "meta") or _transforms() is not None or forward_ad._current_level >= 0:
        return composite.forward(network, x, weights, inputs)
    return traced(encode(network), x, weights, inputs)[: len(network.last.outputs)]


def traced(network: str, x: Tensor, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs through the registered op, D first, and behind them what it made for the backward."""
    enabled = torch.is_grad_enabled()
    needs = [enabled and t.requires_grad for t in (x, *weights, *inputs)]
    return LAYER(x, list(weights), list(inputs), network, needs)


def autocasted(tensors: tuple[Tensor | None, ...], device: str) -> tuple[Any, ...]:
    """The operands in autocast's dtype where it is on, as PyTorch's linear gets them: floating, but not float64."""
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([t if t is None or not t.is_floating_point() or t.dtype is torch.float64 else t.to(dtype) for t in tensors])
