"""What is held between forward and backward, as the saved-tensor hooks see it, and the most that a step has allocated at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epigemm import pytorch as ep

TOKENS, WIDTH, HIDDEN = 256, 64, 512
UNIT = TOKENS * HIDDEN * 2  # one m×n tensor of the hidden layer in bfloat16


def operands(ways=1):
    shapes = ((TOKENS, WIDTH), *[(HIDDEN, WIDTH)] * ways, (WIDTH, HIDDEN), *[(HIDDEN,)] * ways, (WIDTH,))
    return [torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]


def held_bytes(run, tensors):
    """Bytes of the distinct tensors that the backward holds, without the operands."""
    own = {t.untyped_storage().data_ptr() for t in tensors}
    kept = {}

    def keep(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = run(*tensors)
    kept.pop(result.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def eager_mlp(activation):
    return lambda x, w, v, b, c: F.linear(activation(F.linear(x, w, b)), v, c)


def eager_gated(x, w, u, v, b, d, c):
    return F.linear(F.silu(F.linear(x, w, b)) * F.linear(x, u, d), v, c)


def fused_mlp(activation, **settings):
    return lambda *t: ep.mlp(*t, activation=activation, **settings)


def test_gelu_holds_one_tensor_less_than_eager():
    tensors = operands()
    eager = held_bytes(eager_mlp(F.gelu), tensors)
    assert eager == 2 * UNIT
    assert held_bytes(fused_mlp("gelu"), tensors) == eager - UNIT


def test_swiglu_holds_two_tensors_less_than_eager():
    tensors = operands(2)
    eager = held_bytes(eager_gated, tensors)
    assert eager == 4 * UNIT
    assert held_bytes(ep.gated_mlp, tensors) == eager - 2 * UNIT


def test_relu_holds_a_sixteenth_more_than_its_output():
    tensors = operands()
    assert held_bytes(eager_mlp(F.relu), tensors) == UNIT
    assert UNIT < held_bytes(fused_mlp("relu"), tensors) <= UNIT + UNIT // 16


def test_a_relu_layer_holds_a_bit_an_element():
    tensors = operands()[:2]
    assert held_bytes(lambda x, w: ep.linear(x, w, activation="relu"), tensors) == UNIT // 16


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
def test_recomputing_holds_nothing(activation):
    assert held_bytes(fused_mlp(activation, recompute=True), operands()) == 0
    layer = operands()[:2]
    assert held_bytes(lambda x, w: ep.linear(x, w, activation=activation, recompute=True), layer) == 0


def test_recomputing_a_gated_mlp_holds_nothing():
    assert held_bytes(lambda *t: ep.gated_mlp(*t, recompute=True), operands(2)) == 0


def peak_bytes(run, tensors):
    """The most that torch has allocated at a time in forward and backward, beyond what was there before."""
    run(*tensors).sum().backward()
    for t in tensors:
        t.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(*tensors).sum().backward()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_a_step_never_needs_more_than_eager_and_relu_fifteen_sixteenths_of_a_tensor_less():
    tensors, gated = operands(), operands(2)
    slack = UNIT // 50  # scalars and the like
    relu = peak_bytes(eager_mlp(F.relu), tensors) - peak_bytes(fused_mlp("relu"), tensors)
    assert relu >= UNIT * 15 // 16 - slack
    assert peak_bytes(fused_mlp("gelu"), tensors) <= peak_bytes(eager_mlp(F.gelu), tensors) + slack
    assert peak_bytes(ep.gated_mlp, gated) <= peak_bytes(eager_gated, gated) + slack


def test_held_tensors_are_freed_by_the_backward():
    """Nothing but save_for_backward holds them: a second backward says so."""
    x, *rest = operands()
    y = ep.mlp(x, *rest, activation="gelu")
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_a_changed_operand_is_noticed():
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    y = ep.linear(x, w, activation="relu")
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
