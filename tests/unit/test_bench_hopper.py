"""The works of the bench of epilogues: what is verified before it is timed is what the epilogue means."""

from __future__ import annotations

import pytest

import epigemm as eg
from epigemm.bench import hopper

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", hopper.WORKS)
def test_a_work_is_its_formula(name):
    work = hopper.WORKS[name]
    generator = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(shape, generator=generator) for shape in ((24, 32), (16 * work.weights, 32)))
    weights = wide.split(16)
    inputs = {i: torch.randn((16,) if kind == "row" else (24, 16), generator=generator) for i, kind in work.inputs}
    b = tuple(w.T for w in weights)
    result = eg.matmul(x, b if len(b) > 1 else b[0], epilog=work.epilogue, epilog_inputs=inputs or None, engine="cpu")
    d = result[0] if isinstance(result, tuple) else result
    exact = work.exact(torch, *(x.double() @ w.double().T for w in weights), **{i: one.double() for i, one in inputs.items()})
    torch.testing.assert_close(d.double(), exact, rtol=1e-4, atol=1e-4)


def test_the_bars_are_the_designs():
    bars = {name: (work.shallow, work.deep) for name, work in hopper.WORKS.items()}
    assert bars["bare product"] == (1.02, 1.02)
    assert bars["bias + residual"] == bars["GELU_AUX_BIAS"] == (1.03, 1.03)
    assert bars["d-ReLU, bias gradient"] == bars["d-GELU, bias gradient"] == (1.15, 1.02)
    assert bars["d-SwiGLU"] == (1.35, 1.02)
    forward = ("bias + ReLU", "bias + tanh GELU", "bias + erf GELU", "RELU_AUX_BIAS", "SwiGLU")
    assert {bars[name] for name in forward} == {(1.0, 1.0)}
