"""Every user epilogue of the library's table of cases, and random ones, as layers: fused, recomputed, through the op and composite alike.

The composite path is PyTorch's own operations, differentiated by PyTorch, so that it judges the derived backward.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epigemm import pytorch as ep
from epigemm.expression.nodes import walk
from epigemm.expression.trace import as_epilogue
from epigemm.pytorch import composite
from epigemm.pytorch.network import Network
from epigemm.testing.epilogues import EPILOGUES
from epigemm.testing.strategies import trees

M, N, K = 12, 10, 6
# Operands of which the composite path knows only the product; complex numbers have no gradient of ours.
NO_COMPOSITE = ("operand_sums", "second_operand_sum", "zero_point")
ROWS = [row for row in EPILOGUES.values() if row.data != "complex" and row.name not in NO_COMPOSITE and "complex" not in row.name]

SHAPES = {"scalar": (), "column": (M, 1), "row": (1, N), "vector": (N,), "matrix": (M, N), "bits": (M, 16), "seed": ()}


def made(given, generator):
    """One input, with a gradient where it can have one."""
    shape = SHAPES[given.extent]
    if given.extent == "seed":
        return torch.tensor(123456789123)
    if given.extent == "bits":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if given.data == "integers":
        whole = torch.randint(-3, 4, shape, generator=generator)
        return whole.to(getattr(torch, given.dtype)) if given.dtype.startswith("int") else whole.to(torch.float64).requires_grad_()
    dtype = getattr(torch, given.dtype) if given.dtype else torch.float64
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values.abs() + 0.1 if given.data == "positive" else values).to(dtype).requires_grad_()


def operands(row):
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((M, K), *[(N, K)] * row.accumulators))
    if row.data in ("integers", "positive"):
        x, weights = x.round(), [w.round() for w in weights]
    if row.data == "positive":
        x, weights = x.abs() + 0.1, [w.abs() + 0.1 for w in weights]
    tensors = (x.requires_grad_(), *(w.requires_grad_() for w in weights))
    return tensors, {name: made(given, generator) for name, given in row.inputs.items()}


def flatten(result):
    return [result] if isinstance(result, torch.Tensor) else [result[0], *result[1].values()]


def reference(row, tensors, inputs):
    network = Network(as_epilogue(row.function).expression(row.accumulators))
    x, *weights = tensors
    return composite.forward(network, x, weights, list(inputs.values()))


def gradients(outputs, wanted):
    """By everything that a gradient flows through, each output with a cotangent of its own."""
    flowing = [y for y in outputs if y.requires_grad]
    cotangents = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype) for y in flowing]
    return torch.autograd.grad(flowing, wanted, cotangents, allow_unused=True)


WAYS = ("fused", "recompute", "op")


def compare(row, way):
    """Outputs and gradients of one epilogue, one way, against the composite path; how many gradients were compared."""
    tensors, inputs = operands(row)
    x, *weights = tensors

    def run():
        return flatten(ep.apply(row.function, x, tuple(weights), recompute=way == "recompute", **inputs))

    expression = as_epilogue(row.function).expression(row.accumulators)
    stopped = [any(node.op == "amax" for node in walk([o.node])) for o in expression.outputs]
    outputs, expected = run_through_op(run) if way == "op" else run(), reference(row, tensors, inputs)
    for y, z in zip(outputs, expected, strict=True):
        assert (y.shape, y.dtype) == (z.shape, z.dtype)
        torch.testing.assert_close(y.to(torch.float64), z.to(torch.float64), rtol=1e-9, atol=1e-9, equal_nan=True)
    wanted = [*tensors, *(t for t in inputs.values() if t.requires_grad)]
    through = [z.detach() if stop else z for z, stop in zip(expected, stopped, strict=True)]
    if not any(z.requires_grad for z in through):
        return 0
    return sum(compared(got, want) for got, want in zip(gradients(outputs, wanted), gradients(through, wanted), strict=True))


def compared(got, want):
    """Whether there was a gradient to compare; none is zero."""
    if got is None and want is None:
        return 0
    want = torch.zeros_like(got) if want is None else want
    got = torch.zeros_like(want) if got is None else got
    finite = got.isfinite() & want.isfinite()
    assert finite.double().mean() > 0.4
    unit = 1e-9 if want.dtype is torch.float64 else 8 * torch.finfo(want.dtype).eps
    got, want = got[finite].double(), want[finite].double()
    torch.testing.assert_close(got, want, rtol=unit, atol=unit * (1 + float(want.abs().max())))
    return 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_table(row, way):
    assert compare(row, way) > 0


@settings(max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 2).flatmap(trees), st.sampled_from(WAYS))
def test_random_epilogues(row, way):
    expression = as_epilogue(row.function).expression(row.accumulators)
    if not any(node.op == "operand_sum" for node in expression.nodes()):
        compare(row, way)


def run_through_op(run):
    with torch.device("cpu"):
        return run()
