"""The array libraries that the engines' tests run over."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from epigemm.testing.placing import numpy_view, torch_view

# Triton decides when it is first imported whether it interprets kernels on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Library:
    """An array library: its tensor over a NumPy array's memory, and back."""

    name: str
    of: Callable[[np.ndarray], Any]
    numpy: Callable[[Any], np.ndarray] = numpy_view


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> Library:
    if request.param == "torch":
        pytest.importorskip("torch")
        return Library("torch", torch_view)
    return Library("numpy", lambda array: array)
