"""Gradients only for what asks: every subset of the operands, and what is saved for it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

NAMES = ("linear relu residual", "linear residual", "gated_linear gelu residual", "mlp gelu", "mlp relu")


@pytest.mark.parametrize("name", NAMES)
def test_subsets(name, named):
    case = named[name]
    tensors = case.tensors()
    full = torch.autograd.grad(case.ours(*tensors).square().sum(), tensors)
    for flags in product((False, True), repeat=len(tensors)):
        some = [t.detach().clone().requires_grad_(flag) for t, flag in zip(tensors, flags, strict=True)]
        y = case.ours(*some)
        assert y.requires_grad is any(flags)
        if any(flags):
            y.square().sum().backward()
        for got, want, flag in zip(some, full, flags, strict=True):
            if flag:
                torch.testing.assert_close(got.grad, want, rtol=1e-12, atol=1e-12)
            else:
                assert got.grad is None


def saved(run):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return kept


def test_nothing_is_saved_without_a_gradient(each):
    assert saved(lambda: each.ours(*each.tensors(requires_grad=False))) == []
    with torch.no_grad():
        assert saved(lambda: each.ours(*each.tensors())) == []


def test_a_frozen_weight_s_layer_does_not_keep_x(named):
    """ReLU of a frozen layer keeps its weight and the mask alone; a plain layer its weight alone."""
    for name, extra in (("linear relu", torch.uint8), ("linear", None)):
        case = named[name]
        x, w, b = case.tensors()
        kept = saved(lambda case=case, x=x, w=w, b=b: case.ours(x, w.detach(), b.detach()))
        assert not any(t.data_ptr() == x.data_ptr() for t in kept)
        assert [t.dtype for t in kept if t.data_ptr() != w.data_ptr()] == ([extra] if extra else [])


def test_a_plain_layer_trained_alone_keeps_x_alone(named):
    x, w, b = named["linear"].tensors()
    (kept,) = saved(lambda: named["linear"].ours(x.detach(), w, b))
    assert kept.data_ptr() == x.data_ptr()
