"""CUDA graphs: a captured layer replays on new data, forward alone and a whole training step; streams are the caller's."""

from __future__ import annotations

import torch

from epigemm import pytorch as ep


def warmed(run):
    """Planned and compiled outside the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)


def test_a_forward_replays(each, on_gpu):
    static, new = on_gpu(each, torch.float32), on_gpu(each, torch.float32, seed=5)
    with torch.no_grad():
        expected = each.ours(*new)
        warmed(lambda: each.ours(*static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = each.ours(*static)
        for old, fresh in zip(static, new, strict=True):
            old.copy_(fresh)
        graph.replay()
    torch.testing.assert_close(y, expected)


def test_a_training_step_replays(each, on_gpu):
    static, new = on_gpu(each, torch.float32), on_gpu(each, torch.float32, seed=5)

    def step(tensors):
        return torch.autograd.grad(each.ours(*tensors).square().sum(), tensors)

    expected = step(new)
    warmed(lambda: step(static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step(static)
    with torch.no_grad():
        for old, fresh in zip(static, new, strict=True):
            old.copy_(fresh)
    graph.replay()
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_graphed_callables():
    module = ep.MLP(64, 256, activation="relu").cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn_like(x).requires_grad_(),))
    found = torch.autograd.grad(graphed(x).square().sum(), [x, *module.parameters()])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_the_caller_s_stream_is_used():
    x, w = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    ep.linear(x, w, activation="relu")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(0)
        y = ep.linear(x, w, activation="relu")
    assert not side.query()
    side.synchronize()
    assert not y.any()
