"""N-D and 1-D x, empty batches, single rows and columns, strides of every kind, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import epigemm as eg
from epigemm import pytorch as ep


def operands(lead=(3,), k=4, n=5):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((*lead, k), (n, k), (n,), (*lead, n))]


def check(ours, eager, tensors, g=None):
    y, z = ours(*tensors), eager(*tensors)
    assert y.shape == z.shape
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(z) if g is None else g
    grads, expected = (torch.autograd.grad(r, tensors, g) for r in (y, z))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def fused(x, w, b, r):
    return ep.linear(x, w, b, activation="gelu", residual=r)


def eager(x, w, b, r):
    return F.gelu(F.linear(x, w, b)) + r


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (1, 1), (2, 1, 3), (0,), (2, 0), (1, 2)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(4, 5), (1, 5), (4, 1), (1, 1)])
def test_extents(lead, k, n):
    check(fused, eager, operands(lead, k, n))


@pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
def test_empty_batches_of_an_mlp(lead):
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((*lead, 4), (6, 4), (5, 6), (6,), (5,))]
    check(lambda *t: ep.mlp(*t, activation="relu"), lambda x, w, v, b, c: F.linear(F.relu(F.linear(x, w, b)), v, c), tensors)


def test_no_inner_extent():
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 0), (5, 0), (5,), (3, 5))]
    check(fused, eager, tensors)


def test_operands_of_any_strides():
    base = [torch.randn(s, dtype=torch.float64) for s in ((4, 3, 2), (4, 5), (10,), (2, 5, 3))]
    x, w, b, r = base[0].permute(2, 1, 0), base[1].t(), base[2][::2], base[3].transpose(1, 2)
    assert not any(t.is_contiguous() for t in (x, w, b, r))
    check(fused, eager, [t.requires_grad_() for t in (x, w, b, r)])


def test_an_expanded_x():
    tensors = operands((2, 3))
    tensors[0] = torch.randn(1, 3, 4, dtype=torch.float64).expand(2, 3, 4).requires_grad_()
    check(fused, eager, tensors)


@pytest.mark.parametrize("name", ["expanded", "transposed", "sliced"])
def test_cotangents_of_any_strides(name, each):
    tensors = each.tensors()
    shape = each.eager(*tensors).shape
    made = {
        "expanded": lambda: torch.tensor(0.7, dtype=torch.float64).expand(shape),
        "transposed": lambda: torch.randn(*reversed(shape), dtype=torch.float64).permute(2, 1, 0),
        "sliced": lambda: torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., ::2],
    }
    g = made[name]()
    assert not g.is_contiguous()
    check(each.ours, each.eager, tensors, g)


def test_a_sum_s_cotangent(each):
    """sum().backward() expands one number over all of D."""
    tensors, same = each.tensors(), each.tensors()
    each.ours(*tensors).sum().backward()
    each.eager(*same).sum().backward()
    for got, want in zip(tensors, same, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (3, 1), (3, 5), (2, 1, 5), (2, 3, 1), (2, 1, 1), (1, 3, 5), (2, 3, 5)], ids=str)
def test_a_residual_broadcasts(shape):
    x, w, b, _ = operands((2, 3))
    residual = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    check(fused, eager, [x, w, b, residual])
    check(
        lambda *t: ep.apply(lambda acc, b, r: eg.silu(acc + b) * r, t[0], t[1], b=t[2], r=t[3]),
        lambda x, w, b, r: F.silu(F.linear(x, w, b)) * r,
        [x, w, b, residual],
    )


def test_results_are_contiguous():
    x = torch.randn(4, 3).t()
    y = ep.linear(x, torch.randn(5, 4), activation="relu")
    assert y.is_contiguous()


def test_gradients_are_contiguous():
    x, w, b, _ = operands((6,))
    ep.linear(x, w, b, activation="relu").sum().backward()
    assert all(t.grad.is_contiguous() for t in (x, w, b))


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ep.linear(ones(2, 3), ones(4, 5)), r"x has the shape \(2, 3\) and weight the shape \(4, 5\)"),
        (lambda: ep.linear(ones(), ones(4, 5)), r"x has the shape \(\) and weight the shape \(4, 5\)"),
        (lambda: ep.linear(ones(2, 3), ones(4, 3), ones(3)), r"bias has the shape \(3,\); its weight has 4 rows"),
        (lambda: ep.linear(ones(2, 3), ones(4, 3), residual=ones(3, 4)), r"residual has the shape \(3, 4\), which does not"),
        (lambda: ep.linear(ones(2, 3), ones(4, 3), residual=ones(1, 2, 4)), r"residual has the shape \(1, 2, 4\)"),
        (lambda: ep.gated_linear(ones(2, 3), ones(4, 3), ones(5, 3)), "The weights have 4 and 5 rows"),
        (lambda: ep.mlp(ones(2, 3), ones(4, 3), ones(3, 5)), r"w_up has the shape \(4, 3\) and w_down the shape \(3, 5\)"),
        (lambda: ep.mlp(ones(2, 3), ones(4, 3), ones(3, 4), None, ones(4)), "b_down has the shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(eg.ShapeError, match=message):
        call()


@pytest.mark.parametrize("activation", ["rellu", 3, torch.nn.ReLU()], ids=str)
def test_unknown_activations_are_refused(activation):
    with pytest.raises(eg.OptionError, match="The names are relu, gelu"):
        ep.linear(torch.ones(2, 3), torch.ones(4, 3), activation=activation)


def test_operands_of_two_dtypes_are_refused():
    with pytest.raises(eg.EpigemmError):
        ep.linear(torch.ones(2, 3), torch.ones(4, 3, dtype=torch.bfloat16))
