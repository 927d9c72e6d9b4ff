"""What a step of an MLP holds and has allocated at most, by the caching allocator, beside eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from epigemm import pytorch as ep

TOKENS, WIDTH, HIDDEN = 4096, 512, 8192
UNIT = TOKENS * HIDDEN * 2  # one m×n tensor of the hidden layer in bfloat16
SLACK = UNIT // 64


def operands(ways):
    shapes = ((TOKENS, WIDTH), *[(HIDDEN, WIDTH)] * ways, (WIDTH, HIDDEN), *[(HIDDEN,)] * ways, (WIDTH,))
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]


def step(run, tensors):
    """(held between forward and backward, the most allocated in the step), beyond what was there before and D."""
    for _ in range(2):
        run(*tensors).sum().backward()
        for t in tensors:
            t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = run(*tensors)
    held = torch.cuda.memory_allocated() - before - y.nbytes
    y.sum().backward()
    return held, torch.cuda.max_memory_allocated() - before


EAGER = {
    "relu": lambda x, w, v, b, c: F.linear(F.relu(F.linear(x, w, b)), v, c),
    "gelu": lambda x, w, v, b, c: F.linear(F.gelu(F.linear(x, w, b)), v, c),
    "swiglu": lambda x, w, u, v, b, d, c: F.linear(F.silu(F.linear(x, w, b)) * F.linear(x, u, d), v, c),
}
FUSED = {
    "relu": lambda *t: ep.mlp(*t, activation="relu"),
    "gelu": lambda *t: ep.mlp(*t, activation="gelu"),
    "swiglu": ep.gated_mlp,
}
# In units of one hidden tensor: held less than eager, peak less than eager.
BARS = {"relu": (-1 / 16, 15 / 16), "gelu": (1, 0), "swiglu": (2, 0)}


@pytest.mark.parametrize("name", BARS)
def test_held_and_peak(name):
    tensors = operands(2 if name == "swiglu" else 1)
    (held, peak), (eager_held, eager_peak) = step(FUSED[name], tensors), step(EAGER[name], tensors)
    less_held, less_peak = BARS[name]
    assert eager_held - held >= less_held * UNIT - SLACK
    assert eager_peak - peak >= less_peak * UNIT - SLACK
