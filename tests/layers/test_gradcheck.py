"""gradcheck and gradgradcheck in float64 of every function, whichever way what is saved is kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import epigemm as eg
from epigemm import pytorch as ep


@pytest.mark.parametrize("recompute", [False, True])
def test_functions(case, recompute):
    tensors = case.tensors(seed=3)
    function = partial(case.ours, recompute=recompute)
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def epilogue(acc, bias, column, matrix, scalar):
    y = eg.silu(acc + bias) * column + eg.tanh(matrix * scalar)
    return eg.outputs(y * scalar, sumsq=eg.sum(y * y, axis="n"), total=eg.sum(eg.exp(bias) * acc), pre=acc * column)


def test_a_user_s_epilogue_with_further_outputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (5, 3), (5,), (4, 1), (4, 5), ())
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]

    def function(x, w, bias, column, matrix, scalar):
        d, extras = ep.apply(epilogue, x, w, bias=bias, column=column, matrix=matrix, scalar=scalar)
        return (d, *extras.values())

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_two_weights():
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (5, 3), (5, 3), (5,))]

    def function(x, w0, w1, bias):
        return ep.apply(lambda a, b, bias: eg.gelu(a) * b + eg.sigmoid(a + bias), x, (w0, w1), bias=bias)

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_a_third_derivative():
    x = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    y, z = ep.linear(x, one, activation="tanh"), torch.tanh(x)
    for _ in range(3):
        (y,), (z,) = torch.autograd.grad(y, x, create_graph=True), torch.autograd.grad(z, x, create_graph=True)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=0)
