"""MLPs forward and backward, and the host time of a layer, beside eager, torch.compile, max-autotune and the bare products.

    python tests/device/layers/bench.py [--json FILE] [--rounds N] [--small]

Prints one line a measurement: the median over interleaved rounds, as a ratio to the bare products of the same run. `--small` runs tiny
sizes, on the CPU too, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from epigemm import pytorch as ep

SIZES = ((16384, 1024, 4096), (8192, 4096, 14336))  # tokens, d, ff
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Run = Callable[[], Any]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def elapsed_us(run: Run, repeats: int = 3) -> float:
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e3 / repeats


def operands(tokens: int, d: int, ff: int, gated: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, the weights, the biases, and D's cotangent last."""
    ways = 2 if gated else 1
    shapes = ((tokens, d), *[(ff, d)] * ways, (d, ff), *[(ff,)] * ways, (d,), (tokens, d))
    made = [torch.randn(s, device=DEVICE, dtype=dtype) / (s[-1] ** 0.5 if len(s) > 1 else 1) for s in shapes]
    return [*(t.requires_grad_() for t in made[:-1]), made[-1]]


def eager(activation: Callable[[Any], Any], gated: bool) -> Callable[..., torch.Tensor]:
    if gated:
        return lambda x, w, u, v, b, e, c: F.linear(activation(F.linear(x, w, b)) * F.linear(x, u, e), v, c)
    return lambda x, w, v, b, c: F.linear(activation(F.linear(x, w, b)), v, c)


def training_step(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Run:
    return lambda: torch.autograd.grad(function(*tensors[:-1]), tensors[:-1], tensors[-1])


def bare(tensors: list[torch.Tensor], gated: bool) -> Run:
    """The six products of a step; a gated MLP's first weights count as one of twice the width."""
    x, w, v, g = tensors[0].detach(), tensors[1].detach(), tensors[3 if gated else 2].detach(), tensors[-1]
    wide = torch.cat([w, tensors[2].detach()]) if gated else w
    hidden, d_wide = x @ w.T, x @ wide.T

    def run() -> None:
        x @ wide.T
        hidden @ v.T
        g @ v
        g.T @ hidden
        d_wide @ wide
        d_wide.T @ x

    return run


def mlps(rounds: int, small: bool) -> list[dict[str, Any]]:
    rows = []
    dtype = torch.bfloat16
    for tokens, d, ff in ((64, 16, 32),) if small else SIZES:
        for name, act, gated in (("relu", F.relu, False), ("gelu", F.gelu, False), ("silu", F.silu, True)):
            tensors = operands(tokens, d, ff, gated, dtype)
            plain = eager(act, gated)
            ours = (lambda *t: ep.gated_mlp(*t)) if gated else (lambda *t, name=name: ep.mlp(*t, activation=name))
            ways = {"bare": bare(tensors, gated), "epigemm": training_step(ours, tensors), "eager": training_step(plain, tensors)}
            if not small:
                torch._dynamo.reset()
                ways["compile"] = training_step(torch.compile(plain), tensors)
                ways["max-autotune"] = training_step(torch.compile(plain, mode="max-autotune-no-cudagraphs"), tensors)
            for run in ways.values():
                elapsed_us(run)
            times: dict[str, list[float]] = {key: [] for key in ways}
            for _ in range(rounds):
                for key, run in ways.items():
                    times[key].append(elapsed_us(run))
            ratios = {key: statistics.median(t / least for t, least in zip(times[key], times["bare"], strict=True)) for key in ways}
            rows.append({"mlp": name, "gated": gated, "tokens": tokens, "d": d, "ff": ff, "ratio": ratios, "times_us": times})
            print(
                f"{name:5} tokens={tokens} d={d} ff={ff}: " + ", ".join(f"{key} {ratio:.3f}" for key, ratio in ratios.items()), flush=True
            )
    return rows


def returns_us(run: Run, calls: int) -> float:
    """The time until a call returns, many in flight: what the host does."""
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - start) / 1e3 / calls


def host(rounds: int, small: bool) -> list[dict[str, Any]]:
    """Bias and ReLU, m=n=k=64 fp16."""
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    x, weight, bias = (torch.randn(s, device=DEVICE, dtype=dtype) for s in ((64, 64), (64, 64), (64,)))
    ways: dict[str, Run] = {
        "epigemm": lambda: ep.linear(x, weight, bias, activation="relu"),
        "relu(F.linear)": lambda: F.relu(F.linear(x, weight, bias)),
    }
    rows = []
    for grad in (False, True):
        weight.requires_grad_(grad)
        bias.requires_grad_(grad)
        times: dict[str, list[float]] = {key: [] for key in ways}
        for _ in range(rounds + 1):
            for key, run in ways.items():
                times[key].append(returns_us(run, 20 if small else 500))
        ratio = statistics.median(ours / theirs for ours, theirs in zip(*(t[1:] for t in times.values()), strict=True))
        rows.append({"grad": grad, "ratio": ratio, "times_us": times})
        shown = ", ".join(f"{key} {statistics.median(t):.1f} us" for key, t in times.items())
        print(f"host, {'with' if grad else 'without'} grad: {ratio:.2f} ({shown})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    result = {
        "host": host(given.rounds, given.small),
        "mlps": mlps(given.rounds, given.small),
        "torch": torch.__version__,
        "device": DEVICE,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
