"""The CPU engine beside eager PyTorch on the same threads: bias + ReLU and bias + tanh GELU, interleaved, medians of ratios.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python scripts/cpu_probe.py [rounds]

Every candidate of the engine is a row, so this is also how the panel height was found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

import epigemm.expression as eg
from epigemm.engines.base import Call
from epigemm.engines.cpu import threads
from epigemm.engines.cpu.engine import ENGINE
from epigemm.expression.check import check
from epigemm.problem import Operand, Problem

SHAPES = ((2048, 4096, 1024), (8192, 2048, 256), (64, 2048, 2048))


def relu_bias(acc, bias):  # type: ignore[no-untyped-def]
    return eg.relu(acc + bias)


def gelu_bias(acc, bias):  # type: ignore[no-untyped-def]
    return eg.gelu(acc + bias, approximate="tanh")


EPILOGUES: dict[str, tuple[Callable[..., object], Callable[..., torch.Tensor]]] = {
    "relu": (relu_bias, torch.relu),
    "gelu": (gelu_bias, lambda y: F.gelu(y, approximate="tanh")),
}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def runs(m: int, n: int, k: int, epilogue: str) -> tuple[Callable[[], object], dict[str, Callable[[], object]]]:
    """Eager PyTorch, and each candidate by name, over the same data; both allocate their result."""
    rng = np.random.default_rng(0)
    x, w, bias = (rng.standard_normal(s, np.float32) for s in ((m, k), (n, k), (1, n)))
    ours, theirs = EPILOGUES[epilogue]
    xt, wt, bt = torch.from_numpy(x), torch.from_numpy(w), torch.from_numpy(bias[0])
    problem = Problem.of("f32", m=m, n=n, k=k, inputs={"bias": Operand.dense("f32", (1, n))})
    problem = Problem(**{f: getattr(problem, f) for f in problem.__slots__} | {"b": (Operand.dense("f32", (k, n), "col"),)})
    expression = check(eg.as_epilogue(ours).expression(1), problem)

    def call_of(executable):  # type: ignore[no-untyped-def]
        def run() -> object:
            d = np.empty((m, n), np.float32)
            executable.run(Call(x, (w.T,), None, d, {"bias": bias}))
            return d

        return run

    found = {str(c): call_of(ENGINE.prepare(problem, expression, c)) for c in ENGINE.candidates(problem, expression, 8)}
    first = next(iter(found.values()))()
    expected = theirs(F.linear(xt, wt, bt)).numpy()
    np.testing.assert_allclose(first, expected, rtol=0, atol=k * 1e-5)  # type: ignore[arg-type]
    return lambda: theirs(F.linear(xt, wt, bt)), found


def main(rounds: int = 9) -> None:
    torch.set_num_threads(threads.count())
    print(f"{threads.count()} threads, torch {torch.__version__}, numpy {np.__version__}, {rounds} rounds")
    for m, n, k in SHAPES:
        for epilogue in EPILOGUES:
            eager, found = runs(m, n, k, epilogue)
            ratios: dict[str, list[float]] = {name: [] for name in found}
            times = []
            for _ in range(rounds):
                for name, run in found.items():
                    base = seconds(eager)
                    times.append(base)
                    ratios[name].append(seconds(run) / base)
            print(f"m={m} n={n} k={k} {epilogue}: eager {median(times) * 1e3:.2f} ms")
            for name, values in ratios.items():
                print(f"  {name}: {median(values):.3f} x eager ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
