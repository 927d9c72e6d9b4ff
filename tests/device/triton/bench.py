"""The Triton engine's epilogues beside their bare products, cuBLASLt's fused calls, unfused, eager and torch.compile, on a GPU.

Usage: python tests/device/triton/bench.py RESULT.json [-r ROUNDS] [-t SECONDS] [-c CANDIDATES] [--compile] [--small]

One group a shape and work. Times are medians of interleaved rounds, cold L2, standard normal bf16 data. A contender's result is
compared with float64 on some rows before it is timed; eager and torch.compile compute D alone. CANDIDATES of the engine are timed,
each as a row of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import epigemm as eg
from epigemm.bench.device import Bar, Group, as_json, lines, made, stamp, time_in_turn

SHAPES = ((16384, 4096, 1024), (8192, 14336, 4096), (8192, 8192, 8192))
NARROW = tuple((m, n, k) for m in (1, 16, 64) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)))
BARE = "bare"
_FLUSH_BYTES = 128 << 20
_ROWS = 64


@eg.epilogue
def gelu_tanh_bias(acc, bias):
    return eg.gelu(acc + bias, approximate="tanh")


@eg.epilogue
def gelu_bias_residual(acc, bias, residual):
    return eg.gelu(acc + bias) + residual


@eg.epilogue
def squared_relu(acc):
    return eg.square(eg.relu(acc))


@eg.epilogue
def swiglu(gate, up):
    return eg.silu(gate) * up


@eg.epilogue
def gelu_saved(acc, bias):
    y = acc + bias
    return eg.outputs(eg.gelu(y, approximate="tanh"), saved=y)


@eg.epilogue
def relu_bias(acc, bias):
    return eg.relu(acc + bias)


@eg.epilogue
def d_relu(acc, saved):
    d = eg.where(~(saved <= 0), acc, 0.0)
    return eg.outputs(d, d_bias=eg.sum(d, axis="m"))


def _gelu_slope(s, sigmoid):
    gate = sigmoid(1.5957691216057308 * (s + 0.044715 * s * s * s))
    return gate + s * gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * s * s)


@eg.epilogue
def d_gelu(acc, saved):
    d = acc * _gelu_slope(saved, eg.sigmoid)
    return eg.outputs(d, d_bias=eg.sum(d, axis="m"))


@eg.epilogue
def d_swiglu(acc, gate, up):
    s = eg.sigmoid(gate)
    return eg.outputs(acc * up * s * (1 + gate * (1 - s)), d_up=acc * gate * s)


@dataclass(frozen=True)
class Work:
    """One epilogue.

    Args:
        name: of its group.
        epilogue: what it is.
        inputs: name -> "row" or "matrix".
        weights: how many products.
        eager: D by torch, of x @ w.T (one an accumulator) and the inputs.
        bar: over the bare product at k >= 4096, None without one.
        epilog: of cuBLASLt, for its fused call.
    """

    name: str
    epilogue: Any
    inputs: dict[str, str]
    weights: int
    eager: Callable[..., torch.Tensor]
    bar: float | None
    epilog: str = ""


WORKS = (
    Work("bias + tanh GELU", gelu_tanh_bias, {"bias": "row"}, 1, lambda p, bias: F.gelu(p + bias, approximate="tanh"), 1.10, "GELU_BIAS"),
    Work(
        *("erf-GELU + bias + residual", gelu_bias_residual, {"bias": "row", "residual": "matrix"}, 1),
        *(lambda p, bias, residual: F.gelu(p + bias) + residual, 1.15),
    ),
    Work("squared ReLU", squared_relu, {}, 1, lambda p: F.relu(p).square(), 1.10),
    Work("SwiGLU", swiglu, {}, 2, lambda p, q: F.silu(p) * q, 1.15),
    Work(
        "bias + tanh GELU, pre-activation stored",
        gelu_saved,
        {"bias": "row"},
        1,
        lambda p, bias: F.gelu(p + bias, approximate="tanh"),
        1.15,
    ),
    Work("d-ReLU with bias gradient", d_relu, {"saved": "matrix"}, 1, lambda p, saved: torch.where(saved > 0, p, 0), None),
    Work("d-GELU with bias gradient", d_gelu, {"saved": "matrix"}, 1, lambda p, saved: p * _gelu_slope(saved, torch.sigmoid), None),
    Work(
        "d-SwiGLU",
        d_swiglu,
        {"gate": "matrix", "up": "matrix"},
        1,
        lambda p, gate, up: torch.autograd.functional.vjp(lambda g: F.silu(g) * up, gate, p)[1],
        None,
    ),
)
SMALL_M = (Work("bias + ReLU", relu_bias, {"bias": "row"}, 1, lambda p, bias: F.relu(p + bias), None, "RELU_BIAS"),)


class Data:
    """x [m, k], the weights [n, k], and the inputs of a work."""

    def __init__(self, work: Work, m: int, n: int, k: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        make = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.work, self.shape = work, (m, n, k)
        self.x = torch.randn((m, k), **make)
        self.weights = [torch.randn((n, k), **make) * k**-0.5 for _ in range(work.weights)]
        shapes = {"row": (1, n), "matrix": (m, n)}
        self.inputs = {name: torch.randn(shapes[kind], **make) for name, kind in work.inputs.items()}
        self.rows = torch.randint(0, m, (min(_ROWS, m),), device="cuda", generator=generator)
        inputs = {name: (one[self.rows] if one.shape[0] == m and m > 1 else one).double() for name, one in self.inputs.items()}
        self.expected = work.eager(*(self.x[self.rows].double() @ w.double().T for w in self.weights), **inputs)

    def verify(self, d: torch.Tensor, name: str) -> None:
        found = d[self.rows].double()
        off = (found - self.expected).norm() / self.expected.norm()
        if not off < 0.02:  # bf16's rounding of what is stored; NaN never passes
            raise AssertionError(f"{name} is off by {off:.3g} of its norm")

    # ------------------------------------------------------------ contenders

    def triton(self, limit: int, group: Group) -> dict[str, Callable[[], Any]]:
        b = tuple(w.T for w in self.weights)
        product = eg.Matmul(self.x, b if len(b) > 1 else b[0])
        algorithms = product.plan(
            epilog=self.work.epilogue, epilog_inputs=self.inputs or None, engine="triton", preferences={"limit": limit}
        )
        found = {}
        for index, algorithm in enumerate(algorithms):
            name = f"triton {index}" if index else "triton"
            found[name] = lambda algorithm=algorithm: product.execute(algorithm=algorithm)
            group.facts[name] = {"plan": str(algorithm)}
        return found

    def others(self, compiled: bool) -> dict[str, Callable[[], Any]]:
        x, w, inputs = self.x, self.weights, self.inputs
        wide = torch.cat(w) if len(w) > 1 else w[0]
        found: dict[str, Callable[[], Any]] = {BARE: best_bare(x, wide)}
        b = tuple(one.T for one in w)
        unfused = eg.Matmul(x, b if len(b) > 1 else b[0])
        unfused.plan(epilog=self.work.epilogue, epilog_inputs=inputs or None, engine="unfused")
        found["unfused"] = unfused.execute
        if self.work.epilog:
            fused = eg.Matmul(x, b[0])
            fused.plan(epilog=self.work.epilogue, epilog_inputs=inputs, engine="cublaslt")
            found["cublaslt"] = fused.execute
        steps = lambda: self.work.eager(*(F.linear(x, one) for one in w), **inputs)
        found["eager"] = steps
        if compiled:
            torch._dynamo.reset()
            found["torch.compile"] = torch.compile(steps)
        return found


def best_bare(x: torch.Tensor, w: torch.Tensor) -> Callable[[], Any]:
    """cuBLASLt's fastest of its first algorithms for the plain product."""
    product = eg.Matmul(x, w.T)
    product.plan(engine="cublaslt", preferences={"limit": 16})
    product.autotune()
    return product.execute


