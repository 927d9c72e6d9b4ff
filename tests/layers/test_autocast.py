"""Autocast: operands, biases too, in its dtype; gradients back in the parameters' own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epigemm import pytorch as ep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_have_eager_s_dtypes(each, dtype):
    results = []
    for function in (each.ours, each.eager):
        tensors = each.tensors(torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            y = function(*tensors)
        y.sum().backward()
        results.append((y, *(t.grad for t in tensors)))
    for ours, eager in zip(*results, strict=True):
        assert ours.dtype is eager.dtype
        torch.testing.assert_close(ours.float(), eager.float(), rtol=0.1, atol=0.1 * float(eager.detach().abs().max()))


def test_the_operands_are_rounded_and_the_bias_too():
    x, w, b = torch.tensor([[1 + 2.0**-12]]), torch.tensor([[1.0]]), torch.tensor([-1 - 2.0**-12])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ep.linear(x, w).item() == 1.0
        assert ep.linear(x * 0, w, b).item() == -1.0
        assert ep.apply(lambda acc, b: (acc + b) * 2**12, x, w, b=b).item() == -1.0  # an epilogue's input keeps its dtype


def test_float64_stays():
    x, w = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ep.linear(x, w).dtype is F.linear(x, w).dtype is torch.float64


def test_off_means_off():
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert ep.linear(x, w).dtype is torch.float32
    with torch.autocast("xpu" if torch.cuda.is_available() else "cpu", enabled=False):
        assert ep.linear(x, w).dtype is torch.float32


def test_seeds_stay_integers():
    import epigemm as eg

    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ep.apply(lambda acc, seed: eg.dropout(acc, 0.5, seed), x, w, seed=2**40 + 1)
    plain = ep.apply(lambda acc, seed: eg.dropout(acc, 0.5, seed), x, w, seed=2**40 + 1)
    assert torch.equal(y == 0, plain == 0)
