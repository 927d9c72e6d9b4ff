"""The digits demo's PyTorch twin: the fused and the unfused network learn the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

PATH = Path(__file__).parents[2] / "examples" / "digits_torch.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("digits_torch", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_curves_agree(example, capsys):
    losses, accuracy = example.train(epochs=4)
    for ours, theirs in zip(losses["fused"], losses["PyTorch"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    # One epoch is 22 steps of float32 arithmetic, rounded differently.
    assert losses["fused"][0] == pytest.approx(losses["PyTorch"][0], rel=1e-5)
    assert losses["fused"][-1] < losses["fused"][0] / 4
    assert min(accuracy.values()) > 0.85
    example.main(1)
    assert "largest relative difference" in capsys.readouterr().out
