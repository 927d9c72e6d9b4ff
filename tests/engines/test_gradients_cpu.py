"""Derived gradients through the engine, end to end: forward, what it saves, backward, against difference quotients of plain formulas.

The formulas (`epilogues.py`) were never traced, so that tracing, deriving, saving and both runs are checked at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import epigemm as eg
from epigemm.testing.cases import Case
from epigemm.testing.conformance import reference_product
from epigemm.testing.epilogues import EPILOGUES, Row
from epigemm.testing.gradients import Given, derived
from epigemm.testing.reference import wide

M, N, K = 5, 6, 3
DIFFERENTIABLE = [row for row in EPILOGUES.values() if row.formula is not None and derived(row) is not None]


def loss(row: Row, accumulators: list[np.ndarray], inputs: dict[str, np.ndarray], weights: np.ndarray) -> float:
    assert row.formula is not None
    return float((np.broadcast_to(row.formula(*accumulators, **inputs), weights.shape) * weights).sum())


def quotient(row: Row, arrays: dict[str, np.ndarray], name: str, where: tuple[int, ...], weights: np.ndarray, step: float) -> float:
    """(loss(x + step) - loss(x - step)) / (2 step) in one element of an accumulator or input."""
    found = []
    for sign in (1, -1):
        moved = {key: value.copy() for key, value in arrays.items()}
        moved[name][where] += sign * step
        accumulators = [moved.pop(f"acc{i}") for i in range(row.accumulators)]
        found.append(loss(row, accumulators, moved, weights))
    return (found[0] - found[1]) / (2 * step)


def gradients(row: Row, tensors: Any, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """{"acc0" or input: gradient}: the forward runs as a product's epilogue, the backward over beta * C = the cotangent of D."""
    found = derived(row)
    assert found is not None
    operands = [tensors.a.array, *(one.array for one in tensors.b)]
    b = tuple(operands[1:])
    inputs = {name: one.array for name, one in tensors.inputs.items()}
    result = eg.matmul(operands[0], b if len(b) > 1 else b[0], epilog=Given(found.forward), epilog_inputs=inputs or None)
    d, extras = result if isinstance(result, tuple) else (result, {})
    saved = {one.name: {"result": d, "input": inputs.get(one.origin)}.get(one.source, extras.get(one.origin)) for one in found.saved}
    given = {name: {**inputs, **saved}[name] for name in found.backward.input_names}
    empty = np.zeros((M, 0)), np.zeros((0, N))
    result = eg.matmul(*empty, cotangent, beta=1.0, epilog=Given(found.backward), epilog_inputs=given or None)
    d, extras = result if isinstance(result, tuple) else (result, {})
    outputs = {"d": d, **extras}
    return {target: outputs[name] for name, target in found.results}


@pytest.mark.parametrize("row", DIFFERENTIABLE, ids=lambda row: row.name)
def test_gradient_is_the_limit_of_difference_quotients(row: Row) -> None:
    case = Case("gradient", M, N, K, row.name, dtype="float64", data="small")
    tensors = case.build(np.random.default_rng(5))
    product = reference_product(case, tensors)
    arrays = {f"acc{i}": wide(product.a) @ wide(one) for i, one in enumerate(product.b)}
    arrays |= {name: wide(value) for name, value in product.inputs.items()}
    weights = np.random.default_rng(6).normal(size=(M, N))
    found = gradients(row, tensors, weights)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        gradient = np.broadcast_to(found[name], array.shape)
        for where in list(np.ndindex(array.shape))[:: max(array.size // 12, 1)]:
            coarse, fine = (quotient(row, arrays, name, where, weights, step) for step in (2e-5, 1e-5))
            # A central quotient is off by step^2 and by the loss's own rounding over the step: both show in halving the step.
            allowed = 10 * abs(coarse - fine) + 1e-15 / 1e-5 * (1 + np.abs(weights).sum() * 10)
            assert abs(gradient[where] - fine) <= allowed, (name, where, gradient[where], fine, allowed)


def test_there_are_at_least_thirty() -> None:
    assert len(DIFFERENTIABLE) >= 30


def test_relu_at_its_corner_is_pytorchs() -> None:
    """At 0 nothing flows, NaN lets the gradient through: PyTorch's threshold, not the peer's mask."""
    torch = pytest.importorskip("torch")
    row = EPILOGUES["relu"]
    x = np.array([[0.0, -0.0, np.nan, 1.0, -1.0, np.inf], *([[0.0] * 6] * 4)])
    found = derived(row)
    assert found is not None
    y, saved = eg.matmul(x, np.eye(6), np.zeros((5, 6)), alpha=0.0, beta=0.0, epilog=Given(found.forward))
    assert not y.any()  # alpha = 0: nothing is read
    y, saved = eg.matmul(np.zeros((5, 0)), np.zeros((0, 6)), x, beta=1.0, epilog=Given(found.forward))
    ones = np.ones((5, 6))
    d = eg.matmul(np.zeros((5, 0)), np.zeros((0, 6)), ones, beta=1.0, epilog=Given(found.backward), epilog_inputs=saved)
    t = torch.from_numpy(x).requires_grad_()
    torch.relu(t).backward(torch.ones(5, 6, dtype=torch.float64))
    assert np.array_equal(y, torch.relu(torch.from_numpy(x)).numpy(), equal_nan=True)
    assert np.array_equal(d, t.grad.numpy())