def cold_us(run: Callable[[], Any], flush: torch.Tensor) -> Callable[[], float]:
    """One call by events, after the L2 was overwritten; the host queues while the GPU is busy."""

    def timed() -> float:
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    return timed


def measured(work: Work, shape: tuple[int, int, int], given: argparse.Namespace, flush: torch.Tensor) -> Group:
    m, n, k = shape
    group = Group(f"{work.name}, m={m} n={n} k={k} bf16", "us")
    data = Data(work, m, n, k)
    runs: dict[str, Callable[[], Any]] = {}
    for make in (lambda: data.triton(given.candidates, group), lambda: data.others(given.compile)):
        found = made(group, {"contenders": make})
        runs |= found.get("contenders", {})
    timed = {}
    for name, run in runs.items():
        try:
            result = run()
            if name != BARE:
                data.verify(result[0] if isinstance(result, tuple) else result, name)
            timed[name] = cold_us(run, flush)
        except Exception as error:
            group.failed[name] = f"{type(error).__name__}: {error}"
    bars = [Bar("triton", BARE, work.bar if k >= 4096 and m > 64 else None), *(Bar("triton", other) for other in ("unfused", "cublaslt"))]
    group.bars = (*bars, Bar("triton", "eager"), Bar("triton", "torch.compile"))
    time_in_turn(group, timed, given.rounds)
    return group


def host_group(rounds: int) -> Group:
    """Time until a call returns, m=n=k=64 fp16."""
    group = Group("host time of bias + ReLU, m=64 n=64 k=64 fp16", "us", bars=(Bar("triton", "relu(F.linear)", 1.0),))
    x, w, bias = (torch.randn(s, device="cuda", dtype=torch.float16) for s in ((64, 64), (64, 64), (64,)))
    product = eg.Matmul(x, w.T)
    product.plan(epilog=relu_bias, epilog_inputs={"bias": bias}, engine="triton")
    ways = {
        "triton": product.execute,
        "stateless": lambda: eg.matmul(x, w.T, epilog=relu_bias, epilog_inputs={"bias": bias}, engine="triton"),
        "relu(F.linear)": lambda: F.relu(F.linear(x, w, bias)),
    }

    def returns(run: Callable[[], Any]) -> Callable[[], float]:
        def timed(calls: int = 300) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                run()
            return (time.perf_counter_ns() - start) / 1e3 / calls

        return timed

    time_in_turn(group, {name: returns(run) for name, run in ways.items()}, rounds)
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("-r", "--rounds", type=int, default=9)
    parser.add_argument("-t", "--seconds", type=float, default=1e9)
    parser.add_argument("-c", "--candidates", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--small", action="store_true", help="the first shape alone")
    given = parser.parse_args()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    planned = [(work, shape) for shape in (SHAPES[:1] if given.small else SHAPES) for work in WORKS]
    planned += [(work, shape) for shape in (NARROW[:1] if given.small else NARROW) for work in SMALL_M]
    end = time.monotonic() + given.seconds
    groups = [host_group(given.rounds)]
    for work, shape in planned:
        if time.monotonic() > end:
            break
        groups.append(measured(work, shape, given, flush))
        torch.cuda.empty_cache()
        data = as_json("triton", "triton", given.rounds, groups, stamp(torch))
        given.result.write_text(json.dumps(data, indent=1))
    print("\n".join(lines(data)))
    print(f"{len(groups) - 1} of {len(planned)} groups measured", os.path.basename(given.result))


if __name__ == "__main__":
    main()
