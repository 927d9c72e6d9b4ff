"""Any epilogue of the user's: inputs of every extent, further outputs, masks, random numbers, constants; its backward is derived."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import epigemm as eg
from epigemm import pytorch as ep

X, W = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)


@eg.epilogue
def scaled(acc, column, *, factor=2.0):
    return acc * column * factor


def test_constants_and_columns():
    column = torch.randn(2, 3, 1, dtype=torch.float64, requires_grad=True)
    y = ep.apply(scaled(factor=3.0), X, W, column=column)
    torch.testing.assert_close(y, F.linear(X, W) * column * 3)
    y.sum().backward()
    torch.testing.assert_close(column.grad, (F.linear(X, W) * 3).sum(-1, keepdim=True))


def test_numbers_as_inputs():
    torch.testing.assert_close(ep.apply(lambda acc, scale: acc * scale, X, W, scale=0.5), F.linear(X, W) * 0.5)


def test_further_outputs_have_x_s_leading_dimensions():
    def epilogue(acc, bias):
        y = acc + bias
        sums = {"n": eg.sum(y, axis="n"), "m": eg.sum(y, axis="m"), "all": eg.sum(y)}
        return eg.outputs(y, **sums, most=eg.amax(y, axis="n"), bits=eg.bitmask(y > 0), half=y / 2)

    bias = torch.randn(5, dtype=torch.float64)
    d, found = ep.apply(epilogue, X, W, bias=bias)
    y = F.linear(X, W, bias)
    sums = {"n": y.sum(-1, keepdim=True), "m": y.sum((0, 1))[None], "all": y.sum().reshape(1, 1)}
    expected = {**sums, "most": y.amax(-1, keepdim=True), "half": y / 2}
    torch.testing.assert_close(d, y)
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want)
    assert found["bits"].shape == (2, 3, 16)
    assert (found["bits"][..., 0] == sum((y[..., j] > 0).long() << j for j in range(5))).all()


def test_gradients_flow_through_sums_alone():
    w = W.clone().requires_grad_()
    _, found = ep.apply(lambda acc: eg.outputs(eg.relu(acc), squares=eg.sum(acc * acc, axis="n")), X, w)
    found["squares"].sum().backward()
    same = W.clone().requires_grad_()
    F.linear(X, same).square().sum().backward()
    torch.testing.assert_close(w.grad, same.grad)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: torch.device("cpu")], ids=["direct", "op"])
def test_masks_and_maxima_have_no_gradient(mode):
    w = W.clone().requires_grad_()
    with mode():
        d, found = ep.apply(lambda acc: eg.outputs(acc, bits=eg.bitmask(acc > 0), most=eg.amax(acc)), X, w)
    assert (d.requires_grad, found["bits"].requires_grad, found["most"].requires_grad) == (True, False, False)


def test_packed_bits_as_an_input():
    _, found = ep.apply(lambda acc: eg.outputs(acc, bits=eg.bitmask(acc > 0)), X, W)
    w = W.clone().requires_grad_()
    y = ep.apply(lambda acc, bits: eg.where(eg.unbitmask(bits), acc, 0.1 * acc), X, w, bits=found["bits"])
    torch.testing.assert_close(y, F.leaky_relu(F.linear(X, W), 0.1))
    y.sum().backward()
    same = W.clone().requires_grad_()
    F.leaky_relu(F.linear(X, same), 0.1).sum().backward()
    torch.testing.assert_close(w.grad, same.grad)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_draws_the_same_in_the_backward(recompute):
    x, w = torch.randn(64, 8, dtype=torch.float64), torch.randn(32, 8, dtype=torch.float64, requires_grad=True)

    def dropped(acc, seed):
        return eg.dropout(eg.gelu(acc), 0.25, seed)

    y = ep.apply(dropped, x, w, seed=7, recompute=recompute)
    kept = y != 0
    assert 0.65 < kept.double().mean() < 0.85
    full = F.gelu(F.linear(x, w)) / 0.75
    torch.testing.assert_close(y, torch.where(kept, full, 0.0))
    grads = [torch.autograd.grad(r.sum(), w)[0] for r in (y, torch.where(kept, full, 0.0))]
    torch.testing.assert_close(*grads)
    assert not torch.equal(kept, ep.apply(dropped, x, w, seed=8) != 0)


def test_a_cast_decides_d_s_dtype():
    y = ep.apply(lambda acc: eg.cast(acc, "bfloat16"), X.float(), W.float().requires_grad_())
    assert y.dtype is torch.bfloat16
    assert y.requires_grad


def test_a_sum_of_an_operand_passes_no_gradient():
    w = W.clone().requires_grad_()
    d, found = ep.apply(lambda acc: eg.outputs(acc, rows=eg.operand_sum("a")), X, w)
    torch.testing.assert_close(found["rows"], X.sum(-1, keepdim=True))
    assert not found["rows"].requires_grad
    d.sum().backward()
    torch.testing.assert_close(w.grad, X.sum((0, 1)).expand(5, 4))


def test_wrong_names_are_refused():
    with pytest.raises(eg.EpilogInputError, match="takes the inputs bias, and is given bais"):
        ep.apply(lambda acc, bias: acc + bias, X, W, bais=W[:, 0])


def test_what_has_no_derivative_is_refused_when_a_gradient_is_wanted():
    function = lambda acc, seed: eg.outputs(acc, most=eg.amax(acc))
    with pytest.raises(eg.EpilogInputError):
        ep.apply(function, X, W)


def test_an_input_that_is_read_twice():
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    y = ep.apply(lambda acc, bias: (acc + bias) * bias, X, W, bias=bias)
    z = F.linear(X, W, bias) * bias
    torch.testing.assert_close(torch.autograd.grad(y.sum(), bias), torch.autograd.grad(z.sum(), bias))


def test_a_gradient_that_varies_less_than_its_input():
    matrix = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    _, found = ep.apply(lambda acc, matrix: eg.outputs(acc, total=eg.sum(matrix)), X, W, matrix=matrix)
    (found["total"] * 3).sum().backward()
    assert bool((matrix.grad == 3).all())


def test_gradients_share_no_memory():
    """Two biases and two residuals whose gradients are the same numbers; a change to one is no change to another."""
    names = ("b", "c", "r", "s")
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5,), (5,), (2, 3, 5), (2, 3, 5))]
    ep.apply(
        lambda acc, b, c, r, s: acc + b + c + r + s, X, W.clone().requires_grad_(), **dict(zip(names, tensors, strict=True))
    ).sum().backward()
    assert len({t.grad.untyped_storage().data_ptr() for t in tensors}) == 4
