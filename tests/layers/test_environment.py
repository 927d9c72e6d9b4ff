"""Deterministic mode, inference mode, threads, TF32 as PyTorch's flags say, tensor subclasses, modes and devices around a call."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

import epigemm as eg
from epigemm import pytorch as ep
from epigemm.pytorch import product


def test_deterministic_mode(each):
    tensors = each.tensors(torch.float32)

    def run():
        y = each.ours(*tensors)
        return [y, *torch.autograd.grad(y.sum(), tensors)]

    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_inference_mode(each):
    tensors = each.tensors()
    with torch.inference_mode():
        y = each.ours(*tensors)
    assert y.is_inference()
    assert not y.requires_grad
    torch.testing.assert_close(y.clone(), each.eager(*tensors).detach())


def test_inference_tensors_as_operands():
    with torch.inference_mode():
        x = torch.randn(3, 4)
    w = torch.randn(5, 4)
    torch.testing.assert_close(ep.linear(x, w, activation="relu"), torch.relu(x @ w.T))


def test_threads(each):
    """Many threads share one call form: forward and backward, plans made at the same time."""
    tensors = [each.tensors(seed=i) for i in range(8)]
    expected = [torch.autograd.grad(each.eager(*t).square().sum(), t) for t in tensors]

    def run(t):
        return torch.autograd.grad(each.ours(*t).square().sum(), t)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, tensors))
    for got, want in zip(found, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_tf32_follows_pytorch_s_flag(precision):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert product.tf32_allowed() is (precision != "highest")
    finally:
        torch.set_float32_matmul_precision(before)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert product.tf32_allowed() is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert product.tf32_allowed() is False


def test_tf32_reaches_the_product_of_float32_on_a_gpu_alone():
    types = {tf32: product._options("", tf32).compute_type for tf32 in (False, True)}
    assert types == {False: None, True: eg.MatmulComputeType.COMPUTE_32F_FAST_TF32}
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        x, w = torch.full((1, 1), 1 + 2.0**-20), torch.ones(1, 1)
        assert ep.linear(x, w).item() == 1 + 2.0**-20
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


class Wrapped(torch.Tensor):
    """A subclass that says which functions it sees."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_sees_pytorch_s_own_operations():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    y = ep.linear(x, w.as_subclass(Wrapped), activation="gelu")
    assert torch.nn.functional.linear in Wrapped.seen
    torch.testing.assert_close(y.as_subclass(torch.Tensor), torch.nn.functional.gelu(x @ w.T), rtol=1e-5, atol=1e-6)


def test_a_parameter_is_plain(monkeypatch):
    from epigemm.pytorch import dispatch

    monkeypatch.setattr(dispatch, "_indirect", None)
    w = torch.nn.Parameter(torch.randn(5, 4))
    ep.linear(torch.nn.Buffer(torch.randn(3, 4)).data, w).sum().backward()
    assert w.grad is not None


def test_a_default_device_mode(each):
    tensors = each.tensors()
    with torch.device("cpu"):
        y = each.ours(*tensors)
    torch.testing.assert_close(y, each.eager(*tensors))
    y.sum().backward()
    assert tensors[0].grad is not None


def test_anomaly_mode(each):
    with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly(check_nan=True):
        each.ours(*each.tensors()).sum().backward()


def test_no_hidden_cache_holds_a_tensor():
    import gc
    import weakref

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y = ep.linear(x, w, activation="gelu")
    y.sum().backward()
    watched = [weakref.ref(t) for t in (x, w, y)]
    del x, w, y
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


@pytest.mark.parametrize("make", [ep.Linear, ep.MLP, ep.GatedMLP])
def test_meta_tensors(make):
    """Shapes without data, as for counting parameters or planning memory."""
    module = make(6, 8, device="meta")
    y = module(torch.empty(2, 3, 6, device="meta"))
    assert y.device.type == "meta"
    assert y.shape == (2, 3, 8 if make is ep.Linear else 6)
    y.sum().backward()
    assert all(p.grad.shape == p.shape for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_layers(dtype):
    tensors = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((3, 4), (5, 4), (5,))]
    y, z = ep.linear(*tensors), torch.nn.functional.linear(*tensors)
    torch.testing.assert_close(y, z)
    with torch.no_grad():
        torch.testing.assert_close(ep.linear(*tensors), z)
    g = torch.randn_like(z)
    torch.testing.assert_close(torch.autograd.grad(y, tensors, g), torch.autograd.grad(z, tensors, g))
    with pytest.raises(eg.ExpressionError), torch.no_grad():
        ep.linear(*tensors, activation="relu")
