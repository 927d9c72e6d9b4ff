"""Who is measured: each contender computes the same thing from the same arrays, as its users would write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epigemm.api import matmul
from epigemm.engines.cpu import threads
from epigemm.expression import epilogue, gelu, relu

Array = NDArray[Any]
Run = Callable[[], Any]

OURS, TORCH, NUMPY = "epigemm", "torch", "numpy"
CONTENDERS = (OURS, TORCH, NUMPY)


@dataclass(frozen=True, slots=True)
class Data:
    """The arrays of one case: x [m, k], weight [n, k], bias [n]."""

    x: Array
    weight: Array
    bias: Array

    @staticmethod
    def normal(m: int, n: int, k: int, dtype: str, seed: int = 0) -> Data:
        """Standard normal numbers."""
        random = np.random.default_rng(seed)
        return Data(*(random.standard_normal(shape, np.float32).astype(dtype) for shape in ((m, k), (n, k), (n,))))


@epilogue
def bias_relu(acc: Any, bias: Any) -> Any:
    return relu(acc + bias)


@epilogue
def bias_gelu(acc: Any, bias: Any) -> Any:
    return gelu(acc + bias, approximate="tanh")


def numpy_gelu(x: Array) -> Array:
    """The tanh form of GELU, with NumPy's temporaries."""
    inner = x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    return x.dtype.type(0.5) * x * (1 + np.tanh(inner))


@dataclass(frozen=True, slots=True)
class Epilogue:
    """One epilogue in each contender's terms.

    Args:
        ours: the epilogue function.
        in_numpy: of x W^T + bias.
        in_torch: the same, given `torch` and the sum.
        slope: the most that it changes by where its argument changes by 1.
    """

    ours: Any
    in_numpy: Callable[[Array], Array]
    in_torch: Callable[[Any, Any], Any]
    slope: float


EPILOGUES: dict[str, Epilogue] = {
    "bias_relu": Epilogue(bias_relu, lambda y: np.maximum(y, 0), lambda torch, y: torch.relu(y), 1.0),
    "bias_gelu": Epilogue(bias_gelu, numpy_gelu, lambda torch, y: torch.nn.functional.gelu(y, approximate="tanh"), 1.13),
}


def ours(name: str, data: Data, engine: str, out: Array | None = None) -> Run:
    """epigemm, in one call; a new result every time unless `out` is given."""
    function, inputs = EPILOGUES[name].ours, {"bias": data.bias}
    return lambda: matmul(data.x, data.weight.T, epilog=function, epilog_inputs=inputs, engine=engine, out=out)


def numpy_steps(name: str, data: Data) -> Run:
    """NumPy, one step after another."""
    activation = EPILOGUES[name].in_numpy
    return lambda: activation(data.x @ data.weight.T + data.bias)


def torch_eager(name: str, data: Data) -> Run | None:
    """PyTorch's F.linear and activation, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    activation = EPILOGUES[name].in_torch
    x, weight, bias = (torch.from_numpy(array) for array in (data.x, data.weight, data.bias))

    def run() -> Any:
        with torch.inference_mode():
            return activation(torch, torch.nn.functional.linear(x, weight, bias))

    return run


def contender(who: str, name: str, data: Data, engine: str) -> Run | None:
    """One of `CONTENDERS`, None if it cannot run here."""
    if who == OURS:
        return ours(name, data, engine)
    return torch_eager(name, data) if who == TORCH else numpy_steps(name, data)


def contenders(name: str, data: Data, engine: str) -> dict[str, Run]:
    """Those that can run here, ours first."""
    runs = {who: contender(who, name, data, engine) for who in CONTENDERS}
    return {who: run for who, run in runs.items() if run is not None}


def share_threads() -> int:
    """The threads of NumPy's BLAS, which are epigemm's too; PyTorch is given as many."""
    count = threads.count()
    try:
        import torch
    except ImportError:
        return count
    torch.set_num_threads(count)
    return count
