"""The registered op by itself: opcheck, fakes that tell the truth of shapes, dtypes and strides, and its text."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import epigemm as eg
from epigemm import pytorch as ep
from epigemm.expression.trace import as_epilogue
from epigemm.pytorch.network import Network, decode, encode


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the ops that pass, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded(run):
    with Calls() as calls:
        run()
    return calls.seen


@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck(each, recompute):
    tensors = each.tensors()
    seen = recorded(lambda: each.ours(*tensors, recompute=recompute).sum().backward())
    forward = next(args for func, args in seen if func is torch.ops.epigemm.layer.default)
    backward = next(args for func, args in seen if func is torch.ops.epigemm.layer_backward.default)
    given = (*tensors[:1], *each_list(each, tensors), *forward[3:])
    torch.library.opcheck(torch.ops.epigemm.layer.default, given)
    cotangents, held, recipe = backward
    detached = [t.detach() for t in cotangents], [t.detach() for t in held], recipe
    torch.library.opcheck(torch.ops.epigemm.layer_backward.default, detached)


def each_list(case, tensors):
    names = list(case.shapes)
    weights = [t for name, t in zip(names, tensors, strict=True) if name.startswith("w")]
    return weights, [t for name, t in zip(names, tensors, strict=True) if name[0] in "br"]


def epilogue(acc, bias, column, matrix):
    y = eg.gelu(acc + bias) * column + eg.exp(matrix)
    sums = {"n": eg.sum(y, axis="n"), "m": eg.sum(y, axis="m"), "all": eg.sum(y), "most": eg.amax(y)}
    return eg.outputs(y, **sums, bits=eg.bitmask(y > 0), half=eg.cast(y, "float16"), row=bias * 2)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)], ids=str)
def test_fakes_tell_the_truth(lead):
    shapes = ((*lead, 4), (5, 4), (5,), (*lead, 1), (*lead, 5))

    def run():
        x, w, bias, column, matrix = (torch.ones(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
        d, found = ep.apply(epilogue, x, w, bias=bias, column=column, matrix=matrix)
        (d.sum() + found["n"].sum() + found["all"].sum()).backward()
        return [d, *found.values(), *(t.grad for t in (x, w, bias, column, matrix))]

    real = run()
    with FakeTensorMode():
        fake = run()
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


def test_fake_modules_forward_and_backward():
    with FakeTensorMode():
        module = ep.GatedMLP(7, 8)
        y = module(torch.randn(3, 7))
        y.sum().backward()
    assert y.shape == (3, 7)
    assert module.up_proj.weight.grad.shape == (8, 7)


def test_make_fx_shows_the_op():
    graph = make_fx(lambda x, w: ep.linear(x, w, activation="relu"))(torch.ones(2, 3), torch.ones(4, 3))
    assert next(n.target for n in graph.graph.nodes if n.op == "call_function") is torch.ops.epigemm.layer.default


def test_make_fx_with_symbolic_shapes(each):
    tensors = each.tensors(requires_grad=False)
    graph = make_fx(each.ours, tracing_mode="symbolic")(*tensors)
    assert torch.ops.epigemm.layer.default in [n.target for n in graph.graph.nodes]
    longer = [torch.cat([t, t]) if name in ("x", "residual") else t for name, t in zip(each.shapes, tensors, strict=True)]
    torch.testing.assert_close(graph(*longer), each.ours(*longer))


def test_the_flop_counter_counts_each_product(each):
    counts = []
    for function in (each.ours, each.eager):
        with FlopCounterMode(display=False) as counter:
            function(*each.tensors()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_flop_counter_around_the_backward_alone(named):
    counts = []
    for function in (named["mlp relu"].ours, named["mlp relu"].eager):
        y = function(*named["mlp relu"].tensors()).sum()
        with FlopCounterMode(display=False) as counter:
            y.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_flop_counter_sees_what_is_recomputed(named):
    with FlopCounterMode(display=False) as plain:
        named["mlp gelu"].ours(*named["mlp gelu"].tensors()).sum().backward()
    with FlopCounterMode(display=False) as again:
        named["mlp gelu"].ours(*named["mlp gelu"].tensors(), recompute=True).sum().backward()
    assert again.get_total_flops() * 6 == plain.get_total_flops() * 6 + 2 * 6 * 7 * 10 * 6


def test_gradients_through_the_op(case):
    """Under a dispatch mode the op runs, with the same numbers."""
    tensors = case.tensors()
    direct = torch.autograd.grad(case.ours(*tensors).square().sum(), tensors)
    with Calls() as calls:
        through = torch.autograd.grad(case.ours(*tensors).square().sum(), tensors)
    assert [func for func, _ in calls.seen].count(torch.ops.epigemm.layer_backward.default) == 1
    for got, want in zip(through, direct, strict=True):
        assert torch.equal(got, want)


def test_double_backward_through_the_op(named):
    tensors = named["mlp gelu"].tensors()
    with Calls():
        assert torch.autograd.gradgradcheck(named["mlp gelu"].ours, tensors, fast_mode=True)


def test_a_network_s_text_is_the_network():
    first = as_epilogue(epilogue).expression()
    network = Network(first, None, True, "float32")
    assert decode(encode(network)) == network
    assert pickle.loads(pickle.dumps(network)) == network
    odd = as_epilogue(lambda acc: eg.where(acc > float("-inf"), acc * -0.0, float("inf")) + 1).expression()
    again = decode(encode(Network(odd))).first
    assert again == odd


def test_the_direct_path_does_not_call_the_op(monkeypatch, each):
    from epigemm.pytorch import dispatch

    monkeypatch.setattr(dispatch, "LAYER", None)
    each.ours(*each.tensors()).sum().backward()
    with pytest.raises(TypeError), Calls():
        each.ours(*each.tensors())
    with pytest.raises(TypeError), torch.device("cpu"):
        each.ours(*each.tensors())
