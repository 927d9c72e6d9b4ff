"""An engine's epilogues beside their bare products on a GPU: the lines that the Hopper engine has bars for; any engine of a GPU can run it.

Usage: python -m epigemm.bench.hopper RESULT.json [ENGINE] [ROUNDS]

One group a work and shape: x [m, k] times nn.Linear weights [n, k], standard normal. The bare product is the fastest of cuBLASLt's first
16 algorithms, found in the same run; of width 2n for two weights. Calls run back to back, long enough for the clock to settle, in
interleaved rounds. D is compared with float64 on some rows before anything is timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epigemm import engines, gelu, outputs, relu, sigmoid, silu, where
from epigemm.api import Matmul
from epigemm.bench.device import Bar, Group, as_json, lines, made, stamp, time_in_turn, torch_with_gpu
from epigemm.expression import bitmask
from epigemm.expression import sum as sum_over

ENGINE, ROUNDS = "hopper", 9
BARE = "bare"
SHALLOW, DEEP = (16384, 4096, 1024), (8192, 14336, 4096)
PLAIN_SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), SHALLOW, DEEP, (65536, 8192, 16384))
_TIMING_US, _ROWS, _TOLERANCE = 10_000.0, 64, 0.02
_SLOPE = 1.5957691216057308  # 2 sqrt(2 / pi)


def gelu_slope(x: Any, sigmoid_of: Callable[[Any], Any]) -> Any:
    """The derivative of GELU's tanh form."""
    gate = sigmoid_of(_SLOPE * (x + 0.044715 * x * x * x))
    return gate + x * gate * (1 - gate) * _SLOPE * (1 + 0.134145 * x * x)


def _silu_slope(x: Any, s: Any) -> Any:
    return s * (1 + x * (1 - s))


@dataclass(frozen=True, slots=True)
class Work:
    """One epilogue.

    Args:
        epilogue: None is the plain product.
        exact: D, given torch, the products and the inputs, in float64.
        shallow, deep: the bars over the bare product at `SHALLOW` and `DEEP`.
        inputs: name -> "row" or "matrix".
        weights: how many products.
    """

    epilogue: Any
    exact: Callable[..., Any]
    shallow: float
    deep: float
    inputs: tuple[tuple[str, str], ...] = ()
    weights: int = 1


_BIAS = (("bias", "row"),)


