"""torch.compile(fullgraph=True): the same values and gradients, the fused op in the graph, dynamic shapes without recompiling."""

from __future__ import annotations

import pytest
import torch

import epigemm as eg
from epigemm import pytorch as ep

LAYER, BACKWARD = torch.ops.epigemm.layer.default, torch.ops.epigemm.layer_backward.default


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class Recorder:
    """A backend that keeps the graphs of forward and backward and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, _):
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(module, inputs)

    def targets(self):
        return [[node.target for node in graph.graph.nodes if node.op == "call_function"] for graph in self.graphs]


def compare(function, tensors, backend, dynamic=None):
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    wanted = [t for t in tensors if t.requires_grad]
    y, z = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(z)
    for got, want in zip(torch.autograd.grad(y, wanted, g), torch.autograd.grad(z, wanted, g), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    return compiled


@pytest.mark.parametrize("recompute", [False, True])
def test_functions(each, recompute):
    recorder = Recorder()
    compare(lambda *t: each.ours(*t, recompute=recompute), each.tensors(), recorder)
    forward, backward = recorder.targets()
    assert forward.count(LAYER) == 1
    assert backward.count(BACKWARD) == 1
    assert not any(str(target).startswith(("aten.mm", "aten.addmm")) for target in (*forward, *backward))


def test_without_a_gradient(each):
    recorder = Recorder()
    compiled = torch.compile(each.ours, fullgraph=True, backend=recorder)
    tensors = each.tensors(requires_grad=False)
    torch.testing.assert_close(compiled(*tensors), each.ours(*tensors))
    (forward,) = recorder.targets()
    assert forward.count(LAYER) == 1


def silu_scaled(acc, scale):
    y = eg.silu(acc)
    return eg.outputs(y * scale, sumsq=eg.sum(y * y, axis="n"))


@pytest.mark.parametrize("decorated", [False, True])
def test_a_user_s_epilogue(decorated):
    function = eg.epilogue(silu_scaled) if decorated else silu_scaled

    def run(x, w, scale):
        d, found = ep.apply(function, x, w, scale=scale)
        return d.sum(-1, keepdim=True) + found["sumsq"]

    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,))]
    recorder = Recorder()
    compare(run, tensors, recorder)
    assert [targets.count(op) for targets, op in zip(recorder.targets(), (LAYER, BACKWARD), strict=True)] == [1, 1]


def test_an_activation_that_is_a_function():
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (5, 4))]
    compare(lambda x, w: ep.linear(x, w, activation=eg.mish), tensors, "aot_eager")
    compare(lambda x, w: ep.linear(x, w, activation=lambda t: t * 2 + 1), tensors, "aot_eager")


@pytest.mark.parametrize("make", [ep.Linear, ep.MLP, ep.GatedMLP])
def test_modules(make):
    module = make(6, 8, activation="gelu", dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    recorder = Recorder()
    compare(lambda x: module(x), [x], recorder)
    assert sum(targets.count(LAYER) for targets in recorder.targets()) == 1


def test_dynamic_rows_compile_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = ep.MLP(6, 8, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    for lead in ((3, 4), (5, 7), (2, 9)):
        x = torch.randn(*lead, 6, dtype=torch.float64, requires_grad=True)
        y, z = compiled(x), module(x)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(z.sum(), x))
    assert counter.frame_count == 1


def test_inductor():
    """Through code generation: what surrounds the op is compiled, the op is called."""
    module = torch.nn.Sequential(ep.Linear(6, 8, activation="relu"), torch.nn.LayerNorm(8), ep.GatedMLP(8, 12)).double()
    compare(lambda x: module(x) * 2, [torch.randn(3, 6, dtype=torch.float64, requires_grad=True)], "inductor")


def test_export():
    module = ep.MLP(6, 8, activation="relu")
    x = torch.randn(3, 6)
    program = torch.export.export(module, (x,))
    assert any(node.target is LAYER for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), module(x))


def test_autocast_inside():
    module = ep.Linear(6, 8, activation="gelu")

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    x = torch.randn(3, 6)
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, run(x))
