"""Results and gradients on the GPU, whichever engine is chosen, agree with float64 within the bounds that tests/layers computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epigemm import pytorch as ep


def check(case, tensors, dtype, assert_agrees, run=None):
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = case.eager(*exact)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype).cuda()
    actual = (run or case.ours)(*tensors)
    grads = torch.autograd.grad(actual, tensors, g)
    wanted = [expected, *torch.autograd.grad(expected, exact, g.double())]
    assert_agrees([actual, *grads], wanted, case.bounds(tensors, g, dtype), f"{case.name} {dtype}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(case, dtype, on_gpu, assert_agrees):
    check(case, on_gpu(case, dtype), dtype, assert_agrees)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recomputing(each, dtype, on_gpu, assert_agrees):
    check(each, on_gpu(each, dtype), dtype, assert_agrees, lambda *t: each.ours(*t, recompute=True))


def test_large_extents():
    """Against eager on the same GPU: tiles, ragged edges, many rows."""
    x, w, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) / s[-1] ** 0.5 for s in ((1000, 520), (1032, 520), (264, 1032)))
    b, c = torch.randn(1032, device="cuda", dtype=torch.bfloat16), torch.randn(264, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (
        lambda *t: ep.mlp(*t, activation="relu"),
        lambda x, w, v, b, c: F.linear(F.relu(F.linear(x.double(), w.double(), b.double())), v.double(), c.double()),
    ):
        tensors = [t.detach().clone().requires_grad_() for t in (x, w, v, b, c)]
        y = function(*tensors)
        y.float().square().sum().backward()
        results.append([y.detach().double(), *(t.grad.double() for t in tensors)])
    for ours, exact in zip(*results, strict=True):
        assert ((ours - exact).norm() / exact.norm()).item() < 2 * torch.finfo(torch.bfloat16).eps


def test_double_backward(named, on_gpu):
    case = named["mlp gelu"]
    assert torch.autograd.gradgradcheck(case.ours, on_gpu(case, torch.float64), fast_mode=True)


def test_tf32_as_pytorch_s_flag_says():
    x, w = torch.randn(256, 512, device="cuda"), torch.randn(128, 512, device="cuda")
    exact = x.double() @ w.double().T
    errors = {}
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        errors[allowed] = ((ep.linear(x, w) - exact).norm() / exact.norm()).item()
    torch.backends.cuda.matmul.allow_tf32 = False
    assert errors[False] < 1e-6 < 1e-5 < errors[True] < 1e-3


def test_autocast(each, on_gpu):
    tensors = on_gpu(each, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, eager = each.ours(*tensors), each.eager(*tensors)
    assert ours.dtype is eager.dtype
    torch.testing.assert_close(ours.float(), eager.float(), rtol=0.1, atol=0.1 * float(eager.detach().abs().max()))


def test_compiled(each, on_gpu):
    torch._dynamo.reset()
    tensors = on_gpu(each, torch.float32)
    compiled = torch.compile(each.ours, fullgraph=True)
    y, z = compiled(*tensors), each.ours(*tensors)
    torch.testing.assert_close(y, z)
    for got, want in zip(torch.autograd.grad(y.sum(), tensors), torch.autograd.grad(z.sum(), tensors), strict=True):
        torch.testing.assert_close(got, want)