def _biased(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda torch, p, bias: function(torch.nn.functional, p + bias)


def _relu_aux(acc: Any, bias: Any) -> Any:
    return outputs(relu(acc + bias), mask=bitmask(acc + bias >= 0))


def _gelu_aux(acc: Any, bias: Any) -> Any:
    return outputs(gelu(acc + bias, approximate="tanh"), saved=acc + bias)


def _summed(d: Any) -> Any:
    return outputs(d, d_bias=sum_over(d, axis="m"))


def _d_swiglu(acc: Any, gate: Any, up: Any) -> Any:
    return outputs(acc * up * _silu_slope(gate, sigmoid(gate)), d_up=acc * silu(gate))


WORKS: dict[str, Work] = {
    "bare product": Work(None, lambda torch, p: p, 1.02, 1.02),
    "bias + ReLU": Work(lambda acc, bias: relu(acc + bias), _biased(lambda F, y: F.relu(y)), 1.0, 1.0, _BIAS),
    "bias + tanh GELU": Work(
        lambda acc, bias: gelu(acc + bias, approximate="tanh"), _biased(lambda F, y: F.gelu(y, approximate="tanh")), 1.0, 1.0, _BIAS
    ),
    "bias + erf GELU": Work(lambda acc, bias: gelu(acc + bias), _biased(lambda F, y: F.gelu(y)), 1.0, 1.0, _BIAS),
    "RELU_AUX_BIAS": Work(_relu_aux, _biased(lambda F, y: F.relu(y)), 1.0, 1.0, _BIAS),
    "GELU_AUX_BIAS": Work(_gelu_aux, _biased(lambda F, y: F.gelu(y, approximate="tanh")), 1.03, 1.03, _BIAS),
    "bias + residual": Work(
        lambda acc, bias, x: acc + bias + x, lambda torch, p, bias, x: p + bias + x, 1.03, 1.03, (*_BIAS, ("x", "matrix"))
    ),
    "SwiGLU": Work(lambda g, u: silu(g) * u, lambda torch, p, q: torch.nn.functional.silu(p) * q, 1.0, 1.0, (), 2),
    "d-ReLU, bias gradient": Work(
        lambda acc, x: _summed(where(x > 0, acc, 0.0)), lambda torch, p, x: torch.where(x > 0, p, 0), 1.15, 1.02, (("x", "matrix"),)
    ),
    "d-GELU, bias gradient": Work(
        lambda acc, x: _summed(acc * gelu_slope(x, sigmoid)),
        lambda torch, p, x: p * gelu_slope(x, torch.sigmoid), 1.15, 1.02, (("x", "matrix"),)
    ),
    "d-SwiGLU": Work(
        _d_swiglu, lambda torch, p, gate, up: p * up * _silu_slope(gate, torch.sigmoid(gate)), 1.35, 1.02,
        (("gate", "matrix"), ("up", "matrix")),
    ),
}  # fmt: skip


def measure(torch: Any, engine: str, rounds: int, on_round: Callable[[], None] = lambda: None) -> list[Group]:
    """Every work at the two shapes, and the plain product at all shapes in both dtypes."""
    planned = [(name, shape, "bfloat16") for name in WORKS for shape in (SHALLOW, DEEP)]
    planned += [("bare product", shape, dtype) for shape in PLAIN_SHAPES for dtype in ("bfloat16", "float16")]
    groups = []
    for name, shape, dtype in dict.fromkeys(planned):
        groups.append(_measured(torch, engine, rounds, name, shape, dtype, on_round))
        torch.cuda.empty_cache()
    return groups


def _measured(
    torch: Any, engine: str, rounds: int, name: str, shape: tuple[int, int, int], dtype: str, on_round: Callable[[], None]
) -> Group:
    work, (m, n, k) = WORKS[name], shape
    group = Group(f"{name}, m={m} n={n} k={k} {dtype}", "us", bars=(Bar(engine, BARE, work.shallow if k <= 1024 else work.deep),))
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"device": "cuda", "dtype": getattr(torch, dtype), "generator": generator}
    x, wide = torch.randn((m, k), **make), torch.randn((n * work.weights, k), **make)
    weights = wide.split(n)
    inputs = {i: torch.randn((n,) if kind == "row" else (m, n), **make) for i, kind in work.inputs}

    def ours() -> Callable[[], Any]:
        product = Matmul(x, tuple(w.T for w in weights) if len(weights) > 1 else wide.T)
        product.plan(epilog=work.epilogue, epilog_inputs=inputs or None, engine=engine)
        group.facts[engine] = {"plan": product.explain().splitlines()[-1]}
        _verify(torch, work, x, weights, inputs, product.execute())
        execute: Callable[[], Any] = product.execute
        return execute

    calls = made(group, {BARE: lambda: _bare(x, wide), engine: ours})
    time_in_turn(group, {who: _sustained_us(torch, call) for who, call in calls.items()}, rounds, on_round)
    return group


def _verify(torch: Any, work: Work, x: Any, weights: Any, inputs: dict[str, Any], result: Any) -> None:
    d = result[0] if isinstance(result, tuple) else result
    rows = torch.randint(0, len(x), (_ROWS,), device="cuda")
    given = {i: (one[rows] if one.dim() > 1 else one).double() for i, one in inputs.items()}
    exact = work.exact(torch, *(x[rows].double() @ w.double().T for w in weights), **given)
    off = float((d[rows].double() - exact).norm() / exact.norm())
    if not off < _TOLERANCE:  # NaN never passes
        raise AssertionError(f"D is off by {off:.3g} of its norm")


def _bare(x: Any, w: Any) -> Callable[[], Any]:
    product = Matmul(x, w.T)
    product.plan(engine="cublaslt", preferences={"limit": 16})
    product.autotune(iterations=20)
    execute: Callable[[], Any] = product.execute
    return execute


def _sustained_us(torch: Any, call: Callable[[], Any]) -> Callable[[], float]:
    """Microseconds a call, back to back for about `_TIMING_US`, after as long untimed: the clock settles to the call's power."""

    def timed(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        took: float = start.elapsed_time(end) * 1e3 / count
        return took

    def run() -> float:
        count = max(2, int(_TIMING_US / max(timed(2), 1.0)))
        timed(count)
        return timed(count)

    return run


def main(result: Path, engine: str = ENGINE, rounds: int = ROUNDS) -> None:
    """Measure, print, write. The Hopper engine is registered for this run while it is not among the engines."""
    torch = torch_with_gpu()
    engines.ENGINES.setdefault("hopper", ("epigemm.engines.hopper.engine", "cuda"))
    groups = measure(torch, engine, rounds)
    data = as_json("hopper", engine, rounds, groups, stamp(torch))
    result.write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(lines(data)))


if __name__ == "__main__":
    given = [*sys.argv[1:], *(ENGINE, str(ROUNDS))[len(sys.argv) - 2 :]]
    main(Path(given[0]), given[1], int(given[2]))
