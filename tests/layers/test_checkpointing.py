"""Activation checkpointing, offloading and other users of the saved-tensor hooks see all that is saved."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def gradients(run, tensors):
    for t in tensors:
        t.grad = None
    run(*tensors).square().sum().backward()
    return [t.grad for t in tensors]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(each, reentrant):
    tensors = each.tensors()
    assert same(gradients(lambda *t: checkpoint(each.ours, *t, use_reentrant=reentrant), tensors), gradients(each.ours, tensors))


def test_a_checkpoint_holds_nothing(named):
    case = named["mlp gelu"]
    tensors = case.tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        checkpoint(case.ours, *tensors, use_reentrant=False)
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in tensors}


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpoints(each, policy):
    tensors = each.tensors()
    seen = []

    def decide(context, op, *args, **kwargs):
        seen.append(op)
        return policy

    def run(*t):
        return checkpoint(each.ours, *t, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(decide))

    assert same(gradients(run, tensors), gradients(each.ours, tensors))
    assert torch.ops.epigemm.layer.default in seen


def test_offloading(each):
    """What is packed as a copy, elsewhere in memory, is all that the backward needs."""
    tensors = each.tensors()
    expected = gradients(each.ours, tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = each.ours(*tensors).square().sum()
    assert same(torch.autograd.grad(y, tensors), expected)
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(each.ours, tensors), expected)


def test_retain_graph(each):
    tensors = each.tensors()
    y = each.ours(*tensors).square().sum()
    first = torch.autograd.grad(y, tensors, retain_graph=True)
    assert same(torch.autograd.grad(y, tensors), first)
