"""torch.func's transforms, vmap, and forward-mode and double differentiation take the composite path, with eager's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import func

import epigemm as eg
from epigemm import pytorch as ep


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_grad_and_vjp(each):
    tensors = each.tensors(requires_grad=False)
    everything = tuple(range(len(tensors)))
    ours, eager = (func.grad(lambda *t, f=f: f(*t).square().sum(), everything)(*tensors) for f in (each.ours, each.eager))
    close(ours, eager)
    (y, pull), (z, pull_eager) = func.vjp(each.ours, *tensors), func.vjp(each.eager, *tensors)
    close(y, z)
    close(pull(torch.ones_like(y)), pull_eager(torch.ones_like(z)))


def test_jvp(each):
    tensors = tuple(each.tensors(requires_grad=False))
    tangents = tuple(torch.randn_like(t) for t in tensors)
    close(func.jvp(each.ours, tensors, tangents), func.jvp(each.eager, tensors, tangents))


def test_forward_mode(each):
    tensors = each.tensors(requires_grad=False)
    results = []
    for function in (each.ours, each.eager):
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in tensors]
            results.append(torch.autograd.forward_ad.unpack_dual(function(*duals)).tangent)
    close(*results)


def test_vmap_over_x_and_over_everything(each):
    tensors = each.tensors(requires_grad=False)
    x = torch.randn(4, *tensors[0].shape, dtype=torch.float64)
    close(func.vmap(lambda x: each.ours(x, *tensors[1:]))(x), torch.stack([each.eager(x_, *tensors[1:]) for x_ in x]))
    stacked = [torch.stack([t, 2 * t]) for t in tensors]
    expected = torch.stack([each.eager(*tensors), each.eager(*(2 * t for t in tensors))])
    close(func.vmap(each.ours)(*stacked), expected)


def test_gradients_of_each_sample():
    model = ep.MLP(6, 8, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 6, dtype=torch.float64)

    def loss(parameters, row):
        return func.functional_call(model, parameters, (row,)).square().sum()

    each_sample = func.vmap(func.grad(loss), (None, 0))(parameters, x)
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        close(each_sample[name].sum(0), p.grad)


def test_batched_cotangents(each):
    """The forward was fused; the backward is mapped over several cotangents at once."""
    tensors = each.tensors()
    y, z = each.ours(*tensors), each.eager(*tensors)
    g = torch.randn(3, *z.shape, dtype=torch.float64)
    for got, want in zip(*(torch.autograd.grad(r, tensors, g, is_grads_batched=True) for r in (y, z)), strict=True):
        close(got, want)


def test_a_vectorised_jacobian(named):
    x, *rest = named["mlp gelu"].tensors(requires_grad=False)
    functions = (named["mlp gelu"].ours, named["mlp gelu"].eager)
    ours, eager = (torch.autograd.functional.jacobian(lambda x, f=f: f(x, *rest), x, vectorize=True) for f in functions)
    close(ours, eager)


def test_hessian():
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((2, 3), (4, 3), (2, 4), (4,))]

    def ours(x):
        return ep.mlp(x, *tensors[1:], activation="gelu").square().sum()

    def eager(x):
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, tensors[1], tensors[3]))
        return (hidden @ tensors[2].T).square().sum()

    close(func.hessian(ours)(tensors[0]), func.hessian(eager)(tensors[0]))


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_dropout_draws_the_same_numbers_there(p):
    x, w = torch.randn(33, 3), torch.randn(18, 3)

    def run(x):
        return ep.apply(lambda acc, seed: eg.dropout(acc, p, seed), x, w, seed=torch.tensor(-5))

    expected = run(x)
    y, _ = func.vjp(run, x)
    torch.testing.assert_close(y, expected)
    assert torch.equal(y == 0, expected == 0)


def test_masks_and_sums_there():
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(21, 3, dtype=torch.float64)

    def run(x):
        def epilogue(acc):
            return eg.outputs(eg.relu(acc), bits=eg.bitmask(acc > 0), m=eg.sum(acc, axis="m"), most=eg.amax(acc, axis="n"), all=eg.sum(acc))

        return ep.apply(epilogue, x, w)

    (d, found), (d_there, found_there) = run(x), func.vmap(run)(x[None])
    close(d_there[0], d)
    assert torch.equal(found_there["bits"][0], found["bits"])
    for name in ("m", "most", "all"):
        close(found_there[name][0], found[name])


def test_a_gradient_penalty():
    x, *rest = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (5, 3), (5,))]
    results = []
    for function in (lambda x, w, b: ep.linear(x, w, b, activation="silu"), lambda x, w, b: torch.nn.functional.silu(x @ w.T + b)):
        (slope,) = torch.autograd.grad(function(x, *rest).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), (x, *rest)))
    for ours, eager in zip(*results, strict=True):
        close(ours, eager)
