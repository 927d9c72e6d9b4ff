"""Results and gradients agree with eager PyTorch, computed in float64 on the same numbers, within bounds that follow from the roundings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epigemm import pytorch as ep


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(case, dtype, agrees_with_eager):
    agrees_with_eager(case, dtype)


def test_a_wrong_gradient_is_found(named, agrees_with_eager):
    case = named["linear gelu"]

    def wrong(*tensors):
        return case.ours(*tensors) + 1e-9 * tensors[2] ** 2

    with pytest.raises(pytest.fail.Exception, match=r"linear gelu torch\.float64, tensor 0"):
        agrees_with_eager(case, run=wrong)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("function", ["linear", "mlp"])
def test_corners_of_relu(activation, function, activations):
    """At 0, -0, NaN and the infinities both the value and the derivative are PyTorch's."""
    corners = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 2.0])
    x = corners[:, None].clone().requires_grad_()
    one = torch.ones(1, 1)
    same = x.detach().clone().requires_grad_()
    if function == "linear":
        y, z = ep.linear(x, one, activation=activation), activations[activation](F.linear(same, one))
    else:
        y, z = ep.mlp(x, one, one, activation=activation), F.linear(activations[activation](F.linear(same, one)), one)
    torch.testing.assert_close(y, z, rtol=0, atol=0, equal_nan=True)
    for cotangent in (torch.full_like(y, 3.0), torch.full_like(y, float("inf"))):
        ours, eager = (torch.autograd.grad(r, t, cotangent, retain_graph=True)[0] for r, t in ((y, x), (z, same)))
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


def test_gelu_is_the_erf_form():
    x = torch.linspace(-3, 3, 25, dtype=torch.float64)[:, None]
    one = torch.ones(1, 1, dtype=torch.float64)
    torch.testing.assert_close(ep.linear(x, one, activation="gelu"), F.gelu(x), rtol=1e-14, atol=1e-15)
    assert not torch.allclose(ep.linear(x, one, activation="gelu"), F.gelu(x, approximate="tanh"), rtol=1e-6)
    torch.testing.assert_close(ep.linear(x, one, activation="gelu_tanh"), F.gelu(x, approximate="tanh"), rtol=1e-13, atol=1e-15)


def test_bias_gradients_are_summed_in_float32():
    """4096 halves and one 1/1024: a float16 sum would lose the small ones long before its end."""
    x = torch.zeros(4096, 3, dtype=torch.float16)
    for activation in (None, "relu"):
        weight, bias = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True), torch.ones(2, dtype=torch.float16, requires_grad=True)
        y = ep.linear(x, weight, bias, activation=activation)
        g = torch.full_like(y, 0.5)
        g[1::2] = 2.0**-10
        y.backward(g)
        assert bias.grad.tolist() == [1026.0, 1026.0]


def test_a_wider_residual_widens_the_result():
    x, w = torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(4, 2, requires_grad=True)
    y = ep.linear(x, w, activation="gelu", residual=residual)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, F.gelu(x.float() @ w.float().T) + residual, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert (w.grad.dtype, residual.grad.dtype) == (torch.bfloat16, torch.float32)
    assert bool((residual.grad == 1).all())
