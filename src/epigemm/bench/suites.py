"""What is measured: one row a case, by the name of its suite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One epilogue over one product, x [m, k] times the transpose of an `nn.Linear` weight [n, k].

    Args:
        epilogue: a row of `baselines.EPILOGUES`.
        m, n, k: extents.
        dtype: of all operands.
        bar: the most that the ratio of our time to PyTorch's may be, None if that is left open.
    """

    epilogue: str
    m: int
    n: int
    k: int
    dtype: str
    bar: float | None

    def __str__(self) -> str:
        return f"m={self.m} n={self.n} k={self.k} {self.dtype} {self.epilogue}"


# Tall and deep, tall and shallow, and a batch too small to fill the machine.
_SHAPES = ((2048, 4096, 1024), (8192, 2048, 256), (64, 2048, 2048))
_BARS = {"bias_relu": 0.9, "bias_gelu": 1.0}

SUITES: dict[str, tuple[Case, ...]] = {
    "linear": tuple(Case(epilogue, *shape, "float32", bar) for epilogue, bar in _BARS.items() for shape in _SHAPES),
    # Small and odd: whether everything runs, not how fast.
    "smoke": tuple(Case(epilogue, 37, 53, 29, "float32", None) for epilogue in _BARS),
}

# Suites on a GPU: their module's `measure(torch, engine, rounds, on_round)` gives groups of rows with their bars.
DEVICE_SUITES = {"host": "epigemm.bench.host", "headline": "epigemm.bench.headline"}

# A ratio holds its bar up to this much above it: less cannot be told from noise.
BAR_SLACK = 0.01
