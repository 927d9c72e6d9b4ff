"""Layers for PyTorch whose bias, activation, gate and residual run inside the product, forward and backward."""

from __future__ import annotations

from epigemm.pytorch.activations import ACTIVATIONS
from epigemm.pytorch.functions import apply, gated_linear, gated_mlp, linear, mlp
from epigemm.pytorch.modules import MLP, GatedMLP, Linear

__all__ = ["ACTIVATIONS", "MLP", "GatedMLP", "Linear", "apply", "gated_linear", "gated_mlp", "linear", "mlp"]
